"""The compiled functions of training: pure, of fixed shapes, for all slots at once."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.adapters.division import TableDivision
from jaxlora.adapters.exchange import (
    add_part,
    exchange,
    read_part,
    write_weights,
)
from jaxlora.adapters.optimizer import (
    AdapterState,
    OptimizerInputs,
    measure,
    optimizer_step,
)
from jaxlora.adapters.optimizers.state import evaluation_weights
from jaxlora.adapters.optimizers.table import OPTIMIZERS, evaluates_other_weights
from jaxlora.adapters.reference_table import ReferenceTable
from jaxlora.adapters.slot_state import (
    empty_state,
    read_slot_rows,
    row_shapes,
    state_specs,
    write_reference,
    write_slot,
    zero_tables,
)
from jaxlora.adapters.stage_sharding import ONE_DEVICE, REPLICATED, StageSharding
from jaxlora.config import LoraJob
from jaxlora.models.division import table_axes
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.plan.memory.inputs import (
    baseline_shape,
    batch_shapes,
    key_shapes,
)
from jaxlora.programs.program import Prepared, Program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.section_chain import SectionChain
from jaxlora.train.execute.stage_passes import StagePasses
from jaxlora.train.execute.stage_programs import (
    SHORT,
    Arguments,
    PassPrograms,
    Shapes,
    StageProgram,
)
from jaxlora.train.job_state import JobState


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
        arguments: The arguments of the functions.
    """

    def __init__(self, spec: DecoderSpec, placement: StageSharding = ONE_DEVICE):
        """Makes the functions; none is traced yet.

        Args:
            spec: The decoder, or one stage of it.
            placement: The devices of the stage.
        """
        self._spec, self._placement = spec, placement
        self.evaluation_weights: StageProgram | None = None
        self._shapes = spec.adapter_shapes()
        optimizers = () if spec.slots is None else spec.slots.optimizers
        given = table_axes(spec), self._shapes, optimizers, placement.divided_over
        self._division = TableDivision.of(*given)
        state = state_specs(self._shapes, placement, optimizers, self._division)
        self.arguments = Arguments(spec=spec, placement=placement, state=state)
        self.passes: PassPrograms | SectionChain
        if spec.options.layers_per_program is None:
            self.passes = own = PassPrograms(self.arguments)
            self.forward, self.backward = own.forward, own.backward
        else:
            self.passes = SectionChain(self.arguments)
        self.accumulate: Callable[..., Any] = self.passes.accumulate
        self.evaluate: Callable[..., Any] = self.passes.evaluate
        self._make_updates()
        if spec.slots is not None:
            self._make_slots(spec.slots)

    def _make_updates(self) -> None:
        p, division, program = self._placement, self._division, self.arguments.program
        divided, part = tuple(division.weights), functools.partial
        axes = {
            "axes": p.summed_axes,
            "whole_axes": p.whole_axes,
            "divided_axes": p.divided_axes,
        }
        add_baseline = StagePasses(self._spec, p).add_baseline
        takes = "baseline", "losses", "is_new"
        self.add_baseline = program("baseline", add_baseline, takes, "baseline")
        sums = part(exchange, **axes, divided=divided)
        takes = "pending", "slot"
        self.exchange = program("sum over devices", sums, takes, "pending")
        norms = part(measure, division=division)
        self.measure = program("gradient norms", norms, ("pending",), "norms")
        linears = self._spec.own_part.linears_of_stacks
        step = part(optimizer_step, linears=linears, division=division)
        takes, gives = ("state", "inputs", "measured", "rank"), ("state", "result")
        self.step = program("optimizer step", step, takes, gives)
        if p.num_lanes > 1:
            return
        read = part(read_part, whole_axes=p.whole_axes, divided=division.weights)
        takes, gives = ("pending", "slot"), ("row", "is_finite")
        self.read_part = program("gradients", read, takes, gives)
        add = part(add_part, num_tensor=p.num_tensor, divided=division.weights)
        takes = "pending", "slot", "row", "is_finite"
        self.add_part = program("sum over replicas", add, takes, "pending")
        write = part(write_weights, divided=division.weights)
        takes, gives = ("params", "pending", "slot", "row"), ("params", "pending")
        self.write_weights = program("weights", write, takes, gives)

    def _make_slots(self, slots: SlotShape) -> None:
        spec, p = self._spec, self._placement

        def program(what: str, run: Any, *varies: int, **options) -> Program:
            # `partial` makes a new function, because jit caches programs by function.
            jitted = jax.jit(functools.partial(run), compiler_options=SHORT, **options)
            identity = "training", what, spec, p, SHORT, self.arguments.codes
            return Program(jitted, what, identity, varies=varies)

        state = self.arguments.state
        given = self._shapes, slots.num_slots, p, slots.optimizers, self._division
        empty = functools.partial(empty_state, *given)
        zeros = functools.partial(zero_tables, self._shapes)
        placed = p.all_committed(state)
        written = None if p.mesh is None else p.shardings(state)
        self.empty = program("empty slots", empty, out_shardings=placed)
        self.write_slot = program(
            "writing a slot",
            functools.partial(write_slot, optimizers=slots.optimizers),
            2,
            donate_argnums=0,
            out_shardings=written,
        )
        self.empty_reference = program(
            "empty references", zeros, out_shardings=placed.params
        )
        self.write_reference = program(
            "writing a reference",
            write_reference,
            donate_argnums=0,
            out_shardings=None if written is None else written.params,
        )
        whole = None if p.mesh is None else p.sharding(REPLICATED)
        read = functools.partial(read_slot_rows, where=whole)
        self.read_slot = program("reading a slot", read, 0, out_shardings=whole)
        if any(map(evaluates_other_weights, slots.optimizers)):
            self.evaluation_weights = self.arguments.program(
                "weights to evaluate",
                functools.partial(evaluation_weights, optimizers=slots.optimizers),
                ("params", "optimizer_state", "optimizer"),
                "weights",
            )

    # ---- before they are called ----------------------------------------------------

    def shapes(self, limits: Limits) -> Shapes:
        """Shapes of the arguments of the functions, as a run calls them.

        Args:
            limits: Limits of the microbatches.
        """
        spec, p = self._spec, self._placement
        assert spec.slots is not None
        state = self.empty.prepare().out_info
        losses = state.pending.is_finite.shape
        is_slot = jax.ShapeDtypeStruct((spec.slots.num_slots,), "bool")
        width = spec.config.hidden_size
        hidden = jax.ShapeDtypeStruct(
            (p.num_lanes * limits.capacity, width), spec.options.dtype
        )
        placed = self.arguments.placed(
            {
                "base": spec.base_shapes(),
                "state": state,
                "settings": spec.settings_shapes(),
                "losses": jax.ShapeDtypeStruct(losses, "float32"),
                "hidden": hidden,
                "dh": hidden,
                "is_finite": jax.ShapeDtypeStruct((), "bool"),
            }
        )
        inputs, state = optimizer_inputs({}, {}, spec.slots), placed["state"]
        return placed | {
            "params": state.params,
            "optimizer_state": state.optimizer_state,
            "pending": state.pending,
            "rank": placed["settings"]["rank"],
            "batch": batch_shapes(limits, p, spec.options.objectives),
            "keys": key_shapes(spec, p),
            "baseline": baseline_shape(spec, p),
            "is_new": is_slot,
            "slot": jax.ShapeDtypeStruct((), "int32"),
            "inputs": inputs,
            "optimizer": inputs.optimizer,
            "measured": (),
        }

    def prepare_updates(
        self, shapes: Shapes, suffix: str, *, num_stages: int, evaluates: bool
    ) -> Iterator[Prepared]:
        """Starts to compile what comes before and after the passes of a global batch.

        Args:
            shapes: Shapes of the arguments.
            suffix: What the log adds to the name of a program.
            num_stages: Number of stages of the run.
            evaluates: Whether a job has held-out samples.
        """
        if evaluates and shapes["baseline"] is not None:
            yield self.add_baseline.prepare_from(shapes, suffix)
        if num_stages > 1:
            norms = self.measure.prepare_from(shapes, suffix)
            yield norms
            own = self.arguments.placed({"norms": norms.out_info})
            shapes = shapes | {"measured": (own["norms"],) * num_stages}
        if self._placement.num_devices > 1:
            yield self.exchange.prepare_from(shapes, suffix)
        if self.evaluation_weights is not None:
            yield self.evaluation_weights.prepare_from(shapes, suffix)
        yield self.step.prepare_from(shapes, suffix)
        yield from self.prepare_slots(shapes, suffix)

    def prepare_slots(self, shapes: Shapes, suffix: str) -> Iterator[Prepared]:
        """Starts to compile what writes and reads slots."""
        state, slot, spec = shapes["state"], shapes["slot"], self._spec
        assert spec.slots is not None
        yield self.empty.prepare()
        if spec.slots.has_references:
            tables = spec.adapter_shapes().items()
            rows = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in tables}
            args = state.params, slot, rows
            what = f"writing a reference{suffix}"
            yield self.write_reference.prepare(*args, what=what)
        for what, rows in row_shapes(spec).items():
            yield self.write_slot.prepare(state, slot, *rows, what=f"{what}{suffix}")
        for kind in (state.params, *state.optimizer_state.values()):
            yield self.read_slot.prepare(kind, slot, what=f"reading a slot{suffix}")

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


# ---- what goes in and comes out, by slot ---------------------------------------------


def total_losses(losses: Sequence[np.ndarray]) -> np.ndarray:
    """Sums the losses of each slot over ticks and devices in float64.

    Args:
        losses: For each tick, G, or F G with a first axis of devices.
    """
    parts = [np.atleast_2d(np.asarray(loss, np.float64)).sum(axis=0) for loss in losses]
    return np.sum(parts, axis=0)


def by_slot(values: Mapping[int, float], num_slots: int, dtype: Any) -> Any:
    """Puts values into a NumPy array by slot; a jitted call uploads it fastest."""
    out = np.zeros(num_slots, dtype)
    for slot, value in values.items():
        out[slot] = value
    return out


def optimizer_inputs(
    jobs: Mapping[int, JobState], steps: Mapping[int, int], slots: SlotShape
) -> OptimizerInputs:
    """Returns the settings of optimizer steps.

    Args:
        jobs: The jobs, by slot.
        steps: Numbers of the steps, by slot; rows of the other slots are not used.
        slots: The slots.
    """
    # Inputs that stay the same are made once, as this is the host's time of a tick.
    settings = tuple((slot, _Identical(job.settings)) for slot, job in jobs.items())
    fixed = _fixed_inputs(settings, slots)
    rates = {slot: jobs[slot].learning_rate(step) for slot, step in steps.items()}
    return dataclasses.replace(
        fixed,
        step_mask=by_slot(dict.fromkeys(steps, True), slots.num_slots, np.bool_),
        count=by_slot(steps, slots.num_slots, np.int32),
        learning_rate=by_slot(rates, slots.num_slots, np.float32),
    )


class _Identical:
    """Settings of a job, compared by identity: they are frozen, and slow to hash."""

    def __init__(self, job: LoraJob):
        self.job = job

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self.job is other.job

    def __hash__(self) -> int:
        return id(self.job)


@functools.lru_cache(maxsize=16)
def _fixed_inputs(
    jobs: tuple[tuple[int, _Identical], ...], slots: SlotShape
) -> OptimizerInputs:
    """Returns settings that are the same at every step, for all jobs by slot."""

    def row(value: Callable[[LoraJob], float], dtype=np.float32) -> Any:
        values = {slot: value(one.job) for slot, one in jobs}
        return by_slot(values, slots.num_slots, dtype)

    def settings(name: str) -> dict[str, Any]:
        """Settings of an optimizer; 0 in slots with another one."""
        optimizer = OPTIMIZERS[name]
        own = {
            slot: optimizer.settings_of(one.job)
            for slot, one in jobs
            if one.job.optimizer == name
        }
        return {
            key: by_slot({s: own[s][key] for s in own}, slots.num_slots, np.float32)
            for key in optimizer.settings
        }

    number = {name: i for i, name in enumerate(slots.optimizers)}

    return OptimizerInputs(
        step_mask=row(lambda job: False, np.bool_),
        count=row(lambda job: 0, np.int32),
        learning_rate=row(lambda job: 0.0),
        rate_ratio=rate_ratios(row),
        weight_decay=row(lambda job: job.weight_decay),
        settings={name: settings(name) for name in slots.optimizers},
        optimizer=row(lambda job: number[job.optimizer], np.int32),
        max_norm=row(lambda job: job.max_grad_norm or np.inf),
    )
