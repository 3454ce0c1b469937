"""The compiled functions of training: pure, of fixed shapes, for all slots at once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
from jaxlora.adapters.reference_table import ReferenceTable
from jaxlora.adapters.slot_state import (
    empty_state,
    read_slot_rows,
    state_specs,
    write_reference,
    write_slot,
    zero_tables,
)
from jaxlora.adapters.stage_sharding import ONE_DEVICE, REPLICATED, StageSharding
from jaxlora.models.spec import DecoderSpec, SlotShape
from jaxlora.programs.program import Program
from jaxlora.train.execute.pass_programs import MakeProgram, PassPrograms
from jaxlora.train.execute.section_chain import SectionChain
from jaxlora.train.execute.stage_passes import StagePasses

# Programs that only read and write arrays, or launch few kernels. XLA would compile
# several kernels for each fusion, time them, and choose by times that vary.
_SHORT: dict[str, Any] = {"xla_gpu_autotune_level": 0}


class CompiledSteps:
    """The functions of a stage; each has one program for each batch shape.

    On several devices, each device runs the same program on a microbatch of its own.
    See `StagePasses` for the arguments.

    Attributes:
        passes: Programs of the passes; those of a whole decoder may be a chain.
        accumulate, forward, backward, evaluate: See `PassPrograms`. A chain has neither
            `forward` nor `backward`.
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

    def _program(
        self, what, run, takes, gives, *, varies=(), spec=None, **options
    ) -> Program:
        jitted = self._placement.jit(run, takes, gives, **options)
        own = spec or self._spec
        identity = "training", what, own, self._placement, options, self._codes
        return Program(jitted, what, identity, varies=varies)

    def _make_passes(self) -> None:
        spec, p = self._spec, self._placement
        slots = REPLICATED
        self.passes: PassPrograms | SectionChain
        if spec.options.layers_per_program is None:
            own = PassPrograms(spec, p, self.state_specs, self._program)
            self.passes = own
            self.forward, self.backward = own.forward, own.backward
        else:

            def make(spec: DecoderSpec) -> MakeProgram:
                return functools.partial(self._program, spec=spec)

            self.passes = SectionChain(spec, p, self.state_specs, make)
        self.accumulate: Callable[..., Any] = self.passes.accumulate
        self.evaluate: Callable[..., Any] = self.passes.evaluate
        self.add_baseline = self._program(
            "baseline",
            StagePasses(spec, p).add_baseline,
            (slots, p.rows, slots),
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
        p, slots = self._placement, REPLICATED
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
            (self.state_specs, slots, slots, slots),
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
                (state.params, state.optimizer_state, REPLICATED),
                state.params,
                compiler_options=_SHORT,
            )

    def _make_replicas(self) -> None:
        p, slots = self._placement, REPLICATED
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

    def make_references(self) -> ReferenceTable | None:
        """Makes references that are all the base; None: no adapter can be one."""
        assert self._spec.slots is not None
        if not self._spec.slots.has_references:
            return None
        empty = self.empty_reference.prepare().compiled()
        return ReferenceTable(self._spec, empty, self.write_reference, self._placement)

    def make_empty(self) -> AdapterState:
        """Makes the state of empty slots; a run logs the program with its others."""
        return self.empty.prepare().compiled()()

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the name of their attribute."""
        own = {k: v for k, v in vars(self).items() if isinstance(v, Program)}
        return self.passes.programs | own

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return sum(one.num_compilations() for one in self.programs.values())


@functools.lru_cache(maxsize=32)
def compiled_steps(
    spec: DecoderSpec, placement: StageSharding = ONE_DEVICE
) -> CompiledSteps:
    """The jitted functions of a stage, shared by all trainers of this process."""
    return CompiledSteps(spec, placement)
