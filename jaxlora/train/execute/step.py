"""The compiled functions of training: pure, of fixed shapes, for all slots at once."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.exchange import (
    add_part,
    exchange,
    read_part,
    write_weights,
)
from jaxlora.adapters.optimizer import (
    AdapterState,
    empty_state,
    measure,
    optimizer_step,
    state_shardings,
)
from jaxlora.adapters.optimizer_state import evaluation_weights
from jaxlora.adapters.optimizers import OPTIMIZERS, evaluates_other_weights
from jaxlora.adapters.slots import read_slot_rows, write_slot
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.data.pack import PackedBatch
from jaxlora.memory.footprint import StagePrograms
from jaxlora.memory.inputs import batch_shapes, key_shapes
from jaxlora.models.forward import evaluation_options, training_options
from jaxlora.models.spec import DecoderSpec, SlotSettings, SlotShape
from jaxlora.programs.program import Prepared, Program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.stage_passes import StagePasses

# Programs that only read and write arrays, or launch few kernels. XLA would compile
# several kernels for each fusion, time them, and choose by times that vary.
_SHORT: dict[str, Any] = {"xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPasses:
    """The passes of a stage that are being compiled; see `StagePrograms`."""

    last: Prepared
    forward: Prepared | None = None

    @property
    def each(self) -> list[Prepared]:
        """The passes, in the order in which they run."""
        return [one for one in (self.forward, self.last) if one is not None]

    def compiled(self) -> StagePrograms:
        """Waits for the programs."""
        forward = None if self.forward is None else self.forward.compiled()
        return StagePrograms(last=self.last.compiled(), forward=forward)


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
    """

    def __init__(self, spec: DecoderSpec, placement: StageSharding = ONE_DEVICE):
        """Makes the functions; none is traced yet.

        Args:
            spec: The decoder, or one stage of it.
            placement: The devices of the stage.
        """
        self._spec, self._placement = spec, placement
        self.evaluation_weights: Program | None = None
        self._make_passes()
        self._make_updates()
        if spec.slots is not None:
            self._make_slots(spec.slots)
        if placement.mesh is None:
            self._make_replicas()

    def _program(self, what, run, takes, gives, *, varies=(), **options) -> Program:
        jitted = _jitted(run, self._placement, takes, gives, **options)
        identity = "training", what, self._spec, self._placement, options, self._codes
        return Program(jitted, what, identity, varies=varies)

    def _make_passes(self) -> None:
        spec, p = self._spec, self._placement
        passes = StagePasses(spec, p)
        training = training_options(spec)
        base, slots = spec.base_specs(), p.by_slot
        inputs = p.by_linear_and_slot, p.rows  # settings and batch
        h = () if spec.has_embedding else (p.rows,)
        self.accumulate = self._program(
            "training step",
            passes.accumulate,
            (base, slots, p.partial, *inputs, slots, *h),
            (p.partial, p.partial, p.rows),
            varies=(4,),
            donate_argnums=2,
            compiler_options=training,
        )
        self.forward = self._program(
            "forward pass",
            passes.forward,
            (base, slots, *inputs, slots, *h),
            (p.rows, p.rows),
            varies=(3,),
            compiler_options=training,
        )
        self.backward = self._program(
            "backward pass",
            passes.backward,
            (base, slots, p.rows, p.partial, p.rows),
            (p.partial, p.rows),
            varies=(4,),
            donate_argnums=3,
            compiler_options=training,
        )
        self.evaluate = self._program(
            "evaluation",
            passes.evaluate,
            (base, slots, *inputs, slots, *h),
            p.partial if spec.has_head else p.rows,
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
        self.exchange = self._program(
            "sum over devices",
            functools.partial(exchange, axes=p.summed_axes),
            (p.partial, slots),
            p.partial,
            donate_argnums=0,
            compiler_options=_SHORT,
        )
        self.measure = self._program(
            *("gradient norms", measure, (p.partial,), slots), compiler_options=_SHORT
        )
        self.step = self._program(
            "optimizer step",
            functools.partial(optimizer_step, linears=self._spec.linears_of_stacks),
            (self._state_specs, slots, slots, p.by_linear_and_slot),
            (self._state_specs, slots),
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

        given = spec.adapter_shapes(), slots.num_slots, p, slots.optimizers
        self.empty = program(
            "empty slots",
            functools.partial(empty_state, *given),
            (),
            out_shardings=state_shardings(p),
        )
        written = None if p.mesh is None else _shardings(p, self._state_specs)
        self.write_slot = program(
            "writing a slot",
            functools.partial(write_slot, optimizers=slots.optimizers),
            (2,),
            donate_argnums=0,
            out_shardings=written,
        )
        self.read_slot = program("reading a slot", read_slot_rows, (0,))
        if any(map(evaluates_other_weights, slots.optimizers)):
            by_slot = p.by_slot
            self.evaluation_weights = self._program(
                "weights to evaluate",
                functools.partial(evaluation_weights, optimizers=slots.optimizers),
                (by_slot, by_slot, by_slot),
                by_slot,
                compiler_options=_SHORT,
            )

    def _make_replicas(self) -> None:
        self.read_part = self._program(
            *("gradients of a replica", read_part, (), ()), compiler_options=_SHORT
        )
        self.add_part = self._program(
            *("sum over replicas", add_part, (), ()),
            donate_argnums=0,
            compiler_options=_SHORT,
        )
        self.write_weights = self._program(
            *("weights of a replica", write_weights, (), ()),
            donate_argnums=(0, 1),
            compiler_options=_SHORT,
        )

    def make_empty(self) -> AdapterState:
        """Makes the state of empty slots; a run logs the program with its others."""
        return self.empty.prepare().compiled()()

    @property
    def _state_specs(self) -> Any:
        """Partition specs of the state of the slots."""
        specs: Any = AdapterState  # with partition specs in the place of tables
        slots, partial = self._placement.by_slot, self._placement.partial
        return specs(params=slots, optimizer_state=slots, pending=partial)

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
        if spec.has_head:
            args = base, state.params, state.pending, *inputs
            what = f"forward and backward pass{name}" if name else None
            return PreparedPasses(last=self.accumulate.prepare(*args, what=what))
        args = base, state.params, *inputs
        forward = self.forward.prepare(*args, what=f"forward pass{name}")
        kept = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=hidden.sharding),
            forward.out_info[1],
        )
        backward = self.backward.prepare(
            *(base, state.params, kept, state.pending, hidden),
            what=f"backward pass{name}",
            # It is the transpose of this trace, which a loaded program has not made.
            before_tracing=lambda: self.forward.jitted.eval_shape(*args),
        )
        return PreparedPasses(last=backward, forward=forward)

    def batch_shapes(self, limits: Limits) -> PackedBatch:
        """Shapes of the rows of a tick."""
        return batch_shapes(limits, self._placement, self._spec.options.objectives)

    def hidden_shape(self, limits: Limits) -> jax.ShapeDtypeStruct:
        """Shape of the hidden states that go from stage to stage."""
        num_rows = self._placement.num_devices * limits.capacity
        return jax.ShapeDtypeStruct(
            (num_rows, self._spec.config.hidden_size),
            self._spec.options.dtype,
            sharding=self._placement.sharding(self._placement.rows),
        )

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the name of their attribute."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Program)}

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return sum(one.num_compilations() for one in self.programs.values())


def _jitted(
    run: Any, placement: StageSharding, takes: Any, gives: Any, **options
) -> Any:
    """Jits a function that each device of a stage runs on its own part of the arrays.

    Args:
        run: The function.
        placement: The devices.
        takes: Partition specs of its arguments.
        gives: Partition specs of its results.
        **options: Options of `jax.jit`.
    """
    # `partial` makes a new function, because jit caches programs by function.
    if placement.mesh is None:
        return jax.jit(functools.partial(run), **options)
    # Pallas kernels cannot be partitioned, so each device runs them on its own part.
    # Gradients are not summed here: that comes once, before the optimizer step.
    sharded = jax.shard_map(
        run, mesh=placement.mesh, in_specs=takes, out_specs=gives, check_vma=False
    )
    # With other shardings of equal meaning, the next call would compile again.
    return jax.jit(sharded, out_shardings=_shardings(placement, gives), **options)


def _shardings(placement: StageSharding, specs: Any) -> Any:
    def is_spec(x: object) -> bool:
        return isinstance(x, PartitionSpec)

    return jax.tree.map(placement.sharding, specs, is_leaf=is_spec)


@functools.lru_cache(maxsize=32)
def compiled_steps(
    spec: DecoderSpec, placement: StageSharding = ONE_DEVICE
) -> CompiledSteps:
    """The jitted functions of a stage, shared by all trainers of this process."""
    return CompiledSteps(spec, placement)
