"""Row-wise functions of a traced program, as values that kernels are generated from.

A `RowExpression` is the normal form of an author's norm, gate or activation: its
element-wise operations in order, without shapes, names of variables and casts of
layout. It is called on whole rows, and evaluated on chunks of them by the kernels of
`pallas_kernels.produce`. See `pallas_kernels/row_function.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxlora.fuse.trace import open_calls

# Operations that Mosaic compiles for tiles, for values of rows and for those of
# features. Others, such as erf, pow and log1p, end a function.
_PRIMITIVES: dict[str, Any] = {
    primitive.name: primitive
    for primitive in (
        lax.abs_p,
        lax.add_p,
        lax.and_p,
        lax.convert_element_type_p,
        lax.cos_p,
        lax.div_p,
        lax.eq_p,
        lax.exp_p,
        lax.exp2_p,
        lax.ge_p,
        lax.gt_p,
        lax.integer_pow_p,
        lax.le_p,
        lax.log_p,
        lax.logistic_p,
        lax.lt_p,
        lax.max_p,
        lax.min_p,
        lax.mul_p,
        lax.ne_p,
        lax.neg_p,
        lax.not_p,
        lax.one_minus_square_p,
        lax.or_p,
        lax.rsqrt_p,
        lax.select_n_p,
        lax.sign_p,
        lax.sin_p,
        lax.sqrt_p,
        lax.square_p,
        lax.sub_p,
        lax.tanh_p,
    )
}
_SAME = {"add_any": "add"}  # operations with another name
_LAYOUTS = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number of a dtype."""

    value: bool | int | float
    dtype: str


# The number of a value: the arguments come first, then the results of the steps.
Place = int | Constant


@dataclasses.dataclass(frozen=True)
class Step:
    """An element-wise operation.

    Attributes:
        name: Name of the primitive.
        inputs: What it reads.
        params: Parameters of the primitive.
    """

    name: str
    inputs: tuple[Place, ...]
    params: tuple[tuple[str, Any], ...] = ()

    def __call__(self, operands: Sequence[Any]) -> jax.Array:
        """Runs the operation on arrays, which are broadcast to a common shape."""
        shape = jnp.broadcast_shapes(*(np.shape(o) for o in operands))
        spread = (
            o if o.shape == shape else jnp.broadcast_to(o, shape) for o in operands
        )
        return _PRIMITIVES[self.name].bind(*spread, **dict(self.params))


@dataclasses.dataclass(frozen=True)
class RowExpression:
    """A row-wise function of tiles [T, K], rows [T, 1] and features [1, K].

    Two functions that compute the same in the same order are equal.

    Attributes:
        num_tiles: Number of its first arguments, which are tiles.
        num_rows: Number of those that follow, which are values of rows.
        num_features: Number of the last ones, which are values of features.
        steps: Its operations.
        results: Its results.
    """

    num_tiles: int
    num_rows: int
    num_features: int
    steps: tuple[Step, ...]
    results: tuple[Place, ...]

    def __call__(self, *arguments: jax.Array) -> tuple[jax.Array, ...]:
        values: list[Any] = list(arguments)
        read = lambda place: (
            _full(place) if isinstance(place, Constant) else values[place]
        )
        for step in self.steps:
            values.append(step([read(place) for place in step.inputs]))
        shape = arguments[0].shape
        return tuple(jnp.broadcast_to(read(place), shape) for place in self.results)

    @functools.lru_cache(maxsize=256)  # noqa: B019  one for all layers
    def gradient(self, dtype: np.dtype) -> "RowExpression":
        """Returns the function from the tiles, and the result's gradient, to theirs.

        The function must have tiles alone, and one result.

        Args:
            dtype: Dtype of the tiles.

        Raises:
            NotRowWise: The gradient has operations that kernels cannot compute.
        """
        assert not self.num_rows and not self.num_features

        def pull(*tiles_and_dy):
            *tiles, dy = tiles_and_dy
            return jax.vjp(lambda *t: self(*t)[0], *tiles)[1](dy)

        tile = jax.ShapeDtypeStruct((2, 2), dtype)
        traced = jax.make_jaxpr(pull)(*[tile] * (self.num_tiles + 1))
        opened, _ = open_calls(traced)
        builder = Builder(opened.invars)
        for var, value in zip(opened.constvars, traced.consts, strict=True):
            aval: Any = var.aval
            builder.set(var, _constant(value, aval.dtype))
        for equation in opened.eqns:
            builder.add(equation)
        return builder.expression(self.num_tiles + 1, 0, 0, opened.outvars)


def _full(constant: Constant) -> jax.Array:
    return lax.full((), constant.value, jnp.dtype(constant.dtype))


class NotRowWise(Exception):
    """A function is not one that kernels can compute; the message says why."""


def is_layout(equation: Any) -> bool:
    """Returns whether an equation only changes the shape of an array."""
    return equation.primitive.name in _LAYOUTS


def is_element_wise(equation: Any) -> bool:
    """Returns whether kernels can compute an equation on tiles."""
    name = equation.primitive.name
    return is_layout(equation) or _SAME.get(name, name) in _PRIMITIVES


class Builder:
    """Collects the equations of a row-wise function, in their order."""

    def __init__(self, arguments: Sequence[core.Var]) -> None:
        """Starts without steps.

        Args:
            arguments: The variables of the arguments: tiles, rows and features.
        """
        self._places: dict[Any, Place] = {v: i for i, v in enumerate(arguments)}
        self._num_arguments = len(arguments)
        self._steps: list[Step] = []

    def cast(self, var: core.Var, given: np.dtype) -> None:
        """Casts an argument that is given in a wider dtype back to the variable's."""
        aval: Any = var.aval
        if aval.dtype == given:
            return
        params = {"new_dtype": aval.dtype, "weak_type": False, "sharding": None}
        place = self._places[var]
        self._places[var] = self._step("convert_element_type", [place], **params)

    def set(self, var: core.Var, place: Place) -> None:
        """Gives a variable the value of a place."""
        self._places[var] = place

    def place(self, atom: Any) -> Place:
        """Returns where the value of a variable or a literal is."""
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return _constant(atom.val, aval.dtype)
        return self._places[atom]

    def add(self, equation: Any) -> None:
        """Adds an equation, all of whose inputs are known.

        Raises:
            NotRowWise: Kernels cannot compute it.
        """
        if not is_element_wise(equation):
            raise NotRowWise(
                f"kernels cannot compute {equation.primitive.name} on tiles"
            )
        (out,) = equation.outvars
        if is_layout(equation):
            self._places[out] = self.place(equation.invars[0])
            return
        name = equation.primitive.name
        params = {k: v for k, v in equation.params.items() if k != "sharding"}
        if "sharding" in equation.params:
            params["sharding"] = None
        inputs = tuple(map(self.place, equation.invars))
        self._places[out] = self._step(name, inputs, **params)

    def _step(self, name: str, inputs: Sequence[Place], **params: Any) -> Place:
        """Adds a step, or computes it if it is one of constants."""
        step = Step(_SAME.get(name, name), tuple(inputs), tuple(sorted(params.items())))
        constants = [place for place in inputs if isinstance(place, Constant)]
        if len(constants) == len(inputs):
            with jax.ensure_compile_time_eval():
                value = step(list(map(_full, constants)))
            return _constant(np.asarray(value), value.dtype)
        self._steps.append(step)
        return self._num_arguments + len(self._steps) - 1

    def expression(
        self, num_tiles: int, num_rows: int, num_features: int, results: Sequence[Any]
    ) -> RowExpression:
        """Returns the function, without steps that its results do not need."""
        wanted = tuple(map(self.place, results))
        kept = self._needed(wanted)
        first = self._num_arguments
        moved: dict[Place, Place] = {first + n: first + i for i, n in enumerate(kept)}
        steps = (self._steps[n] for n in kept)
        return RowExpression(
            num_tiles=num_tiles,
            num_rows=num_rows,
            num_features=num_features,
            steps=tuple(
                dataclasses.replace(s, inputs=tuple(moved.get(p, p) for p in s.inputs))
                for s in steps
            ),
            results=tuple(moved.get(place, place) for place in wanted),
        )

    def _needed(self, wanted: Sequence[Place]) -> list[int]:
        """Returns the numbers of the steps on which places depend, in order."""
        todo, needed = list(wanted), set()
        while todo:
            place = todo.pop()
            if isinstance(place, Constant) or place < self._num_arguments:
                continue
            number = place - self._num_arguments
            if number not in needed:
                needed.add(number)
                todo += self._steps[number].inputs
        return sorted(needed)


def _constant(value: Any, dtype: Any) -> Constant:
    number = np.asarray(value)
    if number.ndim or not (number.dtype.kind in "biuf" or dtype == jnp.bfloat16):
        raise NotRowWise(f"it reads a constant of {number.dtype}{list(number.shape)}")
    return Constant(number.item(), jnp.dtype(dtype).name)
