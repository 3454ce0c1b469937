"""Runs a program in NumPy, in the arithmetic of its dtypes.

Each operation is exact and its result is rounded to its dtype, as if it was a kernel by
itself. That takes a fraction of the time in which XLA compiles a program. Programs with
something that has no definition here are compiled, and on other devices than CPUs all.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tests.jaxlora.fuse.generator.reference import (
    Evaluator,
    is_float,
    is_key,
)

# Each program runs once, on small arrays. XLA may otherwise drop an author's rounding.
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_allow_excess_precision": False,
}
_COMPILED = {"shard_map", "while", "pallas_call", "ffi_call"}


def run(traced: jax.stages.Traced, args: Any, *, compiled: bool = False) -> Any:
    """Returns the results of a program.

    Args:
        traced: The program.
        args: Its arguments, a pytree.
        compiled: Whether XLA must compile it.
    """
    names = (eqn.primitive.name for eqn in equations(traced.jaxpr.jaxpr))
    is_cpu = jax.default_backend() == "cpu"
    if compiled or not is_cpu or not _COMPILED.isdisjoint(names):
        return traced.lower().compile(COMPILER_OPTIONS)(*args)
    wide = np.longdouble if jax.config.jax_enable_x64 else np.float64
    return _evaluated(_Rounding(wide), traced, args)


def run_exactly(traced: jax.stages.Traced, args: Any) -> Any:
    """Returns the results of a program in which only casts round, in float64.

    Their dtypes are those of the program.
    """
    names = (eqn.primitive.name for eqn in equations(traced.jaxpr.jaxpr))
    if not _COMPILED.isdisjoint(names):
        return traced.lower().compile(COMPILER_OPTIONS)(*args)
    return _evaluated(_Looping(), traced, args)


def _evaluated(evaluator: Evaluator, traced: jax.stages.Traced, args: Any) -> Any:
    closed, leaves = traced.jaxpr, jax.tree.leaves(args)
    results = evaluator.run(closed.jaxpr, closed.consts, leaves)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = [
            v if is_key(v) else np.asarray(v).astype(out.aval.dtype)
            for v, out in zip(results, closed.jaxpr.outvars, strict=True)
        ]
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), narrow)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a jaxpr, at every depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def is_same(first: core.ClosedJaxpr, second: core.ClosedJaxpr) -> bool:
    """Returns whether two programs are the same, with their constants."""
    pairs = zip(first.consts, second.consts, strict=False)
    same = len(first.consts) == len(second.consts) and all(
        one is other or np.array_equal(one, other) for one, other in pairs
    )
    return same and str(first) == str(second)


class _Looping(Evaluator):
    """Evaluates loops and conditionals, too."""

    def _apply(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        params = eqn.params
        if eqn.primitive.name == "scan":
            return self._scan(eqn, values)
        if eqn.primitive.name == "cond":
            body = params["branches"][int(values[0])]
            return self._call(body, values[1:])
        return super()._apply(eqn, values)

    def _call(self, body: Any, values: Sequence[Any]) -> list[Any]:
        consts = body.consts if isinstance(body, core.ClosedJaxpr) else ()
        return self.run(getattr(body, "jaxpr", body), consts, values)

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        params = eqn.params
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
        consts, rest = values[:num_consts], values[num_consts:]
        carry, rows = rest[:num_carry], rest[num_carry:]
        steps = range(params["length"])
        stacks: list[list[Any]] = []
        for step in reversed(steps) if params["reverse"] else steps:
            results = self._call(
                params["jaxpr"], [*consts, *carry, *(v[step] for v in rows)]
            )
            carry = results[:num_carry]
            stacks.append(results[num_carry:])
        if params["reverse"]:
            stacks.reverse()
        outs = eqn.outvars[num_carry:]
        stacked = [
            _stack([row[i] for row in stacks], out) for i, out in enumerate(outs)
        ]
        return [*carry, *stacked]


class _Rounding(_Looping):
    """Rounds the result of every operation to its dtype."""

    def _rounded(self, eqn: Any, value: Any, aval: Any) -> Any:
        if is_key(value) or not is_float(aval.dtype):
            return super()._rounded(eqn, value, aval)
        value = np.asarray(value, self.wide).reshape(aval.shape)
        if eqn.primitive.name == "reduce_precision":
            value = super()._rounded(eqn, value, aval)
        with np.errstate(over="ignore", invalid="ignore"):
            return value.astype(aval.dtype).astype(self.wide)


def _stack(values: list[Any], out: Any) -> Any:
    if not values:
        return np.zeros(out.aval.shape, out.aval.dtype)
    return jnp.stack(values) if is_key(values[0]) else np.stack(values)
