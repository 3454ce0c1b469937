"""Compares a fused function with its original, and both with the reference."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jaxlora
from tests.jaxlora.fuse.generator import around, body, reference, rule
from tests.jaxlora.fuse.generator.draw import Draw

# Each program runs once, on small arrays. XLA may otherwise drop an author's rounding.
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_allow_excess_precision": False,
}


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
def settings(draw: Draw) -> Iterator[None]:
    """JAX's settings for a draw.

    On a CPU no dot has a precision but those that the draw gives one; on a GPU float32
    would then be computed in tf32.
    """
    precision = None if jax.default_backend() == "cpu" else "highest"
    with jax.enable_x64(draw.x64), jax.default_matmul_precision(precision):
        yield


def original(draw: Draw, *, plain: bool = False) -> around.Function:
    """The function that is given to `fuse`; plain: without transforms."""
    return around.inside(draw, lambda p: body.linear(draw, p), plain=plain)


def programs(
    draw: Draw, p: body.Arrays, fuse: Callable[..., Any]
) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """Lowers the fused function and the original, with their gradients."""
    function = original(draw)

    def lowered(inner):
        both = around.values(draw, around.outside(draw, inner))
        return jax.jit(both).lower(p)

    plain = lowered(function)
    return lowered(fuse(function)), plain


def check(draw: Draw, **options: Any) -> Verdict:
    """Compares the fused function with the original by the rule.

    Args:
        draw: The function.
        **options: Options of `jaxlora.fuse`.
    """
    with settings(draw):
        p = body.arguments(draw)
        fuse = lambda function: jaxlora.fuse(function, **options)
        fused, plain = programs(draw, p, fuse)
        if fused.as_text() == plain.as_text():
            return Verdict(is_rewritten=False, faults=())
        found = _precision_faults(fused.as_text(), plain.as_text())
        got, want = (_run(program, p) for program in (fused, plain))
        exact = exact_results(draw, p)
        errors = (rule.relative_error(want[name], *exact[name]) for name in want)
        pooled = max(errors, default=0.0)
        for name, wanted in want.items():
            found += rule.faults(got[name], wanted, *exact[name], name, pooled)
    return Verdict(is_rewritten=True, faults=tuple(found))


def is_fused_alike(draw: Draw) -> bool:
    """Tells whether the default back end leaves a function, or fuses it as XLA's."""
    with settings(draw):
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


def exact_results(draw: Draw, p: body.Arrays) -> dict[str, tuple[Any, Any]]:
    """The reference of each result, and how far each element may be from it."""
    function = around.outside(draw, original(draw, plain=True), plain=True)
    closed, shapes = jax.make_jaxpr(around.values(draw, function), return_shape=True)(p)
    wide = np.longdouble if draw.x64 else np.float64
    pairs = reference.bounds(closed, jax.tree.leaves(p), wide=wide)
    names = jax.tree.unflatten(jax.tree.structure(shapes), range(len(pairs)))
    return {name: pairs[place] for name, place in names.items()}


def _run(program: jax.stages.Lowered, p: body.Arrays) -> dict[str, Any]:
    return program.compile(COMPILER_OPTIONS)(p)


def _precision_faults(fused: str, plain: str) -> list[str]:
    """Products keep the precision that their author asked for."""
    got, want = (_dots(text) for text in (fused, plain))
    if not want[0]:
        return []
    lost = got[0] < want[0] and got[1] > 0
    return [f"precision: {got} products with and without, not {want}"] if lost else []


def _dots(text: str) -> tuple[int, int]:
    """Counts the products with the highest precision, and those without."""
    dots = re.findall(r"stablehlo\.dot_general.*", text)
    highest = sum("HIGHEST" in dot for dot in dots)
    return highest, len(dots) - highest
