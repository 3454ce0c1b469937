"""Memory that a training step needs on its device, and memory that the device has."""

import dataclasses
import functools
import logging
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core

from jaxlora.adapters.slots import SlotTable
from jaxlora.data.pack import PackedBatch
from jaxlora.models.decoder import Remat
from jaxlora.models.forward import Base, SlotKeys, job_losses
from jaxlora.models.spec import DecoderSpec, SlotSettings
from jaxlora.models.stacks import to_paths
from jaxlora.modules.attention import packed_attention
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.modules.scoring import layer_scoring
from jaxlora.pallas_kernels import get_backend
from jaxlora.scheduler import Limits
from jaxlora.train.step import CompiledSteps, compiled, training_options

logger = logging.getLogger(__name__)

RESERVE = 0.05  # share of the memory that stays free for the allocator and others
_COPIES = 4  # of an adapter: weights, two moments and gradients
_CHECKPOINT_COPIES = 3  # more copies while a checkpoint is taken
_HEAD_ROWS = 1024  # rows of logits that the loss computes at a time
_LOGIT_BYTES = 6  # a logit is held in float32 and in bfloat16
_HEAD_BYTES = 768 * 2**20  # at most
_MLP_KEEPS = 3  # arrays of the MLP's width that are kept: gate, up and their product
_BATCHES = 2  # on the device: one runs, the next waits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Device memory that a run may use.

    Attributes:
        num_bytes: Size, without the reserve and without memory in use by others.
        of: Describes how the size was determined.
    """

    num_bytes: int
    of: str


def device_memory(own_bytes: int) -> DeviceMemory | None:
    """Returns the default device's memory for a run; None if it is not reported.

    On a GPU this is the limit of JAX's allocator, less the other arrays of this
    process; not every allocator reports these. On a CPU, which reports nothing, it is
    the machine's memory.

    Args:
        own_bytes: Memory that the run holds on the device already.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        limit = stats["bytes_limit"]
        others = max(0, stats["bytes_in_use"] - own_bytes)
        what = f"what JAX may take of the {device.device_kind}'s memory"
    elif device.platform == "cpu":
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        others, what = 0, "the machine's memory"
    else:
        return None
    kept = math.ceil(RESERVE * limit)
    of = f"{in_words(limit)} of {what}, less {RESERVE:.0%} in reserve"
    if others:
        of += f" and {in_words(others)} of other arrays"
    return DeviceMemory(num_bytes=limit - kept - others, of=of)


def in_words(num_bytes: float) -> str:
    """Formats a number of bytes with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of a run on its device, as a function of the tokens of a microbatch.

    Attributes:
        base: Bytes of the frozen weights.
        slots: Bytes of the adapters, their moments and their gradients.
        fixed: Bytes of the training step that do not depend on the tokens.
        per_token: Bytes per token of a microbatch.
        passing: Transient bytes per token, needed when those of `fixed` are free again.
    """

    base: int
    slots: int
    fixed: int
    per_token: float
    passing: float = 0.0

    def step(self, num_tokens: int) -> float:
        """Bytes of a training step with microbatches of `num_tokens` tokens."""
        return num_tokens * self.per_token + max(self.fixed, num_tokens * self.passing)

    def total(self, num_tokens: int) -> int:
        """Bytes of the whole run with microbatches of `num_tokens` tokens."""
        most = max(self.step(num_tokens), self._checkpoint())
        return self.base + self.slots + math.ceil(most)

    def fitting_tokens(self, num_bytes: int) -> int:
        """Tokens of the largest microbatches that fit; below 1 if none fit."""
        free = num_bytes - self.base - self.slots
        if free < self._checkpoint():
            return 0
        both = self.per_token + self.passing
        return int(min((free - self.fixed) // self.per_token, free // both))

    def _checkpoint(self) -> int:
        return self.slots // _COPIES * _CHECKPOINT_COPIES


def resident(spec: DecoderSpec) -> Footprint:
    """The footprint of weights and slots alone, without a training step."""
    return Footprint(
        base=_num_bytes(spec.base_shapes()),
        slots=_COPIES * _num_bytes(spec.adapter_shapes()),
        fixed=0,
        per_token=0.0,
    )


def _num_bytes(shapes) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))


# ---- estimated, before the step is compiled ------------------------------------------


def estimated(spec: DecoderSpec, block_tokens: int) -> Footprint:
    """Estimates a run's footprint from the arrays that its backward pass keeps.

    These are counted for the first two layers, traced with two numbers of tokens.
    Transient memory inside a layer is added by a formula. For attention it is measured
    by compiling attention's gradient alone, because its scratch memory may be larger
    than all other arrays in a layer.

    Args:
        spec: The decoder.
        block_tokens: Tokens of a block.
    """
    t = block_tokens * max(1, 4096 // block_tokens)
    while t < 2 * spec.options.max_segment_tokens:
        t *= 2  # the memory of a band of keys grows up to the length of a sample

    def kept(num_layers: int, *, remat: Remat) -> float:
        """Bytes kept per token, without the weights, which do not depend on tokens."""
        part = _first_layers(spec, num_layers, remat=remat)
        small, large = (_kept_bytes(part, n, block_tokens) for n in (t, 2 * t))
        return (large - small) / t

    config, options = spec.config, spec.options
    one = kept(1, remat=options.remat)
    layer = kept(2, remat=options.remat) - one if config.num_layers > 1 else 0.0
    per_token = one + (config.num_layers - 1) * layer
    if options.remat != "none":
        # With remat, one layer at a time keeps what each layer keeps without remat.
        per_token += kept(1, remat="none") - one
    if _slots(spec).use_dropout and get_backend(options.implementation).stores_masks:
        per_token += _mask_bytes(spec)
    # The MLP's arrays are free again when attention's gradient begins.
    attention = _attention_bytes(spec, t) - _MLP_KEEPS * _mlp_bytes(spec)
    return dataclasses.replace(
        resident(spec),
        fixed=_head_bytes(spec),
        per_token=per_token,
        passing=max(_passing_bytes(spec), attention),
    )


def _first_layers(spec: DecoderSpec, num_layers: int, *, remat: Remat) -> DecoderSpec:
    config = dataclasses.replace(
        spec.config,
        num_layers=num_layers,
        layer_windows=spec.config.layer_windows[:num_layers],
    )
    options = dataclasses.replace(spec.options, remat=remat)
    adapted = spec.stage(0, num_layers).adapted
    return dataclasses.replace(spec, config=config, options=options, adapted=adapted)


def _kept_bytes(spec: DecoderSpec, num_tokens: int, block_tokens: int) -> int:
    """Bytes that the forward pass keeps for the backward pass, weights included."""
    limits = Limits(capacity=num_tokens, block_tokens=block_tokens)

    def backward(base, params, settings, batch, keys):
        def total(params):
            tables = to_paths(spec.stacks, params, axis=1)
            return job_losses(spec, base, tables, settings, batch, keys).loss.sum()

        return jax.vjp(total, params)[1]

    traced = jax.make_jaxpr(backward)(
        spec.base_shapes(),
        spec.adapter_shapes(),
        _settings_shapes(spec),
        _batch_shapes(limits),
        _key_shapes(spec),
    ).jaxpr
    given = set(traced.invars)
    kept = {v for v in traced.outvars if isinstance(v, jax_core.Var)} - given
    return _num_bytes([v.aval for v in kept])


def _head_bytes(spec: DecoderSpec) -> int:
    """Bytes of the logits that the loss computes at a time, independent of T."""
    return min(_HEAD_BYTES, _HEAD_ROWS * spec.config.vocab_size * _LOGIT_BYTES)


def _passing_bytes(spec: DecoderSpec) -> int:
    """Bytes per token of gradients inside a layer, of the MLP's and model's width."""
    itemsize = jnp.dtype(spec.options.dtype).itemsize
    return _mlp_bytes(spec) + 3 * spec.config.hidden_size * itemsize


def _mlp_bytes(spec: DecoderSpec) -> int:
    """Bytes per token of the features inside an MLP."""
    return spec.config.intermediate_size * jnp.dtype(spec.options.dtype).itemsize


def _attention_bytes(spec: DecoderSpec, num_tokens: int) -> float:
    """Bytes per token of attention's backward pass, as reported by the compiler.

    The result is 0 if the compiler does not report it. Only the compiler knows the
    scratch memory of cuDNN.
    """
    config, options = spec.config, spec.options

    def heads(number: int) -> Any:
        shape = num_tokens, number, config.head_dim
        return jax.ShapeDtypeStruct(shape, options.dtype)

    q, k = heads(config.num_heads), heads(config.num_kv_heads)
    segment_ids = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    run = jax.jit(
        lambda backward, dout: backward(dout),
        compiler_options=training_options(options.attention),
    )
    most = 0
    for scoring in {layer_scoring(config, i) for i in range(config.num_layers)}:

        def forward(q, k, v, segment_ids, scoring=scoring):
            attention = functools.partial(
                packed_attention,
                segment_ids=segment_ids,
                lengths=options.lengths,
                scoring=scoring,
                implementation=options.attention,
            )
            return jax.vjp(attention, q, k, v)[1]

        backward = jax.eval_shape(forward, q, k, k, segment_ids)
        found = run.lower(backward, q).compile().memory_analysis()
        most = max(most, found.temp_size_in_bytes if found else 0)
    return most / num_tokens


def _mask_bytes(spec: DecoderSpec) -> int:
    """Bytes per token of the dropout masks, which XLA makes once and keeps."""
    shapes = spec.base_shapes()
    return sum(shapes[f"{path}.kernel"].shape[0] for path in spec.adapted)


# ---- measured on the compiled step ---------------------------------------------------


def compiled_step(
    spec: DecoderSpec,
    steps: CompiledSteps,
    base: Base,
    table: SlotTable,
    limits: Limits,
) -> jax.stages.Compiled:
    """Compiles the training step as the run will call it; the run reuses the program.

    Args:
        spec: The decoder.
        steps: Compiled functions of the decoder.
        base: Frozen weights.
        table: The slots.
        limits: Capacity and block size.
    """
    return compiled(
        steps.accumulate,
        "the training step",
        base,
        table.state.params,
        table.state.pending,
        table.settings,
        _batch_shapes(limits),
        _key_shapes(spec),
    )


def measured(
    spec: DecoderSpec, program: jax.stages.Compiled, limits: Limits
) -> Footprint | None:
    """Returns the footprint that the compiler reports; None if it reports none.

    Args:
        spec: The decoder.
        program: The compiled training step.
        limits: Limits of the microbatches that it was compiled for.
    """
    found = program.memory_analysis()
    if found is None:
        return None
    beyond = found.output_size_in_bytes - found.alias_size_in_bytes
    beyond += found.temp_size_in_bytes + found.generated_code_size_in_bytes
    training = beyond + _BATCHES * _num_bytes(_batch_shapes(limits))
    fixed = min(_head_bytes(spec), training // 2)
    per_token = (training - fixed) / limits.capacity
    return dataclasses.replace(resident(spec), fixed=fixed, per_token=per_token)


# ---- shapes of a step's inputs -------------------------------------------------------


def _batch_shapes(limits: Limits) -> PackedBatch:
    rows: Any = jax.ShapeDtypeStruct((limits.capacity,), jnp.int32)
    weights: Any = jax.ShapeDtypeStruct((limits.capacity,), jnp.float32)
    num_blocks = limits.capacity // limits.block_tokens
    blocks: Any = jax.ShapeDtypeStruct((num_blocks,), jnp.int32)
    return PackedBatch(
        token_ids=rows,
        positions=rows,
        segment_ids=rows,
        labels=rows,
        loss_weight=weights,
        token_index=rows,
        block_adapter=blocks,
    )


def _slots(spec: DecoderSpec) -> SlotShape:
    assert spec.slots is not None
    return spec.slots


def _key_shapes(spec: DecoderSpec) -> SlotKeys:
    each: Any = jax.ShapeDtypeStruct((_slots(spec).num_slots,), jnp.int32)
    return SlotKeys(seed=each, step=each)


def _settings_shapes(spec: DecoderSpec) -> SlotSettings:
    shape = len(spec.adapted), _slots(spec).num_slots
    each: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    rank: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    return SlotSettings(scaling=each, dropout=each, rank=rank)
