"""The state of a stream between two ticks, and the rules that its ticks keep."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence

from jaxlora.scheduler.check import microbatch_violations
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes, Tick
from jaxlora.scheduler.packers import PackerName
from jaxlora.scheduler.types import Limits, Pace, Sample, padded_tokens

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
        priority: Jobs of higher priority come before the others.
        share_per_batch: How much of its share of the run each batch that is left is:
            the job of which the most is left comes first. `StreamState.with_job` sets
            it. None: no share.
        first_share: The share that is left after the last batch.
    """

    job: int
    owner: int
    batch: int
    num_batches: int
    batch_tokens: float
    left: tuple[int, ...] | None = None
    ready: int = 0
    priority: int = 0
    share_per_batch: float | None = None
    first_share: float = 0.0

    @property
    def num_left(self) -> int:
        """Number of batches that are not done, the current one included."""
        return self.num_batches - self.batch

    @property
    def share(self) -> float:
        """The part of its share of the run that is left."""
        return self.first_share + self.num_left * (self.share_per_batch or 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """The state of a stream between two ticks.

    Attributes:
        tick: Number of the next tick.
        positions: Positions of the jobs that are not planned to their end, in ascending
            order of their slots.
        before: The last ticks, which still share the pipeline with the next one.
    """

    tick: int = 0
    positions: tuple[Position, ...] = ()
    before: tuple[Tick, ...] = ()

    def with_job(self, position: Position, pace: Pace = "together") -> "StreamState":
        """Returns the state with one more job.

        With the pace `together`, the job advances in proportion with the others of its
        priority from here on: in the time in which they do half of what is left of
        them, it does half of its batches. With `equal`, it gets as many tokens as each
        of them from here on, by start-time fair queueing.

        Raises:
            ValueError: Its slot is taken.
        """
        if any(p.owner == position.owner for p in self.positions):
            raise ValueError(f"slot {position.owner} has a job already.")
        # One of lower priority may have waited for long, with all of its share left.
        level = (p for p in self.positions if p.priority == position.priority)
        most = max((p.share for p in level if p.share_per_batch), default=1.0)
        # Not `most / num_left`, whose last bit can order jobs in another way.
        each, first = 1 / (position.num_left / most), 0.0
        if pace == "equal":
            each = position.batch_tokens
            first = most - position.num_left * each
        position = dataclasses.replace(
            position, share_per_batch=each, first_share=first
        )
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
        pace: How running jobs of the same priority share microbatches.
    """

    limits: Limits
    lanes: Lanes
    cost: CostModel
    shapes_from: int = 0
    packer: PackerName = "joint"
    num_batches: int = 1
    pace: Pace = "together"

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
        longest = max(padded_tokens(microbatch, self.limits) for microbatch in tick)
        return next(bucket for bucket in buckets if bucket >= longest)


def advance(
    state: StreamState, ticks: Sequence[Tick], lengths: Lengths, rules: Rules
) -> StreamState:
    """Returns the state of a stream after further ticks, and checks their rules.

    Samples of slots without a job in the state are left out of account.

    Raises:
        RuntimeError: A tick breaks a rule: a microbatch is too long, a sample is not
            the job's to run now, or a batch comes too early.
    """
    positions = {p.owner: p for p in state.positions}
    # Packers other than `joint` do not keep the numbers of samples and jobs, and it
    # does not keep that of samples on unlike replicas.
    limits = dataclasses.replace(rules.limits, max_samples=None)
    if rules.packer != "joint":
        limits = dataclasses.replace(limits, max_jobs=None)
    lanes = rules.lanes.unlike if rules.lanes.replicas else ()
    of_lane = [dataclasses.replace(limits, capacity=one.capacity) for one in lanes]
    owner_of = operator.attrgetter("owner")
    for number, tick in enumerate(ticks, state.tick):
        for lane, microbatch in enumerate(tick):
            own = of_lane[lane] if of_lane else limits
            if wrong := microbatch_violations(lane, microbatch, own):
                raise RuntimeError(f"tick {number}: {wrong[0]}")
        samples = sorted(itertools.chain(*tick), key=owner_of)
        for owner, own in itertools.groupby(samples, owner_of):
            if owner in positions:
                moved = _moved(positions[owner], [*own], number, lengths, rules)
                if moved.batch < moved.num_batches:
                    positions[owner] = moved
                else:
                    del positions[owner]
    num_before = rules.lanes.pipeline.num_stages
    return StreamState(
        tick=state.tick + len(ticks),
        positions=tuple(positions[owner] for owner in sorted(positions)),
        before=(*state.before, *ticks)[-num_before:],
    )


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
