"""The two mixed-integer programs of LoRAFusion, equations (3) and (4)."""

import dataclasses
from collections.abc import Sequence

import pulp

from jaxlora.scheduler import solver
from jaxlora.scheduler.types import Limits, Microbatch, Sample, tokens_by_job

Bins = list[list[Sample]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Solution of a program.

    Attributes:
        bins: The bins; None if no solution was found in time.
        proved: Whether the solution is proved to be optimal.
    """

    bins: Bins | None
    proved: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    problem: pulp.LpProblem
    chosen: list[list[pulp.LpVariable]]  # x[s][b]: sample s is in bin b
    padded: list[dict[int, pulp.LpVariable]]  # k[b][a]: blocks of job a in bin b

    @property
    def blocks(self) -> list[pulp.LpAffineExpression]:
        """Blocks of each bin, summed over all jobs."""
        return [pulp.lpSum(of_job.values()) for of_job in self.padded]

    def solve(
        self,
        samples: Sequence[Sample],
        limits: Limits,
        start: Sequence[Microbatch],
        *,
        time_limit: float,
        seed: int,
    ) -> Solution:
        self._start_from(start, samples, limits)
        answer = solver.solve(self.problem, time_limit=time_limit, seed=seed)
        if answer.objective is None:
            return Solution(bins=None, proved=False)
        bins: Bins = [[] for _ in self.padded]
        for sample, row in zip(samples, self.chosen, strict=True):
            held = [b for b, x in enumerate(row) if (x.varValue or 0) > 0.5]
            if len(held) != 1:
                raise solver.SolverError(f"HiGHS put {sample} into {len(held)} bins.")
            bins[held[0]].append(sample)
        return Solution(bins=[b for b in bins if b], proved=answer.proved)

    def _start_from(
        self, start: Sequence[Microbatch], samples: Sequence[Sample], limits: Limits
    ) -> None:
        held = {s: b for b, microbatch in enumerate(start) for s in microbatch}
        for sample, row in zip(samples, self.chosen, strict=True):
            for b, x in enumerate(row):
                x.setInitialValue(int(held[sample] == b))
        for of_job, microbatch in zip(self.padded, start, strict=True):
            tokens = tokens_by_job(microbatch)
            for job, k in of_job.items():
                blocks = limits.padded(tokens.get(job, 0)) // limits.block_tokens
                k.setInitialValue(blocks)


def fewest_bins(
    samples: Sequence[Sample],
    limits: Limits,
    start: Sequence[Microbatch],
    *,
    time_limit: float,
    seed: int,
) -> Solution:
    """Stage 1, equation (3): minimizes the number of bins.

    Args:
        samples: One global batch of each job.
        limits: Capacity and block size.
        start: A packing of the samples, from which the solver starts.
        time_limit: Time limit in seconds.
        seed: Seed of the solver.
    """
    num_bins = len(start)
    model = _assignment(samples, limits, num_bins, "fewest_bins")
    problem, capacity = model.problem, limits.capacity // limits.block_tokens
    used = [problem.add_variable(f"z_{b}", cat="Binary") for b in range(num_bins)]
    for z, blocks in zip(used, model.blocks, strict=True):
        z.setInitialValue(1)
        problem += blocks <= capacity * z
        problem += blocks >= z
    for b in range(num_bins - 1):
        problem += used[b + 1] <= used[b]
    problem += pulp.lpSum(used)
    return model.solve(samples, limits, start, time_limit=time_limit, seed=seed)


def emptiest_bin(
    samples: Sequence[Sample],
    limits: Limits,
    start: Sequence[Microbatch],
    *,
    at_least: int,
    time_limit: float,
    seed: int,
) -> Solution:
    """Stage 2, equation (4): minimizes the smallest of B* bins.

    The bins are interchangeable, so this minimizes the last bin. No variable is needed
    to select the smallest one.

    Args:
        samples: One global batch of each job.
        limits: Capacity and block size.
        start: A packing of the samples into B* microbatches, the smallest last.
        at_least: Lower bound on the blocks of the smallest bin, at which the solver can
            stop.
        time_limit: Time limit in seconds.
        seed: Seed of the solver.
    """
    model = _assignment(samples, limits, len(start), "emptiest_bin")
    problem, capacity = model.problem, limits.capacity // limits.block_tokens
    *others, last = model.blocks
    for blocks in others:
        problem += blocks <= capacity
    problem += last <= capacity
    problem += last >= at_least
    problem += last
    return model.solve(samples, limits, start, time_limit=time_limit, seed=seed)


def _assignment(
    samples: Sequence[Sample], limits: Limits, num_bins: int, name: str
) -> _Model:
    """Makes a program that puts each sample in one bin and pads jobs to blocks."""
    problem = pulp.LpProblem(name, pulp.LpMinimize)
    jobs = sorted({s.owner for s in samples})
    chosen = [
        [problem.add_variable(f"x_{i}_{b}", cat="Binary") for b in range(num_bins)]
        for i in range(len(samples))
    ]
    for row in chosen:
        problem += pulp.lpSum(row) == 1
    padded: list[dict[int, pulp.LpVariable]] = [{} for _ in range(num_bins)]
    for b, of_job in enumerate(padded):
        for job in jobs:
            k = problem.add_variable(f"k_{job}_{b}", lowBound=0, cat="Integer")
            tokens = pulp.lpSum(
                s.num_tokens * row[b]
                for s, row in zip(samples, chosen, strict=True)
                if s.owner == job
            )
            problem += tokens <= limits.block_tokens * k
            of_job[job] = k
    return _Model(problem=problem, chosen=chosen, padded=padded)
