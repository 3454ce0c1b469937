"""One written form of a linear with a low-rank branch, and its arguments.

A form's function knows nothing of jaxlora. Its parameters' names choose its arguments:
`x`, `w`, `a` and `b` have the shapes of `SHAPES` unless the decorator says otherwise.
"""

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

T, K, N, R, G = 37, 56, 72, 4, 3
BATCH, TOKENS, HEADS = 3, 13, 6
SHAPES: dict[str, tuple[int, ...]] = {
    "x": (T, K),
    "w": (K, N),
    "a": (K, R),
    "b": (R, N),
    "bias": (N,),
    "scale": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A function, its arguments, and what `fuse` must make of it.

    Attributes:
        function: The function, whose arguments and results are pytrees of arrays.
        given: Shapes of arguments, or the arguments, or functions that make them.
        dtype: Dtype of x, w and bias.
        trained: Names of the arguments whose gradients are compared.
        sites: How many low-rank branches `explain` must find.
        exact: The same function without the casts to smaller dtypes.
        deep: Whether rounding grows on the way through several layers, so that the
            exact results must be computed in float64.
        reason: A regular expression that one of the refusals must match; None: none
            is asked for.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    dtype: Any
    trained: tuple[str, ...]
    sites: int
    exact: Callable[..., Any]
    deep: bool = False
    reason: str | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments in the order of the function's parameters, by name."""
        return {
            name: _argument(name, self.given.get(name, SHAPES.get(name)), self.dtype)
            for name in inspect.signature(self.function).parameters
        }

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(self.arguments.values())


FORMS: dict[str, Form] = {}
NEAR_MISSES: dict[str, Form] = {}


def random_array(name: str, shape: tuple[int, ...], dtype: Any = jnp.float32):
    """Draws normals of the size that a trained tensor of this shape has.

    They are never all zero: a branch whose B is zero would hide every fault.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    is_weight = not name.startswith("x") and len(shape) > 1 and shape[-2] > 0
    size = shape[-2] ** -0.5 if is_weight else 1.0
    return jnp.asarray(rng.normal(size=shape) * size, dtype)


def without_zeros(tree: Any) -> Any:
    """Replaces the leaves that are all zero, such as a new adapter's B."""

    def changed(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or np.any(np.asarray(leaf)):
            return leaf
        return random_array(jax.tree_util.keystr(path), leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(changed, tree)


def form(
    *,
    sites: int = 1,
    trained: str = "x a b",
    exact: Callable[..., Any] | None = None,
    deep: bool = False,
    dtype: Any = jnp.float32,
    **given: Any,
):
    """Registers a function in which `sites` branches must be found and rewritten.

    Args:
        sites: How many branches there are.
        trained: Names of the arguments whose gradients are compared.
        exact: The function without the casts to smaller dtypes; None: the function.
        deep: Whether the exact results must be computed in float64.
        dtype: Dtype of x, w and bias.
        **given: Shapes of arguments, or the arguments, or functions that make them.
    """

    def register(function):
        made = _form(function, sites, trained, exact, dtype, given)
        assert made.name not in FORMS, made.name
        FORMS[made.name] = dataclasses.replace(made, deep=deep)
        return function

    return register


def near_miss(
    reason: str | None = None,
    *,
    trained: str = "x a b",
    dtype: Any = jnp.float32,
    **given: Any,
):
    """Registers a function that looks alike and must stay as it is.

    Args:
        reason: A regular expression that one of the refusals must match; None: there
            is nothing to refuse.
        trained: Names of the arguments whose gradients are compared.
        dtype: Dtype of x, w and bias.
        **given: Shapes of arguments, or the arguments, or functions that make them.
    """

    def register(function):
        made = _form(function, 0, trained, None, dtype, given)
        assert made.name not in NEAR_MISSES, made.name
        NEAR_MISSES[made.name] = dataclasses.replace(made, reason=reason)
        return function

    return register


def _form(function, sites, trained, exact, dtype, given) -> Form:
    return Form(
        function=function,
        given=given,
        dtype=dtype,
        trained=tuple(trained.split()),
        sites=sites,
        exact=exact or function,
    )


def _argument(name: str, given: Any, dtype: Any) -> Any:
    if callable(given):
        return given()
    if not isinstance(given, tuple) or not all(isinstance(n, int) for n in given):
        assert given is not None, f"the form must give {name}"
        return given
    is_base = name[0] in "xw" or name == "bias"
    return random_array(name, given, dtype if is_base else jnp.float32)
