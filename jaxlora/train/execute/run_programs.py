"""All programs of a run, which are compiled side by side before its first step."""

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxlora.adapters.exchange import exchanged_slots
from jaxlora.adapters.slot_state import row_shapes
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.stage_sharding import REPLICATED
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.common.background import in_background
from jaxlora.distributed import processes
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.memory.inputs import baseline_shape
from jaxlora.programs.program import (
    Prepared,
    announce,
    counting,
    finish,
    shapes_of,
)
from jaxlora.scheduler import Limits
from jaxlora.train.execute.layout import Layout, PlacedReplica, Stage
from jaxlora.train.execute.optimizer_inputs import optimizer_inputs
from jaxlora.train.execute.pass_programs import PreparedPasses

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPrograms:
    """The programs of a run while they are compiled.

    Attributes:
        passes: Forward and backward passes of each stage.
        further: Those of each further replica.
        others: Optimizer steps, evaluations and what else the run calls.
    """

    passes: tuple[PreparedPasses, ...]
    others: tuple[Prepared, ...]
    further: tuple[PreparedPasses, ...] = ()

    @staticmethod
    def start(
        layout: Layout, slots: StagedSlots, limits: Limits, *, evaluates: bool
    ) -> "RunPrograms":
        """Starts to compile the programs, or to load them; the base is not needed.

        Args:
            layout: The stages.
            slots: The slots.
            limits: Limits of the microbatches.
            evaluates: Whether a job has held-out samples.
        """
        passes, further, others = [], [], []
        # The passes take longest.
        for (stage, table), name in _named(layout, slots):
            base = stage.base_shapes()
            found = stage.steps.passes.prepare(
                base, table.state, table.settings, limits, name
            )
            passes.append(found)
        for (stage, table), name in _named(layout, slots):
            if evaluates:
                others += _evaluation(stage, table, limits, name)
            others += _updates(stage, table, len(layout.stages), name)
        if layout.further:
            table = slots.tables[0]
            row, found = _sums_of_replicas(layout.stages[0], table)
            others += found
            for number, one in enumerate(layout.further, start=2):
                own, *found = _replica(one, table, row, limits, number)
                further.append(own)
                others += found
        found = RunPrograms(
            passes=tuple(passes), further=tuple(further), others=tuple(others)
        )
        announce(found.each)
        return found

    @property
    def each(self) -> list[Prepared]:
        """The programs, one by one."""
        passes = *self.passes, *self.further
        found = *(p for one in passes for p in one.each), *self.others
        return [*dict.fromkeys(found)]  # the reference runs the evaluation

    def compiled_passes(self) -> tuple[StagePrograms, ...]:
        """Waits for the passes of all stages."""
        with counting(self.each):
            return tuple(one.compiled() for one in self.passes)

    def compiled_further(self) -> tuple[StagePrograms, ...]:
        """Waits for the passes of the further replicas."""
        with counting(self.each):
            return tuple(one.compiled() for one in self.further)

    def finish(self) -> None:
        """Waits for all programs, and logs how long they took."""
        with counting(self.each):
            finish(self.each)


class FurtherPrograms:
    """The passes of smaller microbatches, compiled beside training in a thread.

    Training begins with the largest shape. Which ticks have a smaller one does not
    depend on when its programs are ready: training waits for them.
    """

    def __init__(self, layout: Layout, slots: StagedSlots, shapes: Sequence[Limits]):
        """Starts to compile the programs, or to load them.

        Args:
            layout: The stages.
            slots: The slots.
            shapes: Limits of the microbatches of each shape, in the order in which they
                are compiled.
        """
        # Training replaces the arrays meanwhile.
        self._each = [
            (stage, shapes_of((table.state, table.settings)), name)
            for (stage, table), name in _named(layout, slots)
        ]
        self._shapes, self._is_closed = tuple(shapes), False
        self._compiled: dict[int, Future[None]] = {s.capacity: Future() for s in shapes}
        if shapes and processes.count() > 1:  # in the same order on all of them
            self._compile()
        elif shapes:
            in_background(self._compile)

    def _compile(self) -> None:
        for limits in self._shapes:
            future = self._compiled[limits.capacity]
            try:
                self._compile_one(limits)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _compile_one(self, limits: Limits) -> None:
        for stage, (state, settings), name in self._each:
            if self._is_closed:
                return
            found = stage.steps.passes.prepare(
                *(stage.base_shapes(), state, settings, limits),
                f", {limits.capacity} tokens{name}",
            )
            announce(found.each)
            finish(found.each)

    def wait_for(self, rows: int) -> None:
        """Waits for the programs of microbatches of so many rows."""
        future = self._compiled.get(rows)
        if future is None or (future.done() and future.exception() is None):
            return
        began = time.perf_counter()
        future.result()
        logger.info(
            "waited %.1f s for the programs of microbatches of %d tokens",
            time.perf_counter() - began,
            rows,
        )

    def __enter__(self) -> "FurtherPrograms":
        return self

    def __exit__(self, *_) -> None:
        """Compiles no further program, and waits for the one that is compiled now."""
        self._is_closed = True
        for future in self._compiled.values():
            future.exception()


def _named(layout: Layout, slots: StagedSlots):
    """Yields each stage with its slots, and what the log adds to a program's name."""
    num_stages = len(layout.stages)
    pairs = zip(layout.stages, slots.tables, strict=True)
    for number, pair in enumerate(pairs, start=1):
        yield pair, f", stage {number} of {num_stages}" if num_stages > 1 else ""


def _sums_of_replicas(stage: Stage, table: SlotTable) -> tuple[Any, list[Prepared]]:
    """Starts to compile what the first replica does with the gradients of others.

    Returns:
        Shape of the weights of a slot, which it sends to them; and the programs.
    """
    steps, placement = stage.steps, stage.placement
    slot, pending = jax.ShapeDtypeStruct((), "int32"), table.state.pending
    row = steps.read_slot.prepare(table.state.params, slot)
    flat, where = row.out_info, placement.sharding(REPLICATED)
    part = (
        jax.ShapeDtypeStruct(flat.shape, flat.dtype, sharding=where),
        jax.ShapeDtypeStruct((), "bool", sharding=where),
    )
    return flat, [row, steps.add_part.prepare(pending, slot, *part)]


def _replica(
    one: PlacedReplica, table: SlotTable, row: Any, limits: Limits, number: int
) -> tuple[PreparedPasses, Prepared, Prepared, Prepared]:
    """Starts to compile the programs of a further replica.

    Args:
        one: The replica.
        table: Slots of the first replica.
        row: Shape of the weights of a slot, as one array.
        limits: Limits of a microbatch of the first replica.
        number: Number of the replica, from 1 on.

    Returns:
        Its passes, and what makes slots, takes weights and reads gradients.
    """
    stage, name = one.stage, f", replica {number}"
    limits = dataclasses.replace(limits, capacity=one.capacity)
    steps, placement = stage.steps, stage.placement
    where = placement.sharding(REPLICATED)

    def placed(tree: Any, places: Any = None) -> Any:
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            tree,
            jax.tree.map(lambda _: where, tree) if places is None else places,
        )

    empty, slot = steps.empty.prepare(), jax.ShapeDtypeStruct((), "int32")
    state = placed(empty.out_info, placement.shardings(steps.state_specs))
    settings = placed(table.settings_on_host())
    args = stage.base_shapes(), state, settings, limits, name
    weights = state.params, state.pending, slot, placed(row)
    return (
        steps.passes.prepare(*args),
        empty,
        steps.write_weights.prepare(*weights, what=f"weights{name}"),
        steps.read_part.prepare(state.pending, slot, what=f"gradients{name}"),
    )


def _evaluation(
    stage: Stage, table: SlotTable, limits: Limits, name: str
) -> list[Prepared]:
    steps, baseline = stage.steps, baseline_shape(stage.spec, stage.placement)
    found = steps.passes.prepare_evaluation(
        stage.base_shapes(), table.state.params, table.settings, limits, name
    )
    if baseline is None:
        return [*found]
    is_new = jax.ShapeDtypeStruct(baseline.shape, "bool")
    loss = found[-1].out_info.loss
    sums = jax.ShapeDtypeStruct(
        loss.shape,
        loss.dtype,
        sharding=stage.placement.sharding(stage.placement.rows),
    )
    what = f"baseline{name}"
    return [*found, steps.add_baseline.prepare(baseline, sums, is_new, what=what)]


def _updates(
    stage: Stage, table: SlotTable, num_stages: int, name: str
) -> list[Prepared]:
    """Starts to compile what follows the passes of a global batch, and comes first."""
    steps, placement, state = stage.steps, stage.placement, table.state
    assert stage.spec.slots is not None
    found = []
    measured: Sequence[Any] = ()
    if num_stages > 1:
        norms = steps.measure.prepare(state.pending, what=f"gradient norms{name}")
        where = placement.sharding(REPLICATED)
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            norms.out_info,
        )
        found, measured = [norms], (one,) * num_stages
    for slot in exchanged_slots([0], placement):
        what = f"sum over devices{name}"
        found.append(steps.exchange.prepare(state.pending, slot, what=what))
    inputs = optimizer_inputs({}, {}, stage.spec.slots)
    step = steps.step.prepare(
        *(state, inputs, tuple(measured), table.settings.rank),
        what=f"optimizer step{name}",
    )
    number = jax.ShapeDtypeStruct((), "int32")
    writes = list(_references(stage, table, name))
    writes += [
        steps.write_slot.prepare(state, number, *rows, what=f"{what}{name}")
        for what, rows in row_shapes(stage.spec).items()
    ]
    reads = {
        steps.read_slot.prepare(kind, number, what=f"reading a slot{name}"): None
        for kind in table.kept.values()
    }
    if steps.evaluation_weights is not None:
        args = state.params, state.optimizer_state, inputs.optimizer
        what = f"weights to evaluate{name}"
        found.append(steps.evaluation_weights.prepare(*args, what=what))
    return [*found, step, steps.empty.prepare(), *writes, *reads]


def _references(stage: Stage, table: SlotTable, name: str) -> Iterator[Prepared]:
    """Starts to compile what writes adapters that are references, if any can be."""
    assert stage.spec.slots is not None
    if not stage.spec.slots.has_references:
        return
    params, _ = table.of_reference
    shapes = params.items()
    rows = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in shapes}
    number = jax.ShapeDtypeStruct((), "int32")
    what = f"writing a reference{name}"
    yield stage.steps.write_reference.prepare(params, number, rows, what=what)
