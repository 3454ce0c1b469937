"""Chooses how many replicas of each kind to deploy on the GPUs.

With z = 1 / t for a step of t seconds (beyond the base that all kinds have), and X = z
times the work w that a kind takes of a bin of lengths, LobRA's problem (2) is linear:

    maximize z
    sum over i of X[i, j] >= z W[j]              every bin j of lengths is served
    sum over j of c[i, j] X[i, j] <= p[i] q[i]   a replica has no more than its time
    sum over i of n[i] p[i] <= N,  p integer

c[i, j] is the least time of a unit of work of the bin's samples on kind i, so that the
optimum bounds the mean step of any deployment: the time of a step is convex in the
numbers of its samples. A step is no shorter than its longest sample, either: S[i, b] is
the time of the longest samples of some steps b, and Y = z times the share of the kind
that takes them, which must be deployed:

    sum over b, i of S[i, b] Y[i, b] <= 1,  sum over i of Y[i, b] = z,
    Y[i, b] <= Z d[i],  d[i] <= p[i],  d binary

A kind with a larger base has q[i] < 1. This depends on t, and q[i] of the best known
deployment is right for every better one up to it: the program is solved again with the
new one until they agree.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pulp

from jaxlora.scheduler import solver
from jaxlora.scheduler.replicas.bound import Steps
from jaxlora.scheduler.replicas.dispatcher import dispatch
from jaxlora.scheduler.replicas.problem import Deployment, ReplicaKind, check_fit

_MAX_NODES = 2000  # of each program
_MAX_PROGRAMS = 4
_MAX_ROUNDS = 6  # of the search around a solution
_MAX_NEAR = 12  # deployments of a round that are looked at closely
_SAMPLES_TRIED = 50_000  # dispatched in trial steps
_MAX_TRIALS = 6


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PlannedDeployment:
    """A deployment and what is known about it.

    Attributes:
        deployment: The deployment.
        seconds: Mean seconds of a step, by dispatching some of the steps.
        idle: Mean share of the GPUs' time in which they wait in these steps.
        bound: Lower bound of the mean seconds of a step of any deployment, with proof.
    """

    deployment: Deployment
    seconds: float
    idle: float
    bound: float

    @property
    def gap(self) -> float:
        """The mean step over its bound."""
        return self.seconds / self.bound


def plan_deployment(
    kinds: Sequence[ReplicaKind],
    num_gpus: int,
    batches: Sequence[np.ndarray],
    longest: int = 0,
) -> PlannedDeployment:
    """Chooses the deployment with the shortest steps.

    Args:
        kinds: Kinds of replicas to choose from.
        num_gpus: Number of GPUs.
        batches: Lengths of the samples of some steps of all jobs together. The paper
            takes 100 steps. Some replica will hold the longest of them.
        longest: The longest length of other steps, which some replica will hold, too.

    Raises:
        ValueError: There are no samples, or the longest fits into no replica that the
            GPUs suffice for.
        SolverError: HiGHS fails.

    References:
        LobRA, https://doi.org/10.14778/3742728.3742752, section 4.2.
    """
    batches = [np.asarray(batch) for batch in batches if len(batch)]
    kinds = [kind for kind in kinds if kind.num_gpus <= num_gpus]
    kinds = useful_kinds(kinds, batches, longest)
    steps = Steps(kinds, batches, longest)
    program = _Program(steps, num_gpus)
    best, counts, bound = float("inf"), None, 0.0
    for _ in range(_MAX_PROGRAMS):
        found, proved = program.solve(best)
        bound = max(bound, min(proved, best))
        if found is None or found == counts:
            break
        seconds = float(steps.bounds(found).mean())
        if seconds < best:
            counts, best = found, seconds
        if not steps.more.any():
            break
    if counts is None:
        raise solver.SolverError(
            f"HiGHS found no deployment of {len(kinds)} kinds in {_MAX_NODES} nodes. "
            "Give fewer kinds of replicas."
        )
    counts, best = _climb(counts, steps, num_gpus)
    deployment = Deployment(kinds=tuple(kinds), counts=counts)
    return _try_steps(deployment, batches, best, bound)


def useful_kinds(
    kinds: Sequence[ReplicaKind], batches: Sequence[np.ndarray], longest: int = 0
) -> tuple[ReplicaKind, ...]:
    """Leaves out kinds that another one can replace in every deployment.

    The other has no more GPUs, holds what it holds, and takes no longer for any sample.
    (LobRA, section 4.2: configuration pruning.) A kind that holds no sample is left
    out, too.

    Raises:
        ValueError: There are no samples, or the longest one fits into no replica.
    """
    longest = check_fit(kinds, batches, longest)
    lengths = np.unique(np.concatenate([*batches, [longest]]))
    seconds = {id(kind): kind.seconds(lengths) for kind in kinds}

    def replaces(a: ReplicaKind, b: ReplicaKind) -> bool:
        fewer = a.num_gpus <= b.num_gpus and a.cost.base <= b.cost.base
        return fewer and bool((seconds[id(a)] <= seconds[id(b)]).all())

    ordered = sorted(kinds, key=lambda k: (k.num_gpus, k.cost.base, k.stage))
    kept: list[ReplicaKind] = []
    for kind in ordered:
        if np.isfinite(seconds[id(kind)]).any() and not any(
            replaces(a, kind) for a in kept
        ):
            kept = [a for a in kept if not replaces(kind, a)] + [kind]
    return tuple(kept)


def _try_steps(
    deployment: Deployment, batches: Sequence[np.ndarray], mean: float, bound: float
) -> PlannedDeployment:
    """Predicts a mean step from the mean bound of all, and some that are dispatched."""
    size = max(1, int(np.mean([len(batch) for batch in batches])))
    num = min(_MAX_TRIALS, len(batches), max(1, _SAMPLES_TRIED // size))
    found = [dispatch(deployment, batch) for batch in batches[:num]]
    seconds = sum(one.seconds for one in found)
    return PlannedDeployment(
        deployment=deployment,
        seconds=mean * seconds / sum(one.bound for one in found),
        idle=sum(one.seconds * one.idle for one in found) / seconds,
        bound=bound,
    )


class _Program:
    """The mixed-integer program for given steps."""

    def __init__(self, steps: Steps, num_gpus: int):
        self._steps, self._num_gpus = steps, num_gpus
        self._gpus = [kind.num_gpus for kind in steps.kinds]
        # The least GPU-seconds of a step: with this unit of time, z is about 1.
        each = (steps.rates * np.array(self._gpus)[:, None]).min(axis=0)
        self._unit = float((steps.work * each).sum()) / num_gpus
        self._shortest = float((steps.work_of * each).sum(axis=1).min()) / num_gpus

    def solve(self, best: float) -> tuple[tuple[int, ...] | None, float]:
        """Solves the program for deployments whose mean step is at most `best`.

        Returns:
            The numbers of replicas; and a lower bound of the mean step of these
            deployments. None: there are none.
        """
        left = best - self._steps.base
        # A step may be shorter than a large base, on replicas that get no samples; the
        # mean over the steps is then not linear in it, and the base counts as nothing.
        factors = [
            max(0.0, 1 - more / left) if more <= self._shortest else 1.0
            for more in self._steps.more.tolist()
        ]
        program, p = self._make(factors)
        stats = solver.run(program, seed=0, mip_max_nodes=_MAX_NODES, mip_rel_gap=1e-4)
        if not stats.has_solution or stats.best_bound is None:
            return None, 0.0
        counts = tuple(round(variable.varValue or 0.0) for variable in p)
        return counts, self._steps.base + self._unit / stats.best_bound

    def _make(
        self, factors: Sequence[float]
    ) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
        """Makes the program, and returns the numbers of replicas in it, too."""
        program = pulp.LpProblem("deployment", pulp.LpMaximize)
        add, gpus = program.add_variable, self._gpus
        kinds, bins = range(len(gpus)), range(len(self._steps.work))
        z = add("z", 0)
        program += z
        p = [add(f"p_{i}", 0, self._num_gpus // gpus[i], cat="Integer") for i in kinds]
        program += pulp.lpSum(gpus[i] * p[i] for i in kinds) <= self._num_gpus
        # X is in units of a bin's work, so that all numbers are near 1.
        rates = (self._steps.rates * self._steps.work / self._unit).tolist()
        x = [
            {i: add(f"x_{i}_{j}", 0) for i in kinds if np.isfinite(rates[i][j])}
            for j in bins
        ]
        for own in x:
            program += pulp.lpSum(own.values()) >= z
        for i in kinds:
            busy = (rates[i][j] * x[j][i] for j in bins if i in x[j])
            program += pulp.lpSum(busy) <= factors[i] * p[i]
        self._add_longest(program, z, p)
        return program, p

    def _add_longest(
        self, program: pulp.LpProblem, z: pulp.LpVariable, p: Sequence[pulp.LpVariable]
    ) -> None:
        """Adds that steps are no shorter than their longest sample."""
        add, kinds = program.add_variable, self._steps.kinds
        tails = self._steps.tails / self._unit
        most = 1 / float(tails.min(axis=0).sum())  # of z
        deployed = [add(f"d_{i}", cat="Binary") for i in range(len(p))]
        for d, n in zip(deployed, p, strict=True):
            program += d <= n
        program += (
            pulp.lpSum(
                d
                for d, kind in zip(deployed, kinds, strict=True)
                if kind.longest >= self._steps.longest
            )
            >= 1
        )
        seconds = []
        for b, group in enumerate(tails.T.tolist()):
            own = [i for i, size in enumerate(group) if np.isfinite(size)]
            y = {i: add(f"y_{i}_{b}", 0) for i in own}
            program += pulp.lpSum(y.values()) == z
            for i in own:
                program += y[i] <= most * deployed[i]
                seconds.append(group[i] * y[i])
        program += pulp.lpSum(seconds) <= 1


def _climb(
    counts: tuple[int, ...], steps: Steps, num_gpus: int
) -> tuple[tuple[int, ...], float]:
    """Improves a deployment until none nearby has a lower mean of the steps' bounds.

    The program knows the mean step alone, and steps differ. Deployments are nearby if
    two moves of GPUs between kinds make one of the other.
    """
    best = float(steps.bounds(counts).mean())
    for _ in range(_MAX_ROUNDS):
        near = set(_neighbors(counts, steps, num_gpus))
        near |= {far for one in near for far in _neighbors(one, steps, num_gpus)}
        ordered = sorted(near - {counts})
        rough = steps.rough_means(np.array(ordered).reshape(-1, len(counts)))
        promising = [ordered[i] for i in np.argsort(rough, kind="stable")[:_MAX_NEAR]]
        found = {one: float(steps.bounds(one).mean()) for one in promising}
        nearest = min(found, key=lambda one: (found[one], one), default=counts)
        if found.get(nearest, best) >= best:
            break
        counts, best = nearest, found[nearest]
    return counts, best


def _neighbors(
    counts: tuple[int, ...], steps: Steps, num_gpus: int
) -> Iterator[tuple[int, ...]]:
    """Yields deployments in which GPUs of one kind have become replicas of another."""
    gpus = [kind.num_gpus for kind in steps.kinds]
    seen = {counts}
    for i, taken in enumerate(counts):
        for k in range(len(counts)):
            gives = -(-gpus[k] // gpus[i])
            if i == k or gives > taken:
                continue
            near = list(counts)
            near[i] -= gives
            near[k] += gives * gpus[i] // gpus[k]
            found = tuple(near)
            fits = sum(n * g for n, g in zip(found, gpus, strict=True)) <= num_gpus
            if found not in seen and fits and steps.holds_all(found):
                seen.add(found)
                yield found


# ---- replicas of one kind, and one job after the other, to compare with --------------

type Planner = Callable[
    [Sequence[ReplicaKind], int, Sequence[np.ndarray]], PlannedDeployment
]


def best_uniform(
    kinds: Sequence[ReplicaKind],
    num_gpus: int,
    batches: Sequence[np.ndarray],
    longest: int = 0,
) -> PlannedDeployment:
    """Chooses the best replicas of one kind, which must hold the longest sample.

    Its `bound` is that of this deployment. See `plan_deployment`.

    Raises:
        ValueError: The longest sample fits into no replica that the GPUs suffice for.
    """
    batches = [np.asarray(batch) for batch in batches if len(batch)]
    kinds = [k for k in kinds if k.num_gpus <= num_gpus]
    longest = check_fit(kinds, batches, longest)
    found = []
    for kind in kinds:
        if kind.longest >= longest:
            one = Deployment(kinds=(kind,), counts=(num_gpus // kind.num_gpus,))
            bound = float(Steps((kind,), batches).bounds(one.counts).mean())
            found.append(_try_steps(one, batches, bound, bound))
    return min(found, key=lambda one: one.seconds)


def one_after_another(
    kinds: Sequence[ReplicaKind],
    num_gpus: int,
    jobs: Sequence[Sequence[np.ndarray]],
    plan: Planner,
) -> float:
    """Returns the mean seconds of a step of each job, one job after the other.

    Args:
        kinds: Kinds of replicas to choose from.
        num_gpus: Number of GPUs, all of which each job has to itself.
        jobs: For each job, the lengths of its samples in each step; none in steps in
            which it does not take part.
        plan: How the replicas of a job are chosen: `best_uniform` or `plan_deployment`.

    Raises:
        ValueError: A sample fits into no replica.
    """
    seconds = 0.0
    for steps in jobs:
        own = [batch for batch in steps if len(batch)]
        if own:
            share = len(own) / len(steps)
            seconds += share * plan(kinds, num_gpus, own).seconds
    return seconds
