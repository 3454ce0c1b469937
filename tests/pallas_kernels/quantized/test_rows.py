"""Rows in e4m3: scales, rounding, and values that are not finite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlora.pallas_kernels import Fp8Weight, quantize_rows, row_scale
from tests.deviceless import compile_deviceless


def random_rows(t=24, k=96):
    rng = np.random.default_rng(0)
    magnitude = 10.0 ** rng.uniform(-30, 30, (t, 1))
    return (rng.standard_normal((t, k)) * magnitude).astype(np.float32)


def numpy_rows(x):
    """Quantizes with NumPy; returns the scales and the values."""
    scale = np.maximum(np.abs(x).max(axis=1) * np.float32(1 / 448), 2.0**-126)
    scaled = x * (1 / scale.astype(np.float32))[:, None]
    return scale, np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def as_bytes(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("has_factor", [False, True])
def test_rows_match_numpy_to_the_bit(dtype, has_factor):
    x = jnp.asarray(random_rows(), dtype)
    factor = jnp.linspace(1e-3, 2, x.shape[1]) if has_factor else None
    product = np.asarray(x, np.float32) * (1 if factor is None else np.asarray(factor))
    wanted_scale, wanted = numpy_rows(product)
    scale = row_scale(x, factor)
    np.testing.assert_array_equal(scale, wanted_scale)
    values = quantize_rows(x, scale, factor)
    np.testing.assert_array_equal(as_bytes(values), as_bytes(wanted))
    largest = np.abs(np.asarray(values, np.float32)).max(axis=1)
    np.testing.assert_array_equal(largest, 448)


def test_a_program_that_converts_back_rounds_too():
    w = jnp.asarray(random_rows())
    weight = Fp8Weight.quantize(w)
    both = jax.jit(lambda w: Fp8Weight.quantize(w).dequantize(jnp.float32))(w)
    np.testing.assert_array_equal(both, weight.dequantize(jnp.float32))


def test_programs_for_a_gpu_round():
    compile_deviceless("tests.pallas_kernels.quantized.h200_rounding")


def test_extreme_rows():
    largest = float(jnp.finfo(jnp.float32).max)
    rows = jnp.array([[0.0, 0.0], [largest, -largest], [1e-45, 0.0], [1.0, 1e-9]])
    scale = row_scale(rows)
    assert (scale > 0).all() and jnp.isfinite(1 / scale).all()
    got = np.asarray(quantize_rows(rows, scale), np.float32)
    np.testing.assert_array_equal(got, [[0, 0], [448, -448], [0, 0], [448, 0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_its_row(bad):
    x = jnp.asarray(random_rows())
    sick = x.at[7, 11].set(bad)
    scale, sick_scale = row_scale(x), row_scale(sick)
    others = np.arange(len(x)) != 7
    np.testing.assert_array_equal(sick_scale[others], scale[others])
    assert not np.isfinite(sick_scale[7])
    values, sick_values = quantize_rows(x, scale), quantize_rows(sick, sick_scale)
    np.testing.assert_array_equal(
        as_bytes(sick_values)[others], as_bytes(values)[others]
    )
    assert np.isnan(np.asarray(sick_values, np.float32)[7, 11])


def test_values_saturate():
    """A product of a value and a rounded reciprocal may exceed 448."""
    x = jnp.array([[500.0, -1e9, 448.0]])
    got = np.asarray(quantize_rows(x, jnp.ones(1)), np.float32)
    np.testing.assert_array_equal(got, [[448, -448, 448]])
