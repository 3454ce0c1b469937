"""The engine: calls for many adapters become shared microbatches and optimizer steps.

The calls of an adapter run in their order. Between two optimizer steps of an adapter
its gradients are a sum, so datums of all its calls, and of all adapters, may share
microbatches in any order. Nothing runs by itself: `Engine.advance` does the next piece
of work. A device is always given the next piece before the host reads the results of
the one before.
"""

import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import pathlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizer import AdapterState, OptimizerInputs
from jaxlora.adapters.optimizers.table import ADAMW
from jaxlora.adapters.parked_slot import without_values
from jaxlora.adapters.targets import Targets, choose_linears
from jaxlora.common.job_name import BASE
from jaxlora.common.patterns import Patterns
from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.data.pack import JobBatch
from jaxlora.errors import ConfigError, DeviceError
from jaxlora.hf.load import FrozenModel
from jaxlora.models.config import is_of_expert, shared_path
from jaxlora.models.forward import JobLosses
from jaxlora.models.options import DecoderOptions
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import chosen_experts, linear_names, linear_path
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.objectives.datum import DATUM, datum_loss
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.plan.job.kernel_choice import with_choices
from jaxlora.plan.job.planned_model import with_derived
from jaxlora.plan.stages import MeshStages
from jaxlora.programs.program import announce, counting, finish
from jaxlora.scheduler import Limits, Microbatch, Sample
from jaxlora.scheduler.stream.waiting import FairQueue, WaitingBatch
from jaxlora.session.residence import Residence, Resident, WholeState
from jaxlora.session.room import Room
from jaxlora.session.slot_programs import slot_programs
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.execute.feed import TickPacker
from jaxlora.train.execute.layout import Layout

logger = logging.getLogger(__name__)

# Microbatches that the devices have, beside the one that is queued last, before the
# host waits for the first of them.
_MOST_QUEUED = 1
_MOST_ADAPTERS, _MOST_OF_EXPERTS = 8, 4  # in a microbatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PassResult:
    """The result of a forward pass, with or without a backward pass.

    Attributes:
        logprobs: For each datum, the log-probability of every position's target token,
            in nats, with the weights before the next optimizer step.
        metrics: Sums over all datums, by `name:reduction`: `loss:sum`, and `tokens:sum`
            of the positions whose loss counts.
    """

    logprobs: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]

    @property
    def loss(self) -> float:
        """The sum of the losses."""
        return self.metrics["loss:sum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of an optimizer step.

    Attributes:
        step: Optimizer steps that the adapter has taken, with this one.
        grad_norm: Norm of its gradient, before clipping.
        is_finite: Whether losses, hidden states and gradient were all finite. If not,
            the step was skipped: weights and moments are as before, the gradients are
            gone, and the adapter can be trained on.
    """

    step: int
    grad_norm: float
    is_finite: bool


@dataclasses.dataclass(kw_only=True, eq=False)
class PassCall:
    """A call for a pass over datums.

    Attributes:
        samples: The datums.
        is_training: Whether it adds to the adapter's gradients.
        given: Metrics that take the place of those that are computed.
        waiting: Numbers of the datums that are not queued.
        came: When it came, in rows that had run.
        on_result: Called with the result as soon as it is there.
        logprobs: Log-probabilities so far, by number of the datum.
        result: The result; None: it is not there yet.
    """

    samples: Sequence[TokenizedSample]
    is_training: bool
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)
    on_result: Callable[[PassResult], None] | None = None
    waiting: list[int] = dataclasses.field(init=False)
    came: int = 0
    logprobs: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    result: PassResult | None = None

    def __post_init__(self):
        self.waiting = [*range(len(self.samples))]

    def receive(self, number: int, logprobs: np.ndarray) -> None:
        """Takes the log-probabilities of a datum; the last ones make the result."""
        self.logprobs[number] = logprobs
        if len(self.logprobs) < len(self.samples):
            return
        every = tuple(self.logprobs[i] for i in range(len(self.samples)))
        inputs = [sample.inputs or {} for sample in self.samples]
        losses = map(datum_loss, inputs, every)
        tokens = sum(int(sample.is_target.sum()) for sample in self.samples)
        metrics = {"loss:sum": sum(losses), "tokens:sum": float(tokens)}
        self.result = PassResult(logprobs=every, metrics=metrics | dict(self.given))
        if self.on_result is not None:
            self.on_result(self.result)


@dataclasses.dataclass(kw_only=True, eq=False)
class StepCall:
    """A call for an optimizer step.

    Attributes:
        params: Its settings.
        on_result: Called with the result as soon as it is there.
        result: The result; None: it is not there yet.
    """

    params: AdamParams
    on_result: Callable[[StepResult], None] | None = None
    result: StepResult | None = None


Call = PassCall | StepCall


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A piece of work of the device: a microbatch or an optimizer step.

    Attributes:
        rows: Rows of the microbatch; 0: it is an optimizer step.
        is_training: Whether it changes the state of adapters.
        parts: For each datum, in the order of the rows, its call and its number there;
            for an optimizer step, its call and 0.
    """

    rows: int
    is_training: bool
    parts: tuple[tuple[Call, int], ...]


class _InFlight(NamedTuple):
    """A piece of work that the device has, and the function that takes its results."""

    piece: Piece
    settle: Callable[[], None]


@dataclasses.dataclass(kw_only=True, eq=False)
class OpenAdapter(Resident):
    """An adapter that calls are for, or the base.

    Attributes:
        name: Its name.
        number: Its number, which no other has.
        num_steps: Optimizer steps that have changed its weights.
        calls: Calls that are not queued, in their order, by their numbers.
        last_step: The step that was queued last; None: there was none.
    """

    name: str
    number: int
    num_steps: int = 0
    calls: dict[int, Call] = dataclasses.field(default_factory=dict)
    last_step: StepCall | None = None


class Kind(enum.Enum):
    """Kinds of passes, each of which needs a microbatch of its own."""

    TRAINING = enum.auto()
    FORWARD = enum.auto()
    BASE = enum.auto()

    @staticmethod
    def of(one: OpenAdapter, call: PassCall) -> "Kind":
        """Returns the kind of a call."""
        if one.name == BASE:
            return Kind.BASE
        return Kind.TRAINING if call.is_training else Kind.FORWARD


# A datum of a call: its adapter, the call, and its number there.
Place = tuple[OpenAdapter, PassCall, int]


class Engine:
    """A frozen model with slots of adapters, and the calls that wait for it.

    A thread uses it while it has its lock.

    Attributes:
        lock: The lock.
        model: The model, with all arrays of its format.
        config: Its settings, none of which is `auto` but kernels and attention.
        memory_estimate: Memory that they need on the device.
        spec: The decoder with its slots.
        table: The slots.
        adapters: The open adapters, by name.
        base: The base, which has forward passes only.
        queue: Decides which datums run next.
        on_begin: Called with each piece of work before it is given to the device.
        on_queued: Called with each piece of work that was given to the device.
        on_settled: Called with each piece of work whose results are on the host.
    """

    def __init__(
        self,
        model: FrozenModel,
        config: SessionConfig,
        *,
        host_bytes: int | None = None,
        folder: pathlib.Path | None = None,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
        slots_of: Callable[[str], int | None] = lambda tenant: None,
    ):
        """Makes empty slots; programs are compiled, or loaded, when they are needed.

        Args:
            model: The base model, on one device.
            config: Settings.
            host_bytes: See `Residence`.
            folder: See `Residence`.
            weight_of: Returns the share of a tenant, in units of that of another one,
                unless `open` gives it.
            slots_of: Returns the most slots of a tenant; None: any number.

        Raises:
            ConfigError: No kernels or attention can run the model here, the targets
                match nothing, or there is not enough memory.
        """
        room = Room(model, _decoder_spec, _most_adapters)
        config, self.memory_estimate = room.settle(config)
        logger.info("memory: %s", self.memory_estimate)
        self.spec, said = _chosen(model, config)
        logger.info("%s", said)
        self.model, self.config = with_derived(model, self.spec), config
        layers = (0, self.spec.config.num_layers)
        stages = MeshStages(
            spec=self.spec, sizes=MeshSizes(), borders=layers, in_flight=1
        )
        layout = Layout.of(stages, self.model.params)
        (stage,) = layout.stages
        (self.table,) = layout.empty_slots().tables
        self.adapters: dict[str, OpenAdapter] = {}
        self._numbers = itertools.count()
        empty = Adapter(modules={})
        self.base = OpenAdapter(name=BASE, number=next(self._numbers), like=empty)
        self._base = self.model.params
        most = _most_adapters(config, self.spec)
        self._programs = slot_programs(stage.steps, most)
        sizes = config.sizes
        self._limits = Limits(
            capacity=sizes[-1], block_tokens=config.block_tokens, max_jobs=most
        )
        self.queue = FairQueue(
            self._limits, sizes, weight_of=weight_of, most_owners_of=slots_of
        )
        self._packer = TickPacker(layout, self._limits)
        self._residence = Residence(
            self.table,
            self._programs,
            config.num_slots,
            min_stay=2 * sizes[-1],
            host_bytes=host_bytes,
            folder=folder,
            most_of=slots_of,
        )
        self._given: dict[str, Any] = {
            "host_bytes": host_bytes,
            "folder": folder,
            "weight_of": weight_of,
            "slots_of": slots_of,
        }
        self.lock = threading.RLock()
        self.on_begin: Callable[[Piece], None] = lambda piece: None
        self.on_queued: Callable[[Piece], None] = lambda piece: None
        self.on_settled: Callable[[Piece], None] = lambda piece: None
        self._in_flight: deque[_InFlight] = deque()
        self._beginning: Piece | None = None  # it was not given to the device yet
        self._is_lost = False  # whether a program has taken the slots and left none

    @property
    def most_tokens(self) -> int:
        """Most positions that a datum may have."""
        return min(self._limits.capacity, self.spec.config.max_positions)

    def prepare(self, *, is_training: bool = False) -> None:
        """Compiles or loads all programs, so that no call waits for one.

        Args:
            is_training: Whether forward passes alone are left out.
        """
        limits, sizes = self._limits, self.sizes
        inputs = _optimizer_inputs(AdamParams(learning_rate=0.0), 0)
        begun = self._programs.prepare(limits, sizes, inputs, is_training=is_training)
        every = [*begun]
        announce(every)
        with counting(every):
            finish(every)

    # ---- adapters --------------------------------------------------------------------

    def open(
        self,
        name: str,
        adapter: Adapter,
        state: WholeState | None = None,
        *,
        tenant: str = "",
        weight: float | None = None,
    ) -> OpenAdapter:
        """Opens an adapter, which gets a slot if one is free, or else with its turn.

        Args:
            name: Its name, which no open adapter has.
            adapter: The adapter.
            state: Its state, which continues; None: it starts from the weights of
                `adapter`.
            tenant: Whose it is; tenants share the device equally.
            weight: The share of the tenant from now on; None: it stays.

        Raises:
            ConfigError: The slots cannot hold it.
        """
        assert name not in self.adapters
        _check_fits(name, adapter, self.spec)
        one = OpenAdapter(
            name=name,
            number=next(self._numbers),
            tenant=tenant,
            like=without_values(adapter),
            has_gradients=state is not None and state.gradients is not None,
        )
        if weight is not None:
            self.queue.weigh(tenant, weight)
        with self._changing_slots():
            self._residence.add(one, adapter if state is None else state)
        self.adapters[name] = one
        return one

    def check_fits(self, name: str, adapter: Adapter) -> None:
        """Checks that the slots can hold an adapter.

        Raises:
            ConfigError: They cannot.
        """
        _check_fits(name, adapter, self.spec)

    def anew(self) -> "Engine":
        """Returns another engine of the same model and settings, without adapters.

        This one cannot be used any more: there is no memory for the slots of both.
        """
        self._is_lost = True
        for array in jax.tree.leaves(self.table.state):
            array.delete()
        return Engine(self.model, self.config, **self._given)

    def close(self, one: OpenAdapter) -> None:
        """Closes an adapter, whose calls are finished."""
        del self.adapters[one.name]
        self._residence.remove(one)

    def bring(self, one: OpenAdapter) -> int:
        """Returns the slot of an adapter, into which it is brought if it is in none.

        It stays there until the engine is used again.
        """
        return self._bring([one])[0]

    def park(self, one: OpenAdapter) -> None:
        """Takes an adapter out of its slot, if it is in one, until its next turn."""
        with self._changing_slots():
            self._residence.park(one)

    def begin_reading(self, one: OpenAdapter) -> Callable[[], Adapter]:
        """Queues a copy of the weights of an adapter, after what is queued.

        Returns:
            A function that brings the copy to the host; any thread may call it, and
            the adapter may be trained on before.
        """
        return self._residence.begin_reading(one)

    def _bring(self, some: Sequence[OpenAdapter]) -> list[int]:
        """Brings adapters into slots, and returns these."""
        busy = {one for one in self.adapters.values() if one.calls}
        with self._changing_slots():
            return self._residence.bring(some, busy, self.queue.num_rows)

    @contextlib.contextmanager
    def _changing_slots(self) -> Iterator[None]:
        """Notes if a program that changes the slots is broken off."""
        try:
            yield
        except BaseException:
            self._is_still(self.table.state)
            raise

    def rename(self, one: OpenAdapter, name: str) -> None:
        """Gives an adapter another name, which no open adapter has."""
        assert name not in self.adapters
        del self.adapters[one.name]
        one.name = name
        self.adapters[name] = one

    def begin_copy(self, one: OpenAdapter) -> Callable[[], WholeState]:
        """Queues a copy of all that an adapter goes on with; see `begin_reading`."""
        return self._residence.begin_copy(one)

    # ---- calls -----------------------------------------------------------------------

    def submit(self, one: OpenAdapter, call: Call) -> None:
        """Adds a call to those of an adapter."""
        if isinstance(call, PassCall):
            call.came = self.queue.num_rows
        one.calls[next(self._numbers)] = call

    def finish(self, one: OpenAdapter) -> None:
        """Works until all calls of an adapter have their results.

        Raises:
            DeviceError: As for `advance`.
        """
        self._check_is_whole()
        while one.calls:
            self.advance()
        self.drain()

    def drain(self) -> None:
        """Waits for the results of all that the device has.

        Raises:
            DeviceError: As for `advance`.
        """
        with _device_errors():
            while self._in_flight:
                self._settle()

    @property
    def unsettled(self) -> list[Piece]:
        """The pieces of work without results: after an error, the cause is in them."""
        begun = [] if self._beginning is None else [self._beginning]
        return [one.piece for one in self._in_flight] + begun

    # ---- work in a given order -------------------------------------------------------

    def run_layout(
        self,
        rows: int,
        places: Sequence[Place | tuple[str, int]],
    ) -> None:
        """Queues a microbatch whose datums lie as in an earlier one.

        Each adapter gets the gradients, in bits, that it has got from a microbatch of
        this program in which its datums were in the same rows.

        Args:
            rows: Rows of the microbatch, which are one of the sizes.
            places: For each datum, in the order of the rows, its adapter, its call and
                its number among the waiting ones there; or, for rows that stay empty,
                the name of an adapter and the number of tokens.

        Raises:
            DeviceError: As for `advance`.
            ConfigError: It has more adapters than a microbatch can have now.
        """
        self._check_is_whole()
        number, most = len({p[0] for p in places if len(p) == 3}), self._programs.most
        if number > most:
            raise ConfigError(
                f"a microbatch had {number} adapters, and there is room for {most}. "
                "Set slots and adapters_per_microbatch to what they were."
            )
        with _device_errors():
            self._queue_rows(places, rows)

    def run_step(self, one: OpenAdapter) -> None:
        """Queues the optimizer step that is the next call of an adapter.

        Raises:
            DeviceError: As for `advance`.
        """
        self._check_is_whole()
        with _device_errors():
            self._queue_step(one, next(iter(one.calls)))

    def size_for(self, num_tokens: int) -> int:
        """Returns the smallest size of microbatches that holds so many tokens."""
        padded = self._limits.padded(num_tokens)
        return next(size for size in self.sizes if size >= padded)

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of microbatches, in ascending order."""
        return self.config.sizes

    def advance(self) -> bool:
        """Does the next piece of work: queues a step or a microbatch, or waits for one.

        Returns:
            False: nothing was left to do.

        Raises:
            DeviceError: A device has failed, or its memory is full.
        """
        self._check_is_whole()
        with _device_errors():
            return self._advance()

    def _check_is_whole(self) -> None:
        """Checks that no earlier error has taken the slots.

        Raises:
            DeviceError: One has.
        """
        if self._is_lost:
            raise DeviceError(
                "an earlier error, or an interrupt, has broken off a program that was "
                "changing the adapters, so this session cannot go on. Make another, "
                "and load what was saved."
            )

    def _advance(self) -> bool:
        steps = []
        for one in self.adapters.values():
            number = next(iter(one.calls), None)
            if number is not None and isinstance(one.calls[number], StepCall):
                steps.append((one, number))
                if one.last_step is None or one.last_step.result is not None:
                    self._queue_step(one, number)
                    return True
        # Steps that follow steps of their adapters wait for these. Microbatches come
        # first, so that many steps in a row do not hold up others.
        places: list[Place] = []
        if waiting := [*self._waiting(places)]:
            self._queue_passes(waiting, places)
            return True
        if steps:
            self._queue_step(*steps[0])
            return True
        if self._in_flight:
            self._settle()
            return True
        return False

    def _waiting(self, places: list[Place]) -> Iterator[WaitingBatch]:
        """Yields the datums that can run before the next step of each adapter.

        Args:
            places: Gets the place of each datum; the index of a sample is its number.
        """
        for one in (self.base, *self.adapters.values()):
            found: dict[Kind, list[Place]] = {}
            for call in one.calls.values():
                if isinstance(call, StepCall):
                    break
                own = ((one, call, number) for number in call.waiting)
                found.setdefault(Kind.of(one, call), []).extend(own)
            for kind, own in found.items():
                samples = [
                    Sample(
                        owner=one.number,
                        batch=0,
                        index=index,
                        num_tokens=len(call.samples[number].token_ids),
                    )
                    for index, (_, call, number) in enumerate(own, len(places))
                ]
                places += own
                first = own[0][1]
                is_part = len(first.waiting) < len(first.samples)
                yield WaitingBatch(
                    tenant=one.tenant,
                    kind=kind,
                    samples=samples,
                    came=min(call.came for _, call, _ in own),
                    has_begun=is_part or (kind is Kind.TRAINING and one.has_gradients),
                    is_near=one is self.base or one.slot is not None,
                )

    # ---- work on the device ----------------------------------------------------------

    def _queue_passes(
        self, waiting: Sequence[WaitingBatch], places: Sequence[Place]
    ) -> None:
        """Queues a microbatch with some of the datums that wait.

        Args:
            waiting: The datums.
            places: The place of each.
        """
        turn = self.queue.next(waiting)
        chosen = [places[sample.index] for sample in turn.microbatch]
        self._queue_rows(chosen, turn.rows)

    def _queue_rows(self, places: Sequence[Place | tuple[str, int]], rows: int) -> None:
        """Queues a microbatch; arguments as for `run_layout`."""
        samples: list[Sample] = []
        own: list[Place] = []
        # Rows know their slot by its place among those that are taken. Those that stay
        # empty have negative numbers.
        owners: dict[OpenAdapter, int] = {}
        empty: dict[str, int] = {}
        for place in places:
            index = len(own)
            if len(place) == 3:
                one, call, number = place
                owner = owners.setdefault(one, len(owners))
                num_tokens = len(call.samples[number].token_ids)
                own.append(place)
            else:
                name, num_tokens = place
                owner = -1 - empty.setdefault(name, len(empty))
            samples.append(
                Sample(owner=owner, batch=0, index=index, num_tokens=num_tokens)
            )
        some = list(owners)
        every = [call.samples[number] for _, call, number in own]
        batches = {
            owners[one]: JobBatch(
                slot=owners[one], step=0, samples=every, weight=1.0, objective=DATUM
            )
            for one in some
        }
        kind = Kind.of(*own[0][:2])
        slots = [] if kind is Kind.BASE else self._bring(some)
        taken = self._programs.taken(slots, self.config.num_slots)
        run = functools.partial(self._run, kind, taken)
        lengths = lambda sample: (sample.num_tokens,)
        try:
            for (part,) in self._packer.split((tuple(samples),), lengths, rows):
                mine = [own[s.index] for s in part if s.owner in batches]
                self._queue_microbatch(run, part, mine, batches, rows)
        finally:
            for one in some:
                for number in [n for n, c in one.calls.items() if _is_queued(c)]:
                    del one.calls[number]

    def _run(self, kind: Kind, slots: np.ndarray, rows: PackedBatch) -> JobLosses:
        """Queues the passes of rows."""
        table, programs = self.table, self._programs
        if kind is not Kind.TRAINING:
            base = kind is Kind.BASE
            own = table.of_reference if base else (table.weights, table.settings)
            return programs.evaluate(self._base, *own, slots, rows)
        state = table.state
        pending, losses = programs.accumulate(
            *(self._base, state.params, state.pending),
            *(table.settings, slots, rows),
        )
        table.state = dataclasses.replace(state, pending=pending)
        return losses

    def _queue_microbatch(
        self,
        run: Callable[[PackedBatch], JobLosses],
        microbatch: Microbatch,
        places: Sequence[Place],
        batches: Mapping[int, JobBatch],
        rows: int,
    ) -> None:
        """Queues a microbatch.

        Args:
            run: Queues its passes.
            microbatch: Its samples, and those whose rows stay empty.
            places: For each of its samples, its adapter, its call, and its number
                there.
            batches: The datums, by the place of their slot among those that are taken.
            rows: Rows of the microbatch.
        """
        packed = self._packer.pack((microbatch,), batches, rows)
        uploaded = self._packer.upload(packed)[0]
        self._beginning = Piece(
            rows=rows,
            is_training=places[0][1].is_training,
            parts=tuple((call, number) for _, call, number in places),
        )
        self.on_begin(self._beginning)
        before = self.table.state
        try:
            for _, call, number in places:
                call.waiting.remove(number)
            losses = run(uploaded)
        except BaseException:
            # Such as an interrupt while the program was compiled. No datum counts
            # twice, and none is lost.
            if self._is_still(before):
                for _, call, number in places:
                    call.waiting[:] = sorted({*call.waiting, number})
            raise
        for one, call, _ in places:
            one.has_gradients |= call.is_training
        lengths = [len(call.samples[number].token_ids) for _, call, number in places]
        ends = np.cumsum(lengths)[:-1]
        is_row = packed.segment_ids >= 0

        def settle() -> None:
            found = -np.asarray(jax.device_get(losses.nll))[is_row]
            for (_, call, number), own in zip(
                places, np.split(found, ends), strict=True
            ):
                call.receive(number, own)

        self._note(settle)

    def _is_still(self, state: AdapterState) -> bool:
        """Whether the slots are as they were, so that what broke off can be repeated.

        A program that has begun has taken them, and they are lost if it broke off.
        """
        self._is_lost |= any(x.is_deleted() for x in jax.tree.leaves(self.table.state))
        return self.table.state is state and not self._is_lost

    def _queue_step(self, one: OpenAdapter, number: int) -> None:
        """Queues the optimizer step of an adapter, which is its next call."""
        # Whether the step before has counted is known when it is done.
        while one.last_step is not None and one.last_step.result is None:
            self._settle()
        table, call = self.table, one.calls[number]
        assert isinstance(call, StepCall)
        slot = np.int32(self._bring([one])[0])
        inputs = _optimizer_inputs(call.params, one.num_steps)
        before, num_steps = table.state, one.num_steps
        self._beginning = Piece(rows=0, is_training=True, parts=((call, 0),))
        self.on_begin(self._beginning)
        try:
            given = before, slot, inputs, table.settings["rank"]
            table.state, result = self._programs.step(*given)
        except BaseException:
            self._is_still(before)  # then the step is still the next call
            raise
        del one.calls[number]
        one.last_step, one.has_gradients = call, False

        def settle() -> None:  # which may be interrupted, and is then repeated
            found = jax.device_get(result)
            is_finite, norm = bool(found.is_finite[0]), float(found.norm[0])
            one.num_steps = num_steps + is_finite
            call.result = StepResult(
                step=one.num_steps, grad_norm=norm, is_finite=is_finite
            )
            if not is_finite:
                logger.warning(
                    "adapter %s: an optimizer step was skipped, as its losses or "
                    "gradients are not finite",
                    one.name,
                )
            if call.on_result is not None:
                call.on_result(call.result)

        self._note(settle)

    def _note(self, settle: Callable[[], None]) -> None:
        """Notes that the device has the piece of work that was begun last.

        It waits until the device has not too much work. Steps that follow the last
        microbatch that has ended are waited for, too, as they take little time and
        their adapters can go on.
        """
        assert self._beginning is not None
        piece, self._beginning = self._beginning, None
        flight = self._in_flight
        flight.append(_InFlight(piece, settle))
        self.on_queued(piece)
        while piece.rows and sum(one.piece.rows > 0 for one in flight) > _MOST_QUEUED:
            self._settle()
            while not flight[0].piece.rows:
                self._settle()

    def _settle(self) -> None:
        """Waits for the oldest piece of work that is queued, and takes its results."""
        oldest = self._in_flight[0]
        oldest.settle()  # it stays if it is interrupted while it waits
        self._in_flight.popleft()
        self.on_settled(oldest.piece)


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """Turns an error of a device into one that says what to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise DeviceError(
            f"a device failed: {reason.rstrip('.')}. If its memory is full, lower "
            "microbatch_tokens, slots or rank, or set remat. This session cannot go "
            "on: make another, and load what was saved."
        ) from error


def _is_queued(call: Call) -> bool:
    return isinstance(call, PassCall) and not call.waiting


def _optimizer_inputs(params: AdamParams, num_steps: int) -> OptimizerInputs:
    """Returns the settings of a step of one slot."""

    def row(value: Any, dtype: Any = np.float32) -> Any:
        return np.full(1, value, dtype)

    b1, b2 = params.betas
    return OptimizerInputs(
        step_mask=row(True, np.bool_),
        count=row(num_steps, np.int32),
        learning_rate=row(params.learning_rate),
        rate_ratio=rate_ratios(lambda of_step: row(of_step(params))),
        weight_decay=row(params.weight_decay),
        settings={ADAMW.name: {"b1": row(b1), "b2": row(b2), "eps": row(params.eps)}},
        optimizer=row(0, np.int32),
        max_norm=row(params.grad_clip_norm or np.inf),
    )


def _decoder_spec(model: FrozenModel, config: SessionConfig) -> DecoderSpec:
    """Returns the decoder with its slots."""
    return _chosen(model, config)[0]


def _chosen(model: FrozenModel, config: SessionConfig) -> tuple[DecoderSpec, str]:
    """Returns the decoder with its slots, and which kernels run it and why."""
    where = "target_modules"
    targets = Targets(where=where, target_modules=config.target_modules)
    linears = choose_linears(targets, linear_names(model.config), Patterns(where))
    adapts_experts = any(map(is_of_expert, linears))
    scaled = max(1, config.rank // chosen_experts(model.config))
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(
            dtype=model.dtype,
            base_format=model.base_format,
            remat=config.remat,
            max_segment_tokens=max(config.sizes),
            objectives=(DATUM.name,),
        ),
        slots=SlotShape(
            num_slots=config.num_slots,
            rank=config.rank,
            expert_rank=scaled if adapts_experts else 0,
            use_dropout=False,
        ),
        adapted=tuple(sorted({shared_path(linear_path(name)) for name in linears})),
    )
    return with_choices(
        spec,
        model.config,
        attention=config.attention,
        implementation=config.implementation,
        block_tokens=config.block_tokens,
    )


def _most_adapters(config: SessionConfig, spec: DecoderSpec) -> int:
    """Returns the most adapters in a microbatch."""
    most = config.adapters_per_microbatch
    if most is None:
        most = _MOST_OF_EXPERTS if spec.expert_slots is not None else _MOST_ADAPTERS
    return min(most, config.num_slots)


def _check_fits(name: str, adapter: Adapter, spec: DecoderSpec) -> None:
    """Checks that the slots can hold an adapter.

    Raises:
        ConfigError: They cannot.
    """
    assert spec.slots is not None
    kinds = [one.setting for one in adapter.variants if one.setting is not None]
    if other := [*kinds, *adapter.outside, *["its start"] * adapter.keeps_start]:
        raise ConfigError(
            f"adapter {name!r} has {other[0]}, and a session trains A and B alone. "
            "Train it by a run."
        )
    for module, weights in adapter.modules.items():
        path = shared_path(linear_path(module))
        if path not in spec.adapted:
            raise ConfigError(
                f"adapter {name!r} adapts {module}, which has no slots. Set "
                "target_modules when the session is made."
            )
        is_of_experts = ".experts." in path
        most = spec.slots.rank_of(is_of_experts=is_of_experts)
        if weights.rank > most:
            # Slots of experts have a rank that is divided by those of a token.
            times = chosen_experts(spec.config) if is_of_experts else 1
            raise ConfigError(
                f"adapter {name!r} has rank {weights.rank} in {module}, and the slots "
                f"have {most}. Lower it, or set rank={weights.rank * times} when the "
                "session is made."
            )
