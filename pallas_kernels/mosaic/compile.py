"""Compiles a program whose Mosaic kernels are compiled beforehand, in parallel."""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from jaxlora.pallas_kernels import device

logger = logging.getLogger(__name__)

_TARGET = "mosaic_gpu_v2"
_CONFIG = "mhlo.backend_config"
# What a call has instead of its kernel's code, once that is compiled. Errors of Mosaic
# would show it.
_PLACEHOLDER = b"compiled beforehand"


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel as XLA calls it.

    Attributes:
        attributes: Attributes of the custom call, from which Mosaic's runtime compiles
            the kernel, by name.
    """

    attributes: Mapping[str, Any]

    def compile(self) -> None:
        """Compiles a program that only calls the kernel, and is never run.

        Its operands do not matter: Mosaic's runtime compiles from the attributes alone.
        """
        call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((1,), jnp.float32))

        def mosaic_kernel() -> Any:
            return call(**self.attributes)

        jax.jit(mosaic_kernel).lower().compile()


def prepare_to_load() -> None:
    """Lets programs with Mosaic kernels run here that another process has compiled.

    Mosaic's runtime is a part of XLA's plugin. It finds its own library by environment
    variables, which are set when the Python part is imported. A process that traces no
    kernel would not import it.
    """
    if device.platform() == "gpu" and device.not_nvidia() is None:
        import jax.experimental.mosaic.gpu  # noqa: F401


def compile_program(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Calls `lowered.compile()` after its Mosaic kernels were compiled in parallel.

    XLA compiles the kernels of a program one after the other in one thread, for one to
    five seconds each. And it searches the code of the kernel of every call for two
    words, again and again: a third of the time to compile a deep model. Mosaic's
    runtime keeps compiled kernels for the whole process, by a hash of their code which
    is an attribute of the call. So this function compiles each kernel as a program of
    its own in a thread of its own, and then takes its code out of the calls.

    A kernel that does not compile on its own, such as one for a device that is not
    here, stays in the program, so that XLA compiles it or reports why it cannot.

    Args:
        lowered: The program, with or without Mosaic kernels. It is changed, and so is
            what JAX keeps of it: lowered again in this process, it has no code either.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    calls: dict[bytes, list[ir.Operation]] = {}
    for call in _calls_in(module.operation):
        attributes = _attributes(call)
        if attributes["module"] != _PLACEHOLDER:
            calls.setdefault(attributes["kernel_hash"], []).append(call)
    if calls:
        kernels = {key: _Kernel(_attributes(same[0])) for key, same in calls.items()}
        for key in _compile_kernels(kernels):
            for call in calls[key]:
                _remove_code(call)
    return lowered.compile()


def _compile_kernels(kernels: Mapping[bytes, _Kernel]) -> list[bytes]:
    """Compiles kernels in threads; returns the hashes of those that compiled."""

    def size(key: bytes) -> int:
        return len(kernels[key].attributes["module"])

    with ThreadPoolExecutor(
        os.cpu_count(), thread_name_prefix="mosaic-compile"
    ) as pool:
        # Those with the most code take longest, so they start first.
        order = sorted(kernels, key=size, reverse=True)
        futures: dict[bytes, Future] = {
            key: pool.submit(kernels[key].compile) for key in order
        }
    for key, future in futures.items():
        if (error := future.exception()) is not None:
            logger.debug("XLA compiles kernel %s itself: %s", key.hex(), error)
    return [key for key, future in futures.items() if future.exception() is None]


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
    for named in ir.DictAttr(call.attributes[_CONFIG]):
        if isinstance(named.attr, ir.BoolAttr):
            values[named.name] = bool(ir.BoolAttr(named.attr).value)
        else:
            values[named.name] = ir.StringAttr(named.attr).value_bytes
    return values


def _remove_code(call: ir.Operation) -> None:
    with call.context:
        config = {x.name: x.attr for x in ir.DictAttr(call.attributes[_CONFIG])}
        config["module"] = ir.StringAttr.get(_PLACEHOLDER)
        call.attributes[_CONFIG] = ir.DictAttr.get(config)
