"""Runs Triton kernels on NumPy arrays in Triton's interpreter.

Triton chooses between its compiler and its interpreter when a kernel is decorated. This
module interprets kernels that were decorated for the compiler, so that one process can
do both. The interpreter computes bfloat16 wrongly; float16 is right.
"""

import contextlib
import dataclasses
import functools
import threading

import jax.numpy as jnp
import numpy as np
import triton
from triton.language import standard
from triton.runtime import interpreter

_LOCK = threading.Lock()  # the interpreter changes triton.language while it runs


class _Storage:
    """The memory of an array, as the interpreter asks a torch tensor for it."""

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.array is self.array


class _Tensor:
    """A NumPy array with the methods of a torch tensor that the interpreter calls."""

    def __init__(self, array):
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return _Storage(self.array)

    def new_empty(self, *_, **__):
        return _Tensor(self.array)

    def set_(self, storage, *_):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return ()


def run(kernel, inputs, out_types, grid, constants):
    """Runs a kernel; what it does not write is NaN, or the largest integer."""
    arrays = [np.array(array, copy=True) for array in inputs]
    outs = [_unwritten(out) for out in out_types]
    # A GPU does not warn either.
    with _LOCK, _calls_interpreted(), np.errstate(all="ignore"):
        function = interpreter.InterpretedFunction(kernel.fn)
        function[grid](*map(_Tensor, arrays + outs), **constants)
    return outs


def _unwritten(out):
    is_float = jnp.issubdtype(out.dtype, jnp.floating)
    return np.full(
        out.shape, np.nan if is_float else np.iinfo(out.dtype).max, out.dtype
    )


@functools.cache
def _rewritten(function):
    """Makes what the interpreter calls; making it takes longer than a call."""
    return interpreter.InterpretedFunction(function).rewrite()


@contextlib.contextmanager
def _calls_interpreted():
    """Interprets the functions that a kernel calls, and lets NumPy 2.5 run loops."""
    call, patch = triton.JITFunction.__call__, interpreter._patch_lang_tensor
    builder = interpreter.interpreter_builder
    options = builder.options

    def interpreted_call(self, *args, **kwargs):
        return _rewritten(self.fn)(*args, **kwargs)

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(
            tensor, "__index__", lambda x: int(np.asarray(x.handle.data).item())
        )

    triton.JITFunction.__call__ = interpreted_call
    interpreter._patch_lang_tensor = with_index
    # A GPU does not check integers for overflow either.
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    # The interpreter changes what a kernel's own module imports. This is what Triton's
    # library imports. It is done once, as it takes longer than most calls.
    scope = interpreter._patch_lang(standard.cdiv.fn)
    try:
        yield
    finally:
        scope.restore()
        triton.JITFunction.__call__ = call
        interpreter._patch_lang_tensor = patch
        builder.options = options
