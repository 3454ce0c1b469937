"""Packs the ticks of a stream, each one before its turn."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from jaxlora.data.pack import (
    JobBatch,
    pack_tick,
    runs_reference,
    split_by_jobs,
    split_by_segment_limit,
)
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.modules.length_classes import shortest_class
from jaxlora.plan.stream_plan import StreamTick
from jaxlora.scheduler import Limits, Microbatch, Sample
from jaxlora.scheduler.lanes import Lane, Tick
from jaxlora.sharding.global_arrays import put
from jaxlora.train.execute.layout import Layout
from jaxlora.train.job_state import JobState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TickWork:
    """The work of a tick, or of a replica in a tick.

    Attributes:
        num_microbatches: Microbatches that ran.
        num_rows: Rows of them, padding included.
        num_tokens: Tokens in them, without padding.
    """

    num_microbatches: int = 0
    num_rows: int = 0
    num_tokens: int = 0

    def __add__(self, other: "TickWork") -> "TickWork":
        return TickWork(
            num_microbatches=self.num_microbatches + other.num_microbatches,
            num_rows=self.num_rows + other.num_rows,
            num_tokens=self.num_tokens + other.num_tokens,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ReplicaRows:
    """The rows that a replica runs at once in a tick.

    Attributes:
        replica: Number of the replica; the first one is 0.
        rows: The rows: those of the first replica on the devices of each stage, those
            of another one on the host.
        runs_reference: Whether the reference of some samples runs with them.
        slots: Slots of the samples that run.
        work: The work.
    """

    replica: int
    rows: Sequence[PackedBatch]
    runs_reference: bool
    slots: frozenset[int]
    work: TickWork


class TickPacker:
    """Packs the microbatches of ticks, and starts the upload of their rows."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        lanes: Sequence[Lane] = (),
        wait_for: Callable[[int], None] | None = None,
    ):
        """Packs nothing yet.

        Args:
            layout: The stages, and the further replicas.
            limits: Limits of a microbatch of the first replica.
            lanes: The lanes of further replicas.
            wait_for: Waits for the passes of microbatches of so many rows, which may
                be compiled beside training; None: all are there.
        """
        self._num_lanes, self._lanes = layout.num_lanes, tuple(lanes)
        self._places = [stage.placement for stage in layout.stages]
        self._options = layout.stages[0].spec.options
        self._further = [stage.spec.options for stage in layout.further]
        self._limits, self._wait_for = limits, wait_for

    def split(
        self,
        tick: Tick,
        lengths: Callable[[Sample], Sequence[int]],
        rows: int | None = None,
    ) -> list[Tick]:
        """Splits a tick that has more short samples than attention has room for.

        It also splits one with samples of more jobs than experts tell apart, as some
        packers make them.

        Args:
            tick: The tick.
            lengths: Tokens of the samples of a group.
            rows: Rows of each microbatch of the first replica; None: its capacity.
        """
        parts = [[microbatch] for microbatch in tick]
        if (most := self._options.most_adapters) is not None:
            parts = [split_by_jobs(microbatch, most) for microbatch in tick]
        if self._options.attention == "cudnn":
            parts = self._with_room(parts, lengths, rows)
        # A lane without a further part waits; ticks of no-ops keep their place.
        return [
            tuple(p[i] if i < len(p) else () for p in parts)
            for i in range(max(map(len, parts)))
        ]

    def _with_room(
        self,
        lanes: Sequence[Sequence[Microbatch]],
        lengths: Callable[[Sample], Sequence[int]],
        rows: int | None,
    ) -> list[list[Microbatch]]:
        """Splits the microbatches of each lane as attention has room; see `split`."""
        own = shortest_class(rows or self._limits.capacity, *self._options.lengths)
        classes = [own] * self._num_lanes
        for lane in self._lanes:
            options = self._further[lane.replica - 1]
            classes.append(shortest_class(lane.capacity, *options.lengths))
        return [
            [
                part
                for one in microbatches
                for part in split_by_segment_limit(
                    one, short.tokens, short.segments, lengths
                )
            ]
            for microbatches, short in zip(lanes, classes, strict=False)
        ]

    def pack(
        self,
        microbatches: Sequence[Microbatch],
        batches: Mapping[int, JobBatch],
        rows: int | None = None,
    ) -> PackedBatch:
        """Packs microbatches that run at the same time, as arrays of the host.

        Args:
            microbatches: The microbatches.
            batches: By slot, the batch of each job whose samples run.
            rows: Rows of each microbatch; None: the capacity.
        """
        limits = self._limits
        if rows is not None:
            limits = dataclasses.replace(limits, capacity=rows)
        return pack_tick(microbatches, batches, limits, self._options.objectives)

    def upload(self, packed: PackedBatch) -> list[PackedBatch]:
        """Starts the upload of rows to the devices of every stage.

        To one device, a program's call uploads arrays of the host by itself, in a tenth
        of the host's time that `device_put` takes. A stage calls one program with them.
        """
        if self._wait_for is not None:
            self._wait_for(len(packed.token_ids) // self._num_lanes)
        if self._places[0].num_devices == 1:
            return [packed] * len(self._places)
        return [put(packed, p.sharding(p.rows)) for p in self._places]

    def pack_replicas(
        self, tick: Tick, rows: int, batches: Mapping[int, JobBatch]
    ) -> list[ReplicaRows]:
        """Packs the microbatches of a tick for each replica that has samples to run.

        Args:
            tick: The tick.
            rows: Rows of each microbatch of the first replica.
            batches: Global batch of each slot whose samples run.
        """
        num_lanes = self._num_lanes
        parts = [(0, tick[:num_lanes], rows)]
        for lane, microbatch in zip(self._lanes, tick[num_lanes:], strict=True):
            parts.append((lane.replica, (microbatch,), lane.capacity))
        found = []
        for replica, microbatches, capacity in parts:
            samples = [s for m in microbatches for s in m if s.owner in batches]
            if not samples:
                continue
            packed = self.pack(microbatches, batches, capacity)
            found.append(
                ReplicaRows(
                    replica=replica,
                    rows=[packed] if replica else self.upload(packed),
                    runs_reference=runs_reference(packed),
                    slots=frozenset(s.owner for s in samples),
                    work=TickWork(
                        num_microbatches=len(microbatches),
                        num_rows=len(microbatches) * capacity,
                        num_tokens=sum(s.num_tokens for s in samples),
                    ),
                )
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class FedTick:
    """A tick for the devices: a tick of the plan, or a part of one.

    Attributes:
        samples: The samples that run.
        rows: What each replica runs of it; empty if no sample runs.
    """

    samples: Sequence[Sample]
    rows: Sequence[ReplicaRows]


def _running(part: Tick, of: StreamTick) -> list[Sample]:
    """Returns the samples of a part of a tick whose jobs have not left."""
    if of.is_held:
        return []
    return [s for m in part for s in m if s.owner not in of.dropped]


class Feed:
    """The ticks of a stream as arrays, without the samples of jobs that have left."""

    def __init__(
        self,
        next_tick: Callable[[], StreamTick | None],
        jobs: Mapping[int, JobState],
        packer: TickPacker,
    ):
        """Takes no tick yet.

        Args:
            next_tick: Returns the next tick of the plan; None: there is none, and it
                is not asked again.
            jobs: The job in each slot, at any time.
            packer: Packs the ticks.
        """
        self._next_tick, self._jobs, self._packer = next_tick, jobs, packer
        # Parts of ticks of the plan, which know the slots whose samples do not run.
        self._fetched: deque[tuple[Tick, StreamTick]] = deque()
        self._num_taken = 0
        self._ready: FedTick | None = None  # the next one, as it was packed
        self._batches: dict[tuple[int, int], JobBatch] = {}  # by slot and step
        self._remaining: dict[tuple[int, int], int] = {}  # groups to run, likewise
        self._begun: set[tuple[int, int]] = set()  # batches in ticks that were taken

    def has_tick(self, number: int) -> bool:
        """Whether there is a tick of this number, counted from the start."""
        while self._num_taken + len(self._fetched) <= number:
            of = self._next_tick()
            if of is None:
                return False
            if of.parts is None:
                of.parts = tuple(self._packer.split(of.tick, self._lengths, of.rows))
            self._fetched += [(part, of) for part in of.parts]
        return True

    def _lengths(self, group: Sample) -> Sequence[int]:
        prepared = self._jobs[group.owner].prepared
        return prepared.lengths_in_group(group.batch, group.index)

    def prepare(self, number: int) -> None:
        """Packs the next tick before its turn; does nothing if there is none."""
        if self.has_tick(number):
            assert number == self._num_taken
            self._ready = self._pack(*self._fetched[0])

    def take(self) -> FedTick:
        """Returns the next tick.

        If a job has left since `prepare`, the arrays are packed again. Otherwise they
        would leave gradients in its slot.
        """
        part, of = self._fetched.popleft()
        self._num_taken += 1
        ready, self._ready = self._ready, None
        if ready is not None and ready.samples == _running(part, of):
            return ready
        return self._pack(part, of)

    def _pack(self, part: Tick, of: StreamTick) -> FedTick:
        samples = _running(part, of)
        mine = {(s.owner, s.batch) for s in samples}
        assert len(mine) == len({slot for slot, _ in mine}), "two batches of a job"
        batches = {}
        for slot, step in mine:
            if (slot, step) not in self._batches:
                batch = self._jobs[slot].batch(slot, step)
                self._batches[slot, step] = batch
                self._remaining[slot, step] = batch.num_groups
            batches[slot] = self._batches[slot, step]
        # Rows of jobs that have left become padding, so no other rows move.
        rows = self._packer.pack_replicas(part, of.rows, batches)
        return FedTick(samples=samples, rows=rows)

    def begin(self, fed: FedTick) -> dict[int, JobBatch]:
        """Returns the samples of the baselines of batches that begin, by slot.

        Args:
            fed: A tick that was taken.
        """
        new = {(s.owner, s.batch) for s in fed.samples} - self._begun
        self._begun |= new
        found = {
            slot: self._jobs[slot].baseline_batch(slot, self._batches[slot, step])
            for slot, step in new
        }
        return {slot: batch for slot, batch in found.items() if batch is not None}

    def complete(self, fed: FedTick) -> dict[int, JobBatch]:
        """Returns the global batches that a tick completes, by slot."""
        out = {}
        for s in fed.samples:
            self._remaining[s.owner, s.batch] -= 1
            if not self._remaining[s.owner, s.batch]:
                del self._remaining[s.owner, s.batch]
                self._begun.discard((s.owner, s.batch))
                out[s.owner] = self._batches.pop((s.owner, s.batch))
        return out

    def forget(self, slot: int) -> None:
        """Forgets the batches of a job that has left its slot."""
        self._begun = {key for key in self._begun if key[0] != slot}
        for kept in (self._batches, self._remaining):
            for key in [key for key in kept if key[0] == slot]:
                del kept[key]
