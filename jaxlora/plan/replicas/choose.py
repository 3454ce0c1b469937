"""Chooses the replicas of a run with `replicas: auto`, for all devices.

Replicas differ in their microbatches, large ones for the long samples and small ones,
which short samples fill better, and in the number of devices that share them (axis
`tensor`). These lists are compared with meshes of alike replicas:

- replicas of one device with one size, or with two;
- one replica of several devices, and as many of the fewest devices as are left;
- what the planner of `jaxlora.scheduler.replicas` deploys, without pipeline stages.

The first ticks of the run are packed for each of them, as the trainer packs them, and
their time is predicted.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import ReplicaShape, describe_list
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.job.job_slots import JobPosition, assign_slots
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.mesh.choose import is_divided
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.mesh.predict import (
    replica_seconds,
    square_seconds,
    window_seconds,
)
from jaxlora.plan.replicas.room import (
    Room,
    RoomFinder,
    with_list,
)
from jaxlora.plan.run_plan import RunPlan, laid_out
from jaxlora.scheduler import Schedule
from jaxlora.scheduler.streams.stream import StreamState, next_stretch
from jaxlora.sharding.mesh_sizes import MeshSizes

_TICKS = 24  # that are packed for each list, at least
_HALVINGS = 4  # of the largest microbatches, to the smallest
_CLOSE = 0.9  # a size that is closer to a larger one is not tried
_GAIN = 1.02  # a list is taken only if it is this much faster than a mesh


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Timed:
    """A way to run, and its predicted time.

    Attributes:
        config: The run, with a list of replicas or with a mesh.
        seconds: Predicted time of a token.
        bound: The least time of a token on replicas of the fewest devices, if all
            their microbatches were full and none waited.
    """

    config: RunConfig
    seconds: float
    bound: float


class ReplicaLists:
    """Makes lists of replicas for a run, and predicts their time."""

    def __init__(
        self,
        model: PlannedModel,
        spec: DecoderSpec,
        jobs: Sequence[PreparedJob],
        positions: Sequence[JobPosition],
        bounds: Bounds,
        machine: Machine,
    ):
        """Predicts nothing yet.

        Args:
            model: The base model.
            spec: The decoder with the slots.
            jobs: The jobs.
            positions: Positions of the jobs at the start.
            bounds: Bounds of the capacity on one device.
            machine: The machine.
        """
        self._model, self._spec, self._jobs = model, spec, jobs
        self._positions, self._bounds, self._machine = positions, bounds, machine
        self._fits = RoomFinder(spec, bounds, machine)

    def choose(self, config: RunConfig) -> tuple[RunConfig, Note]:
        """Chooses a list of replicas, or a mesh of alike ones; returns the reason too.

        A list has a `remat`; on a mesh, `remat: auto` is still open.

        Args:
            config: The run, without replicas.

        Raises:
            DoesNotFitError: No replica has the memory for the longest sample.
        """
        if self._num == 1 or not self._positions:
            mesh = config.replace(mesh=f"data={self._num}")
            why = "one device" if self._num == 1 else "nothing left to do"
            return mesh, Note(f"replicas: auto: mesh {mesh.mesh}, as there is {why}")
        best, other = self._best(config)
        reason = self._reason(best, other)
        if best.config.replicas is not None:
            return best.config, reason
        return config.replace(mesh=best.config.mesh), reason

    def _best(self, config: RunConfig) -> tuple[_Timed, _Timed | None]:
        """Returns the list or the mesh to take, and the best of the other way."""
        rooms = self._fits.rooms(config, self._degrees(config))
        meshes = [(room, one) for room in rooms for one in self._meshes(room)]
        lists = [(room, one) for room in rooms for one in self._alike(room)]
        best = self._fastest(lists or meshes)
        remat = best.config.remat
        room = next(room for room in rooms if room.config.remat == remat)
        if unlike := [(room, one) for one in self._unlike(room, best.config)]:
            best = min(best, self._fastest(unlike), key=lambda one: one.seconds)
        on_mesh = self._fastest(meshes) if meshes else None
        if on_mesh is None or _GAIN * best.seconds <= on_mesh.seconds:
            return best, on_mesh
        return on_mesh, best

    def _fastest(self, found: Iterable[tuple[Room, RunConfig]]) -> _Timed:
        timed = (self._timed(config, room) for room, config in found)
        return min(timed, key=lambda one: one.seconds)

    @property
    def _num(self) -> int:
        return self._machine.num_devices

    def _degrees(self, config: RunConfig) -> list[int]:
        """Returns the numbers of devices that may share each layer, within a host."""
        if math.isinf(self._machine.speed.link_bytes):
            return [1]
        most = self._machine.num_devices // self._machine.num_hosts
        powers = [2**n for n in range(most.bit_length())]
        return [n for n in powers if is_divided(self._spec, n, config.block_tokens)]

    # ---- ways to run -----------------------------------------------------------------

    def _sizes(self, most: int) -> list[int]:
        """Returns sizes of microbatches, the largest first."""
        unit, bounds = self._bounds.unit, self._bounds
        tried = {
            math.ceil(size / 2**n / unit) * unit
            for size in (most, bounds.smallest)
            for n in range(_HALVINGS)
        }
        sizes = [most]
        for size in sorted(tried, reverse=True):
            is_longest = size == bounds.smallest < most
            if is_longest or bounds.sample_tokens / 2 <= size < _CLOSE * sizes[-1]:
                sizes.append(size)
        return sizes

    def _first_sizes(self, most: int) -> list[int]:
        """Returns the sizes that hold the longest sample."""
        return [n for n in self._sizes(most) if n >= self._bounds.smallest]

    def _meshes(self, room: Room) -> Iterator[RunConfig]:
        """Yields meshes of all devices, without stages and FSDP."""
        for tensor, most in room.most.items():
            mesh = str(MeshSizes(data=self._num // tensor, tensor=tensor))
            for tokens in self._first_sizes(most):
                yield room.config.replace(mesh=mesh, microbatch_tokens=tokens)

    def _alike(self, room: Room) -> Iterator[RunConfig]:
        """Yields lists of alike replicas."""
        for tensor, most in room.most.items():
            if self._num >= 2 * tensor:
                for tokens in self._first_sizes(most):
                    shape = ReplicaShape(tokens=tokens, tensor=tensor)
                    yield with_list(room.config, [shape] * (self._num // tensor))

    def _unlike(self, room: Room, alike: RunConfig) -> Iterator[RunConfig]:
        """Yields lists in which the last replicas may have smaller microbatches.

        Args:
            room: What fits.
            alike: The best of alike replicas.
        """
        for mix in [*self._of_two_sizes(room), *self._of_degrees(room, alike)]:
            largest, smallest = (room.most[one.tensor] for one in (mix[0], mix[-1]))
            firsts, sizes = self._first_sizes(largest), self._sizes(smallest)
            for large, small in itertools.product(firsts, sizes):
                if small < large:
                    yield with_list(
                        room.config, [one.shape(room, large, small) for one in mix]
                    )

    def _of_two_sizes(self, room: Room) -> Iterator[list["_Member"]]:
        """Yields replicas of one device, some of which are small."""
        if 1 not in room.most:
            return
        counts = {2**n for n in range(self._num.bit_length())} | {self._num - 1}
        large, small = _Member(tensor=1), _Member(tensor=1, is_small=True)
        for count in sorted(n for n in counts if n < self._num):
            yield [large] * count + [small] * (self._num - count)

    def _of_degrees(self, room: Room, alike: RunConfig) -> Iterator[list["_Member"]]:
        """Yields a large replica and small ones, and what the planner deploys."""
        least, *others = room.most
        small = _Member(tensor=least, is_small=True)
        tried = [
            [_Member(tensor=one)] + [small] * ((self._num - one) // least)
            for one in others
            if one < self._num
        ]
        # It solves programs, for which it imports a solver.
        from jaxlora.plan.replicas.deployment import deployed_degrees

        if others:
            plan = self._laid_out(alike)
            found = deployed_degrees(plan, self._jobs, self._machine, room.most)
            mix = [_Member(tensor=n, is_small=n == found[-1]) for n in found]
            if len(set(found)) > 1 and mix not in tried:
                tried.append(mix)
        yield from tried

    # ---- time ------------------------------------------------------------------------

    def _laid_out(self, config: RunConfig) -> RunPlan:
        spec = self._spec.with_remat(config.weakest_remat)
        rates = self._machine.rates(spec, config.network_gbits)
        args = config, self._model, spec, self._jobs, self._bounds, rates
        return laid_out(*args)

    def _timed(self, config: RunConfig, room: Room) -> _Timed:
        """Predicts the time of a list of replicas, or of a mesh.

        Args:
            config: The run.
            room: What fits with its `remat`.
        """
        plan = self._laid_out(config)
        spec, rates = plan.spec, plan.rates
        schedule = self._first_ticks(plan)
        took = window_seconds(plan.stages, plan.lanes, schedule, rates, is_part=True)
        samples = [s for m in schedule.microbatches for s in m]
        tokens = sum(s.num_tokens for s in samples)
        # The larger a full microbatch is, the less time each of its tokens takes.
        # Devices that share it lose some more.
        tensor, most = next(iter(room.most.items()))
        full = ReplicaShape(tokens=most, tensor=tensor)
        least = tokens / most * tensor * replica_seconds(plan.stages, full, rates)
        least += square_seconds(spec, rates) * sum(s.num_tokens**2 for s in samples)
        return _Timed(
            config=config, seconds=took / tokens, bound=least / self._num / tokens
        )

    def _first_ticks(self, plan: RunPlan) -> Schedule:
        lengths = lambda job, step: self._jobs[job].lengths(step)
        state, ticks = StreamState(), []
        for position in assign_slots(
            self._positions,
            plan.num_slots,
            preempts=plan.config.preempt,
        ):
            if position.slot is not None:
                state = state.with_job(position.in_stream)
        while len(ticks) < _TICKS:
            stretch = next_stretch(state, lengths, plan.rules)
            if not stretch.ticks:
                break
            ticks, state = [*ticks, *stretch.ticks], stretch.after
        return Schedule(
            microbatches=tuple(m for tick in ticks for m in tick),
            limits=plan.config.limits,
        )

    def _reason(self, best: _Timed, other: _Timed | None) -> Note:
        text = (
            f"replicas: auto: {self._describe(best)}: predicted "
            f"{best.seconds / best.bound - 1:.1%} over the least time of replicas of "
            "the fewest devices"
        )
        if other is not None and other is not best:
            saved = 1 - best.seconds / other.seconds
            text += f", and {saved:.1%} less than {self._describe(other)}"
        return Note(text)

    def _describe(self, one: _Timed) -> str:
        config, text = one.config, describe_list(one.config.replica_shapes)
        if config.replicas is None:
            text = f"mesh {config.mesh} with {config.limits.capacity:,} tokens"
        return f"{text}, remat {config.remat}" if self._bounds.remats else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Member:
    """A replica of a list whose sizes are still open.

    Attributes:
        tensor: Its devices.
        is_small: Whether it has small microbatches.
    """

    tensor: int
    is_small: bool = False

    def shape(self, room: Room, large: int, small: int) -> ReplicaShape:
        """Returns the replica with large or small microbatches, or what fits."""
        tokens = small if self.is_small else min(large, room.most[self.tensor])
        return ReplicaShape(tokens=tokens, tensor=self.tensor)
