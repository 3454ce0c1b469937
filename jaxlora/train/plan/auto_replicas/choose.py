"""Chooses the replicas of a run with `replicas: auto`, as many as there are devices.

A replica is one device so far, so replicas differ in their microbatches: large ones for
the long samples, and small ones, which short samples fill better. Lists of one and of
two sizes are compared with alike replicas along `data`. The first ticks of the run are
packed for each of them, as the trainer packs them, and their time is predicted.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import ReplicaShape, listed
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.capacity import UNCHECKED_TOKENS
from jaxlora.memory.device_memory import DeviceMemory
from jaxlora.memory.mesh import MeshStages, estimated_footprint
from jaxlora.memory.need import DoesNotFitError
from jaxlora.memory.options import estimated_room, largest_fitting
from jaxlora.memory.refusal import refusal
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import Schedule
from jaxlora.scheduler.streams.stream import Position, StreamState, next_stretch
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes
from jaxlora.train.plan.auto_mesh.machine import Machine
from jaxlora.train.plan.auto_mesh.predict import (
    shape_seconds,
    square_seconds,
    window_seconds,
)
from jaxlora.train.plan.job_slots import JobPosition, assign_slots
from jaxlora.train.plan.planned_model import PlannedModel
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.run_plan import RunPlan, laid_out

_TICKS = 24  # that are packed for each list, at least
_HALVINGS = 4  # of the largest microbatches, to the smallest
_CLOSE = 0.9  # a size that is closer to a larger one is not tried
_GAIN = 1.02  # a list is taken only if it is this much faster than a mesh
_SEVERAL = MeshSizes(data=2)  # lists stay, so their memory has the room of a mesh


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Timed:
    """A way to run, and its predicted time.

    Attributes:
        config: The run, with a list of replicas or with a mesh.
        seconds: Predicted time of a token.
        bound: The least time of a token on replicas of one device each, if all their
            microbatches were full and none waited.
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

    def choose(self, config: RunConfig) -> tuple[RunConfig, Note]:
        """Chooses a list, or alike replicas along `data`; returns the reason too.

        A list has a `remat`; along `data`, `remat: auto` is still open.

        Args:
            config: The run, without replicas.

        Raises:
            DoesNotFitError: No device has the memory for the longest sample.
        """
        mesh = config.replace(mesh=f"data={self._num}")
        if self._num == 1 or not self._positions:
            why = "one device" if self._num == 1 else "nothing left to do"
            return mesh, Note(f"replicas: auto: mesh {mesh.mesh}, as there is {why}")
        largest = self._largest(config)
        on_mesh = self._fastest(
            (own.replace(mesh=mesh.mesh, microbatch_tokens=tokens), most)
            for own, most in largest
            for tokens in self._first_sizes(most)
        )
        best = alike = self._fastest(
            (_with_list(own, [tokens] * self._num), most)
            for own, most in largest
            for tokens in self._first_sizes(most)
        )
        remat = alike.config.remat
        own, most = next(pair for pair in largest if pair[0].remat == remat)
        if lists := [_with_list(own, sizes) for sizes in self._lists(most)]:
            unlike = self._fastest((one, most) for one in lists)
            best = min(alike, unlike, key=lambda one: one.seconds)
        if _GAIN * best.seconds > on_mesh.seconds:
            return mesh, self._reason(on_mesh, best)
        return best.config, self._reason(best, on_mesh)

    def _fastest(self, found: Iterable[tuple[RunConfig, int]]) -> _Timed:
        timed = (self._timed(config, most) for config, most in found)
        return min(timed, key=lambda one: one.seconds)

    @property
    def _num(self) -> int:
        return self._machine.num_devices

    # ---- memory ----------------------------------------------------------------------

    def _largest(self, config: RunConfig) -> list[tuple[RunConfig, int]]:
        """Returns the largest microbatches of a replica, for each possible `remat`."""
        available = self._machine.memory_of(self._num)
        if available is None:  # with remat: auto, the run is refused later
            most = self._bounds.choose(max(UNCHECKED_TOKENS, self._bounds.smallest))
            assert most is not None
            return [(config, most)]
        found, refused = [], None
        for remat in self._bounds.remats or (config.weakest_remat,):
            own = config.replace(remat=remat)
            most = self._fitting(own, available)
            if most is not None:
                found.append((own, most))
            else:
                refused = own
        if not found:
            assert refused is not None
            raise self._refusal(refused, available)
        return found

    def _stages(self, config: RunConfig, sizes: Sequence[int]) -> MeshStages:
        spec = self._spec.with_remat(config.weakest_remat)
        return MeshStages.of(_with_list(config, sizes), spec, speed=self._machine.speed)

    def _fitting(self, config: RunConfig, available: DeviceMemory) -> int | None:
        """Returns the largest microbatches of the first replica, which has the most.

        It has the optimizers, and no other replica has larger microbatches.
        """
        stages = self._stages(config, [self._bounds.largest] * max(2, self._num))
        estimate = functools.partial(estimated_footprint, stages, config.block_tokens)
        room = estimated_room(available, _SEVERAL)
        return largest_fitting(self._bounds, estimate, room)

    def _refusal(self, config: RunConfig, available: DeviceMemory) -> DoesNotFitError:
        smallest = self._bounds.smallest
        stages = self._stages(config, [smallest])
        found = estimated_footprint(stages, config.block_tokens, smallest)
        own = config.replace(microbatch_tokens=smallest)
        details = refusal(own, stages, self._bounds, found, available)
        text = (
            "replicas: auto: a replica is one device so far, and none has the memory "
            f"for the longest sample. Set mesh: auto in the place of it: {details}"
        )
        return DoesNotFitError(text, details.need, details.mesh, details.cures)

    # ---- lists -----------------------------------------------------------------------

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

    def _lists(self, most: int) -> Iterator[list[int]]:
        """Yields lists of two sizes; the first one holds the longest sample."""
        counts = {2**n for n in range(self._num.bit_length())} | {self._num - 1}
        counts = sorted(count for count in counts if 0 < count < self._num)
        firsts, sizes = self._first_sizes(most), self._sizes(most)
        for large, small, count in itertools.product(firsts, sizes, counts):
            if small < large:
                yield [large] * count + [small] * (self._num - count)

    # ---- time ------------------------------------------------------------------------

    def _timed(self, config: RunConfig, most: int) -> _Timed:
        """Predicts the time of a list of replicas, or of a mesh.

        Args:
            config: The run.
            most: Tokens of the largest microbatches that fit.
        """
        spec = self._spec.with_remat(config.weakest_remat)
        rates = self._machine.rates(spec, config.network_gbits)
        args = config, self._model, spec, self._jobs, self._bounds, rates
        plan = laid_out(*args)
        schedule = self._first_ticks(plan)
        took = window_seconds(plan.stages, plan.lanes, schedule, rates, is_part=True)
        samples = [s for m in schedule.microbatches for s in m]
        tokens = sum(s.num_tokens for s in samples)
        # The larger a full microbatch is, the less time each of its tokens takes.
        cost = shape_seconds(plan.stages, most, rates).stages[0]
        least = tokens / most * (cost.forward + cost.backward)(most, 0)
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
            lanes=plan.lanes,
        ):
            if position.slot is not None:
                state = state.with_job(
                    Position(
                        job=position.job,
                        owner=position.slot,
                        batch=position.step,
                        num_batches=position.num_steps,
                        batch_tokens=position.batch_tokens,
                    )
                )
        while len(ticks) < _TICKS:
            stretch = next_stretch(state, lengths, plan.rules)
            if not stretch.ticks:
                break
            ticks, state = [*ticks, *stretch.ticks], stretch.after
        return Schedule(
            microbatches=tuple(m for tick in ticks for m in tick),
            limits=plan.config.limits,
        )

    def _reason(self, best: _Timed, other: _Timed) -> Note:
        over, saved = best.seconds / best.bound - 1, 1 - best.seconds / other.seconds
        return Note(
            f"replicas: auto: {self._describe(best)}: predicted {over:.1%} over the "
            f"least time of replicas of one device each, and {saved:.1%} less than "
            f"{self._describe(other)}"
        )

    def _describe(self, one: _Timed) -> str:
        config, text = one.config, describe_list(one.config.replica_shapes)
        if config.replicas is None:
            text = f"mesh {config.mesh} with {config.limits.capacity:,} tokens"
        return f"{text}, remat {config.remat}" if self._bounds.remats else text


def _with_list(config: RunConfig, sizes: Sequence[int]) -> RunConfig:
    """Returns the run with replicas of these microbatches, the largest first."""
    shapes = [ReplicaShape(tokens=size) for size in sizes]
    return config.replace(
        replicas=listed(shapes), mesh=ONE_DEVICE, microbatch_tokens=sizes[0]
    )


def describe_list(shapes: Sequence[ReplicaShape]) -> str:
    """Names replicas, such as `8,192 on tensor=2 + 3 x 2,048 tokens`."""
    parts = []
    for one, count in sorted(Counter(shapes).items(), reverse=True):
        text = f"{count} x {one.tokens:,}" if count > 1 else f"{one.tokens:,}"
        parts.append(f"{text} on tensor={one.tensor}" if one.tensor > 1 else text)
    return f"{' + '.join(parts)} tokens"
