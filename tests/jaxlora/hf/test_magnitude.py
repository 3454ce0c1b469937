"""The largest magnitude of floats by their bits, and refusals of bad values."""

import ml_dtypes
import numpy as np
import pytest

from jaxlora.errors import AdapterError, ModelError
from jaxlora.hf.tensor_file import check_finite, largest

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BF16, np.dtype(np.float32), np.dtype(np.float64)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_largest_is_that_of_absolute_values(dtype):
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.normal(size=(5, 7)).astype(dtype)
        assert largest(values).dtype == dtype
        assert largest(values) == np.abs(values).max()
        assert largest(-np.abs(values)) == np.abs(values).max()
    assert largest(np.zeros((0, 3), dtype)) == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_top_all(dtype, value):
    values = np.full((40, 3), np.finfo(np.float16).max).astype(dtype)
    values[39, 2] = value
    what = "NaN" if np.isnan(value) else "infinity"
    with pytest.raises(ModelError, match=f"a.weight holds {what}, so nothing can"):
        check_finite(values, "a.weight", ModelError)
    with pytest.raises(AdapterError, match=f"a.weight holds {what}"):
        check_finite([largest(block) for block in values], "a.weight", AdapterError)
    values[0, 0], values[1, 1] = np.inf, np.nan
    assert np.isnan(largest(values))


@pytest.mark.parametrize(
    ("value", "stored", "dtype", "overflows"),
    [
        (65519.0, np.float32, np.float16, False),
        (65520.0, np.float32, np.float16, True),
        (-1e300, np.float64, np.float32, True),
        (3.4e38, np.float32, BF16, True),
        (3.38e38, np.float32, BF16, False),
        (65504.0, np.float16, BF16, False),
    ],
)
def test_overflow_of_a_cast(value, stored, dtype, overflows):
    values = np.array([1.0, value], stored)
    if not overflows:
        check_finite(values, "a.weight", ModelError, np.dtype(dtype))
        return
    with pytest.raises(
        ModelError, match=r"a\.weight holds a value of magn.* overflows"
    ):
        check_finite(values, "a.weight", ModelError, np.dtype(dtype))


def test_signalling_nans_are_no_warnings():
    values = np.array([0x7F800001, 0], np.uint32).view(np.float32)
    with pytest.raises(ModelError, match=r"a\.weight holds NaN"):
        check_finite(values, "a.weight", ModelError, BF16)


def test_a_tensor_without_elements_is_finite():
    check_finite([], "a.weight", ModelError, np.dtype(np.float32))
