"""The residuals of a forward pass whose backward pass is a program of its own.

Each array that a program returns is memory of its own. So an array that the backward
pass has already, a constant, or another shape of an array that is kept, is not
returned.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jax_core
from jaxtyping import Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Residual:
    """An array of a backward pass.

    Attributes:
        number: Its number among the arguments, followed by the arrays that are kept;
            None: it is a constant.
        shape: Its shape, which may be another one than that of the kept array.
        constant: The constant.
    """

    number: int | None
    shape: tuple[int, ...] = ()
    constant: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pullback:
    """Recipe of a backward pass from the arrays that its forward pass keeps.

    Attributes:
        structure: Structure of the pytree that `jax.vjp` returned.
        residuals: Where each of its arrays is.
    """

    structure: Any
    residuals: tuple[_Residual, ...]

    def join(self, kept: Sequence[Any], arguments: Any) -> Callable[..., Any]:
        """Returns the backward pass.

        Args:
            kept: The arrays that `pull_back` returned.
            arguments: The arguments, in the same pytree.
        """
        arrays = [*jax.tree.leaves(arguments), *kept]
        leaves = [
            one.constant
            if one.number is None
            else arrays[one.number].reshape(one.shape)
            for one in self.residuals
        ]
        return jax.tree.unflatten(self.structure, leaves)


def pull_back(
    run: Callable[..., Array], primals: Sequence[Any], arguments: Any
) -> tuple[Array, Pullback, tuple[Array, ...]]:
    """Runs a function; returns its result, its pullback, and the arrays to keep.

    Args:
        run: The function.
        primals: The arguments by which it is differentiated.
        arguments: A pytree of arrays that the backward pass has, too. They are the
            same objects as those that the function uses.
    """
    structures = []

    def forward(*primals: Any) -> tuple[Array, list[Any]]:
        out, pullback = jax.vjp(run, *primals)
        leaves, structure = jax.tree.flatten(pullback)
        structures.append(structure)
        return out, leaves

    given = jax.tree.leaves(primals)
    traced = jax.make_jaxpr(forward)(*primals)
    out, *values = jax_core.jaxpr_as_fun(traced)(*given)
    jaxpr = traced.jaxpr
    known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    known |= zip(jaxpr.invars, given, strict=True)
    numbers = {id(one): i for i, one in enumerate(jax.tree.leaves(arguments))}
    num_arguments, sources = len(numbers), dict(reshapes(jaxpr))
    kept: list[Array] = []
    found = []
    for var, value in zip(jaxpr.outvars[1:], values, strict=True):
        if isinstance(var, jax_core.Literal):
            found.append(_Residual(number=None, constant=np.asarray(var.val)))
            continue
        while var in sources:
            var = sources[var]
        source = known.get(var, var)
        if not isinstance(source, jax_core.Var | Array):  # JAX has types for constants
            constant = np.reshape(np.asarray(source), value.shape)
            found.append(_Residual(number=None, constant=constant))
            continue
        if id(source) not in numbers:
            numbers[id(source)] = num_arguments + len(kept)
            kept.append(value)
        found.append(_Residual(number=numbers[id(source)], shape=value.shape))
    pullback = Pullback(structure=structures[0], residuals=tuple(found))
    return out, pullback, tuple(kept)


def reshapes(
    jaxpr: jax_core.Jaxpr,
) -> Iterator[tuple[jax_core.Var, jax_core.Var]]:
    """Yields each reshape of an array, and the array, also those of shared layers."""
    for equation in jaxpr.eqns:
        match equation.primitive.name:
            case "reshape":
                if isinstance(equation.invars[0], jax_core.Var):
                    yield equation.outvars[0], equation.invars[0]
            case "jit":
                inner = equation.params["jaxpr"].jaxpr
                pairs = zip(inner.outvars, equation.outvars, strict=True)
                given = zip(inner.invars, equation.invars, strict=True)
                outer = {
                    a: b
                    for a, b in (*given, *pairs)
                    if isinstance(a, jax_core.Var) and isinstance(b, jax_core.Var)
                }
                for new, old in reshapes(inner):
                    if new in outer and old in outer:
                        yield outer[new], outer[old]
