"""Plans a run as one stream of ticks, a stretch at a time, while jobs come and go.

A stretch begins wherever the one before it has ended, also in the middle of global
batches, so that nothing drains between the two. It is a pure function of the state of
the stream: it can be planned ahead in the background, thrown away when a job joins or
leaves, and planned again by a run that resumes.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxlora.scheduler.lanes import Tick, ticks_of
from jaxlora.scheduler.pack.fill import Ahead
from jaxlora.scheduler.pack.jobs import JobBatches, JobQueue, ticks_per_batch
from jaxlora.scheduler.pack.ways import plan_ticks
from jaxlora.scheduler.packers import pack_ticks
from jaxlora.scheduler.stream.replica_fill import fill_replicas
from jaxlora.scheduler.stream.state import (
    Lengths,
    Position,
    Rules,
    StreamState,
    advance,
)
from jaxlora.scheduler.types import Microbatch, Sample

# A stretch has as many full ticks, and at most four times as many ticks.
_FULL_TICKS = 24
_MAX_TICKS = 4 * _FULL_TICKS
# A job comes first if it needs more than this part of the ticks of all jobs.
_CRITICAL = 0.9
# The end is near when fewer ticks are left.
_END_TICKS = 96


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The next ticks of a stream.

    Attributes:
        ticks: The ticks; none if no job has samples left.
        after: State of the stream after them.
    """

    ticks: tuple[Tick, ...]
    after: StreamState


def next_stretch(state: StreamState, lengths: Lengths, rules: Rules) -> Stretch:
    """Plans the next ticks of a stream; the same state always gets the same ticks.

    Raises:
        ValueError: A sample is longer than the capacity.
        RuntimeError: The packer has a bug: a tick breaks a rule.
    """
    if not state.positions:
        return Stretch(ticks=(), after=state)
    shapes_from, num_shapes = rules.shapes_from, len(rules.cost.buckets)
    rules = rules.at(state.tick)
    ticks = _plan(state, lengths, rules)
    if len(rules.cost.buckets) < num_shapes and rules.packer == "joint":
        ticks = ticks[: shapes_from - state.tick]  # the next stretch has all shapes
    return Stretch(ticks=ticks, after=advance(state, ticks, lengths, rules))


# ---- packers -------------------------------------------------------------------------


def _plan(state: StreamState, lengths: Lengths, rules: Rules) -> tuple[Tick, ...]:
    """Plans at least one tick."""
    if rules.packer != "joint":
        return _plan_batches(state, lengths, rules)
    limits, lanes, cost = rules.limits, rules.lanes, rules.cost
    queue = JobQueue.of(_jobs(state.positions, lengths, rules), limits, lanes, cost)
    if lanes.replicas:
        return tuple(fill_replicas(queue, limits, lanes, first_tick=state.tick))
    most = _FULL_TICKS * lanes.num_lanes * limits.capacity
    ahead = Ahead(
        first_tick=state.tick,
        before=[tuple(map(_of_nobody, tick)) for tick in state.before],
        most_work=most,
        most_ticks=_MAX_TICKS,
        work_left=_work_left(state.positions, lengths, most),
    )
    return tuple(plan_ticks(queue, limits, lanes, cost, ahead))


def _work_left(positions: Sequence[Position], lengths: Lengths, most: float) -> float:
    """Returns the tokens of all jobs if a stretch may have them all; else infinity."""
    if sum(p.num_left * p.batch_tokens for p in positions) > most:
        return math.inf
    return sum(
        s.num_tokens
        for p in positions
        for batch in _batches(p, lengths, p.num_left)
        for s in batch
    )


def _plan_batches(
    state: StreamState, lengths: Lengths, rules: Rules
) -> tuple[Tick, ...]:
    """Packs the next batches of each job by a packer that takes whole batches.

    No-ops before them keep the batches of each job apart.
    """
    samples = [
        sample
        for position in state.positions
        for batch in _batches(position, lengths, rules.num_batches)
        for sample in batch
    ]
    packed = pack_ticks(
        samples, rules.limits, rules.packer, rules.lanes, rules.cost
    ).microbatches
    ticks = ticks_of(packed, rules.lanes.num_lanes)
    first: dict[int, int] = {}
    for number, tick in enumerate(ticks):
        for microbatch in tick:
            for sample in microbatch:
                first.setdefault(sample.owner, number)
    waits = [p.ready - state.tick - first[p.owner] for p in state.positions]
    no_op: Tick = ((),) * rules.lanes.num_lanes
    return (no_op,) * max(0, *waits) + tuple(ticks)


def _jobs(
    positions: Sequence[Position], lengths: Lengths, rules: Rules
) -> Iterator[JobBatches]:
    """Yields the batches of jobs, which keep their pace until the end is near.

    A job that needs almost as many ticks as all jobs together comes before the others.
    At the end, those that need the most ticks do, which takes the least time. Higher
    priorities come before all that.
    """
    lanes = rules.lanes
    tokens, distance = lanes.tick_tokens(rules.limits.capacity), lanes.pipeline.distance
    ticks = [
        p.num_left * ticks_per_batch(p.batch_tokens, tokens, distance)
        for p in positions
    ]
    work = sum(p.num_left * p.batch_tokens for p in positions) / tokens
    left = max(work, *ticks)
    is_end = left <= _END_TICKS
    # With equal shares, such a job may take at most half of each tick.
    most = {"together": 1.0, "equal": 0.5}[rules.pace] * tokens
    # More than shares can differ by.
    ahead = 2 * max(1.0, *(abs(s) for p in positions for s in (p.share, p.first_share)))
    for position, needed in zip(positions, ticks, strict=True):
        is_critical = (
            _CRITICAL * left < needed
            and position.num_left * position.batch_tokens <= most * needed
        )
        urgency = position.share_per_batch, position.first_share + ahead * is_critical
        each, first = (None, 0.0) if is_end else urgency
        yield JobBatches(
            batches=_batches(position, lengths, position.num_left),
            num_batches=position.num_left,
            batch_tokens=position.batch_tokens,
            is_started=position.left is not None,
            ready=position.ready,
            urgency_per_batch=each,
            first_urgency=first,
            priority=position.priority,
        )


def _batches(
    position: Position, lengths: Lengths, num_batches: int
) -> Iterator[list[Sample]]:
    """Yields what is left of the current batch, and further batches."""
    left = position.left
    last = min(position.batch + num_batches, position.num_batches)
    for number in range(position.batch, last):
        tokens = lengths(position.job, number)
        yield [
            Sample(
                owner=position.owner, batch=number, index=i, num_tokens=int(tokens[i])
            )
            for i in (range(len(tokens)) if left is None else left)
        ]
        left = None


def _of_nobody(microbatch: Microbatch) -> Microbatch:
    """Gives samples to owners without a job, as their slots may have other jobs now.

    Jobs keep their distance from them by `Position.ready`.
    """
    return tuple(dataclasses.replace(s, owner=-1 - s.owner) for s in microbatch)


# ---- ahead of time -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A stretch that was asked for.

    Attributes:
        stretch: The stretch.
        ahead: Whether it was planned ahead, in the background.
        waited_seconds: Time that the caller waited for it.
    """

    stretch: Stretch
    ahead: bool
    waited_seconds: float


class PlanAhead:
    """Plans stretches in the background, before they are needed.

    A stretch is planned for the state that the stream is expected to have. If it turns
    out to have another one, because a job has joined or left, it is planned again. In
    both cases it depends only on the state, never on timing.

    The planner is a thread, not a process. Planning a stretch takes milliseconds, less
    than sending samples to a process and microbatches back. Spawned processes would
    also import the user's training script, which would need a main guard.
    """

    def __init__(self, plan: Callable[[StreamState], Stretch]):
        """Starts without a plan.

        Args:
            plan: Plans a stretch; must be deterministic.
        """
        self._plan = plan
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="plan-ahead")
        self._expected: StreamState | None = None
        self._future: Future[Stretch] | None = None

    def __enter__(self) -> "PlanAhead":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def prepare(self, state: StreamState) -> None:
        """Starts planning the stretch after a state that is expected."""
        self._drop()
        self._expected = state
        self._future = self._worker.submit(self._plan, state)

    def take(self, state: StreamState) -> Planned:
        """Returns the stretch after exactly this state.

        Raises:
            ValueError: A sample is longer than the capacity.
            RuntimeError: The packer has a bug: a tick breaks a rule.
        """
        start = time.perf_counter()
        future = self._future if state == self._expected else None
        if future is None:
            self._drop()
        stretch = self._plan(state) if future is None else future.result()
        self._future = None
        return Planned(
            stretch=stretch,
            ahead=future is not None,
            waited_seconds=time.perf_counter() - start,
        )

    def close(self) -> None:
        """Ends the thread without waiting for a plan in progress."""
        self._drop()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _drop(self) -> None:
        if self._future is not None:
            self._future.cancel()
        self._future = None
