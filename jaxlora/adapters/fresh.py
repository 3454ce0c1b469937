"""The adapter that a new job starts from."""

import itertools
import os
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxlora.adapters.adapter import Adapter, LoraWeights, OutsideWeights
from jaxlora.adapters.initial import DRAWN, kept_start, loftq_start
from jaxlora.adapters.targets import ModuleLora
from jaxlora.adapters.vera import VeraMatrices
from jaxlora.config import LoraJob
from jaxlora.config.starts import LOFTQ
from jaxlora.families.model_config import ModelConfig
from jaxlora.models.slot_modules import SLOT_MODULES, Tokens
from jaxlora.modules.trained_tensors import (
    LORA_A,
    LORA_B,
    TRAINED_BIAS,
    VERA_D,
    TrainedTensor,
    tensors_with,
)
from jaxlora.sharding.global_arrays import everywhere

_MAX_THREADS = 8


def fresh_adapter(
    job: LoraJob,
    modules: Mapping[str, ModuleLora],
    kernels: Mapping[str, Any],
    dtype: DTypeLike = np.float32,
    biases: Mapping[str, Any] = MappingProxyType({}),
    stored: Callable[[str], np.ndarray] | None = None,
) -> Adapter:
    """Makes the adapter that a new job starts from, with PEFT's initial values.

    Each module draws from its own stream, keyed by the job's seed and the module's
    name, so that neither other jobs nor other targets change it.

    Args:
        job: The job that the adapter is for.
        modules: The modules that the job adapts.
        kernels: Frozen weight of each linear, K N, by module name.
        dtype: Dtype in which weights are multiplied.
        biases: Frozen bias of each linear that has one, N, by module name.
        stored: Reads the weight of a linear that was quantized, N K and float32, which
            LoftQ needs.
    """
    # Programs on several devices must start in the same order on all, so no thread
    # runs them.
    made = {
        name: _of_weight(job, name, module, kernels[name], dtype)
        for name, module in modules.items()
    }
    for name in modules.keys() & biases.keys():
        made[name][TRAINED_BIAS.name] = np.asarray(everywhere(biases[name]))
    if job.init_lora_weights == LOFTQ:
        assert stored is not None
        for name, module in modules.items():
            given = kernels[name], stored(name), module.rank, module.scaling
            made[name] |= loftq_start(*given)

    def drawn(name: str) -> dict[str, np.ndarray]:
        rng, rank = _random(job, name), modules[name].rank
        tensors = {}
        if (draw := DRAWN.get(job.init_lora_weights)) is not None:
            pair = draw(rng, kernels[name].shape, rank)
            tensors = dict(zip((LORA_A.name, LORA_B.name), pair, strict=True))
        tensors |= made[name]
        own = [t for t in _tensors(job) if name in biases or not t.needs_bias]
        for tensor in own:
            if tensor.name not in tensors:
                assert tensor.start is not None
                tensors[tensor.name] = tensor.start(rng, kernels[name], rank)
        return {t.name: tensors[t.name].astype(np.float32) for t in own}

    # NumPy draws without the interpreter's lock. A thread gets many modules, as small
    # ones are drawn faster than they are handed over.
    names, num_threads = tuple(modules), min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    with ThreadPoolExecutor(num_threads) as pool:
        parts = (names[start::num_threads] for start in range(num_threads))
        found = pool.map(lambda part: {name: drawn(name) for name in part}, parts)
        tensors = dict(itertools.chain.from_iterable(one.items() for one in found))
    return _adapter(job, modules, kernels, {name: tensors[name] for name in names})


def _random(job: LoraJob, name: str) -> np.random.Generator:
    stream = np.random.Philox(key=[job.seed, zlib.crc32(name.encode())])
    return np.random.Generator(stream)


def _of_weight(
    job: LoraJob,
    name: str,
    module: ModuleLora,
    kernel: Any,
    dtype: DTypeLike,
) -> dict[str, np.ndarray]:
    """Makes the tensors that start from the frozen weight, or by a setting."""
    tensors = {
        tensor.name: tensor.from_weight(kernel, dtype)
        for tensor in _tensors(job)
        if tensor.from_weight is not None
    }
    if job.keeps_start:
        given = str(job.init_lora_weights), _random(job, name), kernel
        tensors |= kept_start(*given, module.rank // 2, module.scaling)
    if job.use_vera:
        tensors[VERA_D.name] = np.full(module.rank, job.d_initial)
    return tensors


def blank_adapter(
    job: LoraJob,
    modules: Mapping[str, ModuleLora],
    kernels: Mapping[str, Any],
    biases: Collection[str] = (),
) -> Adapter:
    """Makes an adapter with the shapes of `fresh_adapter`, whose zeros use no memory.

    Args:
        job: The job that the adapter is for.
        modules: The modules that the job adapts.
        kernels: Frozen weight of each linear, K N, or its shape, by module name.
        biases: Names of the modules that have a bias.
    """

    def blank(name: str) -> dict[str, np.ndarray]:
        (k, n), rank = kernels[name].shape, modules[name].rank
        return {
            tensor.name: np.broadcast_to(np.float32(0), tensor.shape(k, n, rank))
            for tensor in _tensors(job)
            if name in biases or not tensor.needs_bias
        }

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
    return tensors_with(lambda setting: getattr(job, setting))


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
    return Adapter(
        modules=weights,
        use_rslora=job.use_rslora,
        dropout=job.dropout,
        keeps_start=job.keeps_start,
        loftq_bits=job.loftq_bits,
        vera=_vera_matrices(job, modules, kernels) if job.use_vera else None,
    )


def _vera_matrices(
    job: LoraJob, modules: Mapping[str, ModuleLora], kernels: Mapping[str, Any]
) -> VeraMatrices:
    sizes = [kernels[name].shape for name in modules]
    in_features, out_features = (max(axis) for axis in zip(*sizes, strict=True))
    key = job.projection_prng_key
    return VeraMatrices(key, job.rank, in_features, out_features)
