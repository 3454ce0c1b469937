"""Finds layers that a function repeats, so that they are analysed once.

A decoder whose layers are not in a loop repeats the same equations. `find_run` looks
for a run of such *segments*: they have the same equations, on arrays of their own, on
arrays that all of them read, and on results of the segment before.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core, linear_util

from jaxlora.fuse.trace import live_equations

ENDS = 3  # segments that are kept at each end of a run
_LEAST = 2 * ENDS + 2  # segments of a run that is worth shortening
_MOST_LENGTHS, _TRIED = 256, 2  # distances that may be the length of a segment
# Their rules compare how the numbers of adapters are computed, with its constants.
_COMPARING = {"eq", "gather", "ragged_dot_general"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Segments of a jaxpr that follow each other and are alike.

    Attributes:
        jaxpr: The jaxpr.
        start: Number of the first equation of the first segment. The equations before
            it are those of another segment, whose inputs may be others.
        length: Number of equations of a segment.
        count: Number of segments.
        maker: For each variable, the number of its equation and its place there.
    """

    jaxpr: core.Jaxpr
    start: int
    length: int
    count: int
    maker: Mapping[Any, tuple[int, int]]

    def begin(self, segment: int) -> int:
        """Returns the number of the first equation of a segment."""
        return self.start + segment * self.length

    @property
    def skipped(self) -> range:
        """The numbers of the equations that the shortened jaxpr lacks."""
        return range(self.begin(ENDS), self.begin(self.count - ENDS))

    @functools.cached_property
    def shortened(self) -> core.Jaxpr:
        """The jaxpr without the segments in the middle.

        What reads the last of them there reads the last one before them here.
        """
        skipped, eqns = self.skipped, self.jaxpr.eqns
        joined = {
            old: new
            for n in range(skipped.stop - self.length, skipped.stop)
            for old, new in zip(
                eqns[n].outvars, eqns[n - len(skipped)].outvars, strict=True
            )
        }
        replaced = lambda v: joined.get(v, v) if is_var(v) else v
        rest = (
            eqn.replace(invars=list(map(replaced, eqn.invars)))
            for eqn in eqns[skipped.stop :]
        )
        is_kept = lambda v: number_of(self.maker, v) not in skipped
        return self.jaxpr.replace(
            eqns=[*eqns[: skipped.start], *rest],
            outvars=[v for v in self.jaxpr.outvars if is_kept(v)],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )


def is_var(atom: Any) -> bool:
    """Tells whether an atom is a variable, and not a literal."""
    return isinstance(atom, core.Var)


def number_of(maker: Mapping[Any, tuple[int, int]], atom: Any) -> int:
    """Returns the number of the equation that computes an atom; -1: there is none."""
    return maker[atom][0] if is_var(atom) and atom in maker else -1


def makers_of(jaxpr: core.Jaxpr) -> dict[Any, tuple[int, int]]:
    """Returns the equation that computes each variable, and the place there."""
    eqns = enumerate(jaxpr.eqns)
    return {v: (n, place) for n, eqn in eqns for place, v in enumerate(eqn.outvars)}


def find_run(jaxpr: core.Jaxpr) -> Run | None:
    """Returns the longest run of segments that a jaxpr repeats; None: it has none."""
    tokens = np.array(_tokens(jaxpr))
    maker = makers_of(jaxpr)
    runs = (_run(jaxpr, tokens, maker, length) for length in _lengths(tokens))
    found = [run for run in runs if run is not None]
    return max(found, key=lambda run: len(run.skipped), default=None)


def _lengths(tokens: np.ndarray) -> list[int]:
    """Returns the distances at which most equations are alike, the best first."""
    places: dict[int, list[int]] = {}
    for number, token in enumerate(tokens.tolist()):
        places.setdefault(token, []).append(number)
    often = (numbers for numbers in places.values() if len(numbers) >= _LEAST)
    gaps = collections.Counter(
        gap for numbers in often for gap in {*np.diff(numbers).tolist()}
    )
    lengths = [gap for gap, _ in gaps.most_common(_MOST_LENGTHS)]
    alike = {n: np.count_nonzero(tokens[n:] == tokens[:-n]) for n in lengths}
    return sorted(lengths, key=lambda n: (-alike[n], n))[:_TRIED]


def _tokens(jaxpr: core.Jaxpr) -> list[int]:
    """Returns a number for each equation, equal for those that are read alike.

    Variables are told apart by their types alone, and so are the numbers from which
    keys are made. What a function that an equation calls computes is not read.
    """
    live, results = live_equations(jaxpr), set(filter(is_var, jaxpr.outvars))
    known: dict[Hashable, int] = {}
    found = []
    for number, eqn in enumerate(jaxpr.eqns):
        read = tuple(v.aval for v in eqn.invars)
        written = tuple((v.aval, v in results) for v in eqn.outvars)
        constants = () if _makes_key(eqn) else _constants(eqn, _in_effect)
        what = eqn.primitive, eqn.ctx, live[number], read, written, constants
        found.append(known.setdefault(what, len(known)))
    return found


def _makes_key(eqn: Any) -> bool:
    """Tells whether an equation computes keys of random numbers."""
    dtypes = (getattr(v.aval, "dtype", None) for v in eqn.outvars)
    return any(jax.dtypes.issubdtype(d, jax.dtypes.prng_key) for d in dtypes if d)


def _constants(eqn: Any, comparable: Callable[[Any], Hashable]) -> Hashable:
    """Returns the literals and the parameters of an equation."""
    literals = tuple(None if is_var(v) else _literal(v) for v in eqn.invars)
    return literals, tuple((k, comparable(v)) for k, v in eqn.params.items())


def _literal(atom: core.Literal) -> Hashable:
    value = np.asarray(atom.val)
    return value.dtype.str, value.tobytes()


def _exactly(value: Any) -> Hashable:
    """Returns a parameter, or its identity if it cannot be compared."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _in_effect(value: Any) -> Hashable:
    """Returns what is read of a parameter: functions have a name only."""
    if isinstance(value, tuple | list):
        return tuple(map(_in_effect, value))
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        return value.debug_info.func_name
    is_function = callable(value) or isinstance(value, linear_util.WrappedFun)
    return type(value) if is_function else _exactly(value)


def _run(
    jaxpr: core.Jaxpr,
    tokens: np.ndarray,
    maker: Mapping[Any, tuple[int, int]],
    length: int,
) -> Run | None:
    """Returns the run of segments of a length, or None."""
    first, stop = _longest((tokens[length:] == tokens[:-length]).tolist())

    def reads(number: int) -> list[Hashable]:
        made = [(v, number_of(maker, v)) for v in jaxpr.eqns[number].invars]
        return [(number - n, maker[v][1]) if n >= first else is_var(v) for v, n in made]

    # The first segment reads what is before the run, where others read one before.
    second = first + length
    begin, end = _longest(reads(n) == reads(n + length) for n in range(second, stop))
    start = second + begin + length
    count = (second + end + length - start) // length
    run = Run(jaxpr=jaxpr, start=start, length=length, count=count, maker=maker)
    return run if count >= _LEAST and _is_closed(run) and _is_regular(run) else None


def _longest(alike: Iterable[bool]) -> tuple[int, int]:
    """Returns where the longest part of a series that is true begins and ends."""
    best, begin = (0, 0), 0
    for number, one in enumerate(itertools.chain(alike, [False])):
        if not one:
            best = max(best, (begin, number), key=lambda ends: ends[1] - ends[0])
            begin = number + 1
    return best


def _is_closed(run: Run) -> bool:
    """Tells whether the results of each segment are read by the next one only."""
    end = run.begin(run.count)
    for number, eqn in enumerate(run.jaxpr.eqns[run.start :], run.start):
        made = [number_of(run.maker, v) for v in eqn.invars]
        if number >= end:
            if any(run.start <= n < run.skipped.stop for n in made):
                return False
            continue
        segment = (number - run.start) // run.length
        before = run.begin(segment - 1)
        if any(run.begin(-1) <= n < before for n in made):
            return False
    return True


def _is_regular(run: Run) -> bool:
    """Tells whether segments have the same parts for the arrays of others.

    Each such array is read by all segments in the same places, or by one segment. Those
    of one segment are arguments, or keys.
    """
    eqns, before, after = run.jaxpr.eqns, run.begin(-1), run.begin(run.count)
    segments = [eqns[run.begin(n) : run.begin(n + 1)] for n in range(run.count)]
    outer = [
        [v for eqn in part for v in eqn.invars if is_outer(run.maker, before, v)]
        for part in segments
    ]
    shared = set(outer[0]).intersection(*outer[1:])
    owners = collections.Counter(v for read in outer for v in {*read} - shared)
    rest = (v for eqn in (*eqns[:before], *eqns[after:]) for v in eqn.invars)
    others = set(filter(is_var, (*rest, *run.jaxpr.outvars)))
    made = [eqns[n] for v in owners if (n := number_of(run.maker, v)) >= 0]
    if max(owners.values(), default=1) > 1 or not others.isdisjoint(owners):
        return False
    if not all(map(_makes_key, made)):
        return False
    is_comparing = any(eqn.primitive.name in _COMPARING for eqn in segments[0])
    if is_comparing and (made or len({*map(_all_constants, segments)}) > 1):
        return False
    return len({_roles(read, shared) for read in outer}) == 1


def _all_constants(segment: Iterable[Any]) -> Hashable:
    return tuple(_constants(eqn, _exactly) for eqn in segment)


def _roles(read: Iterable[Any], shared: set[Any]) -> tuple[Hashable, ...]:
    """Numbers the arrays that a segment reads alone; others stand for themselves."""
    own: dict[Any, int] = {}
    return tuple(v if v in shared else own.setdefault(v, len(own)) for v in read)


def is_outer(maker: Mapping[Any, tuple[int, int]], before: int, atom: Any) -> bool:
    """Tells whether an atom is an array that is computed before an equation."""
    return is_var(atom) and number_of(maker, atom) < before
