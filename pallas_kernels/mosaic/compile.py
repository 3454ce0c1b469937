"""Compiles a program whose Mosaic kernels are compiled beforehand, in parallel."""

import dataclasses
import functools
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jaxlib.mlir import ir

from jaxlora.pallas_kernels import device

logger = logging.getLogger(__name__)

TARGET = "mosaic_gpu_v2"
_CONFIG = "mhlo.backend_config"
# A call has this in place of its kernel's code, once that is compiled. Errors of Mosaic
# would show it.
_PLACEHOLDER = b"compiled beforehand"
# Attributes of the calls of kernels that run on one device, besides hash and code.
_ONE_DEVICE = {
    "use_custom_barrier": False,
    "skip_device_barrier": False,
    "uses_xla_collective_metadata": False,
}


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel as XLA calls it.

    Attributes:
        attributes: Attributes of the custom call, from which Mosaic's runtime compiles
            the kernel, by name.
    """

    attributes: Mapping[str, Any]

    @property
    def key(self) -> frozenset:
        """Attributes that identify the kernel: all but the code, which has a hash."""
        return frozenset((k, v) for k, v in self.attributes.items() if k != "module")

    def compile(self) -> None:
        """Compiles a program that only calls the kernel, and is never run.

        Its operands do not matter: Mosaic's runtime compiles from the attributes alone.
        """
        call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.float32))

        def kernel_alone() -> Any:
            return call(**self.attributes)

        # A program that JAX's persistent cache holds would be loaded, not compiled.
        with jax_config.persistent_cache_min_compile_time_secs(math.inf):
            jax.jit(kernel_alone).lower().compile()


class _LoweredKernels(dict[bytes, bytes]):
    """Mosaic's table of lowered kernels, code by hash; compiles new ones at once."""

    def __setitem__(self, kernel_hash: bytes, code: bytes) -> None:
        super().__setitem__(kernel_hash, code)
        found = {"kernel_hash": kernel_hash, "module": code}
        compile_ahead({**found, **_ONE_DEVICE})


def compile_ahead(attributes: Mapping[str, Any]) -> None:
    """Starts to compile a kernel in a thread; see `_Kernel`. Any thread may call it."""
    _start(_Kernel(attributes))


# The kernels of this process that are compiled or being compiled.
_started: dict[frozenset, Future] = {}
_lock = threading.Lock()


def _start(kernel: _Kernel) -> Future:
    """Starts to compile a kernel in a thread, unless that was done before."""
    with _lock:
        found = _started.get(kernel.key)
        if found is None:
            found = _started[kernel.key] = _threads().submit(kernel.compile)
        return found


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="mosaic-compile")


def prepare_to_load() -> None:
    """Lets programs with Mosaic kernels run here that another process has compiled.

    Mosaic's runtime is a part of XLA's plugin. It finds its own library by environment
    variables, which are set when the Python part is imported. A process that traces no
    kernel would not import it.
    """
    if device.platform() == "gpu" and device.not_nvidia() is None:
        import jax.experimental.mosaic.gpu  # noqa: F401


def compile_when_lowered() -> None:
    """Lets Mosaic compile the kernels that it lowers from now on."""
    from jax.experimental.mosaic.gpu import core

    if not isinstance(core.KNOWN_KERNELS, _LoweredKernels):
        core.KNOWN_KERNELS = _LoweredKernels(core.KNOWN_KERNELS)


def compile_program(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Calls `lowered.compile()` after its Mosaic kernels were compiled in parallel.

    XLA compiles the kernels of a program one after the other in one thread, for one to
    five seconds each. And it searches the code of the kernel of every call for two
    words, again and again: a third of the time to compile a deep model. Mosaic's
    runtime keeps compiled kernels for the whole process, by a hash of their code which
    is an attribute of the call. So this function compiles each kernel as a program of
    its own in a thread of its own, unless `lower_program` has done so, and then takes
    its code out of the calls.

    A kernel that does not compile on its own, such as one for a device that is not
    here, stays in the program, so that XLA compiles it or reports why it cannot.

    Args:
        lowered: The program, with or without Mosaic kernels. It is changed, and so is
            what JAX keeps of it: lowered again in this process, it has no code either.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    calls: dict[Future, list[ir.Operation]] = {}
    for call in calls_in(module.operation):
        attributes = read_attributes(call)
        if attributes["module"] != _PLACEHOLDER:
            calls.setdefault(_start(_Kernel(attributes)), []).append(call)
    for kernel, same in calls.items():
        if (error := kernel.exception()) is not None:
            logger.debug("XLA compiles a Mosaic kernel itself: %s", error)
            continue
        for call in same:
            _remove_code(call)
    return lowered.compile()


def calls_in(operation: ir.Operation) -> Iterator[ir.Operation]:
    """Yields the calls of Mosaic kernels in an operation, such as a module."""
    for region in operation.regions:
        for block in region:
            for view in block:
                inner = view.operation
                if inner.name == "stablehlo.custom_call":
                    target = inner.attributes["call_target_name"]
                    if ir.StringAttr(target).value == TARGET:
                        yield inner
                yield from calls_in(inner)


def read_attributes(call: ir.Operation) -> dict[str, Any]:
    """Returns the attributes of a kernel's call; see `_Kernel`."""
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
