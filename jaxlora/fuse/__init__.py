"""Finds low-rank branches in any JAX function and runs them in the fused kernels.

The package itself can be called, as `jaxlora.fuse` is also the name of its function.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

from jaxlora.fuse.api import fuse


class _CallablePackage(types.ModuleType):
    """A package that can be called like its function `fuse`."""

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return fuse(fn, **options)


sys.modules[__name__].__class__ = _CallablePackage
