"""Causal attention over packed rows through cuDNN, for Hopper and newer GPUs.

Segments are sorted into classes of length, with a call of cuDNN for each class; see
`length_classes`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib import cuda_versions
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxlora.modules.cudnn_call import class_backward, class_forward
from jaxlora.modules.length_classes import SegmentLengths, length_classes, members_of
from jaxlora.modules.scoring import ATTENTION_RESULTS, Scoring, with_sinks
from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.operands import unsupported_dtype

# Compiler options for the outermost `jax.jit`. XLA takes cuDNN's deterministic gradient
# only if the whole program is compiled with them. Otherwise the first of several equal
# calls sums dq by float atomics, and the others, which then differ from it, fail.
DETERMINISTIC: Mapping[str, bool] = {"xla_gpu_exclude_nondeterministic_ops": True}

_FIRST_CUDNN = 91002  # the first whose backward pass of packed rows is free of bugs
_FIRST_CUDNN_OF_10_3 = 91100
_MAX_ELEMENTS = 2**31  # offsets are int32


def cudnn_unsupported(
    *, dtype: Any, head_dim: int, softcap: float | None = None
) -> str | None:
    """Says why cuDNN cannot run packed attention here; None if it can.

    Args:
        dtype: Dtype of queries, keys and values.
        head_dim: Features of a head.
        softcap: Bound of the scores, if there is one.
    """
    if device.platform() != "gpu":
        return f"the device is a {device.platform()}, not an NVIDIA GPU"
    capability = str(device.capability() / 10)
    if not capability.startswith(("9.", "10.")):
        return (
            f"the GPU's compute capability is {capability}, neither Hopper's 9 nor "
            "Blackwell's 10"
        )
    version = _cudnn_version()
    if version < _FIRST_CUDNN:
        return "cuDNN 9.10.2 or newer is not loaded"
    if capability == "10.3" and version < _FIRST_CUDNN_OF_10_3:
        return "compute capability 10.3 takes cuDNN 9.11 or newer"
    if (reason := unsupported_dtype(dtype)) is not None:
        return reason
    most = 256 if capability.startswith("9.") else 128
    if head_dim % 8 or head_dim > most:
        return f"head_dim {head_dim} is not a multiple of 8 up to {most}"
    if softcap is not None:
        return f"the model caps attention scores at {softcap:g}, which cuDNN cannot do"
    return None


def _cudnn_version() -> int:
    """Returns the version that is loaded, or that a planned machine is to have."""
    if device.planned_device() is not None:
        return _FIRST_CUDNN_OF_10_3
    return 0 if cuda_versions is None else cuda_versions.cudnn_get_version()


def cudnn_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    is_sound: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    lengths: SegmentLengths,
    scoring: Scoring,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H E"]:
    """Attention as `packed_attention` defines it, for sound q, k, v and dout.

    Compile the program around its gradient with `DETERMINISTIC`. Without it, the
    gradient has other bits in each run, and the gradient of several layers fails.

    Args:
        q: Queries, bfloat16 or float16; H is a multiple of HK.
        k: Keys, in q's dtype.
        v: Values, in q's dtype.
        is_sound: Where it is false, the row's output is NaN and takes no gradient.
        segment_ids: Segment of each row; padding rows are negative and get zeros.
            Segments for which `shortest_class` has no room get NaN.
        lengths: Lengths of the segments.
        scoring: Settings of the scores; a soft cap is not supported.
        sinks: See `packed_attention`.

    Raises:
        ValueError: q has too many elements for cuDNN's offsets.
    """
    if q.size >= _MAX_ELEMENTS:
        raise ValueError(
            f"q has {q.size} elements, and cuDNN's offsets are 32 bits wide. Lower "
            "microbatch_tokens, or use attention: xla."
        )
    classes = length_classes(q.shape[0], *lengths)
    return _attention(q, k, v, is_sound, segment_ids, sinks, classes, scoring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(q, k, v, is_sound, segment_ids, sinks, classes, scoring):
    given = q, k, v, is_sound, segment_ids, sinks
    return _attention_forward(*given, classes, scoring)[0]


def _attention_forward(q, k, v, is_sound, segment_ids, sinks, classes, scoring):
    # Without the barrier XLA would compute these again in every kernel that reads them,
    # instead of once for all layers.
    all_members = jax.lax.optimization_barrier(members_of(segment_ids, classes))
    out, lse = jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)
    for c, members in zip(classes, all_members, strict=True):
        part, part_lse = class_forward(q, k, v, c, members, scoring)
        # Select, do not add: cuDNN leaves the other rows uninitialised.
        out = jnp.where(members.is_member[:, None, None], part, out)
        lse = jnp.where(members.is_member[:, None], part_lse, lse)
        is_sound &= ~members.overflows
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    # The same array is returned and kept, so it takes memory once.
    out = jnp.where(is_sound[:, None, None], out, jnp.nan)
    out, lse = checkpoint_name((out, lse), ATTENTION_RESULTS)
    return out, (q, k, v, is_sound, all_members, out, lse)


def _attention_backward(classes, scoring, saved, dout):
    q, k, v, is_sound, all_members, out, lse = saved
    is_sound = is_sound[:, None, None]
    # Without the barrier XLA would compute it in the forward pass and keep both.
    out = jnp.where(is_sound, jax.lax.optimization_barrier(out), 0)
    # A tile in cuDNN holds rows of other segments, to which 0 x NaN would spread.
    dout = jnp.where(is_sound, dout, 0)
    gradients = tuple(map(jnp.zeros_like, (q, k, v)))
    for c, members in zip(classes, all_members, strict=True):
        parts = class_backward((q, k, v, out, lse), dout, c, members, scoring)
        is_member = members.is_member[:, None, None]
        gradients = tuple(
            jnp.where(is_member, part, whole)
            for part, whole in zip(parts, gradients, strict=True)
        )
    return *gradients, None, None, None  # sinks are frozen


_attention.defvjp(_attention_forward, _attention_backward)
