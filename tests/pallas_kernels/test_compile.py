"""Tests of `compile_program` and `trace_program`, with kernels that nothing runs."""

import hashlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels import compile_program, trace_program
from jaxlora.pallas_kernels.mosaic import compile as mosaic_compile

CODE = {name: name.encode() * 50_000 for name in ("expand", "outer")}


def kernel(name, x):
    """Calls a kernel as Mosaic's lowering does."""
    call = jax.ffi.ffi_call("mosaic_gpu_v2", jax.ShapeDtypeStruct(x.shape, x.dtype))
    code = CODE[name]
    key = hashlib.sha256(code).digest()
    return call(x, kernel_hash=key, module=code, use_custom_barrier=False)


def lower_decoder():
    """Lowers a new program, because JAX keeps those that it has lowered."""

    @jax.jit
    def layer(x):
        return kernel("outer", kernel("expand", x))

    def decoder(x):
        for _ in range(3):
            x = layer(x)
        return kernel("expand", x)

    return jax.jit(decoder).lower(jnp.zeros(3))


def calls_of(lowered):
    """The attributes of each call of a kernel in a program."""
    module = lowered.compiler_ir("stablehlo")
    calls = mosaic_compile.calls_in(module.operation)
    return [mosaic_compile.read_attributes(call) for call in calls]


@pytest.fixture
def given(monkeypatch):
    """What `calls_of` returns for each program when it is compiled."""
    found = []
    other = jax.jit(jnp.negative).lower(jnp.zeros(3)).compile()

    def compile_other(self):
        found.append(calls_of(self))
        return other

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_other)
    return found


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """No kernel is compiled yet."""
    monkeypatch.setattr(mosaic_compile, "_started", {})
    monkeypatch.setattr(core, "KNOWN_KERNELS", {})


@pytest.fixture
def compiled(monkeypatch):
    """The code of each kernel that was compiled on its own."""
    found = []

    def compile_kernel(self):
        code = self.attributes["module"]
        assert self.attributes["kernel_hash"] == hashlib.sha256(code).digest()
        assert self.attributes["use_custom_barrier"] is False
        found.append(code)

    monkeypatch.setattr(mosaic_compile._Kernel, "compile", compile_kernel)
    return found


def test_each_kernel_is_compiled_once_and_its_code_is_in_no_call(given, compiled):
    lowered = lower_decoder()
    before = calls_of(lowered)
    assert {call["module"] for call in before} == set(CODE.values())
    compile_program(lowered)
    assert sorted(compiled) == sorted(CODE.values())
    assert given == [[call | {"module": b"compiled beforehand"} for call in before]]
    compile_program(lowered)
    assert len(compiled) == len(CODE)


def test_a_kernel_that_does_not_compile_alone_stays_in_the_program(given, monkeypatch):
    def compile_kernel(self):
        if self.attributes["module"] == CODE["outer"]:
            raise RuntimeError("no such device")

    monkeypatch.setattr(mosaic_compile._Kernel, "compile", compile_kernel)
    compile_program(lower_decoder())
    (calls,) = given
    assert {call["module"] for call in calls} == {CODE["outer"], b"compiled beforehand"}


def test_a_program_without_kernels_is_compiled(compiled):
    program = compile_program(jax.jit(lambda x: x + 1).lower(jnp.zeros(3)))
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert compiled == []


class MosaicProgram:
    """A jitted function with a real kernel, which is lowered for a GPU."""

    def trace(self, x):
        @plgpu.kernel(out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))
        def run(x_gmem, y_gmem):
            y_gmem[...] = x_gmem[...] * 2

        return jax.jit(run).trace(x)


def test_a_kernel_is_compiled_as_soon_as_it_is_lowered(monkeypatch, given, compiled):
    monkeypatch.setattr(mosaic_compile.device, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic_compile.device, "not_nvidia", lambda: None)
    monkeypatch.setattr(mosaic_compile.device, "capability", lambda: 90)
    traced = trace_program(MosaicProgram(), jnp.zeros(128))
    lowered = traced.lower(lowering_platforms=("cuda",))
    (started,) = mosaic_compile._started.values()
    started.result()
    (call,) = calls_of(lowered)
    assert compiled == [call["module"]]
    compile_program(lowered)
    assert given == [[call | {"module": b"compiled beforehand"}]]
    assert len(compiled) == 1
