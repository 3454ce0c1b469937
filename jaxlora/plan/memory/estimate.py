"""Estimates the memory of a run before its training step is compiled."""

import dataclasses
import functools
import importlib.util
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core

from jaxlora.models.base_format import BaseFormat
from jaxlora.models.build import LayerLinear
from jaxlora.models.config import DeltaShape, ModelConfig
from jaxlora.models.division import copied_shapes, part_shapes
from jaxlora.models.forward import job_losses, training_options
from jaxlora.models.options import Remat
from jaxlora.models.residuals import reshapes
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.models.structure import linears
from jaxlora.modules.attention import packed_attention
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.modules.gated_delta import (
    DeltaInputs,
    DeltaWeights,
    packed_gated_delta,
)
from jaxlora.modules.scoring import layer_scoring
from jaxlora.modules.triton_gated_delta import (
    DeltaImplementation,
    triton_delta_unsupported,
)
from jaxlora.pallas_kernels import get_backend
from jaxlora.pallas_kernels.device import planned_device, planned_for, shapes_only
from jaxlora.pallas_kernels.expert_rows import num_blocks
from jaxlora.pallas_kernels.triton.target import interpreted
from jaxlora.plan.memory import planned
from jaxlora.plan.memory.footprint import (
    GAPS,
    Footprint,
    StageUse,
    fixed_bytes,
    gathered_bytes,
    num_bytes,
    shard_bytes,
    stage_resident,
    whole_table_bytes,
)
from jaxlora.plan.memory.inputs import batch_shapes, key_shapes
from jaxlora.programs.program import kept_value
from jaxlora.scheduler import Limits
from jaxlora.sharding.rules import EXPERT, TENSOR

_TRACED_TOKENS = 4096  # at least, so that the bytes per token are exact enough
_MLP_KEEPS = 3  # arrays of the MLP's width that are kept: gate, up and their product
_GRADIENT_COPIES = 2.5
# With these, a layer's input is kept for the gradient of its norm alone, which the
# first layer does not compute.
_INPUT_FOR_GRADIENT: tuple[Remat, ...] = ("none", "mlp")
# Linears that share their input run in one call; see `apply_together`.
_TOGETHER = {
    "q_proj": "q, k and v",
    "k_proj": "q, k and v",
    "v_proj": "q, k and v",
    "gate_proj": "gate and up",
    "up_proj": "gate and up",
    "in_proj_qkv": "qkv and z",
    "in_proj_z": "qkv and z",
    "in_proj_b": "b and a",
    "in_proj_a": "b and a",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Bytes per token that the training step of a decoder needs at one capacity.

    Attributes:
        kept_by_layer: Kept by each layer for its backward pass; the mean, if layers are
            of several kinds.
        kept_at_ends: Kept outside the layers, most of it for the loss.
        recomputed: What one layer keeps beyond `kept_by_layer` while it runs again in
            its backward pass.
        transient: Needed inside a layer for a while, and not by the loss.
        alone: The same in a backward pass that is a program of its own. What it gets
            from the forward pass is not its own, and is not free before its end.
    """

    kept_by_layer: float
    kept_at_ends: float
    recomputed: float
    transient: float
    alone: float


def stage_estimated(spec: DecoderSpec, found: StepBytes, use: StageUse) -> Footprint:
    """Estimates the footprint of one stage on each of its devices.

    Args:
        spec: The stage, or the whole decoder.
        found: Bytes per token of the training step of the whole decoder, or of the part
            of it that each device runs.
        use: How the devices are used.
    """
    # Between the halves of layers, devices that share them have parts of the rows.
    hidden = _hidden_bytes(spec) / use.num_tensor
    part, is_alone = use.part_of(spec), _runs_backward_alone(spec)
    kept = len(spec.layer_numbers) * found.kept_by_layer + _mask_bytes(part)
    if spec.has_head:
        kept += found.kept_at_ends
    has_input = spec.options.remat in _INPUT_FOR_GRADIENT
    waiting = use.num_waiting * hidden
    weights = shard_bytes(copied_shapes(spec, use.num_tensor), use.num_shards)
    if spec.options.layers_per_program is not None:
        kept += has_input * hidden
        waiting += 2 * hidden  # between two programs, and its gradient
        weights = _layer_weights(spec, use)
    elif not spec.has_head and spec.has_embedding:
        kept -= has_input * hidden
    gaps = GAPS * use.num_kept * kept if is_alone else 0.0
    transient = found.alone if is_alone else found.transient
    return dataclasses.replace(
        stage_resident(spec, use),
        gathered_bytes=gathered_bytes(spec, use),
        fixed_bytes=fixed_bytes(spec, use) + weights,
        bytes_per_token=use.num_kept * kept + gaps + waiting,
        # No layer is recomputed while the loss is.
        transient_bytes_per_token=found.recomputed + transient,
        scratch_bytes=scratch_bytes(part) + _gradient_copies(spec, use) + weights,
    )


def part_bytes(
    spec: DecoderSpec,
    tensor: int,
    block_tokens: int,
    num_tokens: int | None,
    expert: int = 1,
) -> StepBytes:
    """Returns `step_bytes` of the part of a decoder that each of the devices runs."""
    part = spec.divided(tensor=tensor, expert=expert).own_part
    return step_bytes(part, block_tokens, num_tokens)


def step_bytes(
    spec: DecoderSpec, block_tokens: int, num_tokens: int | None
) -> StepBytes:
    """Estimates the bytes per token of a training step from what its trace keeps.

    The arrays that the backward pass keeps are counted for the first two layers, and
    the first of each other kind, traced with one or two numbers of tokens. Transient
    memory inside a layer is added by a formula. That of attention may be larger than
    all other arrays in a layer, and cuDNN's may almost double per token from one
    capacity to the next: its sequences are divisors of the capacity.

    Args:
        spec: The whole decoder, or the part of it that a device runs.
        block_tokens: Tokens of a block.
        num_tokens: Tokens of a microbatch; None: without attention's transient memory,
            which is a lower bound for every capacity.
    """
    rules = tuple(_delta_rules(spec).values())
    given = "step_bytes", spec, block_tokens, num_tokens, planned_device(), rules
    estimate = lambda: dataclasses.asdict(_estimate(spec, block_tokens, num_tokens))
    return StepBytes(**kept_value("the estimate of memory", given, estimate))


def _estimate(
    spec: DecoderSpec, block_tokens: int, num_tokens: int | None
) -> StepBytes:
    if planned_device() is not None:
        with planned_for(planned.TRACED_ON):
            found = _step_bytes(planned.traceable(spec, block_tokens), block_tokens)
    else:
        found = _step_bytes(spec, block_tokens)
    if num_tokens is None:
        return found
    found = _with_padding(found, spec, num_tokens)
    attention = _attention_bytes(spec, num_tokens)
    for shape, runs in _delta_rules(spec).items():
        each, fixed = _delta_bytes(shape, spec.options.dtype, block_tokens, runs)
        attention = max(attention, each + fixed / num_tokens)
    # The MLP's arrays are free again when attention's gradient begins.
    freed = _mlp_bytes(spec, num_inner=_MLP_KEEPS)
    kept = max(0.0, freed - found.recomputed)
    return dataclasses.replace(
        found,
        transient=max(found.transient, attention - freed),
        alone=max(found.alone, attention - freed + kept),
    )


@functools.lru_cache(maxsize=16)
def _step_bytes(spec: DecoderSpec, block_tokens: int) -> StepBytes:
    """Estimates a training step's bytes per token without those of attention."""
    # The memory of a band of keys grows up to the length of a sample, and the rows of
    # experts have more padding from some number of tokens on.
    tokens = block_tokens * max(1, _TRACED_TOKENS // block_tokens)
    longest = spec.options.max_segment_tokens
    while tokens < 2 * longest or len(_block_rows(spec, (tokens, 2 * tokens))) > 1:
        tokens *= 2

    remat, mlp, hidden = spec.options.remat, _mlp_bytes(spec), _hidden_bytes(spec)
    one, fixed = _kept(_of_layers(spec, (0,), remat=remat), tokens, block_tokens)
    two = one
    kinds = [spec.config.layer_kind(i) for i in range(spec.config.num_layers)]
    if len(kinds) > 1:
        second = 1 if kinds[1] == kinds[0] else 0
        whole = _of_layers(spec, (0, second), remat=remat)
        if _are_alike(spec, 0, second):
            both = _kept_bytes(whole, tokens, block_tokens)
            two = (both - 2 * fixed) / tokens
        else:
            two, _ = _kept(whole, tokens, block_tokens)
    more = recomputed = 0.0
    for kind in dict.fromkeys(kinds):
        layer = (kinds.index(kind),)
        own = _of_layers(spec, layer, remat=remat)
        kept = _kept(own, tokens, block_tokens)[0]
        more += kinds.count(kind) / len(kinds) * (kept - one)
        if remat != "none":
            weakest = _of_layers(spec, layer, remat="none")
            most = _kept(weakest, tokens, block_tokens)[0]
            recomputed = max(recomputed, most - kept)
    # The gradients of the MLP's arrays, as none of these is free for them.
    alone = _mlp_bytes(spec, num_inner=_MLP_KEEPS) + hidden - recomputed
    if remat == "none":
        transient = own = mlp + 3 * hidden
    else:
        # The most is needed at the gradient of the MLP's product. Then the gradient of
        # the hidden states has the place of what was kept for the loss.
        transient, own = mlp, mlp + hidden
    return StepBytes(
        kept_by_layer=two - one + more,
        kept_at_ends=2 * one - two,
        recomputed=recomputed,
        transient=transient,
        alone=max(own, alone),
    )


def _block_rows(spec: DecoderSpec, numbers: Sequence[int]) -> set[int]:
    """Rows of a block of experts in microbatches of these numbers of tokens."""
    config = spec.config
    shapes = set(filter(None, map(config.expert_shape, range(config.num_layers))))
    held = [
        dataclasses.replace(one, number=one.number // config.expert_parts)
        for one in shapes
    ]
    return {spec.expert_block_rows(*one) for one in itertools.product(held, numbers)}


def _of_layers(
    spec: DecoderSpec, numbers: tuple[int, ...], *, remat: Remat
) -> DecoderSpec:
    """Returns the decoder that consists of some layers, by their numbers."""

    def renumbered(paths: Iterable[str]) -> Iterator[str]:
        for path in paths:
            _, layer, name = path.split(".", 2)
            for new, number in enumerate(numbers):
                if number == int(layer):
                    yield f"layers.{new}.{name}"

    options = dataclasses.replace(spec.options, remat=remat)
    if (base := options.base_format) is not None:
        kept = tuple(sorted(renumbered(base.kept)))
        base = BaseFormat(options=base.options, kept=kept)
        options = dataclasses.replace(options, base_format=base)
    return dataclasses.replace(
        spec,
        config=spec.config.of_layers(numbers),
        options=options,
        adapted=tuple(sorted(renumbered(spec.adapted))),
    )


def _are_alike(spec: DecoderSpec, one: int, other: int) -> bool:
    """Whether two layers keep as many bytes that no token adds to.

    These are slices of the slot tables. The embedding and the loss keep none, unless
    slots train whole copies.
    """
    if spec.whole_copies:
        return False

    def linears(number: int) -> set[tuple[str, str | None]]:
        paths = spec.stage(number, number + 1).adapted
        return {(p.split(".", 2)[2], spec.options.weight_format(p)) for p in paths}

    return linears(one) == linears(other)


@functools.lru_cache(maxsize=64)
def _kept(spec: DecoderSpec, num_tokens: int, block_tokens: int) -> tuple[float, int]:
    """Returns the bytes that are kept for each token, and those that are fixed.

    They follow from traces with two numbers of tokens.
    """
    small = _kept_bytes(spec, num_tokens, block_tokens)
    large = _kept_bytes(spec, 2 * num_tokens, block_tokens)
    return (large - small) / num_tokens, 2 * small - large


def _kept_bytes(spec: DecoderSpec, num_tokens: int, block_tokens: int) -> int:
    """Bytes that the forward pass keeps for the backward pass, weights included."""
    limits = Limits(capacity=num_tokens, block_tokens=block_tokens)

    def backward(base, params, settings, batch, keys):
        def total(params):
            tables = to_modules(spec.stacks, params)
            return job_losses(spec, base, tables, settings, batch, keys).loss.sum()

        return jax.vjp(total, params)[1]

    with shapes_only():
        axes = [(TENSOR, spec.options.tensor), (EXPERT, spec.options.expert)]
        traced = jax.make_jaxpr(backward, axis_env=axes)(
            spec.base_shapes(),
            spec.adapter_shapes(),
            spec.settings_shapes(),
            batch_shapes(limits, objectives=spec.options.objectives),
            key_shapes(spec),
        ).jaxpr
    given = set(traced.invars)
    kept = {v for v in traced.outvars if isinstance(v, jax_core.Var)} - given
    sources = dict(reshapes(traced))
    same = kept & sources.keys()
    reshaped = {v for v in same if any(sources[v] is other for other in kept)}
    return num_bytes([v.aval for v in kept - reshaped])


def _hidden_bytes(spec: DecoderSpec) -> int:
    """Bytes per token of hidden states."""
    return spec.config.hidden_size * jnp.dtype(spec.options.dtype).itemsize


def _runs_backward_alone(spec: DecoderSpec) -> bool:
    """Whether the backward pass of the layers is a program of its own, or several."""
    return not spec.has_head or spec.options.layers_per_program is not None


def _gradient_copies(spec: DecoderSpec, use: StageUse) -> int:
    """Bytes of the gradients of all layers of a backward pass of its own.

    There are those of each layer, those stacked, and weights in the layers' dtype. A
    program with both passes puts them where activations were.
    """
    if not _runs_backward_alone(spec):
        return 0
    size = len(spec.layer_numbers)
    # Gradients of whole copies are neither stacked nor cast.
    slots = num_bytes(_layer_tables(spec, use))
    part = (spec.options.layers_per_program or size) / size
    own = 0 if spec.has_head else whole_table_bytes(spec)
    return math.ceil(_GRADIENT_COPIES * part * slots) + own


def _layer_weights(spec: DecoderSpec, use: StageUse) -> int:
    """Bytes of the adapters in the layers' dtype, which sections keep."""
    layers = _layer_tables(spec, use).values()
    num = sum(math.prod(shape.shape) for shape in layers)
    return num * spec.options.dtype.itemsize


def _layer_tables(spec: DecoderSpec, use: StageUse) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the slot tables of a device, without whole copies of modules."""
    _, tables = part_shapes(spec, use.num_tensor, use.num_expert)
    whole = spec.whole_copies
    return {name: shape for name, shape in tables.items() if name not in whole}


def _mlp_bytes(spec: DecoderSpec, *, num_inner: int = 1) -> int:
    """Bytes per token of arrays inside an MLP, or inside experts.

    A token is copied to each of its experts, so there is its copies' input, too. If
    devices share the experts, each has room for the copies of the tokens of all
    devices, and has these tokens and their results.

    Args:
        spec: The decoder.
        num_inner: Number of arrays with the MLP's width.
    """
    config, widths = spec.config, [0]
    parts = config.expert_parts
    for shape in set(map(config.expert_shape, range(config.num_layers))):
        if shape is None:
            widths.append(num_inner * config.intermediate_size)
        else:
            copies = parts * min(shape.chosen, shape.number // parts)
            width = copies * (num_inner * shape.features + config.hidden_size)
            width += 2 * parts * config.hidden_size if parts > 1 else 0
            widths.append(width + num_inner * (shape.shared_features or 0))
    return max(widths) * jnp.dtype(spec.options.dtype).itemsize


def _with_padding(found: StepBytes, spec: DecoderSpec, num_tokens: int) -> StepBytes:
    """Adds the rows of experts that hold no token, which depend on all tokens.

    Their number depends on that of the experts and slots, and little on the tokens.
    """
    config, itemsize = spec.config, jnp.dtype(spec.options.dtype).itemsize
    kept, transient = [0.0], [0.0]  # by layer
    for shape in map(config.expert_shape, range(config.num_layers)):
        if shape is None:
            kept.append(0.0)
            continue
        number = shape.number // config.expert_parts
        copies = min(shape.chosen, number) * config.expert_parts * num_tokens
        held = dataclasses.replace(shape, number=number)
        rows = spec.expert_block_rows(held, num_tokens)
        rows *= num_blocks(copies, number, spec.num_expert_slots, rows)
        share = itemsize * (rows - copies) / num_tokens
        kept.append(share * (config.hidden_size + _MLP_KEEPS * shape.features))
        transient.append(share * (config.hidden_size + shape.features))
    more = {
        "transient": found.transient + max(transient),
        "alone": found.alone + max(transient),
    }
    if spec.options.remat in ("mlp", "layer"):
        more["recomputed"] = found.recomputed + max(kept)
    else:
        more["kept_by_layer"] = found.kept_by_layer + sum(kept) / config.num_layers
    return dataclasses.replace(found, **more)


def _attention_bytes(spec: DecoderSpec, num_tokens: int) -> float:
    """Bytes per token of attention's backward pass.

    They follow from a formula, or from the compiler where XLA computes attention.
    """
    config, options, most = spec.config, spec.options, 0.0
    for heads in set(map(config.at_layer, range(config.num_layers))):
        name = options.attention_of(heads.head_dim)
        if (scratch := ATTENTIONS[name].scratch_bytes) is not None:
            found = scratch(heads, options.lengths, num_tokens) / num_tokens
        else:
            given = spec.with_remat("none"), heads, num_tokens
            found = _compiled_attention_bytes(*given)
        most = max(most, found)
    return most


@functools.lru_cache(maxsize=64)
def _compiled_attention_bytes(
    spec: DecoderSpec, own: ModelConfig, num_tokens: int
) -> float:
    """Bytes per token of attention's backward pass, as reported by the compiler.

    Args:
        spec: The decoder, without recomputation.
        own: Its model as the layers see it; see `ModelConfig.at_layer`.
        num_tokens: Tokens of a microbatch.

    Returns:
        The bytes; 0 if the compiler does not report them.
    """
    config, options = spec.config, spec.options

    def heads(number: int) -> Any:
        shape = num_tokens, number, own.head_dim
        return jax.ShapeDtypeStruct(shape, options.dtype)

    q, k = heads(own.num_heads), heads(own.num_kv_heads)
    segment_ids = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    run = jax.jit(
        lambda backward, dout: backward(dout),
        compiler_options=training_options(spec),
    )
    most = 0
    attending = [
        i
        for i in range(config.num_layers)
        if config.delta_shape(i) is None and config.at_layer(i) == own
    ]
    for scoring in {layer_scoring(config, i) for i in attending}:

        def forward(q, k, v, segment_ids, scoring=scoring):
            attention = functools.partial(
                packed_attention,
                segment_ids=segment_ids,
                lengths=options.lengths,
                scoring=scoring,
                implementation=options.attention_of(own.head_dim),
            )
            return jax.vjp(attention, q, k, v)[1]

        backward = jax.eval_shape(forward, q, k, k, segment_ids)
        found = run.lower(backward, q).compile().memory_analysis()
        most = max(most, found.temp_size_in_bytes if found else 0)
    return most / num_tokens


def _delta_rules(spec: DecoderSpec) -> dict[DeltaShape, DeltaImplementation]:
    """Returns the sizes of gated delta rules, and what is to run them.

    For a device that is not here, the packages can be missing. Then it is the plain
    rule, which takes more memory.
    """
    config, is_here = spec.config, importlib.util.find_spec("triton") is not None

    def runs(shape: DeltaShape) -> DeltaImplementation:
        reason = triton_delta_unsupported(spec.options.dtype, shape)
        return "triton" if reason is None and is_here else "xla"

    shapes = map(config.delta_shape, range(config.num_layers))
    return {shape: runs(shape) for shape in shapes if shape is not None}


@functools.lru_cache(maxsize=16)
def _delta_bytes(
    shape: DeltaShape,
    dtype: jnp.dtype,
    block_tokens: int,
    implementation: DeltaImplementation,
) -> tuple[float, float]:
    """Bytes of the gradient of a gated delta rule: per token, and for any number.

    Two numbers of tokens are compiled, because memory grows evenly with them, and a
    compilation for each capacity would take seconds.
    """
    few = block_tokens * max(1, _TRACED_TOKENS // block_tokens)
    less, more = (
        _compiled_delta_bytes(shape, dtype, num, block_tokens, implementation)
        for num in (few, 2 * few)
    )
    each = (more - less) / few
    return each, less - each * few


def _compiled_delta_bytes(
    shape: DeltaShape,
    dtype: jnp.dtype,
    num_tokens: int,
    block_tokens: int,
    implementation: DeltaImplementation,
) -> int:
    """Bytes of the gradient of a gated delta rule, as reported by the compiler.

    That of any device is good enough: it gives room to the arrays between kernels, and
    the kernels need none.
    """
    heads = shape.num_value_heads

    def array(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def rows(*features: int) -> Any:
        return array(num_tokens, *features)

    def gradient(given, weights, segment_ids, dout):
        def run(given: DeltaInputs) -> jax.Array:
            return packed_gated_delta(
                given,
                weights,
                shape,
                segment_ids,
                block_tokens=block_tokens,
                implementation=implementation,
            )

        return jax.vjp(run, given)[1](dout)

    with interpreted(_no_kernel):
        lowered = jax.jit(gradient).lower(
            DeltaInputs(rows(shape.mixed_features), rows(heads), rows(heads)),
            DeltaWeights(
                array(shape.mixed_features, shape.conv_width),
                array(heads),
                array(heads),
            ),
            jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
            rows(heads, shape.value_dim),
        )
    found = lowered.compile().memory_analysis()
    return found.temp_size_in_bytes if found else 0


def _no_kernel(*arguments: Any) -> NoReturn:
    """Stands for kernels in a program that never runs."""
    raise AssertionError(f"{arguments} in a program that is only compiled")


def _mask_bytes(spec: DecoderSpec) -> int:
    """Bytes per token of the dropout masks that XLA makes once and keeps, if any."""
    backend = get_backend(spec.options.implementation)
    if spec.slots is None or not spec.slots.use_dropout or not backend.stores_masks:
        return 0
    linears = map(spec.linear, spec.adapted)
    return sum(
        one.in_features * (1 if one.experts is None else one.experts.chosen)
        for one in linears
    )


# ---- scratch memory of linears -------------------------------------------------------


def scratch_bytes(spec: DecoderSpec) -> int:
    """Returns the bytes that the largest call of linears takes beside its results.

    These are dequantized weights, transposed ones, and what the variants of LoRA make.
    They are freed when the call has ended.

    Args:
        spec: The decoder, or one stage of it.
    """
    base = spec.options.base_format
    of_linear, of_call = _variant_bytes(spec)
    if base is None:
        return of_linear + of_call
    calls: dict[tuple[int, str], int] = {}
    for number in spec.layer_numbers:
        for linear in _quantized(spec, base, number):
            call = number, _call(linear.name)
            size = _scratch_of(spec, base, linear)
            calls[call] = calls.get(call, 0) + size
    return max(of_linear, *calls.values(), 0) + of_call


def _call(linear: str) -> str:
    """Names the call in which a linear of a layer runs, see `_TOGETHER`."""
    module, _, name = linear.rpartition(".")
    return f"{module}.{_TOGETHER.get(name, name)}"


def _variant_bytes(spec: DecoderSpec) -> tuple[int, int]:
    """Most bytes that variants take in one linear, and in one call of linears."""
    of_linear, calls = 0, {"": 0}
    if (slots := spec.slots) is None:
        return 0, 0
    for path in spec.adapted:
        _, layer, name = path.split(".", 2)
        linear, call = spec.linear(path), f"{layer} {_call(name)}"
        sizes = slots, linear.in_features, linear.out_features
        is_dense = not spec.options.weight_format(path)
        copied = 0 if is_dense else spec.options.dtype.itemsize
        own = sum(variant.linear_bytes(*sizes, copied) for variant in slots.variants)
        of_linear = max(of_linear, own)
        together = sum(variant.call_bytes(*sizes) for variant in slots.variants)
        calls[call] = calls.get(call, 0) + together
    return of_linear, max(calls.values())


def _scratch_of(spec: DecoderSpec, base: BaseFormat, linear: LayerLinear) -> int:
    """Bytes of a linear's weight, or of those of all experts, as a call reads it."""
    size = linear.in_features * linear.out_features
    if linear.experts is not None:  # they are dequantized in every format
        return spec.options.dtype.itemsize * linear.experts.number * size
    if not base.options.multiplies_backward:
        return spec.options.dtype.itemsize * size
    backend = get_backend(spec.options.implementation)
    is_made = backend.reads_transpose and not base.options.stores_transpose
    return size if is_made else 0


def _quantized(
    spec: DecoderSpec, base: BaseFormat, number: int
) -> Iterable[LayerLinear]:
    return (
        linear
        for name, linear in linears(spec.config, number).items()
        if base.quantizes(f"layers.{number}.{name}")
    )
