"""The compiled functions of training: pure, of fixed shapes, for all slots at once."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.division import TableDivision
from jaxlora.adapters.exchange import (
    add_part,
    exchange,
    read_part,
    write_weights,
)
from jaxlora.adapters.optimizer import (
    AdapterState,
    measure,
    optimizer_step,
)
from jaxlora.adapters.optimizers.state import evaluation_weights
from jaxlora.adapters.optimizers.table import OPTIMIZERS, evaluates_other_weights
from jaxlora.adapters.reference_table import MakeTables, ReferenceTable
from jaxlora.adapters.slot_state import (
    empty_state,
    read_slot_rows,
    state_specs,
    write_reference,
    write_slot,
    zero_tables,
)
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.data.objectives import has_reference
from jaxlora.data.pack import PackedBatch
from jaxlora.memory.inputs import baseline_shape, batch_shapes, key_shapes
from jaxlora.models.forward import (
    JobLosses,
    SlotKeys,
    evaluation_options,
    training_options,
)
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec, SlotShape
from jaxlora.programs.program import Prepared, Program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.prepared_passes import PreparedPasses
from jaxlora.train.execute.stage_passes import StagePasses

# Programs that only read and write arrays, or launch few kernels. XLA would compile
# several kernels for each fusion, time them, and choose by times that vary.
_SHORT: dict[str, Any] = {"xla_gpu_autotune_level": 0}


class CompiledSteps:
    """The functions of a stage; each has one program for each batch shape.

    On several devices, each device runs the same program on a microbatch of its own.
    See `StagePasses` for the arguments.

    Attributes:
        accumulate: Forward and backward pass of the last stage, which adds to the
            pending gradients. It takes and returns only the pending part of the state,
            as each array costs host time.
        forward: Forward pass of another stage.
        backward: Backward pass of another stage, which adds to the pending gradients.
        evaluate: Forward pass without dropout and without residuals.
        add_baseline: Adds losses of an evaluation to the baselines of slots.
        exchange: Sum of a slot's pending gradients over the devices; not used if no
            devices share a slot.
        read_part: Gradients of a slot, for the replica that takes the step; this and
            the next two are not used without other replicas.
        add_part: Adds the gradients of another replica.
        write_weights: Takes the weights that another replica has made.
        measure: Norms of the pending gradients, which the other stages need for their
            optimizer steps.
        step: Optimizer step of the slots whose global batch is complete.
        empty: Makes the state of empty slots.
        write_slot: Replaces the state of a slot; see `jaxlora.adapters.slots`.
        read_slot: Reads rows of a slot; see `jaxlora.adapters.slots`.
        evaluation_weights: Makes the weights that are evaluated; None: no optimizer
            evaluates other weights than those in training.
        empty_reference: Makes weights of references that are all the base; it and the
            next one are not used without references that are adapters.
        write_reference: Replaces the weights of a slot's reference.
        state_specs: Partition specs of the state of the slots.
    """

    def __init__(self, spec: DecoderSpec, placement: StageSharding = ONE_DEVICE):
        """Makes the functions; none is traced yet.

        Args:
            spec: The decoder, or one stage of it.
            placement: The devices of the stage.
        """
        self._spec, self._placement = spec, placement
        self.evaluation_weights: Program | None = None
        self._shapes = spec.adapter_shapes()
        optimizers = () if spec.slots is None else spec.slots.optimizers
        self._division = TableDivision.of(spec.table_axes(), self._shapes, optimizers)
        given = self._shapes, placement, optimizers, self._division
        self.state_specs = state_specs(*given)
        self._make_passes()
        self._make_updates()
        if spec.slots is not None:
            self._make_slots(spec.slots)
        if placement.num_lanes == 1:
            self._make_replicas()

    def _program(self, what, run, takes, gives, *, varies=(), **options) -> Program:
        jitted = self._placement.jit(run, takes, gives, **options)
        identity = "training", what, self._spec, self._placement, options, self._codes
        return Program(jitted, what, identity, varies=varies)

    def _make_passes(self) -> None:
        spec, p = self._spec, self._placement
        passes = StagePasses(spec, p)
        training = training_options(spec)
        base, slots, state = spec.base_specs(), p.by_slot, self.state_specs
        params, pending = state.params, state.pending
        inputs = p.by_linear_and_slot, p.rows  # settings and batch
        h = () if spec.has_embedding else (p.hidden,)
        self.accumulate = self._program(
            "training step",
            passes.accumulate,
            (base, params, pending, *inputs, slots, *h),
            (pending, p.partial, p.hidden),
            varies=(4,),
            donate_argnums=2,
            compiler_options=training,
        )
        self.forward = self._program(
            "forward pass",
            passes.forward,
            (base, params, *inputs, slots, *h),
            (p.hidden, p.by_device),
            varies=(3,),
            compiler_options=training,
        )
        self.backward = self._program(
            "backward pass",
            passes.backward,
            (base, params, p.by_device, pending, p.hidden),
            (pending, p.hidden),
            varies=(4,),
            donate_argnums=3,
            compiler_options=training,
        )
        self.evaluate = self._program(
            "evaluation",
            passes.evaluate,
            (base, params, *inputs, slots, *h),
            _evaluated(p) if spec.has_head else p.hidden,
            varies=(3,),
            compiler_options=evaluation_options(spec),
        )
        self.add_baseline = self._program(
            "baseline",
            passes.add_baseline,
            (slots, p.partial, slots),
            slots,
            compiler_options=_SHORT,
        )

    @property
    def _codes(self) -> tuple[str, ...]:
        """Tells the code of optimizers apart that is not in this package."""
        slots = self._spec.slots
        names = () if slots is None else slots.optimizers
        return tuple(OPTIMIZERS[name].fingerprint for name in names)

    def _make_updates(self) -> None:
        p, slots = self._placement, self._placement.by_slot
        division, pending = self._division, self.state_specs.pending
        self.exchange = self._program(
            "sum over devices",
            functools.partial(
                exchange,
                axes=p.summed_axes,
                whole_axes=p.whole_axes,
                divided=tuple(division.weights),
            ),
            (pending, slots),
            pending,
            donate_argnums=0,
            compiler_options=_SHORT,
        )
        self.measure = self._program(
            "gradient norms",
            functools.partial(measure, divided=tuple(division.weights)),
            (pending,),
            slots,
            compiler_options=_SHORT,
        )
        self.step = self._program(
            "optimizer step",
            functools.partial(
                optimizer_step,
                linears=self._spec.linears_of_stacks,
                division=division,
            ),
            (self.state_specs, slots, slots, p.by_linear_and_slot),
            (self.state_specs, slots),
            varies=(2,),
            donate_argnums=0,
            compiler_options=_SHORT,
        )

    def _make_slots(self, slots: SlotShape) -> None:
        spec, p = self._spec, self._placement

        def program(what: str, run: Any, varies: Sequence[int], **options) -> Program:
            # `partial` makes a new function, because jit caches programs by function.
            jitted = jax.jit(functools.partial(run), compiler_options=_SHORT, **options)
            identity = "training", what, spec, p, _SHORT, self._codes
            return Program(jitted, what, identity, varies=varies)

        division, state = self._division, self.state_specs
        given = self._shapes, slots.num_slots, p, slots.optimizers, division
        self.empty = program(
            "empty slots",
            functools.partial(empty_state, *given),
            (),
            out_shardings=p.all_committed(state),
        )
        written = None if p.mesh is None else p.shardings(state)
        self.write_slot = program(
            "writing a slot",
            functools.partial(write_slot, optimizers=slots.optimizers),
            (2,),
            donate_argnums=0,
            out_shardings=written,
        )
        self.empty_reference = program(
            "empty references",
            functools.partial(zero_tables, self._shapes),
            (),
            out_shardings=p.all_committed(state.params),
        )
        self.write_reference = program(
            "writing a reference",
            write_reference,
            (),
            donate_argnums=0,
            out_shardings=None if written is None else written.params,
        )
        whole = None if p.mesh is None else p.sharding(PartitionSpec())
        read = functools.partial(read_slot_rows, where=whole)
        self.read_slot = program("reading a slot", read, (0,), out_shardings=whole)
        if any(map(evaluates_other_weights, slots.optimizers)):
            self.evaluation_weights = self._program(
                "weights to evaluate",
                functools.partial(evaluation_weights, optimizers=slots.optimizers),
                (state.params, state.optimizer_state, p.by_slot),
                state.params,
                compiler_options=_SHORT,
            )

    def _make_replicas(self) -> None:
        p, slots = self._placement, self._placement.by_slot
        params, pending = self.state_specs.params, self.state_specs.pending
        divided = self._division.weights
        self.read_part = self._program(
            "gradients of a replica",
            functools.partial(read_part, whole_axes=p.whole_axes, divided=divided),
            (pending, slots),
            (slots, slots),
            compiler_options=_SHORT,
        )
        self.add_part = self._program(
            "sum over replicas",
            functools.partial(add_part, num_tensor=p.num_tensor, divided=divided),
            (pending, slots, slots, slots),
            pending,
            donate_argnums=0,
            compiler_options=_SHORT,
        )
        self.write_weights = self._program(
            "weights of a replica",
            functools.partial(write_weights, divided=divided),
            (params, pending, slots, slots),
            (params, pending),
            donate_argnums=(0, 1),
            compiler_options=_SHORT,
        )

    def make_references(self, empty: MakeTables | None = None) -> ReferenceTable | None:
        """Makes references that are all the base; None: no adapter can be one.

        Args:
            empty: Makes their weights or shapes; None: zeros on the devices.
        """
        assert self._spec.slots is not None
        if not self._spec.slots.has_references:
            return None
        empty = empty or self.empty_reference.prepare().compiled()
        return ReferenceTable(self._spec, empty, self.write_reference, self._placement)

    def make_empty(self) -> AdapterState:
        """Makes the state of empty slots; a run logs the program with its others."""
        return self.empty.prepare().compiled()()

    def prepare_passes(
        self,
        base: Mapping[str, Any],
        state: AdapterState,
        settings: SlotSettings,
        limits: Limits,
        name: str = "",
    ) -> PreparedPasses:
        """Starts to compile the forward and backward pass as a run calls them.

        Args:
            base: Frozen weights of the stage, or their shapes.
            state: State of the slots.
            settings: Settings of the slots.
            limits: Limits of the microbatches.
            name: What the log adds to the name of a pass; empty: there is one stage.
        """
        spec, keys = self._spec, key_shapes(self._spec, self._placement)
        hidden = self.hidden_shape(limits)
        h = () if spec.has_embedding else (hidden,)
        inputs = settings, self.batch_shapes(limits), keys, *h
        reference, params = None, state.params
        if has_reference(spec.options.objectives):
            reference = self.prepare_evaluation(base, params, settings, limits, name)
        if spec.has_head:
            args = base, state.params, state.pending, *inputs
            what = f"forward and backward pass{name}" if name else None
            last = self.accumulate.prepare(*args, what=what)
            return PreparedPasses(last=last, reference=reference)
        args = base, state.params, *inputs
        forward = self.forward.prepare(*args, what=f"forward pass{name}")
        where = self._placement.sharding(self._placement.by_device)
        kept = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            forward.out_info[1],
        )
        backward = self.backward.prepare(
            *(base, state.params, kept, state.pending, hidden),
            what=f"backward pass{name}",
            # It is the transpose of this trace, which a loaded program has not made.
            before_tracing=lambda: self.forward.jitted.eval_shape(*args),
        )
        return PreparedPasses(last=backward, forward=forward, reference=reference)

    def prepare_evaluation(
        self,
        base: Mapping[str, Any],
        params: Mapping[str, Any],
        settings: SlotSettings,
        limits: Limits,
        name: str = "",
    ) -> Prepared:
        """Starts to compile the evaluation of a microbatch; see `prepare_passes`.

        The parameters may be given by their shapes.
        """
        keys = SlotKeys(baseline=baseline_shape(self._spec, self._placement))
        h = () if self._spec.has_embedding else (self.hidden_shape(limits),)
        args = base, params, settings, self.batch_shapes(limits), keys, *h
        return self.evaluate.prepare(*args, what=f"evaluation{name}")

    def batch_shapes(self, limits: Limits) -> PackedBatch:
        """Shapes of the rows of a tick."""
        return batch_shapes(limits, self._placement, self._spec.options.objectives)

    def hidden_shape(self, limits: Limits) -> jax.ShapeDtypeStruct:
        """Shape of the hidden states that go from stage to stage."""
        num_rows = self._placement.num_lanes * limits.capacity
        return jax.ShapeDtypeStruct(
            (num_rows, self._spec.config.hidden_size),
            self._spec.options.dtype,
            sharding=self._placement.sharding(self._placement.hidden),
        )

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the name of their attribute."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Program)}

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return sum(one.num_compilations() for one in self.programs.values())


def _evaluated(p: StageSharding) -> JobLosses:
    """Partition specs of the losses of an evaluation, which has those of rows."""
    sums, rows = cast(Any, (p.partial, p.rows))
    return JobLosses(loss=sums, metrics=sums, is_finite=sums, nll=rows)


@functools.lru_cache(maxsize=32)
def compiled_steps(
    spec: DecoderSpec, placement: StageSharding = ONE_DEVICE
) -> CompiledSteps:
    """The jitted functions of a stage, shared by all trainers of this process."""
    return CompiledSteps(spec, placement)
