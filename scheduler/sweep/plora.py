"""PLoRA's planner, by the paper: packs of configurations that start and end together.

| paper | here |
| --- | --- |
| memory of an adapter, appendix A.1 | `adapter_bytes` |
| load factor C of (14) | part of `Costs.free_bytes`: C M_gpu d - M_base |
| F(D, K), expressions (18), (19), an ILP | `fill_job` |
| Algorithm 1, DTM | `DTM` |
| Algorithm 2, the job planner | `plan_jobs` |
| Theorem 6.1 | `PloraPlan.approximation_ratio` |

The paper leaves some points open, which are decided here:

- T(H, d) is passed in (`Costs`). A job ends with its longest configuration; the others
  leave it as they end, and nothing takes their place.
- (18) is a ratio whose denominator depends on H. It is maximized by Dinkelbach's
  method: a sequence of ILPs that maximize sum of ranks - ratio * T.
- Line 11 of Algorithm 1 takes the minimum of T(p) over policies that run different
  configurations. As in the text, the policy with the highest concurrent throughput (13)
  is taken; of equal ones the first.
- GPUs for which nothing fits stay idle until a job ends.

References:
    PLoRA, https://arxiv.org/abs/2508.02932, section 6 and appendices A and C.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

import pulp

from jaxlora.scheduler import solver
from jaxlora.scheduler.sweep.problem import Costs, Group, Sweep, SweepPlan
from jaxlora.scheduler.sweep.rounds import Kinds, Roster, Shape, play

MOST_GPUS = 8  # Algorithm 1 solves 127 jobs for 8 GPUs, and 12,148 for 16
_MAX_NODES = 1000
_SAME = 1 + 1e-9  # ratios that differ by less are equal

Counts = tuple[int, ...]  # configurations of each kind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A packed job of F(D, K).

    Attributes:
        shape: Costs on its GPUs.
        counts: Configurations of each kind.
        throughput: Sum of their ranks over its seconds, expression (18).
    """

    shape: Shape
    counts: Counts
    throughput: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PloraPlan:
    """A plan by Algorithm 2.

    Attributes:
        plan: The plan; each of its groups is a job.
        num_ilps: ILPs that were solved.
    """

    plan: SweepPlan
    num_ilps: int

    @property
    def approximation_ratio(self) -> float:
        """F / (F - T_last (G - D) / G) of Theorem 6.1, D GPUs used by the last job.

        The theorem compares with W / G, where W is the GPU time of the plan's own jobs,
        and supposes that no GPU is idle before the last job starts. So it bounds the
        idle time at the end, not the distance from plans with other jobs.
        """
        share, used = self._last_job
        return 1 / (1 - share * (1 - used))

    @property
    def printed_ratio(self) -> float:
        """Bound (25) of appendix C with the theorem's D, the GPUs that are used.

        The proof needs D to be the idle ones there. As printed, it is at most 8 / 7 if
        the last job is on one of eight GPUs, and no bound of anything.
        """
        share, used = self._last_job
        return math.inf if share * used >= 1 else 1 / (1 - share * used)

    @property
    def _last_job(self) -> tuple[float, float]:
        """The last job's shares of the makespan, and of the GPUs."""
        last = max(self.plan.groups, key=lambda job: job.end)
        share = (last.end - last.start) / self.plan.makespan
        return share, last.degree / self.plan.sweep.num_gpus


def plan_jobs(sweep: Sweep, costs: Costs) -> PloraPlan:
    """Plans a sweep by Algorithm 2: DTM whenever a job ends.

    Args:
        sweep: Configurations and GPUs.
        costs: Time and memory. They must not pad ranks, as PLoRA's kernels do not.

    Raises:
        ValueError: There are more than `MOST_GPUS` GPUs, costs pad ranks, or a
            configuration fits into no group.
    """
    if sweep.num_gpus > MOST_GPUS:
        raise ValueError(
            f"Algorithm 1 tries every sequence of degrees, which is feasible for up to "
            f"{MOST_GPUS} GPUs, got {sweep.num_gpus}. Use plan_sweep."
        )
    if costs.pads_ranks:
        raise ValueError("PLoRA's cost model has no padded ranks: pads_ranks=False.")
    kinds = Kinds(sweep, costs)
    roster, dtm = Roster(kinds), DTM(kinds)
    left: Counts = tuple(kinds.count)
    free, now = list(range(sweep.num_gpus)), 0.0
    ends: list[tuple[float, tuple[int, ...]]] = []  # and the GPUs that become free
    jobs: list[Group] = []
    while any(left):
        for job in dtm(len(free), left):
            gpus, free = tuple(free[: job.shape.degree]), free[job.shape.degree :]
            queue = [k for k, n in enumerate(job.counts) for _ in range(n)]
            jobs.append(roster.group(job.shape, gpus, queue, now))
            heapq.heappush(ends, (jobs[-1].end, gpus))
            left = _without(left, job.counts)
        if any(left):
            now = ends[0][0]
            while ends and ends[0][0] == now:
                free += heapq.heappop(ends)[1]
            free.sort()
    plan = SweepPlan(sweep=sweep, groups=tuple(jobs))
    return PloraPlan(plan=plan, num_ilps=dtm.num_ilps)


class DTM:
    """Decomposed throughput maximization, Algorithm 1."""

    def __init__(self, kinds: Kinds):
        self._kinds = kinds
        self._jobs: dict[tuple[int, Counts], Job | None] = {}
        self.num_ilps = 0

    def __call__(self, num_gpus: int, left: Counts) -> list[Job]:
        """Returns the jobs that are packed for free GPUs; maybe none."""
        policies: list[list[Job]] = []
        self._helper(num_gpus, [], left, policies)
        return max(policies, key=lambda p: sum(job.throughput for job in p))

    def _helper(
        self, num_gpus: int, policy: list[Job], left: Counts, out: list[list[Job]]
    ) -> None:
        """DTMHelper: solves for each degree first, then for the rest of the GPUs."""
        degree = 1 << num_gpus.bit_length() >> 1
        placed = False
        while degree and any(left):
            if (job := self._job(degree, left)) is not None:
                placed = True
                rest = _without(left, job.counts)
                self._helper(num_gpus - degree, [*policy, job], rest, out)
            degree //= 2
        if not placed:
            out.append(policy)

    def _job(self, degree: int, left: Counts) -> Job | None:
        if degree not in self._kinds.degrees:
            return None
        key = degree, left
        if key not in self._jobs:
            self._jobs[key], num_ilps = fill_job(self._kinds, degree, left)
            self.num_ilps += num_ilps
        return self._jobs[key]


def fill_job(kinds: Kinds, degree: int, left: Counts) -> tuple[Job | None, int]:
    """F(D, K): the job of highest throughput on `degree` GPUs, and the ILPs it took.

    The job is None if nothing fits.
    """
    shape = kinds.shape(degree, kinds.slot_ranks[-1])
    may = [k for k, n in enumerate(left) if n and shape.fits[k]]
    if not may:
        return None, 0
    # Any job bounds the best ratio from below. The first is the best single one.
    alone = {k: kinds.rank[k] / (kinds.steps[k] * shape.round_alone(k)) for k in may}
    first = max(may, key=lambda k: alone[k])
    counts, ratio = _counts(kinds, {first: 1}), alone[first]
    program = _Program(kinds, shape, left, may)
    num_ilps = 0
    while True:
        found = program.solve(ratio)
        num_ilps += 1
        if not any(found):
            break
        ranks = sum(n * r for n, r in zip(found, kinds.rank, strict=True))
        queue = [k for k, n in enumerate(found) for _ in range(n)]
        better = ranks / play(shape, kinds.steps, queue)[0]
        if better <= ratio * _SAME:
            break
        counts, ratio = found, better
    return Job(shape=shape, counts=counts, throughput=ratio), num_ilps


class _Program:
    """The ILP of (18), (19): max sum r_k x_k - ratio T(x), with T as a variable.

    The distinct numbers of steps cut a job into intervals. In each, the round takes as
    long as its largest line with the configurations that still run, if there are any:

        round[j] >= fixed[i] on[j] + sum over running k of seconds[k, i] x[k]
        x[k] <= n[k] on[j] for the last interval j of kind k,  on[j + 1] <= on[j]
    """

    def __init__(self, kinds: Kinds, shape: Shape, left: Counts, may: Sequence[int]):
        self._kinds = kinds
        self._problem = problem = pulp.LpProblem("F", pulp.LpMaximize)
        self._x = {
            k: problem.add_variable(f"x_{k}", 0, left[k], cat="Integer") for k in may
        }
        size = {k: shape.bytes_of[k] / shape.free for k in may}
        problem += pulp.lpSum(size[k] * x for k, x in self._x.items()) <= 1
        ends = sorted({kinds.steps[k] for k in may})
        on = [problem.add_variable(f"on_{j}", cat="Binary") for j in range(len(ends))]
        terms = []
        for j, end in enumerate(ends):
            least = problem.add_variable(f"round_{j}", 0)
            running = [k for k in may if kinds.steps[k] >= end]
            for line, fixed in enumerate(shape.fixed):
                seconds = {k: shape.seconds_of[k][line] for k in running}
                load = pulp.lpSum(seconds[k] * self._x[k] for k in running)
                problem += least >= fixed * on[j] + load
            if j:
                problem += on[j] <= on[j - 1]
            for k in running:
                if kinds.steps[k] == end:
                    problem += self._x[k] <= left[k] * on[j]
            terms.append((end - (ends[j - 1] if j else 0)) * least)
        self._ranks = pulp.lpSum(kinds.rank[k] * x for k, x in self._x.items())
        self._seconds = pulp.lpSum(terms)

    def solve(self, ratio: float) -> Counts:
        """Returns the configurations of the best job for one ratio."""
        self._problem.setObjective(self._ranks - ratio * self._seconds)
        solver.run(self._problem, seed=0, mip_max_nodes=_MAX_NODES, gapRel=1e-6)
        found = {k: round(x.varValue or 0) for k, x in self._x.items()}
        return _counts(self._kinds, found)


def _counts(kinds: Kinds, found: dict[int, int]) -> Counts:
    return tuple(found.get(k, 0) for k in range(len(kinds)))


def _without(left: Counts, used: Counts) -> Counts:
    return tuple(n - m for n, m in zip(left, used, strict=True))


def adapter_bytes(
    rank: int,
    step_tokens: int,
    *,
    matrices: Sequence[tuple[int, int]],
    num_layers: int,
    bytes_per_value: int = 2,
    gradient_factor: int = 3,
) -> float:
    """Memory of one adapter by appendix A.1, equations (20) and (21).

    The memory of parameters is multiplied by `gradient_factor` for gradients and
    moments. In the paper it is then multiplied by the bytes of a value a second time,
    which is left out.

    Args:
        rank: LoRA rank.
        step_tokens: Batch size times length.
        matrices: Inputs and outputs of each adapted matrix of a layer.
        num_layers: Number of layers.
        bytes_per_value: c_prec.
        gradient_factor: c_grad; 3 for AdamW.
    """
    values = num_layers * rank * sum(i + o for i, o in matrices)
    activations = num_layers * len(matrices) * step_tokens * rank
    return ((1 + gradient_factor) * values + activations) * bytes_per_value
