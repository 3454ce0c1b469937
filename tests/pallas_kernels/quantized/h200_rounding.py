"""Checks that programs for an H200 keep roundings to e4m3, without a GPU.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_rows`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxlora.pallas_kernels import Fp8Weight
from tests import h200
from tests.pallas_kernels.reference import base_products_reference


def rounded_weight(w):
    return Fp8Weight.quantize(w).dequantize(jnp.float32)


def product(x, values, scale):
    return base_products_reference(x, [Fp8Weight(values=values, scale=scale)])


def main() -> None:
    place = SingleDeviceSharding(h200.devices()[0])
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    matrix = of(jnp.float32, 128, 256)
    weight = of(jnp.float8_e4m3fn, 64, 256), of(jnp.float32, 64)
    for function, arguments in (
        (rounded_weight, [matrix]),
        (product, [matrix, *weight]),
    ):
        text = jax.jit(function).lower(*arguments).compile().as_text()
        assert "f8e4m3fn[128,256]" in text, f"{function.__name__} does not round"


if __name__ == "__main__":
    main()
