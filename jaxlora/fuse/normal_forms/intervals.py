"""The rule of arrays that are made whole numbers, by bounds of their elements.

The bounds follow from how an array was computed. They tell that the floor of a number
from 0.8 to 1.8 is a mask of zeros and ones.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.normal_forms.forms import Atom, Factor, Form, Opaque, Term, is_float
from jaxlora.fuse.normal_forms.normal import Normalizer

Bounds = tuple[Any, Any]  # the smallest and the largest value, in the array's dtype
_DEPTH = 24  # equations between an array and what bounds it

_SAME = ("reshape", "squeeze", "broadcast_in_dim", "transpose", "copy", "stop_gradient")
# Bounds of operations that are monotone in each operand, rounding included.
_MONOTONE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "max": np.maximum,
    "min": np.minimum,
    "floor": np.floor,
    "ceil": np.ceil,
}


def whole_form(n: Normalizer, eqn: Any) -> Form:
    """Returns the form of an array of whole numbers, which is a mask of zeros and ones.

    It is one if it is the floor of a number from 0.8 to 1.8, as in dropout.
    """
    (out,) = eqn.outvars
    if not is_float(out.aval) or not _is_zero_or_one(n.graph, out):
        raise Opaque
    dims = n.indices.new_dims(out.aval.shape)
    return Form(dims, (Term(1.0, (Factor(out, dims, out.aval.dtype, keeps=True),)),))


def _is_zero_or_one(graph: Graph, atom: Atom) -> bool:
    """Returns whether every element of an array of whole numbers is 0 or 1."""
    found = _bounds(graph, atom, {}, _DEPTH)
    return found is not None and bool(found[0] >= 0 and found[1] <= 1)


def _bounds(
    graph: Graph,
    atom: Atom,
    seen: dict[Atom, Bounds | None],
    depth: int,
) -> Bounds | None:
    """Returns the bounds of an array's elements; None: they are not known."""
    aval: Any = atom.aval
    if isinstance(atom, core.Literal):
        value = np.asarray(atom.val, aval.dtype)
        return (value.min(), value.max()) if value.size else None
    if atom in seen:
        return seen[atom]
    eqn, found = graph.equation(atom), None
    if eqn is not None and depth and len(eqn.outvars) == 1:
        operands = (_bounds(graph, v, seen, depth - 1) for v in eqn.invars)
        known = [bounds for bounds in operands if bounds is not None]
        with np.errstate(all="ignore"):
            found = _apply(eqn, known) if len(known) == len(eqn.invars) else None
    if found is None or not all(np.isfinite(end) for end in found):
        found = _of_dtype(aval.dtype)
    seen[atom] = found
    return found


def _of_dtype(dtype: Any) -> Bounds | None:
    """Returns the range of whole numbers and of truth values."""
    if jnp.issubdtype(dtype, np.bool_):
        return np.False_, np.True_
    if not jnp.issubdtype(dtype, jnp.integer):
        return None
    info = jnp.iinfo(dtype)
    return dtype.type(info.min), dtype.type(info.max)


def _apply(eqn: Any, known: list[Bounds]) -> Bounds | None:
    """Returns the bounds of an equation's result from those of its operands."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    is_float = jnp.issubdtype(dtype, jnp.floating)
    lows, highs = [low for low, _ in known], [high for _, high in known]
    if name in _SAME:
        return known[0]
    if name in _MONOTONE and is_float:
        return _MONOTONE[name](*lows), _MONOTONE[name](*highs)
    if name == "round" and is_float:
        return _rounded(eqn, lows[0]), _rounded(eqn, highs[0])
    if name == "sub" and is_float:
        return lows[0] - highs[1], highs[0] - lows[1]
    if name == "mul" and is_float:
        ends = [one * other for one in known[0] for other in known[1]]
        return min(ends), max(ends)
    if name == "convert_element_type":
        return _converted(lows[0], dtype), _converted(highs[0], dtype)
    if name in _BITS:
        return _BITS[name](known, dtype)
    return None


def _rounded(eqn: Any, value: Any) -> Any:
    if eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.rint(value)
    half = np.copysign(value.dtype.type(0.5), value)
    return np.trunc(value + half)


def _converted(value: Any, dtype: Any) -> Any:
    """Casts a bound; one that the dtype does not hold becomes NaN, which is none."""
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        if not info.min <= value <= info.max:
            return np.float32(np.nan)
    return np.asarray(value).astype(dtype)[()]


def _shifted(known: list[Bounds], dtype: Any) -> Bounds | None:
    (low, high), (shift, same) = known
    if low < 0 or shift != same:
        return None
    return low >> shift, high >> shift


def _either(known: list[Bounds], dtype: Any) -> Bounds | None:
    """Bounds of bits beside those of a constant, as in the bits of 1 and a fraction."""
    for (low, high), (constant, same) in (known, known[::-1]):
        if constant == same and low >= 0 and constant >= 0:
            fraction = (1 << int(high).bit_length()) - 1
            if not int(constant) & fraction:
                return constant | low, constant | high
    return None


def _as_floats(known: list[Bounds], dtype: Any) -> Bounds | None:
    """The floats that positive integers stand for are in the same order."""
    (low, high) = known[0]
    size = low.dtype.itemsize
    if dtype.itemsize != size or low < 0 or int(high) >> (8 * size - 1):
        return None
    return low.view(dtype), high.view(dtype)


_BITS: dict[str, Callable[[list[Bounds], Any], Bounds | None]] = {
    "shift_right_logical": _shifted,
    "or": _either,
    "bitcast_convert_type": _as_floats,
}
