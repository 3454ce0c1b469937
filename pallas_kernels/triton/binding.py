"""The optional package jax_triton, through which JAX programs call Triton kernels."""

import functools
import os
from typing import Any

import jax

from jaxlora.pallas_kernels import device


def import_jax_triton() -> Any:
    """Imports jax_triton, which needs a JAX with CUDA.

    Some versions clear TRITON_CACHE_DIR, which other users of Triton in this process
    need.
    """
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    if before is not None:
        os.environ["TRITON_CACHE_DIR"] = before
    else:
        os.environ.pop("TRITON_CACHE_DIR", None)
    _assemble_for_present_gpu()
    return jax_triton


@functools.cache
def _assemble_for_present_gpu() -> None:
    from jax_triton import triton_lib as module

    triton_lib: Any = module
    triton_lib.triton_kernel_call_lib = _Assembler(triton_lib.triton_kernel_call_lib)


class _Assembler:
    """jaxlib's part of jax_triton, which assembles kernels for the present GPU."""

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, *arguments: Any) -> Any:
        """Makes a kernel; the last argument is what its PTX is assembled for."""
        return self._library.TritonKernel(*arguments[:-1], _assembled(arguments[-1]))


def _assembled(capability: int) -> int:
    """Returns the capability for which code of a capability is assembled.

    A newer GPU runs PTX of an older capability, but not its machine code.
    """
    elsewhere = jax.sharding.get_abstract_mesh().abstract_device is not None
    if elsewhere or device.not_nvidia() is not None:
        return capability
    return max(capability, device.capability())
