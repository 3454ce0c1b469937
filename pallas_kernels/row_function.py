"""Row-wise functions as kernels evaluate them: on chunks of rows.

A row-wise function is plain `jax.numpy` on whole rows: element-wise operations on
tiles, on values of rows and on values of features. A kernel cannot hold whole rows, so
it evaluates the function's jaxpr on chunks of their features. What needs whole rows,
such as their sums of squares, is an argument.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

# A function of tiles [T, K], then of rows [T, 1], then of features [1, K], that returns
# a tuple of tiles. It is hashed and pickled, so it is a frozen dataclass or a function
# of a module.
RowFunction = Callable[..., tuple[jax.Array, ...]]


class RowArguments(typing.NamedTuple):
    """The arguments of a row-wise function, or their shapes.

    Attributes:
        tiles: [T, K], of one dtype.
        rows: Values of rows, [T].
        features: Values of features, [K], of one dtype.
    """

    tiles: Sequence[Any]
    rows: Sequence[Any] = ()
    features: Sequence[Any] = ()


# The extent of a value says along what it varies. Values of rows and of features are
# vectors in a kernel, and are broadcast to tiles as late as possible.
Extent = Literal["tile", "row", "feature", "scalar"]

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_IDENTITIES = ("stop_gradient", "copy", "optimization_barrier")
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")

# Operations that Mosaic has in 16 bits. It has others, such as exp, in float32, where
# they are computed and then rounded; that has the bits of an operation in 16 bits.
_SHORT = {"add", "convert_element_type", "max", "min", "mul", "neg", "select_n", "sub"}

# Parameters of operations that are not element-wise, such as sums.
_AXES = {"axes", "axis", "dimension", "dimensions", "dimension_numbers", "permutation"}


class Value(typing.NamedTuple):
    """A value of one chunk.

    Attributes:
        extent: What it varies along.
        array: [ROWS, STEP] for a tile, [ROWS] for rows, [STEP] for features.
    """

    extent: Extent
    array: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An equation of the function's jaxpr, with inner calls expanded.

    Attributes:
        primitive: The operation.
        inputs: Variables or constants.
        outputs: Variables.
        params: Parameters of the operation.
    """

    primitive: Any
    inputs: list[Any]
    outputs: list[core.Var]
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class RowProgram:
    """The jaxpr of a row-wise function.

    Attributes:
        inputs: Its variables: the tiles, the rows, and the features.
        results: The variables of its results.
        made_by: The equation that makes each variable.
    """

    inputs: list[core.Var]
    results: list[Any]
    made_by: dict[core.Var, Equation]

    def evaluate(self, variable: Any, known: dict[Any, Value]) -> Value:
        """Returns the value of a variable on a chunk, and adds it to `known`.

        Args:
            variable: A variable or a constant.
            known: Values on the chunk, such as those of the inputs.
        """
        if not isinstance(variable, core.Var):
            return Value("scalar", variable)
        if variable not in known:
            known[variable] = self._compute(self.made_by[variable], known)
        return known[variable]

    def _compute(self, equation: Equation, known: dict[Any, Value]) -> Value:
        values = [self.evaluate(one, known) for one in equation.inputs]
        if equation.primitive.name in _RESHAPES:
            return values[0]
        extent = _common_extent([value.extent for value in values])
        shapes = [jnp.shape(v.array) for v in values if v.extent == extent]
        shape = shapes[0] if shapes else _tile_shape(values)
        arrays = [
            _spread(value, extent, shape, jnp.result_type(_aval(one).dtype))
            for value, one in zip(values, equation.inputs, strict=True)
        ]
        params = equation.params | (
            {"sharding": None} if "sharding" in equation.params else {}
        )
        is_wide = equation.primitive.name not in _SHORT
        given = [_widened(array) for array in arrays] if is_wide else arrays
        out = equation.primitive.bind(*given, **params)
        out = out[0] if equation.primitive.multiple_results else out
        if is_wide:
            out = out.astype(_aval(equation.outputs[0]).dtype)
        return Value(extent, out)


def _widened(array: Any) -> Any:
    """Returns an array in float32 if it has floats of 16 bits."""
    dtype = jnp.result_type(array)
    is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return lax.convert_element_type(array, jnp.float32) if is_short else array


def _aval(one: Any) -> Any:
    return one.aval if isinstance(one, core.Var) else jax.typeof(one)


def _common_extent(extents: Sequence[Extent]) -> Extent:
    found = set(extents) - {"scalar"}
    if "tile" in found or len(found) > 1:
        return "tile"
    return found.pop() if found else "scalar"


def _tile_shape(values: Sequence[Value]) -> tuple[int, ...]:
    """Returns the shape of a tile that is made of vectors of rows and of features."""
    sizes = {v.extent: jnp.shape(v.array) for v in values if v.extent != "scalar"}
    return (*sizes.get("row", ()), *sizes.get("feature", ()))


def _spread(value: Value, extent: Extent, shape: tuple[int, ...], dtype) -> Any:
    """Broadcasts a value to an extent."""
    if value.extent == extent:
        return jnp.asarray(value.array, dtype) if extent == "scalar" else value.array
    if value.extent == "scalar":
        return jnp.full(shape, value.array, dtype)
    axis = 0 if value.extent == "row" else 1
    return lax.broadcast_in_dim(value.array, shape, (axis,))


def tile_of(value: Value, shape: tuple[int, int]) -> Any:
    """Returns a value as a tile."""
    return _spread(value, "tile", shape, None)


def row_program(
    function: RowFunction, arguments: RowArguments, num_rows: int
) -> RowProgram:
    """Traces a row-wise function.

    Args:
        function: The function.
        arguments: Its arguments, or their shapes.
        num_rows: Rows of a block.

    Raises:
        ValueError: It is not element-wise.
    """
    dtypes = (tuple(jnp.dtype(x.dtype) for x in some) for some in arguments)
    return _row_program(function, arguments.tiles[0].shape[1], num_rows, *dtypes)


@functools.cache
def _row_program(function, num_features, num_rows, tiles, rows, features) -> RowProgram:
    of = jax.ShapeDtypeStruct
    shapes = [of((num_rows, num_features), dtype) for dtype in tiles]
    shapes += [of((num_rows, 1), dtype) for dtype in rows]
    shapes += [of((1, num_features), dtype) for dtype in features]
    closed = jax.make_jaxpr(function)(*shapes)
    equations: list[Equation] = []
    inputs = list(closed.jaxpr.invars)
    results = _expand(closed.jaxpr, closed.consts, inputs, equations)
    made_by = {out: equation for equation in equations for out in equation.outputs}
    return RowProgram(inputs, results, made_by)


def _expand(jaxpr, consts, inputs, equations: list[Equation]) -> list[Any]:
    """Appends the equations of a jaxpr and of its calls; returns its results."""
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= zip(jaxpr.invars, inputs, strict=True)

    def read(one):
        return one.val if isinstance(one, core.Literal) else known[one]

    for equation in jaxpr.eqns:
        ins, name = list(map(read, equation.invars)), equation.primitive.name
        if name in _CALLS:
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            inner_consts = getattr(inner, "consts", ())
            outs = _expand(getattr(inner, "jaxpr", inner), inner_consts, ins, equations)
        elif name in _IDENTITIES:
            outs = ins
        elif name not in _RESHAPES and _AXES & equation.params.keys():
            raise ValueError(
                f"a row-wise function calls {name}, but only element-wise operations "
                "can be computed. Pass what it needs of whole rows as an argument."
            )
        else:
            outs = [core.Var(out.aval) for out in equation.outvars]
            made = Equation(equation.primitive, ins, outs, dict(equation.params))
            equations.append(made)
        known |= zip(equation.outvars, outs, strict=True)
    return list(map(read, jaxpr.outvars))
