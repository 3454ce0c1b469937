"""Plans a run as one stream of ticks, a stretch at a time, while jobs come and go.

A stretch begins wherever the one before it has ended, also in the middle of global
batches, so that nothing drains between the two. It is a pure function of the state of
the stream: it can be planned ahead in the background, thrown away when a job joins or
leaves, and planned again by a run that resumes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes, Tick, ticks_of
from jaxlora.scheduler.packers import PackerName
from jaxlora.scheduler.streams.buckets import rows_of
from jaxlora.scheduler.streams.lane_fill import next_window, queue_of
from jaxlora.scheduler.streams.replica_fill import fill_replicas
from jaxlora.scheduler.streams.ticks import pack_ticks
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Sample,
    padded_tokens,
)
from jaxlora.scheduler.windows.planner import Hint, JobBatches, Planner

# Given the number of a job and of a global batch, returns the tokens of each sample.
Lengths = Callable[[int, int], Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The part of a job that is not in a tick yet.

    Attributes:
        job: Number of the job, by which its lengths are asked for.
        owner: Slot of the job, which its samples name.
        batch: Number of its current global batch.
        num_batches: Number of its batches, those that are done included.
        batch_tokens: Mean number of tokens of a batch, which may be an estimate.
        left: Indices of the samples of the current batch that are not in a tick yet, in
            ascending order; None: the batch has not begun.
        ready: First tick in which the current batch may run.
    """

    job: int
    owner: int
    batch: int
    num_batches: int
    batch_tokens: float
    left: tuple[int, ...] | None = None
    ready: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """The state of a stream between two ticks.

    Attributes:
        tick: Number of the next tick.
        positions: Positions of the jobs that are not planned to their end, in ascending
            order of their slots.
        before: The last ticks, which still share the pipeline with the next one.
        hints: What the last stretch of each replica has found.
    """

    tick: int = 0
    positions: tuple[Position, ...] = ()
    before: tuple[Tick, ...] = ()
    hints: tuple[Hint, ...] = ()

    def with_job(self, position: Position) -> "StreamState":
        """Returns the state with one more job.

        Raises:
            ValueError: Its slot is taken.
        """
        if any(p.owner == position.owner for p in self.positions):
            raise ValueError(f"slot {position.owner} has a job already.")
        positions = sorted((*self.positions, position), key=lambda p: p.owner)
        return dataclasses.replace(self, positions=tuple(positions))

    def without(self, owner: int) -> "StreamState":
        """Returns the state without the job in a slot; what is planned of it stays."""
        left = tuple(p for p in self.positions if p.owner != owner)
        return dataclasses.replace(self, positions=left)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Settings that all ticks of a stream share.

    Attributes:
        limits: Limits of a microbatch.
        lanes: The lanes, and their pipeline.
        cost: Times of a microbatch on one lane of each stage. Its buckets are the
            compiled shapes; the largest is the capacity.
        shapes_from: First tick that may have a shape below the capacity. A number of a
            tick, and not a time, decides it: the same run always gets the same ticks.
        packer: Name of the packer. `joint` fills one microbatch after the other with
            whatever is left. The others take whole batches.
        num_batches: Number of batches of each job that the other packers take at once.
    """

    limits: Limits
    lanes: Lanes
    cost: CostModel
    shapes_from: int = 0
    packer: PackerName = "joint"
    num_batches: int = 1

    def at(self, tick: int) -> "Rules":
        """Returns the rules for a stretch that begins with a tick."""
        if tick >= self.shapes_from or len(self.cost.buckets) < 2:
            return self
        largest = self.cost.buckets[-1:]
        return dataclasses.replace(
            self, cost=dataclasses.replace(self.cost, buckets=largest)
        )

    def rows(self, number: int, tick: Tick) -> int:
        """Returns the compiled shape of a tick: the rows of each of its microbatches.

        All lanes of a tick have the shape of the longest one. With unlike replicas, it
        is the shape of the first replica; each of the others has one shape.
        """
        buckets = self.at(number).cost.buckets or (self.limits.capacity,)
        return rows_of(tick, self.limits, buckets)


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

    Args:
        state: The stream so far.
        lengths: Tokens of the samples of a batch.
        rules: What all ticks have in common.

    Raises:
        ValueError: A sample is longer than the capacity.
        RuntimeError: The packer has a bug: a tick breaks a rule.
    """
    if not state.positions:
        return Stretch(ticks=(), after=state)
    shapes_from, num_shapes = rules.shapes_from, len(rules.cost.buckets)
    rules = rules.at(state.tick)
    if rules.lanes.pinned:
        ticks, hints = _plan_replicas(state, lengths, rules)
    else:
        hint = state.hints[0] if state.hints else Hint()
        ticks, hint = _plan_lanes(state, lengths, rules, hint)
        hints = (hint,)
    if len(rules.cost.buckets) < num_shapes and rules.packer == "joint":
        ticks = ticks[: shapes_from - state.tick]  # the next stretch has all shapes
    after = advance(state, ticks, lengths, rules)
    return Stretch(ticks=ticks, after=dataclasses.replace(after, hints=hints))


# ---- packers -------------------------------------------------------------------------


def _plan_replicas(
    state: StreamState, lengths: Lengths, rules: Rules
) -> tuple[tuple[Tick, ...], tuple[Hint, ...]]:
    """Plans each replica on its own, as far as all of those with work are planned."""
    lanes = rules.lanes
    one = dataclasses.replace(rules, lanes=lanes.one_replica())
    hints = list(state.hints or [Hint()] * lanes.data)
    planned: dict[int, tuple[Tick, ...]] = {}
    for replica in range(lanes.data):
        mine = range(replica * lanes.fsdp, (replica + 1) * lanes.fsdp)
        own = dataclasses.replace(
            state,
            positions=tuple(
                p for p in state.positions if lanes.replica(p.owner) == replica
            ),
            before=tuple(tuple(tick[lane] for lane in mine) for tick in state.before),
        )
        if own.positions:
            found = _plan_lanes(own, lengths, one, hints[replica])
            planned[replica], hints[replica] = found
    num = min(map(len, planned.values()))
    idle: tuple[Tick, ...] = (((),) * lanes.fsdp,) * num
    by_replica = [planned.get(r, idle)[:num] for r in range(lanes.data)]
    ticks = tuple(sum(parts, ()) for parts in zip(*by_replica, strict=True))
    return ticks, tuple(hints)


def _plan_lanes(
    state: StreamState, lengths: Lengths, rules: Rules, hint: Hint
) -> tuple[tuple[Tick, ...], Hint]:
    """Plans lanes that share all jobs; at least one tick."""
    if rules.packer != "joint":
        return _plan_batches(state, lengths, rules), hint
    before = [tuple(map(_of_nobody, tick)) for tick in state.before]
    jobs = lambda: (_job_batches(position, lengths) for position in state.positions)
    if rules.lanes.replicas:
        queue = queue_of(jobs(), rules.limits, rules.lanes, rules.cost)
        ticks = fill_replicas(queue, rules.limits, rules.lanes, first_tick=state.tick)
        return tuple(ticks), hint
    if rules.lanes.num_lanes > 1:
        window = next_window(
            *(jobs, rules.limits, rules.lanes, rules.cost),
            first_tick=state.tick,
            before=before,
            hint=hint,
        )
        return tuple(window.ticks), window.hint
    planner = Planner(
        *(rules.limits, rules.lanes.pipeline, rules.cost),
        first_slot=state.tick,
        before=[microbatch for (microbatch,) in before],
        hint=hint,
    )
    for job in jobs():
        planner.add(job)
    return tuple((microbatch,) for microbatch in planner.next_window()), planner.hint


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


def _job_batches(position: Position, lengths: Lengths) -> JobBatches:
    num_batches = position.num_batches - position.batch
    return JobBatches(
        batches=_batches(position, lengths, num_batches),
        num_batches=num_batches,
        batch_tokens=position.batch_tokens,
        is_started=position.left is not None,
        ready=position.ready,
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


# ---- state ---------------------------------------------------------------------------


def advance(
    state: StreamState, ticks: Sequence[Tick], lengths: Lengths, rules: Rules
) -> StreamState:
    """Returns the state of a stream after further ticks, and checks their rules.

    Samples of slots without a job in the state are left out of account.

    Args:
        state: The stream so far.
        ticks: The ticks that follow.
        lengths: Tokens of the samples of a batch.
        rules: What all ticks have in common.

    Raises:
        RuntimeError: A tick breaks a rule: a microbatch is too long, a sample is not
            the job's to run now, or a batch comes too early.
    """
    positions = {p.owner: p for p in state.positions}
    for number, tick in enumerate(ticks, state.tick):
        for lane, microbatch in enumerate(tick):
            _check_microbatch(microbatch, lane, number, rules)
        for owner, samples in _by_owner(tick).items():
            if owner in positions:
                moved = _moved(positions[owner], samples, number, lengths, rules)
                if moved.batch < moved.num_batches:
                    positions[owner] = moved
                else:
                    del positions[owner]
    num_before = rules.lanes.pipeline.num_stages
    return StreamState(
        tick=state.tick + len(ticks),
        positions=tuple(positions[owner] for owner in sorted(positions)),
        before=(*state.before, *ticks)[-num_before:],
        hints=state.hints,
    )


def _by_owner(tick: Tick) -> dict[int, list[Sample]]:
    owners: dict[int, list[Sample]] = {}
    for microbatch in tick:
        for sample in microbatch:
            owners.setdefault(sample.owner, []).append(sample)
    return owners


def _check_microbatch(
    microbatch: Microbatch, lane: int, number: int, rules: Rules
) -> None:
    lanes, capacity = rules.lanes, rules.limits.capacity
    if lanes.replicas:
        capacity = lanes.unlike[lane].capacity
    if padded_tokens(microbatch, rules.limits) > capacity:
        raise RuntimeError(f"tick {number} has a microbatch over the capacity.")
    owners = [s.owner for s in microbatch]
    if len(set(owners)) != sum(
        i == 0 or owner != owners[i - 1] for i, owner in enumerate(owners)
    ):
        raise RuntimeError(f"tick {number} mixes the samples of its jobs.")
    if lanes.pinned and {lanes.replica(owner) for owner in owners} - {
        lane // lanes.fsdp
    }:
        raise RuntimeError(f"tick {number} runs a job on the wrong replica.")


def _moved(
    position: Position,
    samples: Sequence[Sample],
    number: int,
    lengths: Lengths,
    rules: Rules,
) -> Position:
    """Returns a job's position after a tick with some of its samples."""
    tokens = lengths(position.job, position.batch)
    left = set(range(len(tokens)) if position.left is None else position.left)
    taken = [s.index for s in samples]
    if {s.batch for s in samples} != {position.batch} or number < position.ready:
        raise RuntimeError(
            f"tick {number} has batches {sorted({s.batch for s in samples})} of slot "
            f"{position.owner}, whose batch {position.batch} may run from tick "
            f"{position.ready} on."
        )
    if len(set(taken)) < len(taken) or not left.issuperset(taken):
        raise RuntimeError(
            f"tick {number} has samples {taken} of slot {position.owner}, and "
            f"{sorted(left)} of batch {position.batch} are left."
        )
    if any(s.num_tokens != tokens[s.index] for s in samples):
        raise RuntimeError(f"tick {number} has other lengths of {position.owner}.")
    left.difference_update(taken)
    if left:
        return dataclasses.replace(position, left=tuple(sorted(left)))
    return dataclasses.replace(
        position,
        batch=position.batch + 1,
        left=None,
        ready=number + rules.lanes.pipeline.distance,
    )
