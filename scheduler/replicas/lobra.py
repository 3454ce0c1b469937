"""LobRA's own algorithms, to compare with: padded buckets, and integer programs.

Samples are padded to the boundaries of R buckets, which a dynamic program chooses for
each step. An integer program divides the samples of each bucket among the kinds of
replicas; the replicas of a kind share them evenly. The deployment is the best one for
the mean numbers of samples in buckets.

The paper leaves to its appendix, which is not used here, how it solves problem (2). Its
second pruning is as section 4.2 says it: deployments are ordered by a bound of their
time, and those that are predicted to be slower than the best one are not solved. The
solver is HiGHS, not SCIP.

References:
    LobRA, https://doi.org/10.14778/3742728.3742752.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pulp

from jaxlora.scheduler import solver
from jaxlora.scheduler.replicas.problem import Deployment, ReplicaKind, check_fit

NUM_BUCKETS = 16  # R, section 5.1
INTERVAL = 256  # tokens of an interval u of section 4.3
_SECONDS = 5.0  # of a program
_GAP = 1e-3  # relative, at which a program ends
_MAX_SOLVED = 8  # deployments for which (2) is solved
_MAX_DEPLOYMENTS = 300_000
_CLOSE = 1.001  # of times by which deployments are not solved


def boundaries(lengths: np.ndarray, num_buckets: int = NUM_BUCKETS) -> np.ndarray:
    """Chooses the boundaries of buckets with the least padding; equation (4).

    Args:
        lengths: Lengths of samples.
        num_buckets: Most buckets.

    Returns:
        The boundaries, in ascending order; the last one holds the longest sample. They
        are multiples of `INTERVAL`.
    """
    intervals, counts = np.unique(
        -(-np.asarray(lengths) // INTERVAL), return_counts=True
    )
    ends = intervals * INTERVAL
    total = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * ends)])
    # padding[a, b]: of intervals a to b - 1 in a bucket that ends with the last one.
    padding = np.full((len(ends) + 1, len(ends) + 1), np.inf)
    for b in range(1, len(ends) + 1):
        padding[:b, b] = ends[b - 1] * (total[b] - total[:b]) - (tokens[b] - tokens[:b])
    state = np.full(len(ends) + 1, np.inf)
    state[0] = 0.0
    parents = []
    for _ in range(min(num_buckets, len(ends))):
        through = state[:, None] + padding
        parents.append(through.argmin(axis=0))
        state = through.min(axis=0)
    out, at = [], len(ends)
    for parent in reversed(parents):
        out.append(int(ends[at - 1]))
        at = int(parent[at])
    return np.array(out[::-1])


def padded(lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Pads each length to the next boundary; longer ones than the last are kept."""
    lengths = np.asarray(lengths)
    at = np.searchsorted(ends, lengths)
    return np.where(at < len(ends), ends[np.minimum(at, len(ends) - 1)], lengths)


def padded_kinds(kinds: Sequence[ReplicaKind]) -> tuple[ReplicaKind, ...]:
    """Returns kinds that also hold samples which are padded beyond their longest."""
    return tuple(
        dataclasses.replace(kind, longest=-(-kind.longest // INTERVAL) * INTERVAL)
        for kind in kinds
    )


def even_step(deployment: Deployment, lengths: np.ndarray) -> float:
    """Returns the time of a step on replicas of one kind that share samples evenly.

    This is the "naive" design of section 3, and the baseline Task-Fused.
    """
    (kind,), (count,) = deployment.kinds, deployment.counts
    return _shared(kind, count, lengths)


def step_by_length(deployment: Deployment, lengths: np.ndarray) -> np.ndarray:
    """Returns the seconds of each kind if samples go to the smallest that holds them.

    This is the "better" design of section 3, of which the paper says that the largest
    replica waits for 42 % of the time [kinds].
    """
    order = np.argsort([kind.longest for kind in deployment.kinds], kind="stable")
    left, out = np.asarray(lengths), np.zeros(len(deployment.kinds))
    for i in order:
        kind = deployment.kinds[i]
        out[i] = _shared(kind, deployment.counts[i], left[left <= kind.longest])
        left = left[left > kind.longest]
    if len(left):
        raise ValueError(f"a sample of {left.max()} tokens fits into no replica.")
    return out


def _shared(kind: ReplicaKind, count: int, lengths: np.ndarray) -> float:
    """Returns the time of alike replicas that are dealt samples, longest first."""
    if not len(lengths):
        return 0.0
    loads = [kind.cost.base] * count
    for seconds in sorted(kind.seconds(lengths).tolist(), reverse=True):
        heapq.heapreplace(loads, loads[0] + seconds)
    return max(loads)


def dispatch_step(
    deployment: Deployment, lengths: np.ndarray
) -> tuple[float, np.ndarray]:
    """Solves equation (3): how many samples of each bucket a replica of a kind gets.

    Args:
        deployment: The replicas.
        lengths: Padded lengths of the samples of a step.

    Returns:
        The time of the step, and the seconds of a replica of each kind [kinds].

    Raises:
        ValueError: A sample fits into no replica.
    """
    ends, numbers = np.unique(lengths, return_counts=True)
    if len(ends) and ends[-1] > deployment.longest:
        raise ValueError(f"a sample of {ends[-1]} tokens fits into no replica.")
    seconds = np.stack([kind.seconds(ends) for kind in deployment.kinds])
    program = pulp.LpProblem("dispatch", pulp.LpMinimize)
    last = program.add_variable("t", 0)
    program += last
    kinds = list(enumerate(zip(deployment.kinds, deployment.counts, strict=True)))
    unit = float(np.where(np.isfinite(seconds), seconds, 0.0).max())
    given = {
        (i, j): program.add_variable(
            f"d_{i}_{j}", 0, int(-(-n // count)), cat="Integer"
        )
        for i, (kind, count) in kinds
        for j, n in enumerate(numbers.tolist())
        if np.isfinite(seconds[i, j])
    }
    for j, n in enumerate(numbers.tolist()):
        own = (count * given[i, j] for i, (_, count) in kinds if (i, j) in given)
        program += pulp.lpSum(own) >= n
    for i, (kind, _) in kinds:
        terms = (float(seconds[k] / unit) * d for k, d in given.items() if k[0] == i)
        program += pulp.lpSum(terms) + kind.cost.base / unit <= last
    stats = solver.run(program, seed=0, time_limit=_SECONDS, mip_rel_gap=_GAP)
    if not stats.has_solution:
        raise solver.SolverError(f"HiGHS stopped with {stats.status.name!r}.")
    out = np.zeros(len(kinds))
    for (i, j), d in given.items():
        out[i] += round(d.varValue or 0.0) * seconds[i, j]
    for i, (kind, _) in kinds:
        out[i] += kind.cost.base * (out[i] > 0)
    return float(out.max()), out


def candidates(
    kinds: Sequence[ReplicaKind], lengths: np.ndarray
) -> tuple[ReplicaKind, ...]:
    """Leaves out kinds that are consistently less efficient; section 4.2.

    A kind stays if no other one holds what it holds with fewer GPU-seconds.
    """
    lengths = np.unique(lengths)
    cost = [kind.num_gpus * kind.seconds(lengths) for kind in kinds]

    def is_beaten(i: int) -> bool:
        return any(
            bool((cost[k] <= cost[i]).all())
            and (bool((cost[k] < cost[i]).any()) or k < i)
            for k in range(len(kinds))
            if k != i
        )

    return tuple(kind for i, kind in enumerate(kinds) if not is_beaten(i))


def plan_lobra(
    kinds: Sequence[ReplicaKind], num_gpus: int, batches: Sequence[np.ndarray]
) -> tuple[Deployment, np.ndarray]:
    """Chooses a deployment by equation (2).

    Args:
        kinds: Kinds of replicas; see `candidates`.
        num_gpus: Number of GPUs.
        batches: Lengths of the samples of 100 steps.

    Returns:
        The deployment, and the boundaries of the buckets that it was chosen for.

    Raises:
        ValueError: A sample fits into no replica, or there are too many deployments.
    """
    longest = check_fit(kinds, batches)
    lengths = np.concatenate(batches)
    kinds = padded_kinds(candidates(kinds, lengths))
    ends = boundaries(lengths)
    counts = np.bincount(np.searchsorted(ends, lengths), minlength=len(ends))
    mean = np.repeat(ends, np.ceil(counts / len(batches) - 1e-9).astype(int))
    plans = np.array(list(_deployments(kinds, num_gpus, longest)))
    estimates = _estimates(kinds, plans, mean)
    best, chosen = math.inf, None
    for at in np.argsort(estimates, kind="stable")[:_MAX_SOLVED]:
        if estimates[at] * _CLOSE >= best:
            break
        one = Deployment(kinds=kinds, counts=tuple(plans[at].tolist()))
        seconds, _ = dispatch_step(one, mean)
        if seconds < best:
            best, chosen = seconds, one
    assert chosen is not None, "some deployment holds all samples"
    return chosen, ends


def _deployments(
    kinds: Sequence[ReplicaKind], num_gpus: int, longest: int
) -> Iterator[list[int]]:
    """Yields the counts of deployments to which no replica can be added."""
    gpus = [kind.num_gpus for kind in kinds]
    ways = [1] + [0] * num_gpus  # to use so many GPUs
    for size in gpus:
        for used in range(size, num_gpus + 1):
            ways[used] += ways[used - size]
    if (number := sum(ways[num_gpus - min(gpus) + 1 :])) > _MAX_DEPLOYMENTS:
        raise ValueError(
            f"{num_gpus} GPUs have {number} deployments of {len(kinds)} kinds of "
            f"replicas, and {_MAX_DEPLOYMENTS} can be looked at. Give fewer of either, "
            "or use plan_deployment."
        )

    def fill(at: int, left: int) -> Iterator[list[int]]:
        if at == len(gpus):
            if left < min(gpus):
                yield []
            return
        for n in range(left // gpus[at], -1, -1):
            for rest in fill(at + 1, left - n * gpus[at]):
                yield [n, *rest]

    for counts in fill(0, num_gpus):
        if any(n and k.longest >= longest for n, k in zip(counts, kinds, strict=True)):
            yield counts


def _estimates(
    kinds: Sequence[ReplicaKind], plans: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns about the least time of a step on each deployment [deployments].

    It is the largest, over all lengths, of the work of longer samples over the speed of
    the replicas that hold them.
    """
    seconds = np.stack([kind.seconds(lengths) for kind in kinds])
    largest = int(np.argmax([kind.longest for kind in kinds]))
    finite = np.isfinite(seconds).all(axis=0)
    speeds = seconds[largest, finite].sum() / seconds[:, finite].sum(axis=1)
    limits = np.array([kind.longest for kind in kinds])
    base = min(kind.cost.base for kind in kinds)
    out = np.zeros(len(plans))
    for limit in (0, *np.unique(limits)[:-1].tolist()):
        work = seconds[largest, lengths > limit].sum()
        speed = plans @ np.where(limits > limit, speeds, 0.0)
        if work:
            with np.errstate(divide="ignore"):
                out = np.maximum(out, work / speed)
    return base + out
