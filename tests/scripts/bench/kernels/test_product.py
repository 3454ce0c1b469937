"""The frozen product in Triton, in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels.triton.target import interpreted
from scripts.bench.kernels.product import product
from tests.pallas_kernels import triton_interpreter


@pytest.fixture(autouse=True)
def _interpreter():
    with interpreted(triton_interpreter.run):
        yield


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float16)


def test_the_product_and_its_gradient_match_plain_jax():
    x, w, dy = normal(0, 384, 256), normal(1, 256, 512) / 16, normal(2, 384, 512)
    y, vjp = jax.vjp(product, x, w)
    dx, _ = vjp(dy)
    for got, left, right in ((y, x, w), (dx, dy, w.T)):
        want = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-2)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="100 x 64 x 256 are not multiples"):
        product(normal(0, 100, 64), normal(1, 64, 256))
