"""The optional package jax_triton, through which JAX programs call Triton kernels."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any


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
    return jax_triton


class _Assembler:
    """jaxlib's part of jax_triton, with another capability of new kernels."""

    def __init__(self, library: Any, capability: int):
        self._library, self._capability = library, capability

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, *arguments: Any) -> Any:
        """Makes a kernel; the last argument is what its PTX is assembled for."""
        return self._library.TritonKernel(*arguments[:-1], self._capability)


@contextlib.contextmanager
def assembled_for(capability: int) -> Iterator[None]:
    """Assembles kernels that are lowered inside for a GPU of another capability.

    Args:
        capability: Ten times the compute capability, at least that which Triton
            compiles for.
    """
    import_jax_triton()
    from jax_triton import triton_lib as module

    triton_lib: Any = module

    library = triton_lib.triton_kernel_call_lib
    cache = triton_lib._COMPILED_KERNEL_CACHE
    kept = dict(cache)
    cache.clear()  # its keys do not say what a kernel was assembled for
    triton_lib.triton_kernel_call_lib = _Assembler(library, capability)
    try:
        yield
    finally:
        triton_lib.triton_kernel_call_lib = library
        cache.clear()
        cache.update(kept)
