"""All programs of a run, which are compiled side by side before its first step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxlora.adapters.exchange import exchange_rounds
from jaxlora.adapters.slots import SlotTable, row_shapes
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.memory.footprint import StagePrograms
from jaxlora.programs.program import Prepared, announce, finish
from jaxlora.scheduler import Limits
from jaxlora.train.execute.layout import Layout, Stage
from jaxlora.train.execute.staged_stream import optimizer_inputs
from jaxlora.train.execute.step import PreparedPasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPrograms:
    """The programs of a run while they are compiled.

    Attributes:
        passes: Forward and backward passes of each stage.
        others: Optimizer steps, evaluations and what else the run calls.
    """

    passes: tuple[PreparedPasses, ...]
    others: tuple[Prepared, ...]

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
        passes, others = [], []
        # The passes take longest.
        for (stage, table), name in _named(layout, slots):
            base = stage.base_shapes()
            found = stage.steps.prepare_passes(
                base, table.state, table.settings, limits, name
            )
            passes.append(found)
        for (stage, table), name in _named(layout, slots):
            if evaluates:
                others.append(_evaluation(stage, table, limits, name))
            others += _updates(stage, table, len(layout.stages), name)
        found = RunPrograms(passes=tuple(passes), others=tuple(others))
        announce(found.each)
        return found

    @property
    def each(self) -> list[Prepared]:
        """The programs, one by one."""
        return [*(p for one in self.passes for p in one.each), *self.others]

    def compiled_passes(self) -> tuple[StagePrograms, ...]:
        """Waits for the passes of all stages."""
        return tuple(one.compiled() for one in self.passes)

    def finish(self) -> None:
        """Waits for all programs, and logs how long they took."""
        finish(self.each)


def _named(layout: Layout, slots: StagedSlots):
    """Yields each stage with its slots, and what the log adds to a program's name."""
    num_stages = len(layout.stages)
    pairs = zip(layout.stages, slots.tables, strict=True)
    for number, pair in enumerate(pairs, start=1):
        yield pair, f", stage {number} of {num_stages}" if num_stages > 1 else ""


def _evaluation(stage: Stage, table: SlotTable, limits: Limits, name: str) -> Prepared:
    steps = stage.steps
    h = () if stage.spec.has_embedding else (steps.hidden_shape(limits),)
    return steps.evaluate.prepare(
        *(stage.base_shapes(), table.state.params, table.settings),
        *(steps.batch_shapes(limits), *h),
        what=f"evaluation{name}",
    )


def _updates(
    stage: Stage, table: SlotTable, num_stages: int, name: str
) -> list[Prepared]:
    """Starts to compile what follows the passes of a global batch, and comes first."""
    steps, placement, state = stage.steps, stage.placement, table.state
    assert stage.spec.slots is not None
    num_slots, found = stage.spec.slots.num_slots, []
    measured: Sequence[Any] = ()
    if num_stages > 1:
        norms = steps.measure.prepare(state.pending, what=f"gradient norms{name}")
        where = placement.sharding(placement.by_slot)
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            norms.out_info,
        )
        found, measured = [norms], (one,) * num_stages
    for slot in exchange_rounds([0], num_slots, placement):
        what = f"sum over devices{name}"
        found.append(steps.exchange.prepare(state.pending, slot, what=what))
    inputs = optimizer_inputs({}, stage.spec.slots)
    step = steps.step.prepare(
        state, inputs, tuple(measured), what=f"optimizer step{name}"
    )
    rows, number = row_shapes(stage.spec), jax.ShapeDtypeStruct((), "int32")
    write = steps.write_slot.prepare(state, number, rows, what=f"writing a slot{name}")
    return [*found, step, write]
