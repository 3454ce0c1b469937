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


def check(draw: Draw, **options: Any) -> Verdict:
    """Compares a draw's fused function with the original by the rule.

    Args:
        draw: The function.
        **options: Options of `jaxlora.fuse`.
    """

    def both(inner: around.Function, *, plain: bool = False) -> around.Function:
        return around.values(draw, around.outside(draw, inner, plain=plain))

    with settings(x64=draw.x64):
        return compare(
            fused=lambda: both(jaxlora.fuse(original(draw), **options)),
            original=both(original(draw)),
            plain=both(original(draw, plain=True), plain=True),
            p=body.arguments(draw),
        )


def compare(
    *,
    fused: Callable[[], around.Function],
    original: around.Function,
    plain: around.Function,
    p: body.Arrays,
) -> Verdict:
    """Compares a fused function with its original by the rule.

    Args:
        fused: Makes the fused function, with its gradients.
        original: The original, with its gradients.
        plain: What the reference evaluates: the original without calls and loops.
        p: The arguments.
    """
    of_original = jax.jit(original).lower(p)  # first, so that its errors are its own
    of_fused = jax.jit(fused()).lower(p)
    texts = of_fused.as_text(), of_original.as_text()
    if texts[0] == texts[1]:
        return Verdict(is_rewritten=False, faults=())
    found = _precision_faults(*texts)
    got, want = (_run(program, p) for program in (of_fused, of_original))
    exact = _exact_results(plain, p)
    errors = (rule.relative_error(want[name], *exact[name]) for name in want)
    pooled = max(errors, default=0.0)
    for name, wanted in want.items():
        found += rule.faults(got[name], wanted, *exact[name], name, pooled)
    return Verdict(is_rewritten=True, faults=tuple(found))


def is_fused_alike(draw: Draw) -> bool:
    """Tells whether the default back end leaves a function, or fuses it as XLA's."""
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
    plain: around.Function, p: body.Arrays
) -> dict[str, tuple[Any, Any]]:
    """The reference of each result, and how far each element may be from it."""
    closed, shapes = jax.make_jaxpr(plain, return_shape=True)(p)
    wide = np.longdouble if jax.config.jax_enable_x64 else np.float64
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
