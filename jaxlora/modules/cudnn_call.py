"""XLA's custom calls of cuDNN's fused attention, for one class of packed segments.

`jax.nn.dot_product_attention` offers no packed segments, so the calls are made here as
`jax._src.cudnn` makes them; a test compares the two.
"""

import json

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxlora.modules.length_classes import LengthClass, Members
from jaxlora.modules.scoring import Scoring


def class_forward(q, k, v, c: LengthClass, members: Members, scoring: Scoring):
    """Runs the forward pass of one class of segments.

    Returns:
        The output, T H E, and the logarithm of the softmax's sum, T H. Both are
        unspecified for rows of other classes.
    """
    q_shape = q.shape
    q, k, v = (_as_sequences(x, c) for x in (q, k, v))
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
        members,
        scoring,
    )
    lse = stats.at[members.index, :, members.offset].get(mode="clip")
    return out.transpose(0, 2, 1, 3).reshape(q_shape), lse


def class_backward(
    forward: tuple[Array, ...], dout, c: LengthClass, members: Members, scoring: Scoring
):
    """Runs the backward pass of one class of segments.

    Args:
        forward: q, k, v, the output, and the logarithm of the softmax's sum.
        dout: Gradient of the output.
        c: The class.
        members: Segments of the class.
        scoring: Settings of the scores.

    Returns:
        The gradients of q, k and v, unspecified for rows of other classes.
    """
    q, k, v, out, lse = forward
    steps = jnp.arange(c.tokens, dtype=jnp.int32)
    stats = lse.at[members.starts[:, None] + steps].get(mode="clip").transpose(0, 2, 1)
    # Beyond the end of a segment it is infinity, because exp(score - infinity) is 0.
    inside = (steps < members.lengths[:, None])[:, None]
    stats = jnp.where(inside, stats, jnp.inf)
    shapes = [x.shape for x in (q, k, v)]
    q, k, v, out, dout = (_as_sequences(x, c) for x in (q, k, v, out, dout))
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
        members,
        scoring,
    )
    return tuple(
        dx.transpose(0, 2, 1, 3).reshape(shape)
        for dx, shape in zip(gradients, shapes, strict=True)
    )


def _as_sequences(x, c: LengthClass):
    """Views T rows as T / tokens sequences, without a copy."""
    return x.reshape(-1, c.tokens, *x.shape[1:])


def _call(target, operands, out_types, dots, c: LengthClass, members: Members, scoring):
    """Calls cuDNN on T / tokens sequences; a segment may start anywhere in them.

    Results with four dimensions have the memory layout of the operands, with the heads
    inside. The last result is scratch memory, which XLA sizes.
    """
    assert scoring.softcap is None, "cudnn_unsupported refuses it"
    window = scoring.window
    (count, _, num_heads, e), num_kv_heads = operands[0].shape, operands[1].shape[2]
    config = _backend_config(
        (count, num_heads, c.tokens, c.tokens),
        "BF16" if operands[0].dtype == jnp.bfloat16 else "F16",
        scale=scoring.scale_of(e),
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
    # Offsets count elements. The last one is the end of the last sequence.
    offsets = jnp.append(members.starts, jnp.int32(count * c.tokens))
    q_offsets, kv_offsets = offsets * (num_heads * e), offsets * (num_kv_heads * e)
    return call(*operands, members.lengths, members.lengths, q_offsets, kv_offsets)


def _backend_config(shape, dtype, *, scale, window, segments, dots, is_backward) -> str:
    """Returns XLA's `GpuBackendConfig` as JSON."""
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
        # If this is false, XLA sets it in the first of several equal calls only. Then
        # it cannot find the compiled graph of the others, whose configurations differ.
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
