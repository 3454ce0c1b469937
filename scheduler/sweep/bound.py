"""Lower bounds of the makespan, and the groups of GPUs that they suggest.

For a makespan M, a mixed-integer program asks for groups that end by M. Groups with the
same shape and the same longest configuration form a class c: d GPUs each, slots of one
rank, s rounds or more. (With many numbers of steps, a class is an interval of them, and
s is its smallest one.) With

    m[c]     groups of the class (an integer),
    R[c]     rounds of all of them together,
    y[k, c]  configurations of kind k that run in them,

every plan whose groups keep their GPUs satisfies

    sum over c of d m[c] <= G                                        the GPUs
    sum over c of y[k, c] = n[k]                                     all configurations
    R[c] >= s m[c]                                                   the longest one
    free R[c] >= sum over k of bytes[k] steps[k] y[k, c]             memory
    fixed[i] R[c] + sum over k of seconds[k, i] steps[k] y[k, c] <= M m[c]        time

for each line i of the time of a round, where y[k, c] = 0 if the kind does not fit into
the class or alone takes longer than M there. If the program has no solution, no such
plan ends by M.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.sparse

from jaxlora.scheduler.sweep.problem import Bound
from jaxlora.scheduler.sweep.rounds import Kinds, Shape

# Limits of the solver are nodes, not seconds, so that results do not depend on the load
# of the machine.
_MAX_NODES = 20
_MAX_CLASSES = 64  # beyond it, similar numbers of steps share a class
_OPTIMAL, _INFEASIBLE = 0, 2  # statuses of scipy.optimize.milp
_STEP, _NUM_HALVINGS = 1.15, 8  # of the search for the bound
_MOST_STEPS = 200
_ZERO = 1e-6

Class = tuple[Shape, int]  # and the least number of rounds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupMix:
    """Groups that might end by some makespan.

    Attributes:
        num_groups: Groups of each class.
        shares: Configurations of each kind that run in them; fractions.
    """

    num_groups: dict[Class, int]
    shares: dict[Class, dict[int, float]]


class _Rows:
    """Constraints of a program, as a sparse matrix that grows row by row."""

    def __init__(self):
        self.least: list[float] = []
        self.most: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []

    def add(
        self, values: dict[int, float], least: float = 0.0, most: float = np.inf
    ) -> None:
        self._rows += [len(self.least)] * len(values)
        self._columns += values
        self._values += values.values()
        self.least.append(least)
        self.most.append(most)

    def constraint(self, num_columns: int) -> scipy.optimize.LinearConstraint:
        matrix = scipy.sparse.csr_array(
            (self._values, (self._rows, self._columns)),
            shape=(len(self.least), num_columns),
        )
        return scipy.optimize.LinearConstraint(matrix, self.least, self.most)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """Columns of one class: m, R, and y by kind."""

    groups: int
    rounds: int
    kinds: dict[int, int]


def find_mix(kinds: Kinds, makespan: float) -> tuple[GroupMix | None, bool]:
    """Looks for groups that end by a makespan.

    Returns:
        A mix, if one was found, and whether it is proved that there is none.
    """
    classes = _classes(kinds, makespan)
    if {k for may in classes.values() for k in may} < set(range(len(kinds))):
        return None, True
    columns, most = [], []
    for (shape, _), may in classes.items():
        first = len(most)
        most += [kinds.sweep.num_gpus // shape.degree, np.inf]
        most += [kinds.count[k] for k in may]
        of = {k: first + 2 + i for i, k in enumerate(may)}
        columns.append(_Columns(groups=first, rounds=first + 1, kinds=of))
    rows = _rows(kinds, list(classes), columns, makespan)
    cost, integrality = np.zeros(len(most)), np.zeros(len(most))
    for (shape, _), at in zip(classes, columns, strict=True):
        cost[at.groups], integrality[at.groups] = shape.degree, 1
    found = scipy.optimize.milp(
        cost,
        constraints=rows.constraint(len(most)),
        bounds=scipy.optimize.Bounds(0.0, most),
        integrality=integrality,
        options={"node_limit": _MAX_NODES, "mip_rel_gap": 1.0},
    )
    if found.x is None:
        return None, found.status == _INFEASIBLE
    num_groups, shares = {}, {}
    for one, at in zip(classes, columns, strict=True):
        if number := round(found.x[at.groups]):
            num_groups[one] = number
            of = {k: float(found.x[i]) for k, i in at.kinds.items()}
            shares[one] = {k: share for k, share in of.items() if share > _ZERO}
    return GroupMix(num_groups=num_groups, shares=shares), False


def _classes(kinds: Kinds, makespan: float) -> dict[Class, list[int]]:
    """Returns the kinds that may run in each class by a makespan."""
    out = {}
    steps_of_classes = _step_classes(
        kinds.steps, max(1, _MAX_CLASSES // len(kinds.shapes))
    )
    for shape in kinds.shapes:
        for rounds, longest in steps_of_classes:
            may = [
                k
                for k, steps in enumerate(kinds.steps)
                if shape.fits[k]
                and steps <= longest
                and max(
                    fixed * rounds + seconds * steps
                    for fixed, seconds in zip(
                        shape.fixed, shape.seconds_of[k], strict=True
                    )
                )
                <= makespan
            ]
            if may:
                out[shape, rounds] = may
    return out


def _step_classes(steps: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Returns the least and the most steps of the longest configuration, by class."""
    distinct = sorted(set(steps))
    each = -(-len(distinct) // most)
    parts = [distinct[i : i + each] for i in range(0, len(distinct), each)]
    return [(part[0], part[-1]) for part in parts]


def _rows(
    kinds: Kinds, classes: Sequence[Class], columns: Sequence[_Columns], makespan: float
) -> _Rows:
    """Makes the constraints. Rounds are in units of the most steps, for scaling."""
    unit = max(kinds.steps)
    rows = _Rows()
    for k, count in enumerate(kinds.count):
        rows.add({at.kinds[k]: 1.0 for at in columns if k in at.kinds}, count, count)
    for (shape, rounds), at in zip(classes, columns, strict=True):
        rows.add({at.rounds: 1.0, at.groups: -rounds / unit})
        _add_load(rows, kinds, shape, at, makespan)
    gpus = {
        at.groups: float(shape.degree)
        for (shape, _), at in zip(classes, columns, strict=True)
    }
    rows.add(gpus, most=kinds.sweep.num_gpus)
    return rows


def _add_load(
    rows: _Rows, kinds: Kinds, shape: Shape, at: _Columns, seconds: float
) -> None:
    """Adds that groups have the memory and the time for their configurations.

    The column of groups has the time of all of them together, in units of `seconds`.
    """
    steps, unit = kinds.steps, max(kinds.steps)
    held = {
        i: -shape.bytes_of[k] * steps[k] / (shape.free * unit)
        for k, i in at.kinds.items()
    }
    rows.add({at.rounds: 1.0} | held)
    for line, fixed in enumerate(shape.fixed):
        spent = {
            i: -shape.seconds_of[k][line] * steps[k] / seconds
            for k, i in at.kinds.items()
        }
        rows.add({at.groups: 1.0, at.rounds: -fixed * unit / seconds} | spent)


def find_bound(kinds: Kinds) -> tuple[Bound, float, GroupMix]:
    """Finds lower bounds of the makespan by bisection.

    Returns:
        The bounds; the smallest makespan that was not excluded; and a mix for the
        smallest makespan for which one was found, which is usually the same.
    """
    least = any_plan(kinds)
    proved = makespan = least
    mix, excluded = find_mix(kinds, makespan)
    for _ in range(_MOST_STEPS):
        if mix is not None:
            break
        if excluded:
            proved = makespan
        makespan *= _STEP
        mix, excluded = find_mix(kinds, makespan)
    if mix is None:
        raise RuntimeError(f"no groups were found that end within {makespan:.4g} s.")
    low = proved
    for _ in range(_NUM_HALVINGS if low < makespan else 0):
        middle = (low + makespan) / 2
        found, excluded = find_mix(kinds, middle)
        if found is None:
            low = middle
            proved = middle if excluded else proved
        else:
            makespan, mix = middle, found
    return Bound(fixed_groups=proved, any_plan=least), makespan, mix


def any_plan(kinds: Kinds) -> float:
    """Bounds the makespan of plans in which groups may also change at any time.

    A linear program minimizes the makespan for the rounds of all groups of a shape
    together: they have the memory and the time for all steps, GPUs are never busy
    beyond the makespan, and no configuration takes longer than the makespan.
    """
    shapes, steps, unit = kinds.shapes, kinds.steps, longest_alone(kinds)
    rows, last = _Rows(), 0  # column 0: the makespan, in units of the longest one
    columns = []
    for shape in shapes:
        fits = [k for k in range(len(kinds)) if shape.fits[k]]
        of = {k: last + 3 + i for i, k in enumerate(fits)}
        columns.append(_Columns(groups=last + 1, rounds=last + 2, kinds=of))
        last += 2 + len(of)
    for k, count in enumerate(kinds.count):
        rows.add({at.kinds[k]: 1.0 for at in columns if k in at.kinds}, count, count)
        alone = {
            at.kinds[k]: -steps[k] * shape.round_alone(k) / unit
            for shape, at in zip(shapes, columns, strict=True)
            if k in at.kinds
        }
        rows.add({0: count} | alone)
    gpus = {0: float(kinds.sweep.num_gpus)}
    for shape, at in zip(shapes, columns, strict=True):
        gpus[at.groups] = -float(shape.degree)
        _add_load(rows, kinds, shape, at, unit)
    rows.add(gpus)
    cost = np.zeros(last + 1)
    cost[0] = 1.0
    found = scipy.optimize.milp(
        cost,
        constraints=rows.constraint(len(cost)),
        bounds=scipy.optimize.Bounds([1.0] + [0.0] * last, np.inf),
    )
    if found.status != _OPTIMAL:
        raise RuntimeError(f"the solver of the bound stopped: {found.message}")
    return float(found.fun) * unit


def longest_alone(kinds: Kinds) -> float:
    """Returns the time of the longest configuration, each in its fastest group."""
    return max(
        min(steps * shape.round_alone(k) for shape in kinds.shapes if shape.fits[k])
        for k, steps in enumerate(kinds.steps)
    )
