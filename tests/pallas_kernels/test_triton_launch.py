"""A Triton kernel runs as a JAX function, for a target or in the interpreter."""

import importlib.util
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.triton.launch import Tile, launch
from jaxlora.pallas_kernels.triton.target import (
    forced_capability,
    interpreted,
    present_target,
    unsupported_device,
)
from tests.pallas_kernels import triton_interpreter


@triton.jit
@typing.no_type_check
def _twice(x):
    return x + x


@triton.jit
@typing.no_type_check
def _double(x, y, T: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < T
    tl.store(y + rows, _twice(tl.load(x + rows, mask=inside, other=0)), mask=inside)


def doubled(x):
    tile = Tile(sizes={"BLOCK": 16}, num_warps=1, num_stages=1)
    (y,) = launch(
        _double,
        [x],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(triton.cdiv(x.shape[0], 16),),
        tile=tile,
        target=present_target(),
        constants={"T": x.shape[0]},
    )
    return y


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.int32])
def test_the_interpreter_runs_a_kernel_that_calls_another(dtype):
    x = jnp.arange(37, dtype=dtype)
    with interpreted(triton_interpreter.run):
        np.testing.assert_array_equal(doubled(x), x + x)
        np.testing.assert_array_equal(jax.jit(doubled)(x), x + x)
    assert isinstance(tl.zeros, triton.JITFunction), "the compiler is as before"


def test_vmap_gives_the_values_of_a_loop():
    x = jnp.arange(32.0).reshape(2, 16)
    with interpreted(triton_interpreter.run):
        np.testing.assert_array_equal(jax.vmap(doubled)(x), 2 * x)


@pytest.mark.parametrize(
    ("capability", "code", "own_products"),
    [(80, 80, 80), (89, 89, 89), (90, 80, 90), (100, 80, 80), (120, 120, 120)],
)
def test_own_products_of_hopper_are_asked_for(
    capability, code, own_products, monkeypatch
):
    monkeypatch.setattr(device, "capability", lambda: capability)
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    assert present_target().capability == code
    assert present_target(hopper=True).capability == own_products


def test_a_target_can_be_forced():
    with forced_capability(89, num_sms=142):
        assert unsupported_device() is None
        target = present_target()
        assert (target.capability, target.num_sms) == (89, 142)
        with interpreted(triton_interpreter.run):
            assert present_target() != target
        assert present_target() == target


def test_a_jitted_function_is_traced_for_each_target():
    found = []

    @jax.jit
    def f(x):
        found.append(present_target().capability)
        return x

    for capability in (80, 89, 80):
        with forced_capability(capability, num_sms=142):
            f(jnp.zeros(1))
    assert found == [80, 89]


def test_what_is_not_installed_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name == "jax_triton" else real(name),
    )
    with forced_capability(89, num_sms=142):
        assert unsupported_device() == (
            "the package jax-triton is not installed (run `pip install "
            "'jaxlora[triton]'`)"
        )


def test_packages_are_not_asked_for_on_a_device_that_cannot_use_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = "the device is a tpu, not an NVIDIA GPU"
    monkeypatch.setattr("jaxlora.pallas_kernels.device.not_nvidia", lambda: reason)
    assert unsupported_device() == reason
