"""Random kinds of replicas and samples, and independent answers for small ones."""

import itertools

import numpy as np
import scipy.optimize

from jaxlora.scheduler import AffineCost
from jaxlora.scheduler.replicas import Deployment, ReplicaKind

# GPUs, longest sample, and speed of a GPU against that of a replica of one.
SHAPES = ((1, 2048, 1.0), (2, 4096, 0.92), (4, 8192, 0.78), (8, 16384, 0.58))
SQUARE = 2e-5  # time of a squared token, in that of a token


def paper_kinds(base: float = 300.0) -> tuple[ReplicaKind, ...]:
    """Kinds whose costs are in proportion."""
    return tuple(
        ReplicaKind(
            tensor=gpus,
            longest=longest,
            cost=AffineCost(
                base=base,
                per_token=1 / (gpus * speed),
                per_square=SQUARE / (gpus * speed),
            ),
        )
        for gpus, longest, speed in SHAPES
    )


def random_kinds(rng: np.random.Generator, num: int = 3) -> tuple[ReplicaKind, ...]:
    """Kinds with other ratios of their costs, and other bases."""
    out = []
    for i in range(num):
        gpus = 2**i
        each = gpus * rng.uniform(0.6, 1.0)
        out.append(
            ReplicaKind(
                tensor=gpus,
                longest=int(2 ** rng.uniform(8, 10) * gpus),
                cost=AffineCost(
                    base=float(rng.choice([0.0, 50.0, 200.0])),
                    per_token=1 / each,
                    per_square=float(rng.uniform(0, 1e-3)) / each,
                ),
            )
        )
    return tuple(out)


def random_steps(
    seed: int, num_samples: int, num_steps: int, longest: int = 16384
) -> list[np.ndarray]:
    """Draws steps of 4 to 12 jobs with log-normal lengths."""
    rng = np.random.default_rng([9, seed])
    num = int(rng.integers(4, 13))
    medians = np.exp(rng.uniform(np.log(120), np.log(3500), num))
    sigmas, shares = rng.uniform(0.4, 0.8, num), rng.dirichlet(np.ones(num) * 1.5)

    def step() -> np.ndarray:
        job = rng.choice(num, num_samples, p=shares)
        drawn = medians[job] * np.exp(sigmas[job] * rng.normal(size=num_samples))
        return np.clip(np.rint(drawn), 16, longest).astype(int)

    return [step() for _ in range(num_steps)]


def ends_of(deployment: Deployment, lengths, replica_of, start=None) -> np.ndarray:
    """Computes the end of each replica, sample by sample."""
    ends = np.zeros(deployment.num_replicas) if start is None else np.array(start)
    used = set()
    for tokens, replica in zip(lengths, replica_of, strict=True):
        kind = deployment.replicas[replica]
        assert tokens <= kind.longest
        if replica not in used:
            used.add(replica)
            ends[replica] += kind.cost.base
        per_square = kind.cost.per_square * tokens**2
        ends[replica] += kind.cost.per_token * tokens + per_square
    return ends


def best_dispatch(deployment: Deployment, lengths, start=None) -> float:
    """Returns the time of the best dispatch, by trying all of them."""
    fitting = [
        [r for r, kind in enumerate(deployment.replicas) if n <= kind.longest]
        for n in lengths
    ]
    return min(
        float(ends_of(deployment, lengths, each, start)[list(set(each))].max())
        for each in itertools.product(*fitting)
    )


def fluid_step(deployment: Deployment, lengths: np.ndarray) -> float:
    """Returns the time of a step whose samples may be divided, all replicas used."""
    kinds, counts = deployment.kinds, deployment.counts
    pairs = [
        (i, s)
        for i, kind in enumerate(kinds)
        for s, n in enumerate(lengths)
        if n <= kind.longest
    ]
    rows = np.zeros((len(kinds), len(pairs) + 1))
    served = np.zeros((len(lengths), len(pairs) + 1))
    for column, (i, s) in enumerate(pairs):
        cost, n = kinds[i].cost, float(lengths[s])
        rows[i, column] = cost.per_token * n + cost.per_square * n * n
        served[s, column] = 1
    rows[:, -1] = -np.array(counts)
    bases = [-n * kind.cost.base for kind, n in zip(kinds, counts, strict=True)]
    goal = np.zeros(len(pairs) + 1)
    goal[-1] = 1
    found = scipy.optimize.linprog(
        goal, A_ub=rows, b_ub=bases, A_eq=served, b_eq=np.ones(len(lengths))
    )
    assert found.status == 0, found.message
    return float(found.fun)


def all_deployments(kinds, num_gpus: int, longest: int):
    """Yields every deployment that holds a sample of `longest` tokens."""
    ranges = [range(num_gpus // kind.num_gpus + 1) for kind in kinds]
    for counts in itertools.product(*ranges):
        used = [(k, n) for k, n in zip(kinds, counts, strict=True) if n]
        gpus = sum(k.num_gpus * n for k, n in used)
        if used and gpus <= num_gpus and max(k.longest for k, _ in used) >= longest:
            yield Deployment(kinds=kinds, counts=counts)
