"""Causal attention over packed rows through cuDNN, for Hopper and newer GPUs.

cuDNN takes a packed row as segments (where each starts, how long it is), and sizes its
scratch and its launch by segments x longest segment, whatever is in them. So segments
are sorted into classes of length, and each class is a call of its own: of segments
longer than n tokens, T rows hold fewer than T / n, so that no class but the shortest
can overflow, and none is sized much larger than T. A segment's class depends on
its own length alone: it goes through the same kernel whatever its neighbours are.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.lib import cuda_versions
from jaxtyping import Array, Bool, Float, Int

# For the outermost `jax.jit`: XLA takes cuDNN's deterministic gradient only where the
# whole program is compiled so. Otherwise dq is summed by float atomics in the first of
# several equal calls, and the others, which differ from it then, fail.
DETERMINISTIC: Mapping[str, bool] = {"xla_gpu_exclude_nondeterministic_ops": True}

_FIRST_CUDNN = 91002  # the first whose backward pass of packed rows is free of bugs
_SHORTEST_CLASS = 128  # tokens
_ROOM = 1.5  # for short segments, over the number that the mean length makes
_MAX_ELEMENTS = 2**31  # offsets are int32


def cudnn_unsupported(*, dtype: Any, head_dim: int) -> str | None:
    """Why cuDNN cannot run packed attention here, or None if it can."""
    if jax.default_backend() != "gpu":
        return f"the device is a {jax.default_backend()}, not an NVIDIA GPU"
    capability = str(jax.devices()[0].compute_capability)
    if not capability.startswith(("9.", "10.")):
        return (
            f"the GPU's compute capability is {capability}, neither Hopper's 9 nor "
            "Blackwell's 10"
        )
    if cuda_versions is None or cuda_versions.cudnn_get_version() < _FIRST_CUDNN:
        return "cuDNN 9.10.2 or newer is not loaded"
    if capability == "10.3" and cuda_versions.cudnn_get_version() < 91100:
        return "compute capability 10.3 takes cuDNN 9.11 or newer"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype).name} is neither bfloat16 nor float16"
    most = 256 if capability.startswith("9.") else 128
    if head_dim % 8 or head_dim > most:
        return f"head_dim {head_dim} is not a multiple of 8 up to {most}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthClass:
    """The segments that one call of cuDNN takes.

    Attributes:
        above: They are longer than this.
        tokens: They are no longer than this, a divisor of T.
        segments: How many there is room for, a multiple of T / tokens.
    """

    above: int
    tokens: int
    segments: int


def length_classes(
    rows: int, max_segment_tokens: int, mean_segment_tokens: int
) -> tuple[LengthClass, ...]:
    """Classes for every length up to `max_segment_tokens`, the shortest first.

    Each is for segments twice as long as those of the one before. The first has room
    for `_ROOM` times as many segments as the mean makes of a microbatch, and all others
    for any that there may be. There are as many classes as should take the least time
    and scratch.

    Args:
        rows: T.
        max_segment_tokens: At least as long as the longest segment.
        mean_segment_tokens: What the segments have in the mean, or less.
    """
    longest = rows
    while longest % 2 == 0 and longest // 2 >= max(max_segment_tokens, _SHORTEST_CLASS):
        longest //= 2
    room = math.ceil(_ROOM * rows / mean_segment_tokens)
    options, sizes = [], [longest]
    while True:
        # cuDNN ignores the offsets where a sequence has room for one segment.
        times = max(2, math.ceil(room * sizes[0] / rows))
        options.append((_cost(sizes, times), times, tuple(sizes)))
        if sizes[0] % 2 or sizes[0] // 2 < _SHORTEST_CLASS:
            break
        sizes.insert(0, sizes[0] // 2)
    _, times, sizes = min(options)
    return tuple(
        LengthClass(
            above=above,
            tokens=tokens,
            segments=rows // tokens * (2 if above else times),
        )
        for above, tokens in zip((0, *sizes), sizes, strict=False)
    )


def _cost(sizes: Sequence[int], times: int) -> float:
    """Of classes of such lengths, the first with room for so many times T tokens.

    cuDNN takes time for all the room there is, and each class reads T rows; scratch
    goes with the room of a class times its length. As fitted to a forward and backward
    pass on an H200: 35 us for T tokens of room, and 90 us for a class.
    """
    others = len(sizes) - 1
    scratch = max(times * sizes[0], 2 * sizes[-1] if others else 0) / sizes[-1]
    return times + 2 * others + 2.5 * len(sizes) + scratch


def crowd(rows: int, max_segment_tokens: int, mean_segment_tokens: int) -> LengthClass:
    """The class of the shortest segments, the only one that they may overflow."""
    return length_classes(rows, max_segment_tokens, mean_segment_tokens)[0]


class Members(NamedTuple):
    """The segments of one class; S of them, filled up with empty ones.

    Attributes:
        is_mine: T. Whether a row belongs to one of them.
        has_no_room: T. Whether it belongs to one of the class that finds no room.
        place: T. Which of them a row belongs to.
        back: T. How many rows the start of a row's segment lies back.
        starts: S. Their first rows; T where there are no more.
        lengths: S. Their numbers of rows; 0 where there are no more.
    """

    is_mine: Array
    has_no_room: Array
    place: Array
    back: Array
    starts: Array
    lengths: Array


def members_of(
    segment_ids: Int[Array, " T"], classes: tuple[LengthClass, ...]
) -> tuple[Members, ...]:
    """Sorts the segments of a row into classes; rows of negative ids are in none.

    Without a scatter, which a deterministic program would run one row at a time.
    """
    t = segment_ids.shape[0]
    rows = jnp.arange(t, dtype=jnp.int32)
    changes = jnp.append(True, segment_ids[1:] != segment_ids[:-1])
    start = jax.lax.cummax(jnp.where(changes, rows, 0))
    later = jax.lax.cummin(jnp.where(changes, rows, t), reverse=True)
    end = jnp.append(later[1:], t)
    length = jnp.where(segment_ids >= 0, end - start, 0)

    def members(c: LengthClass) -> Members:
        is_mine = (length > c.above) & (length <= c.tokens)
        begun = jnp.cumsum(is_mine & (rows == start), dtype=jnp.int32)
        # The rows before the n-th start are those where fewer than n have begun.
        order = jnp.arange(c.segments, dtype=jnp.int32)
        starts = (begun <= order[:, None]).sum(1, dtype=jnp.int32)
        lengths = length.at[starts].get(mode="fill", fill_value=0)
        fits = begun <= c.segments
        place = jnp.clip(begun - 1, 0, c.segments - 1)
        back = rows - start
        return Members(is_mine & fits, is_mine & ~fits, place, back, starts, lengths)

    return tuple(map(members, classes))


def cudnn_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    is_sound: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    max_segment_tokens: int,
    mean_segment_tokens: int,
    window: int | None,
) -> Float[Array, "T H E"]:
    """Attention as `packed_attention` defines it, for sound q, k, v and dout.

    Compile the program around its gradient with `DETERMINISTIC`: without, the gradient
    has other bits each time, and that of several layers fails.

    Args:
        q: Queries, bfloat16 or float16; H is a multiple of HK.
        k: Keys, in q's dtype.
        v: Values, in q's dtype.
        is_sound: False: the row's output is NaN, and takes no gradient.
        segment_ids: Which segment a row belongs to; negative rows get zeros.
            Segments of the shortest class beyond its number (see `crowd`) get NaN.
        max_segment_tokens: At least as long as the longest segment.
        mean_segment_tokens: What the segments have in the mean, or less.
        window: How many rows back a row sees, itself included; None: all.

    Raises:
        ValueError: q has too many elements for cuDNN's offsets.
    """
    if q.size >= _MAX_ELEMENTS:
        raise ValueError(
            f"q has {q.size} elements, and cuDNN's offsets are 32 bits wide. Lower "
            "microbatch_tokens, or use attention: xla."
        )
    classes = length_classes(q.shape[0], max_segment_tokens, mean_segment_tokens)
    return _attention(q, k, v, is_sound, segment_ids, classes, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, is_sound, segment_ids, classes, window):
    return _attention_forward(q, k, v, is_sound, segment_ids, classes, window)[0]


def _attention_forward(q, k, v, is_sound, segment_ids, classes, window):
    # Behind a barrier, or XLA makes them again in every kernel that reads them, instead
    # of once for all layers.
    all_members = jax.lax.optimization_barrier(members_of(segment_ids, classes))
    out, lse = jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)
    for c, mine in zip(classes, all_members, strict=True):
        part, part_lse = _forward(q, k, v, c, mine, window)
        # Select, not add: cuDNN leaves the other rows as it found them.
        out = jnp.where(mine.is_mine[:, None, None], part, out)
        lse = jnp.where(mine.is_mine[:, None], part_lse, lse)
        is_sound &= ~mine.has_no_room
    # What is returned is what is kept, so that it takes memory once.
    out = jnp.where(is_sound[:, None, None], out, jnp.nan)
    return out, (q, k, v, is_sound, all_members, out, lse)


def _attention_backward(classes, window, saved, dout):
    q, k, v, is_sound, all_members, out, lse = saved
    is_sound = is_sound[:, None, None]
    # Behind a barrier, or XLA makes it in the forward pass and keeps both.
    out = jnp.where(is_sound, jax.lax.optimization_barrier(out), 0)
    # A tile of cuDNN's holds rows of other segments, where 0 x NaN would spread.
    dout = jnp.where(is_sound, dout, 0)
    gradients = tuple(map(jnp.zeros_like, (q, k, v)))
    for c, mine in zip(classes, all_members, strict=True):
        parts = _backward(q, k, v, out, lse, dout, c, mine, window)
        is_mine = mine.is_mine[:, None, None]
        gradients = tuple(
            jnp.where(is_mine, part, whole)
            for part, whole in zip(parts, gradients, strict=True)
        )
    return *gradients, None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(q, k, v, c: LengthClass, mine: Members, window):
    """(out, log of the softmax' sum) of the rows of a class; the rest is not set."""
    q_shape = q.shape
    q, k, v = (_cut(x, c) for x in (q, k, v))
    count, _, num_heads, e = q.shape
    out, stats, _ = _call(
        "__cudnn$fmhaSoftmax",
        (q, k, v),
        (
            jax.ShapeDtypeStruct((count, num_heads, c.tokens, e), q.dtype),
            jax.ShapeDtypeStruct((c.segments, num_heads, c.tokens), jnp.float32),
        ),
        {
            "bmm1_dot_dimension_numbers": ((3, 3), ((0, 2), (0, 2))),
            "bmm2_dot_dimension_numbers": ((3, 1), ((0, 1), (0, 2))),
        },
        c,
        mine,
        window,
    )
    lse = stats.at[mine.place, :, mine.back].get(mode="clip")
    return out.transpose(0, 2, 1, 3).reshape(q_shape), lse


def _backward(q, k, v, out, lse, dout, c: LengthClass, mine: Members, window):
    """(dq, dk, dv) of the rows of a class; the rest is not set."""
    steps = jnp.arange(c.tokens, dtype=jnp.int32)
    stats = lse.at[mine.starts[:, None] + steps].get(mode="clip").transpose(0, 2, 1)
    # Behind a segment's end, infinity: exp(score - infinity) is 0.
    inside = (steps < mine.lengths[:, None])[:, None]
    stats = jnp.where(inside, stats, jnp.inf)
    shapes = [x.shape for x in (q, k, v)]
    q, k, v, out, dout = (_cut(x, c) for x in (q, k, v, out, dout))
    count, _, _, e = q.shape
    *gradients, _ = _call(
        "__cudnn$fmhaSoftmaxBackward",
        (q, k, v, stats, dout, out),
        [
            jax.ShapeDtypeStruct((count, x.shape[2], c.tokens, e), x.dtype)
            for x in (q, k, v)
        ],
        {
            "bmm1_grad_gemm1_dot_dimension_numbers": ((2, 1), ((0, 1), (0, 2))),
            "bmm1_grad_gemm2_dot_dimension_numbers": ((3, 1), ((0, 1), (0, 2))),
            "bmm2_grad_gemm1_dot_dimension_numbers": ((2, 1), ((0, 1), (0, 2))),
            "bmm2_grad_gemm2_dot_dimension_numbers": ((3, 3), ((0, 2), (0, 2))),
        },
        c,
        mine,
        window,
    )
    return tuple(
        dx.transpose(0, 2, 1, 3).reshape(shape)
        for dx, shape in zip(gradients, shapes, strict=True)
    )


def _cut(x, c: LengthClass):
    """T rows as T / tokens sequences, whose rows stay where they are in memory."""
    return x.reshape(-1, c.tokens, *x.shape[1:])


def _call(target, operands, out_types, dots, c: LengthClass, mine: Members, window):
    """Calls cuDNN on sequences of which a segment need not know where they begin.

    Results of four dimensions lie in memory as the operands do, with the heads inside.
    The last result is scratch, which XLA sizes.
    """
    (count, _, num_heads, e), num_kv_heads = operands[0].shape, operands[1].shape[2]
    config = _backend_config(
        (count, num_heads, c.tokens, c.tokens),
        "BF16" if operands[0].dtype == jnp.bfloat16 else "F16",
        scale=e**-0.5,
        window=0 if window is None or window >= c.tokens else window,
        segments=c.segments // count,
        dots=dots,
        is_backward=target.endswith("Backward"),
    )
    call = jax.ffi.ffi_call(
        target,
        [*out_types, jax.ShapeDtypeStruct((0,), jnp.uint8)],
        output_layouts=[
            (0, 2, 1, 3) if x.ndim == 4 else tuple(range(x.ndim)) for x in out_types
        ]
        + [(0,)],
        custom_call_api_version=2,
        legacy_backend_config=config,
    )
    # Offsets count elements; the one behind the last segment is the end of all.
    offsets = jnp.append(mine.starts, jnp.int32(count * c.tokens))
    q_offsets, kv_offsets = offsets * (num_heads * e), offsets * (num_kv_heads * e)
    return call(*operands, mine.lengths, mine.lengths, q_offsets, kv_offsets)


def _backend_config(shape, dtype, *, scale, window, segments, dots, is_backward) -> str:
    """What XLA reads: its `GpuBackendConfig` as JSON."""
    layout = {
        "dim_level_types": [],
        "dim_unique": [],
        "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"],
        "tiles": [],
        "element_size_in_bits": "0",
        "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": dtype,
            "dimensions": [str(n) for n in shape],
            "tuple_shapes": [],
            "layout": layout,
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window,
        "max_seg_per_batch": segments,
        "is_paged_attention": False,
        # XLA sets this in the first of several equal calls only, and cannot find the
        # compiled graph of the others then, as their configurations differ.
        "force_deterministic": is_backward,
    }
    for name, ((left, right), (batch_left, batch_right)) in dots.items():
        attention[name] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(n) for n in batch_left],
            "rhs_batch_dimensions": [str(n) for n in batch_right],
        }
    return json.dumps(
        {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}
    )
