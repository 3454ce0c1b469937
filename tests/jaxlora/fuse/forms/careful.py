"""Functions that may be fused or left alone, if only their values are kept.

Each has something that is easily lost: a rounding, a dtype, a precision, what an id
outside of a table reads, or an empty dimension.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.jaxlora.fuse.forms.form import SHAPES, random_array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Careful:
    """A function, and its arguments.

    Attributes:
        function: The function of arrays.
        given: Arguments, or shapes of arguments that are drawn.
        dtype: Dtype of the arguments that are drawn.
        x64: Whether 64-bit types are enabled.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    dtype: Any
    x64: bool

    def arguments(self) -> dict[str, Any]:
        names = inspect.signature(self.function).parameters
        return {name: self._argument(name) for name in names}

    def _argument(self, name: str) -> Any:
        given = self.given.get(name, SHAPES.get(name))
        if isinstance(given, tuple):
            return random_array(name, given, self.dtype)
        return given if isinstance(given, jax.Array) else jnp.asarray(given)


CAREFUL: dict[str, Careful] = {}


def careful(*, dtype: Any = jnp.float32, x64: bool = False, **given: Any):
    """Registers a function whose values must be kept.

    Args:
        dtype: Dtype of the arguments that are drawn.
        x64: Whether 64-bit types are enabled.
        **given: Arguments, or shapes of arguments that are drawn.
    """

    def register(function):
        assert function.__name__ not in CAREFUL, function.__name__
        made = Careful(function=function, given=given, dtype=dtype, x64=x64)
        CAREFUL[function.__name__] = made
        return function

    return register
