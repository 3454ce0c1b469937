"""Generates text from a base model and from adapters, several of them in one batch.

The package itself can be called, as `jaxlora.generate` is also the name of its
function.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """A package that can be called like its function `generate`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from jaxlora.generate.api import generate

        return generate(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
