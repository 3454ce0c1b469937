"""Puts what was found in one of many segments in the places of all of them.

The form of a value follows from its equation and the forms that it reads. So if two
segments in a row read the same forms of the ones before them, all that follow do, and
the sites of one are those of all. `expanded` checks this, and that the segments beside
those that were left out have the same sites and near misses.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxlora.fuse.linears.repeats import (
    ENDS,
    Run,
    is_outer,
    is_var,
    makers_of,
    number_of,
)
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.site import Index, Refusal, Site
from jaxlora.fuse.trace import source_of

_PLACE = ("jaxpr", "location", "sizes")  # fields that say where a site is

Findings = tuple[list[Site], dict[int, Refusal]]  # near misses by equation


class _Unknown(Exception):
    """A variable has no part in a segment that others have too."""


def expanded(
    run: Run,
    sites: Sequence[Site],
    refusals: Mapping[int, Refusal],
    normalizers: Sequence[Normalizer],
) -> Findings | None:
    """Returns the sites and near misses of a jaxpr from those of its shortened one.

    Args:
        run: The segments of the jaxpr.
        sites: The sites of the shortened jaxpr.
        refusals: Its near misses, by the number of the equation.
        normalizers: Have read the shortened jaxpr.

    Returns:
        The sites in their order, and the near misses; None if the segments that were
        left out are not known to be like the others.
    """
    short = _Shortened(run)
    by_number = {short.number(site): site for site in sites}
    try:
        found = {short.findings(n, by_number, refusals) for n in range(1, 2 * ENDS - 1)}
        borders = [
            {short.border(segment, n) for segment in range(2, 2 * ENDS - 1)}
            for n in normalizers
        ]
    except _Unknown:
        return None
    if len(found) > 1 or any(len(forms) > 1 for forms in borders):
        return None
    return _copied(short, by_number, refusals)


class _Shortened:
    """A shortened jaxpr, whose equations and segments have their numbers there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.eqns = run.shortened.eqns
        self.maker = makers_of(run.shortened)
        self.first = run.begin(-1)  # what is computed from here on has alike others
        self.outer = {n: self._outer_places(n) for n in range(1, 2 * ENDS)}

    def number(self, site: Site) -> int:
        """Returns the number of the equation that computes a site's first result."""
        return self.maker[site.projections[0].root][0]

    def _outer_places(self, segment: int) -> dict[Any, tuple[int, int]]:
        """Returns where a segment or the one before first reads arrays of others."""
        places: dict[Any, tuple[int, int]] = {}
        begin = self.run.begin(segment)
        for number in range(begin - self.run.length, begin + self.run.length):
            for place, atom in enumerate(self.eqns[number].invars):
                if is_outer(self.maker, self.first, atom):
                    places.setdefault(atom, (number - begin, place))
        return places

    def part_of(self, var: Any, segment: int) -> tuple[str, int, int]:
        """Returns the part that a variable has in a segment.

        Raises:
            _Unknown: It has none.
        """
        number = number_of(self.maker, var)
        if number >= self.first:
            return "made", number - self.run.begin(segment), self.maker[var][1]
        if var not in self.outer[segment]:
            raise _Unknown
        return "read", *self.outer[segment][var]

    def findings(
        self,
        segment: int,
        sites: Mapping[int, Site],
        refusals: Mapping[int, Refusal],
    ) -> Hashable:
        """Describes the sites and near misses of a segment without their place."""
        begin = self.run.begin(segment)
        numbers = range(begin, begin + self.run.length)
        return (
            tuple(
                (n - begin, self._described(sites[n], segment, sites[n].sizes))
                for n in numbers
                if n in sites
            ),
            tuple(
                (n - begin, refusals[n].path, refusals[n].reason)
                for n in numbers
                if n in refusals
            ),
        )

    def border(self, segment: int, n: Normalizer) -> Hashable:
        """Describes the forms of what a segment reads of the one before."""
        begin = self.run.begin(segment)
        eqns = self.eqns[begin : begin + self.run.length]
        read = (v for eqn in eqns for v in eqn.invars if isinstance(v, core.Var))
        before = range(self.first, begin)
        crossing = [v for v in read if number_of(self.maker, v) in before]
        forms = tuple((v, n.forms.get(v)) for v in dict.fromkeys(crossing))
        return self._described(forms, segment, n.indices.sizes)

    def _described(
        self, value: Any, segment: int, sizes: Mapping[Index, int]
    ) -> Hashable:
        names: dict[Index, int] = {}
        begin = self.run.begin(segment)

        def describe(value: Any, field: str = "") -> Hashable:
            if field == "equations":
                absolute = (n for n in value if n < self.first)
                relative = (n - begin for n in value if n >= self.first)
                return frozenset(absolute), frozenset(relative)
            if is_var(value):
                return self.part_of(value, segment)
            if isinstance(value, core.Literal):
                return np.asarray(value.val).tobytes(), value.aval
            if isinstance(value, tuple):
                return tuple(describe(part, "part") for part in value)
            if isinstance(value, frozenset):
                return frozenset(map(describe, value))
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                names_of = (f.name for f in dataclasses.fields(value))
                kept = (f for f in names_of if f not in _PLACE)
                return type(value), *(describe(getattr(value, f), f) for f in kept)
            if field == "part" and type(value) is int:  # tuples of int hold indices
                return names.setdefault(value, len(names)), sizes.get(value)
            return value

        return describe(value)


def _copied(
    short: _Shortened, sites: Mapping[int, Site], refusals: Mapping[int, Refusal]
) -> Findings:
    """Copies what was found in the last segment before those that were left out."""
    run, stop, shift = short.run, short.run.skipped.start, len(short.run.skipped)
    sizes = dict(next(iter(sites.values())).sizes) if sites else {}
    moves = [(range(stop), _Move(short, 0, sizes))]
    moves += [(range(stop, len(short.eqns)), _Move(short, shift, sizes))]
    template = range(stop - run.length, stop)
    steps = range(run.length, shift + run.length, run.length)
    count = len(sizes)
    for copy, by in enumerate(steps, 1):
        moves.append((template, _Move(short, by, sizes, copy * count)))
    found: dict[int, Site] = {}
    misses: dict[int, Refusal] = {}
    for numbers, move in moves:
        for n in numbers:
            if n in sites:
                found[n + move.by] = move.site(sites[n], n)
            if n in refusals:
                location = move.location(n)
                misses[n + move.by] = dataclasses.replace(
                    refusals[n], location=location
                )
    return [found[number] for number in sorted(found)], misses


class _Move:
    """Moves what was found in a shortened jaxpr to its place in the whole one.

    Attributes:
        by: What is added to the numbers of equations.
    """

    def __init__(
        self, short: _Shortened, by: int, sizes: dict[Index, int], names: int = 0
    ) -> None:
        """Describes a move.

        Args:
            short: The shortened jaxpr.
            by: What is added to the numbers of equations.
            sizes: The size of each index; those of copies are added.
            names: What is added to indices; 0: it is no copy.
        """
        self.by = by
        self._short, self._sizes, self._names = short, sizes, names
        self._eqns = short.run.jaxpr.eqns

    def location(self, number: int) -> str:
        """Returns the code that made an equation."""
        return source_of(self._eqns[number + self.by])

    def site(self, site: Site, number: int) -> Site:
        """Returns a site at its new place.

        Args:
            site: The site.
            number: Number of the equation that computes its result.
        """
        return dataclasses.replace(
            self._moved(site),
            jaxpr=self._short.run.jaxpr,
            location=self.location(number),
            equations=frozenset(map(self._number, site.equations)),
            sizes=self._sizes,
        )

    def _number(self, number: int) -> int:
        return number + self.by if number >= self._short.first else number

    def _moved(self, value: Any) -> Any:
        if is_var(value):
            return self._var(value)
        if isinstance(value, tuple):
            return tuple(
                self._index(part) if type(part) is int else self._moved(part)
                for part in value
            )
        if isinstance(value, frozenset):
            return frozenset(map(self._moved, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (f.name for f in dataclasses.fields(value))
            kept = (f for f in fields if f not in (*_PLACE, "equations"))
            new = {name: self._moved(getattr(value, name)) for name in kept}
            return dataclasses.replace(value, **new)
        return value

    def _index(self, index: Index) -> Index:
        new = index + self._names
        self._sizes[new] = self._sizes[index]
        return new

    def _var(self, var: Any) -> Any:
        number = number_of(self._short.maker, var)
        if number >= self._short.first:
            return self._eqns[number + self.by].outvars[self._short.maker[var][1]]
        if not self._names:
            return var
        template = ENDS - 1
        _, offset, place = self._short.part_of(var, template)
        begin = self._short.run.begin(template)
        return self._eqns[begin + offset + self.by].invars[place]
