"""The adapter that a new job starts from."""

import functools
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxlora.adapters.adapter import Adapter, LoraWeights, OutsideWeights
from jaxlora.adapters.initial import DRAWN, kept_start
from jaxlora.adapters.targets import ModuleLora
from jaxlora.common.background import POOL
from jaxlora.config import LoraJob
from jaxlora.models.config import ModelConfig
from jaxlora.models.slot_modules import SLOT_MODULES, Tokens
from jaxlora.modules.trained_tensors import tensors_with
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.table import variants_with
from jaxlora.modules.variants.variant import NewModule, TrainedTensor

_MAX_THREADS = 8
_PART_SIZE = 1 << 22  # numbers that a thread draws at least, if there are as many


def fresh_adapter(
    job: LoraJob,
    modules: Mapping[str, ModuleLora],
    kernels: Mapping[str, Any],
    dtype: DTypeLike = np.float32,
) -> Adapter:
    """Makes the adapter that a new job starts from, with PEFT's initial values.

    Each module draws from its own stream, keyed by the job's seed and the module's
    name, so that neither other jobs nor other targets change it.

    Args:
        job: The job that the adapter is for.
        modules: The modules that the job adapts.
        kernels: Frozen weight of each linear, K N, by module name.
        dtype: Dtype in which weights are multiplied.
    """
    wanted = _tensors(job)
    # Programs on several devices must start in the same order on all, so no thread
    # runs them.
    made = {
        name: _of_weight(job, wanted, name, module, kernels[name], dtype)
        for name, module in modules.items()
    }

    def drawn(part: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        new = {n: NewModule(_random(job, n), kernels[n], modules[n].rank) for n in part}
        found = {name: made[name] for name in part}
        if (draw := DRAWN.get(job.init_lora_weights)) is not None:
            for name, one in new.items():
                pair = draw(one.rng, one.kernel.shape, one.rank)
                both = zip((LORA_A.name, LORA_B.name), pair, strict=True)
                found[name] = dict(both) | found[name]
        for tensor in wanted:
            left = [name for name in part if tensor.name not in found[name]]
            if left:
                assert tensor.start is not None
                values = tensor.start(job, [new[name] for name in left])
                for name, value in zip(left, values, strict=True):
                    found[name] = found[name] | {tensor.name: value}
        return {
            name: {t.name: _float32(one[t.name]) for t in wanted}
            for name, one in found.items()
        }

    # NumPy draws without the interpreter's lock. A thread gets many modules: to hand
    # over a small one, or the lock, takes longer than to draw it.
    size = sum(module.rank * kernels[n].shape[0] for n, module in modules.items())
    names, num_parts = tuple(modules), min(_num_threads(), 1 + size // _PART_SIZE)
    # Those of the same kind, which follow each other at a distance, are drawn together.
    alike = sorted(names, key=lambda name: kernels[name].shape[0])
    parts = (alike[start::num_parts] for start in range(num_parts))
    tensors = {k: x for one in _threads().map(drawn, parts) for k, x in one.items()}
    return _adapter(job, modules, kernels, {name: tensors[name] for name in names})


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32, copy=False)


def is_drawn_alone(job: LoraJob) -> bool:
    """Whether `fresh_adapter` runs no program, so that any thread may call it."""
    is_alone = all(tensor.from_weight is None for tensor in _tensors(job))
    return is_alone and not job.keeps_start


def _num_threads() -> int:
    return min(len(os.sched_getaffinity(0)), _MAX_THREADS)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """The threads that draw, which the adapters of a sweep share."""
    return ThreadPoolExecutor(_num_threads(), thread_name_prefix=f"{POOL}-draw")


def _random(job: LoraJob, name: str) -> np.random.Generator:
    stream = np.random.Philox(key=[job.seed, zlib.crc32(name.encode())])
    return np.random.Generator(stream)


def _of_weight(
    job: LoraJob,
    wanted: Sequence[TrainedTensor],
    name: str,
    module: ModuleLora,
    kernel: Any,
    dtype: DTypeLike,
) -> dict[str, np.ndarray]:
    """Makes the tensors that start from the frozen weight, or by a setting."""
    tensors = {
        tensor.name: tensor.from_weight(kernel, dtype)
        for tensor in wanted
        if tensor.from_weight is not None
    }
    if job.keeps_start:
        given = str(job.init_lora_weights), _random(job, name), kernel
        tensors |= kept_start(*given, module.rank // 2, module.scaling)
    return tensors


def blank_adapter(
    job: LoraJob,
    modules: Mapping[str, ModuleLora],
    kernels: Mapping[str, Any],
) -> Adapter:
    """Makes an adapter with the shapes of `fresh_adapter`, whose zeros use no memory.

    Args:
        job: The job that the adapter is for.
        modules: The modules that the job adapts.
        kernels: Frozen weight of each linear, K N, or its shape, by module name.
    """

    wanted = _tensors(job)
    zeros = functools.cache(functools.partial(np.broadcast_to, np.float32(0)))

    def blank(name: str) -> dict[str, np.ndarray]:
        (k, n), rank = kernels[name].shape, modules[name].rank
        return {tensor.name: zeros(tensor.shape(k, n, rank)) for tensor in wanted}

    return _adapter(job, modules, kernels, {name: blank(name) for name in modules})


def fresh_outside(
    job: LoraJob,
    tokens: Mapping[str, Tokens],
    model: ModelConfig,
    params: Mapping[str, Any],
) -> dict[str, OutsideWeights]:
    """Makes what a new job trains outside the linears.

    Args:
        job: The job.
        tokens: Tokens of the rows of each module that it trains, by name.
        model: The base model.
        params: Its frozen weights by path, of which the embedding is V D and the head
            D V. Without a head, it is tied to the embedding.
    """
    found = {}
    for name, ids in tokens.items():
        module = SLOT_MODULES[name]
        array = module.start(job, params, ids, module.shape(model, len(ids)))
        found[name] = OutsideWeights(array, ids)
    return found


def blank_outside(
    tokens: Mapping[str, Tokens], model: ModelConfig
) -> dict[str, OutsideWeights]:
    """Returns what `fresh_outside` does, with zeros that take no memory."""
    return {
        name: OutsideWeights(
            np.broadcast_to(np.float32(0), SLOT_MODULES[name].shape(model, len(ids))),
            ids,
        )
        for name, ids in tokens.items()
    }


def _tensors(job: LoraJob) -> tuple[TrainedTensor, ...]:
    return tensors_with(job.is_set)


def _adapter(
    job: LoraJob,
    modules: Mapping[str, ModuleLora],
    kernels: Mapping[str, Any],
    tensors: Mapping[str, dict[str, np.ndarray]],
) -> Adapter:
    weights = {
        name: LoraWeights(
            tensors=tensors[name], rank=module.rank, lora_alpha=module.lora_alpha
        )
        for name, module in modules.items()
    }
    shapes = [kernels[name].shape for name in modules]
    frozen = (variant.frozen(job, shapes) for variant in variants_with(job.is_set))
    return Adapter(
        modules=weights,
        use_rslora=job.use_rslora,
        dropout=job.dropout,
        keeps_start=job.keeps_start,
        vera=next(filter(None, frozen), None),
    )
