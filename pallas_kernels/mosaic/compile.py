"""Compiles a program and its Mosaic kernels in parallel."""

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

_TARGET = "mosaic_gpu_v2"
_DTYPES = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "i32": jnp.int32,
    "ui32": jnp.uint32,
}


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel as XLA calls it.

    Attributes:
        attributes: Attributes of the custom call, from which Mosaic's runtime compiles
            the kernel, by name.
        operands: Shapes of the operands.
        results: Shapes of the results.
    """

    attributes: dict[str, Any]
    operands: list[jax.ShapeDtypeStruct]
    results: list[jax.ShapeDtypeStruct]

    def compile(self) -> None:
        """Compiles a program that only calls the kernel."""
        call = jax.ffi.ffi_call(_TARGET, self.results)

        def mosaic_kernel(*arrays: jax.Array) -> Any:
            return call(*arrays, **self.attributes)

        jax.jit(mosaic_kernel).lower(*self.operands).compile()


def compile_program(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Calls `lowered.compile()`, and compiles the Mosaic kernels in parallel meanwhile.

    XLA compiles the kernels of a program one after the other in one thread, for one to
    five seconds each. Mosaic's runtime caches compiled kernels for the whole process by
    a hash of their code. So this function compiles each kernel as a separate program in
    a separate thread while XLA works on the rest. XLA then finds it in the cache.

    Args:
        lowered: The program, with or without Mosaic kernels.
    """
    kernels = _kernels(lowered)
    if not kernels:
        return lowered.compile()
    pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="mosaic-compile")
    try:
        for kernel in kernels:
            pool.submit(kernel.compile)
        return lowered.compile()
    finally:
        # A program from the persistent cache does not need its kernels compiled.
        pool.shutdown(wait=False, cancel_futures=True)


def _kernels(lowered: jax.stages.Lowered) -> list[_Kernel]:
    """Finds the distinct kernels of a program, those with the most code first."""
    module: Any = lowered.compiler_ir("stablehlo")
    kernels = {}
    for call in _calls_in(module.operation):
        kernel = _Kernel(
            attributes=_attributes(call),
            operands=[_shape(value.type) for value in call.operands],
            results=[_shape(value.type) for value in call.results],
        )
        kernels[kernel.attributes["module"]] = kernel
    return [kernels[code] for code in sorted(kernels, key=len, reverse=True)]


def _calls_in(operation: ir.Operation) -> Iterator[ir.Operation]:
    for region in operation.regions:
        for block in region:
            for view in block:
                inner = view.operation
                if inner.name == "stablehlo.custom_call":
                    target = inner.attributes["call_target_name"]
                    if ir.StringAttr(target).value == _TARGET:
                        yield inner
                yield from _calls_in(inner)


def _attributes(call: ir.Operation) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for named in ir.DictAttr(call.attributes["mhlo.backend_config"]):
        if isinstance(named.attr, ir.BoolAttr):
            values[named.name] = bool(ir.BoolAttr(named.attr).value)
        else:
            values[named.name] = ir.StringAttr(named.attr).value_bytes
    return values


def _shape(array: ir.Type) -> jax.ShapeDtypeStruct:
    tensor = ir.RankedTensorType(array)
    return jax.ShapeDtypeStruct(tensor.shape, _DTYPES[str(tensor.element_type)])
