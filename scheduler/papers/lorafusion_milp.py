"""The two mixed-integer programs of LoRAFusion, equations (3) and (4)."""

from collections.abc import Sequence

import pulp

from jaxlora.scheduler import solver
from jaxlora.scheduler.types import Limits, Microbatch, Sample, tokens_by_job

# The bins, or None if no solution was found in time; and whether the solution is proved
# to be optimal.
Solution = tuple[list[list[Sample]] | None, bool]


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
    model = _Assignment(samples, limits, start, "fewest_bins")
    problem, capacity = model.problem, limits.capacity // limits.block_tokens
    used = [problem.add_variable(f"z_{b}", cat="Binary") for b in range(len(start))]
    for z, blocks in zip(used, model.blocks, strict=True):
        z.setInitialValue(1)
        problem += blocks <= capacity * z
        problem += blocks >= z
    for b in range(len(start) - 1):
        problem += used[b + 1] <= used[b]
    problem += pulp.lpSum(used)
    return model.solve(time_limit=time_limit, seed=seed)


def emptiest_bin(
    samples: Sequence[Sample],
    limits: Limits,
    start: Sequence[Microbatch],
    *,
    at_least: int,
    time_limit: float,
    seed: int,
) -> Solution:
    """Stage 2, equation (4): minimizes the smallest of B* bins; see `fewest_bins`.

    The bins are interchangeable, so this minimizes the last bin. No variable is needed
    to select the smallest one. The solver can stop at `at_least`, a lower bound on the
    blocks of the smallest bin; in `start`, it is the last one.
    """
    model = _Assignment(samples, limits, start, "emptiest_bin")
    problem, capacity = model.problem, limits.capacity // limits.block_tokens
    for blocks in model.blocks:
        problem += blocks <= capacity
    last = model.blocks[-1]
    problem += last >= at_least
    problem += last
    return model.solve(time_limit=time_limit, seed=seed)


class _Assignment:
    """A program that puts each sample in one bin and pads jobs to blocks.

    Attributes:
        problem: The program, which starts from a packing.
        blocks: Blocks of each bin, summed over all jobs.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        limits: Limits,
        start: Sequence[Microbatch],
        name: str,
    ):
        self.problem = problem = pulp.LpProblem(name, pulp.LpMinimize)
        self._samples, bins = samples, range(len(start))
        # x[s][b]: sample s is in bin b.
        self._chosen = [
            [problem.add_variable(f"x_{i}_{b}", cat="Binary") for b in bins]
            for i in range(len(samples))
        ]
        held = {s: b for b, microbatch in enumerate(start) for s in microbatch}
        for sample, row in zip(samples, self._chosen, strict=True):
            for b, x in enumerate(row):
                x.setInitialValue(int(held[sample] == b))
            problem += pulp.lpSum(row) == 1
        self.blocks: list[pulp.LpAffineExpression] = []
        for b, microbatch in enumerate(start):
            padded, given = [], tokens_by_job(microbatch)
            for job in sorted({s.owner for s in samples}):
                # k[b][a]: blocks of job a in bin b.
                k = problem.add_variable(f"k_{job}_{b}", lowBound=0, cat="Integer")
                blocks = limits.padded(given.get(job, 0)) // limits.block_tokens
                k.setInitialValue(blocks)
                tokens = pulp.lpSum(
                    s.num_tokens * row[b]
                    for s, row in zip(samples, self._chosen, strict=True)
                    if s.owner == job
                )
                problem += tokens <= limits.block_tokens * k
                padded.append(k)
            self.blocks.append(pulp.lpSum(padded))

    def solve(self, *, time_limit: float, seed: int) -> Solution:
        objective, proved = solver.solve(self.problem, time_limit=time_limit, seed=seed)
        if objective is None:
            return None, False
        bins: list[list[Sample]] = [[] for _ in self.blocks]
        for sample, row in zip(self._samples, self._chosen, strict=True):
            held = [b for b, x in enumerate(row) if (x.varValue or 0) > 0.5]
            if len(held) != 1:
                raise solver.SolverError(f"HiGHS put {sample} into {len(held)} bins.")
            bins[held[0]].append(sample)
        return [b for b in bins if b], proved
