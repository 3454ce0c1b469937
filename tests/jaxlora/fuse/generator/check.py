"""Compares a fused function with its original, and both with the reference."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

import jaxlora
from tests.jaxlora.fuse.generator import arithmetic, around, body, reference, rule
from tests.jaxlora.fuse.generator.draw import Draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `fuse` made of a function.

    Attributes:
        is_rewritten: Whether its program is another than the original's.
        faults: What is wrong with it.
    """

    is_rewritten: bool
    faults: tuple[str, ...]


@contextlib.contextmanager
def settings(*, x64: bool = False) -> Iterator[None]:
    """JAX's settings for a function.

    On a CPU no dot has a precision but those that the author gave one; on a GPU float32
    would then be computed in tf32.
    """
    precision = None if jax.default_backend() == "cpu" else "highest"
    with jax.enable_x64(x64), jax.default_matmul_precision(precision):
        yield


def original(draw: Draw, *, plain: bool = False) -> around.Function:
    """The function that is given to `fuse`; plain: without transforms."""
    return around.inside(draw, lambda p: body.linear(draw, p), plain=plain)


def check(draw: Draw, *, compiled: bool = False, **options: Any) -> Verdict:
    """Compares a draw's fused function with the original by the rule.

    Args:
        draw: The function.
        compiled: Whether XLA runs the programs.
        **options: Options of `jaxlora.fuse`.
    """

    def both(inner: around.Function, *, plain: bool = False) -> around.Function:
        return around.values(draw, around.outside(draw, inner, plain=plain))

    with settings(x64=draw.x64):
        return compare(
            fused=lambda: both(jaxlora.fuse(original(draw), **options)),
            original=both(original(draw)),
            plain=both(original(draw, plain=True), plain=True)
            if {*draw.around, *draw.outside}
            else None,
            p=body.arguments(draw),
            compiled=compiled,
        )


def compare(
    *,
    fused: Callable[[], around.Function],
    original: around.Function,
    plain: around.Function | None = None,
    p: body.Arrays,
    compiled: bool = False,
) -> Verdict:
    """Compares a fused function with its original by the rule.

    Args:
        fused: Makes the fused function, with its gradients.
        original: The original, with its gradients.
        plain: The original without loops, which the reference evaluates; None: the
            original has none.
        p: The arguments.
        compiled: Whether XLA runs the programs. It does too where NumPy finds a fault.
    """
    of_original = jax.jit(original).trace(p)  # first, so that its errors are its own
    of_fused = jax.jit(fused()).trace(p)
    if arithmetic.is_same(of_fused.jaxpr, of_original.jaxpr):
        return Verdict(is_rewritten=False, faults=())
    found = _precision_faults(of_fused.jaxpr, of_original.jaxpr)
    got, want = (
        arithmetic.run(program, (p,), compiled=compiled)
        for program in (of_fused, of_original)
    )
    exact = _exact_results(of_original if plain is None else jax.jit(plain).trace(p), p)
    errors = (rule.relative_error(want[name], *exact[name]) for name in want)
    pooled = max(errors, default=0.0)
    for name, wanted in want.items():
        found += rule.faults(got[name], wanted, *exact[name], name, pooled)
    if found and not compiled:
        # NumPy rounds more often than XLA, which has the last word.
        return compare(fused=fused, original=original, plain=plain, p=p, compiled=True)
    return Verdict(is_rewritten=True, faults=tuple(found))


def is_fused_alike(draw: Draw) -> bool:
    """Returns whether the default back end leaves a function, or fuses it as XLA's."""
    with settings(x64=draw.x64):
        p, function = body.arguments(draw), original(draw)
        kept, *fused = (
            str(jax.make_jaxpr(around.values(draw, around.outside(draw, inner)))(p))
            for inner in (
                function,
                jaxlora.fuse(function, implementation="xla"),
                jaxlora.fuse(function),
            )
        )
    return fused[1] in (kept, fused[0])


def _exact_results(
    traced: jax.stages.Traced, p: body.Arrays
) -> dict[str, tuple[Any, Any]]:
    """The reference of each result, and how far each element may be from it."""
    wide = np.longdouble if jax.config.jax_enable_x64 else np.float64
    pairs = reference.bounds(traced.jaxpr, jax.tree.leaves(p), wide=wide)
    shapes = traced.out_info
    names = jax.tree.unflatten(jax.tree.structure(shapes), range(len(pairs)))
    return {name: pairs[place] for name, place in names.items()}


def _precision_faults(fused: core.ClosedJaxpr, plain: core.ClosedJaxpr) -> list[str]:
    """Products of float32 keep the precision that their author asked for.

    Those of types with 16 bits are exact in float32, whatever was asked for.
    """
    got, want = (_dots(closed.jaxpr) for closed in (fused, plain))
    if not want[0]:
        return []
    lost = got[0] < want[0] and got[1] > 0
    return [f"precision: {got} products with and without, not {want}"] if lost else []


def _dots(jaxpr: core.Jaxpr) -> tuple[int, int]:
    """Counts the products with the highest precision, and those without."""
    dots = [
        e
        for e in arithmetic.equations(jaxpr)
        if e.primitive.name == "dot_general"
        and all(v.aval.dtype.itemsize > 2 for v in e.invars)
    ]
    highest = sum("HIGHEST" in str(e.params["precision"]) for e in dots)
    return highest, len(dots) - highest
