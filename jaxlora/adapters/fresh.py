"""The adapter that a new job starts from."""

import functools
import itertools
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxlora.adapters.adapter import Adapter, LoraWeights, TokenRowValues
from jaxlora.adapters.initial import DRAWN, kept_start
from jaxlora.adapters.targets import ModuleLora
from jaxlora.config import LoraJob
from jaxlora.models.decoder import EMBEDDING, HEAD
from jaxlora.models.score import SCORE
from jaxlora.modules.trained_tensors import tensors_with
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.table import variants_with
from jaxlora.modules.variants.variant import TrainedTensor
from jaxlora.sharding.global_arrays import everywhere

_MAX_THREADS = 8
_SCORE_DEVIATION = 0.02  # transformers' default initializer_range


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
    # Programs on several devices must start in the same order on all, so no thread
    # runs them.
    made = {
        name: _of_weight(job, name, module, kernels[name], dtype)
        for name, module in modules.items()
    }

    def drawn(name: str) -> dict[str, np.ndarray]:
        rng, rank = _random(job, name), modules[name].rank
        tensors = {}
        if (draw := DRAWN.get(job.init_lora_weights)) is not None:
            pair = draw(rng, kernels[name].shape, rank)
            tensors = dict(zip((LORA_A.name, LORA_B.name), pair, strict=True))
        tensors |= made[name]
        for tensor in _tensors(job):
            if tensor.name not in tensors:
                assert tensor.start is not None
                tensors[tensor.name] = tensor.start(job, rng, kernels[name], rank)
        return {t.name: tensors[t.name].astype(np.float32) for t in _tensors(job)}

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

    def blank(name: str) -> dict[str, np.ndarray]:
        (k, n), rank = kernels[name].shape, modules[name].rank
        return {
            tensor.name: np.broadcast_to(np.float32(0), tensor.shape(k, n, rank))
            for tensor in _tensors(job)
        }

    return _adapter(job, modules, kernels, {name: blank(name) for name in modules})


def fresh_score(job: LoraJob, size: int) -> np.ndarray:
    """Draws a score head as transformers does: normal, with its usual deviation."""
    stream = np.random.Philox(key=[job.seed, zlib.crc32(SCORE.encode())])
    draws = np.random.Generator(stream).normal(0.0, _SCORE_DEVIATION, size)
    return draws.astype(np.float32)


def blank_rows(
    token_ids: Mapping[str, tuple[int, ...] | range], size: int
) -> dict[str, TokenRowValues]:
    """Returns the rows of `fresh_rows` as zeros that take no memory.

    Args:
        token_ids: Tokens of `embed_tokens` and of `lm_head`; a `range`: all.
        size: Size of a row.
    """
    return {
        module: TokenRowValues(ids, np.broadcast_to(np.float32(0), (len(ids), size)))
        for module, ids in token_ids.items()
        if ids
    }


def fresh_rows(
    token_ids: Mapping[str, tuple[int, ...] | range], params: Mapping[str, Any]
) -> dict[str, TokenRowValues]:
    """Returns the rows that tokens have in the frozen embedding and head.

    Args:
        token_ids: Tokens of `embed_tokens` and of `lm_head`; a `range`: all.
        params: Frozen weights by path, of which the embedding is V D and the head D V.
            Without a head, it is tied to the embedding.
    """
    found = {}
    for module, ids in token_ids.items():
        if ids:
            is_head = module == "lm_head" and HEAD in params
            path, axis = (HEAD, 1) if is_head else (EMBEDDING, 0)
            rows = everywhere(_taken(params[path], np.array(ids, np.int32), axis))
            found[module] = TokenRowValues(ids, np.asarray(rows))
    return found


@functools.partial(jax.jit, static_argnums=2)
def _taken(table: Any, ids: Any, axis: int) -> jax.Array:
    taken = jnp.take(table, ids, axis)
    return (taken if axis == 0 else taken.T).astype(np.float32)


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
