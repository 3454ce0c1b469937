"""MXFP4 weights beside ml_dtypes' e2m1 and exact powers of two."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlora.pallas_kernels import Mxfp4Weight
from tests.pallas_kernels.quantized.weights import dequantized, quantized


def test_codes_and_scales_are_those_of_the_format():
    """All scales but those whose values can over- or underflow, and all codes."""
    scale = np.arange(2, 252, dtype=np.uint8)[:, None]
    values = np.arange(16, dtype=np.uint8)[None].repeat(len(scale), 0) * 17
    weight = Mxfp4Weight(values=jnp.asarray(values), scale=jnp.asarray(scale))
    weight.check()
    pairs = np.stack([values & 15, values >> 4], axis=2).reshape(len(scale), 32)
    exact = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exact *= 2.0 ** (scale.astype(np.float64) - 127)
    for dtype in (jnp.float32, jnp.bfloat16):
        found = np.asarray(dequantized(weight, dtype), np.float64)
        np.testing.assert_array_equal(found, exact)


def test_quantized_values_are_the_nearest_and_come_back_as_they_are():
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(8, 64)) * 2.0 ** rng.integers(-9, 9, (8, 1))).astype(
        np.float32
    )
    w[0] = np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0], 64)
    weight = quantized("mxfp4", w)
    weight.check()
    blocks = w.reshape(8, 2, 32)
    power = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(2, keepdims=True))) - 2)
    scaled = np.clip(blocks / power, -6, 6)
    nearest = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * power
    found = dequantized(weight)
    np.testing.assert_array_equal(found, nearest.reshape(w.shape))
    again = quantized("mxfp4", found)
    np.testing.assert_array_equal(dequantized(again), found)


def test_a_weight_of_zeros_stays_zero():
    weight = quantized("mxfp4", np.zeros((2, 32), np.float32))
    assert not np.asarray(dequantized(weight, jnp.bfloat16)).any()


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="K=48 is not a multiple"):
        Mxfp4Weight.quantize(jnp.ones((2, 48)))
