"""Checks of the arguments of `multi_lora_linears`, with errors that say the cure."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.pallas_kernels.backends import BACKENDS, Backend, is_partitioned
from jaxlora.pallas_kernels.dropout import TILE_TOKENS, MaskWords
from jaxlora.pallas_kernels.expert_rows import RowPlan
from jaxlora.pallas_kernels.given_mask import GivenMask, num_words
from jaxlora.pallas_kernels.operands import padded_rank
from jaxlora.pallas_kernels.projection import (
    RANK_STEP,
    ROWS,
    KernelSettings,
    LinearShape,
    Projection,
)
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight


def check_projections(
    backend: Backend,
    x,
    projections: Sequence[Projection],
    block_adapter,
    *,
    layer=None,
    w_transposed: bool = False,
) -> tuple[Projection, ...]:
    """Checks linears that share x; returns them with every slot's rank."""
    _check_alike(projections)
    is_stack = layer is not None
    for p in projections:
        if isinstance(p.w, QuantizedWeight):
            _check_quantized(p.w, x, is_stack=is_stack, w_transposed=w_transposed)
    made = tuple(
        _checked(
            backend, x, p, block_adapter, is_stack=is_stack, w_transposed=w_transposed
        )
        for p in projections
    )
    _check_mesh(backend)
    return made


def check_experts(
    backend: Backend,
    x,
    projections: Sequence[Projection],
    plan: RowPlan,
    *,
    w_transposed: bool = False,
) -> None:
    """Checks linears of experts that share x."""
    _check_alike(projections)
    if x.shape[0] != plan.num_rows:
        raise ValueError(
            f"x has {x.shape[0]} rows, wanted the {plan.num_rows} of the plan. Make "
            "them with gather_rows."
        )
    for p in projections:
        _check_expert_projection(x, p, plan, w_transposed)
        if plan.block_rows < TILE_TOKENS:
            _check_shared(backend, p, plan)
        _check_supported(
            backend,
            LinearShape(
                dtype=x.dtype,
                in_features=x.shape[1],
                out_features=p.b.shape[2],
                rank=p.a.shape[2],
                block_tokens=TILE_TOKENS,
            ),  # no quantized w reaches a back end
        )
    _check_mesh(backend)


def _check_shared(backend: Backend, projection: Projection, plan: RowPlan) -> None:
    """Checks a linear whose adapters share blocks of rows."""
    why = unshared(backend, [projection])
    if why is not None:
        raise ValueError(
            f"the plan's blocks have {plan.block_rows} rows, but {why}. Make the plan "
            "with block_rows=block_rows_for(...), or leave block_rows out."
        )


def unshared(backend: Backend, projections: Sequence[Projection]) -> str | None:
    """Returns why the adapters of experts cannot share blocks; None if they can."""
    if not backend.shares_blocks:
        return f"the back end {backend.name!r} takes blocks of {TILE_TOKENS}"
    if any(p.dropout is not None for p in projections):
        return "a linear has dropout, whose masks go by block"
    if any(padded_rank(p.a.shape[2]) >= RANK_STEP for p in projections):
        return f"a linear has more than {RANK_STEP // 2} ranks"
    return None


def _check_expert_projection(
    x, projection: Projection, plan: RowPlan, w_transposed: bool
) -> None:
    p, e, g = projection, plan.num_experts, plan.num_adapters
    k, (n, r) = x.shape[1], (p.b.shape[2], p.a.shape[2])
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "w": (_expert_shape(x, p.w, e, w_transposed), (e, k, n)),
        "a": (p.a.shape, (e * g, k, r)),
        "b": (p.b.shape, (e * g, r, n)),
        "scaling": (jnp.shape(p.scaling), (g,)),
    }
    if p.rank is not None:
        shapes["rank"] = jnp.shape(p.rank), (g,)
    if p.bias is not None:
        shapes["bias"] = p.bias.shape, (e, n)
    if isinstance(p.dropout, GivenMask):
        raise ValueError(
            "dropout is a GivenMask, and linears of experts take a Dropout, whose mask "
            "is computed for each expert. Give one."
        )
    if p.dropout is not None:
        shapes["dropout.rate"] = jnp.shape(p.dropout.rate), (g,)
        shapes["dropout.token_index"] = p.dropout.token_index.shape, plan.row.shape[:1]
    wrong = [
        f"{name} {got}, wanted {wanted}"
        for name, (got, wanted) in shapes.items()
        if got != wanted
    ]
    if wrong:
        raise ValueError(
            f"shapes do not match x {x.shape}, {e} experts and {g} adapters: "
            f"{'; '.join(wrong)}."
        )
    if not isinstance(p.w, QuantizedWeight) and x.dtype != p.w.dtype:
        raise ValueError(f"x and w must share a dtype, got {x.dtype} and {p.w.dtype}.")
    if p.settings is not None:
        _check_settings(p.settings, g)
    if p.dora is not None:
        raise ValueError(
            "a linear of experts has dora, which is not defined for experts. Leave it "
            "out, and adapt experts with LoRA."
        )


def _expert_shape(x, w, num_experts: int, w_transposed: bool) -> tuple[int, ...]:
    """Returns the shape of a stack of experts' weights, with N last; checks it."""
    if not isinstance(w, QuantizedWeight):
        e, *last = w.shape
        return (e, *last[::-1]) if w_transposed else (e, *last)
    if not w.is_stack:
        raise ValueError(
            f"w is one quantized weight ({w.format}), wanted a stack of {num_experts}: "
            "give each of its arrays a first axis of experts."
        )
    _check_quantized(w.first(), x, is_stack=False, w_transposed=w_transposed)
    (e,) = {len(x) for x in w.arrays.values()}
    return e, *w.first().shape


def _check_alike(projections: Sequence[Projection]) -> None:
    """Checks that linears can run in one call."""
    kinds = sorted({type(p.dropout).__name__ for p in projections})
    if len(kinds) != 1:
        raise ValueError(
            "projections must have the same kind of dropout or none, got "
            f"{' and '.join(kinds)}. Give those without one a Dropout of rate 0, or a "
            "GivenMask that keeps everything."
        )
    if len({p.a.shape[0] for p in projections}) != 1:
        raise ValueError(
            "projections must have the same number of slots, got "
            f"{[p.a.shape[0] for p in projections]}."
        )
    formats = [p.weight_format for p in projections]
    if len(set(formats)) != 1:
        raise ValueError(
            "projections must have base weights of one format, got "
            f"{' and '.join(map(str, formats))}. Call multi_lora_linears once for each "
            "format."
        )
    constants = [p.w.constants for p in projections if isinstance(p.w, QuantizedWeight)]
    for name in constants[0] if constants else ():
        values = [found[name] for found in constants]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"projections must have the same {name}, got {values}. Change it with "
                f"dataclasses.replace(w, {name}=...)."
            )


def _check_quantized(w: QuantizedWeight, x, *, is_stack, w_transposed) -> None:
    """Checks a quantized weight, and that x can be multiplied by it."""
    w.check()
    if is_stack or w_transposed:
        given = "layer" if is_stack else "w_transposed=True"
        raise ValueError(
            f"{given} was given with a quantized weight ({w.format}), which is always "
            "one weight stored N K. Leave it out, and give each layer's own weight."
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"x is {x.dtype}, but linears on a quantized weight ({w.format}) compute "
            "in bfloat16, float16 or float32. Cast x."
        )


def _checked(
    backend: Backend,
    x,
    projection: Projection,
    block_adapter,
    *,
    is_stack,
    w_transposed,
) -> Projection:
    """Checks a projection; returns it with every slot's rank."""
    p = projection
    num_slots, _, rank = p.a.shape
    _check_shapes(x, p, block_adapter, is_stack, w_transposed)
    _check_supported(
        backend,
        LinearShape(
            dtype=x.dtype,
            in_features=x.shape[1],
            out_features=p.b.shape[2],
            rank=rank,
            block_tokens=x.shape[0] // block_adapter.shape[0],
            weight_format=p.weight_format,
        ),
    )
    if p.settings is not None:
        _check_settings(p.settings, num_slots)
    if p.dora is not None:
        _check_dora(p)
    if isinstance(p.dropout, GivenMask):
        _check_given_mask(p, x)
    elif p.dropout is not None and p.dropout.words is not None:
        _check_words(p.dropout.words, x, num_slots)
    ranks = jnp.full((num_slots,), rank, jnp.int32) if p.rank is None else p.rank
    return dataclasses.replace(p, rank=ranks)


def _check_shapes(
    x, projection: Projection, block_adapter, is_stack, w_transposed
) -> None:
    (t, k), num_blocks = x.shape, block_adapter.shape[0]
    w, a, b = projection.w, projection.a, projection.b
    w_shape = w.shape[1:] if is_stack else w.shape
    k_n = w_shape[::-1] if w_transposed else w_shape
    if k_n != (k, b.shape[2]) or a.shape[1] != k:
        raise ValueError(
            f"shapes do not match: x {x.shape}, w {w_shape}, a {a.shape}, "
            f"b {b.shape}; wanted T K, {'N K' if w_transposed else 'K N'}, G K R, "
            "G R N."
        )
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"a {a.shape} and b {b.shape} must share G and R.")
    if num_blocks == 0 or t % num_blocks:
        raise ValueError(
            f"x has T={t} rows, not a multiple of the NB={num_blocks} entries of "
            "block_adapter. Pad each adapter's rows to whole blocks first."
        )
    if not isinstance(w, QuantizedWeight) and x.dtype != w.dtype:
        raise ValueError(f"x and w must share a dtype, got {x.dtype} and {w.dtype}.")


def _check_words(words: MaskWords, x, num_slots: int) -> None:
    t, k = x.shape
    blocks, slots, features = (*words.token.shape[1:2], *words.feature.shape[1:])
    num_blocks = -(-t // TILE_TOKENS)
    if (blocks, slots) != (num_blocks, num_slots) or features < k:
        raise ValueError(
            f"dropout's words are for {blocks * TILE_TOKENS} tokens, {slots} slots and "
            f"{features} features, wanted {t}, {num_slots} and {k} or more. Make them "
            "with mask_words for this layer."
        )


def _check_given_mask(projection: Projection, x) -> None:
    mask: Any = projection.dropout
    wanted = (num_words(x.shape[0]), x.shape[1])
    if mask.bits.shape != wanted or mask.bits.dtype != jnp.uint32:
        raise ValueError(
            f"a given mask has bits of shape {mask.bits.shape} and dtype "
            f"{mask.bits.dtype}, wanted {wanted} and uint32 for x {x.shape}. Make them "
            "with pack_mask from a mask of x's shape."
        )
    slots = (projection.a.shape[0],)
    if jnp.shape(mask.inverse_keep) != slots:
        raise ValueError(
            "a given mask has inverse_keep of shape "
            f"{jnp.shape(mask.inverse_keep)}, wanted {slots}: one factor per slot."
        )
    if projection.settings is not None:
        raise ValueError(
            "a projection has a given mask and settings, but settings hold the factors "
            "of a Dropout. Leave settings out: the kernels compute them from "
            "inverse_keep."
        )


def _check_dora(projection: Projection) -> None:
    dora: Any = projection.dora
    wanted = projection.b.shape[0], projection.b.shape[2]
    if dora.gain.shape != wanted:
        raise ValueError(
            f"dora has gains of shape {dora.gain.shape}, wanted {wanted}: one for each "
            "slot and output feature."
        )
    if dora.drops is not None and projection.dropout is None:
        raise ValueError(
            "dora says that slots drop features, and the projection has no dropout. "
            "Give it one, or leave drops out."
        )


def _check_settings(settings: KernelSettings, num_slots: int) -> None:
    shapes = {name: np.shape(getattr(settings, name)) for name in ROWS}
    if any(shape[1:] != (num_slots,) for shape in shapes.values()):
        raise ValueError(
            f"settings has rows of shapes {shapes}, wanted (P, {num_slots}), as the "
            f"layer has {num_slots} slots. Make settings with kernel_settings for "
            "these slots."
        )


def _check_supported(backend: Backend, shape: LinearShape) -> None:
    if (reason := backend.unsupported(shape)) is not None:
        able = [b.name for b in BACKENDS.values() if b.unsupported(shape) is None]
        raise ValueError(
            f"implementation={backend.name!r} cannot run this layer: {reason}. "
            f"Use one of: {', '.join(able)}."
        )


def _check_mesh(backend: Backend) -> None:
    """Checks that XLA does not partition kernels that cannot be partitioned."""
    mesh = jax.sharding.get_abstract_mesh()
    if is_partitioned(mesh) and not backend.partitionable:
        raise ValueError(
            f"implementation={backend.name!r} under the mesh {mesh}: its kernels "
            "cannot be partitioned and would run on the whole array on every device. "
            "Call it inside jax.shard_map(check_vma=False)."
        )
