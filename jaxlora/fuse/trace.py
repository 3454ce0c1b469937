"""Looks through the calls of a jaxpr that only wrap other equations.

A call of `jax.jit` inside a function hides what it computes; `jnp.where` and
`jax.random.bernoulli` are such calls. `open_calls` replaces calls by their equations,
and remembers them, so that a call that need not be opened is kept as it is.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core, source_info_util

from jaxlora.fuse.graph import BODIES

# A site that one of these wrote is named by the code that called the library.
_LIBRARIES = {"equinox", "flax", "haiku", "quax", "qwix"}
_MAX_FRAMES = 32  # between an operation of a library and the code that called it
_OPENED = ("closed_call", "jit", "pjit")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call that was opened.

    Attributes:
        eqn: The call, between variables of the opened jaxpr.
        start: Number of its first equation in the opened jaxpr.
        stop: Number of the first equation after it.
        results: For each result, the atom that holds it in the opened jaxpr.
        calls: The calls in its body, in order.
    """

    eqn: Any
    start: int
    stop: int
    results: tuple[Any, ...]
    calls: tuple["Call", ...]


def open_calls(jaxpr: core.Jaxpr) -> tuple[core.Jaxpr, tuple[Call, ...]]:
    """Returns a jaxpr without calls at any depth, and the calls that it had, in order.

    Every equation has variables of its own, even if a body was called twice.
    """
    eqns: list[Any] = []
    env: dict[Any, Any] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    calls = _open_into(eqns, jaxpr.eqns, env, rename=False)
    outvars = [_read(env, v) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars), calls


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, core.Literal) else env[atom]


def _open_into(
    eqns: list[Any], inner: Iterable[Any], env: dict[Any, Any], *, rename: bool
) -> tuple[Call, ...]:
    """Appends equations to `eqns`, and maps their variables in `env`."""
    calls = []
    for old in inner:
        outvars = [core.Var(v.aval) if rename else v for v in old.outvars]
        invars = [_read(env, v) for v in old.invars]
        eqn = old.replace(invars=invars, outvars=outvars)
        name, start = eqn.primitive.name, len(eqns)
        body = eqn.params[BODIES[name][0]] if name in _OPENED else None
        if body is None or body.constvars:
            eqns.append(eqn)
            env.update(zip(old.outvars, outvars, strict=True))
            continue
        local = dict(zip(body.invars, invars, strict=True))
        nested = _open_into(eqns, body.eqns, local, rename=True)
        results = tuple(_read(local, v) for v in body.outvars)
        env.update(zip(old.outvars, results, strict=True))
        calls.append(
            Call(eqn=eqn, start=start, stop=len(eqns), results=results, calls=nested)
        )
    return tuple(calls)


def inlined(
    jaxpr: Any, inputs: Iterable[Any], outputs: Sequence[core.Var] = ()
) -> tuple[list[Any], list[Any]]:
    """Returns the equations of a traced function, and the atoms of its results.

    Args:
        jaxpr: The traced function.
        inputs: The atoms in the place of its arguments.
        outputs: Variables in the place of its results; none: they get new ones.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    consts = zip(jaxpr.constvars, jaxpr.consts, strict=True)
    env |= {v: core.Literal(value, v.aval) for v, value in consts}
    env |= zip(jaxpr.outvars, outputs, strict=bool(outputs))
    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [env.setdefault(v, core.Var(v.aval)) for v in eqn.outvars]
        read = [_read(env, v) for v in eqn.invars]
        eqns.append(eqn.replace(invars=read, outvars=outvars))
    return eqns, [_read(env, v) for v in jaxpr.outvars]


def source_of(eqn: Any) -> str:
    """Returns the file, line and function of the code that made an equation.

    If a library of layers made it, that is the code that called the library.
    """
    lines = source_info_util.summarize(eqn.source_info, _MAX_FRAMES).split("\n")
    outward = lines[::-1]
    own = (line for line in outward if _LIBRARIES.isdisjoint(_installed_in(line)))
    return next(own, outward[0])


def _installed_in(location: str) -> tuple[str, ...]:
    """Returns the name of the installed package that a location is in, if any."""
    parts = pathlib.PurePath(location.partition(":")[0]).parts
    if "site-packages" not in parts:
        return ()
    return parts[parts.index("site-packages") + 1 :][:1]
