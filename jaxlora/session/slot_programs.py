"""Programs that take a few of many slots, and cost nothing for the others.

The table of all slots stays where it is. A pass gathers the slots that have rows in its
microbatch, and its rows know them by their place among these. So its time and memory
do not depend on the number of slots.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlora.adapters.optimizer import (
    AdapterState,
    OptimizerInputs,
    Pending,
    slot_step,
)
from jaxlora.adapters.optimizers.state import Kind, Tables
from jaxlora.adapters.parked_slot import PARAMS
from jaxlora.adapters.slot_state import divided_rows, write_slot
from jaxlora.models.forward import (
    Base,
    JobLosses,
    SlotKeys,
    evaluation_options,
    training_options,
)
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.memory.inputs import batch_shapes
from jaxlora.programs.program import Prepared, Program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.stage_passes import StagePasses
from jaxlora.train.execute.step import CompiledSteps

Slots = Int[Array | np.ndarray, " F"]


def with_few_slots(spec: DecoderSpec, number: int) -> DecoderSpec:
    """Returns a decoder with fewer slots, as programs here run it."""
    assert spec.slots is not None
    slots = dataclasses.replace(spec.slots, num_slots=number)
    return dataclasses.replace(spec, slots=slots)


class SlotPrograms:
    """The programs of a session, each with one program for each size of a microbatch.

    Attributes:
        most: Number of slots F that a pass takes.
        accumulate: Forward and backward pass, which adds to pending gradients.
        evaluate: Forward pass.
        step: Optimizer step of one slot.
        read: Copies the rows of a slot, flat.
        read_finite: Copies whether the gradients of a slot are finite so far.
        write: Replaces the rows of a slot, and empties its gradients.
        write_gradients: Replaces the gradients of a slot.
    """

    def __init__(self, steps: CompiledSteps, most: int):
        """Makes the programs; none is traced yet.

        Args:
            steps: Programs of all slots, on one device.
            most: Number of slots that a pass takes.
        """
        arguments = steps.arguments
        spec = with_few_slots(arguments.spec, most)
        self.most, self._steps = most, steps
        self._passes = StagePasses(spec, arguments.placement)
        own = f"of {most} slots"
        self.accumulate = arguments.program(
            f"training step {own}",
            self._accumulate,
            ("base", "params", "pending", "settings", "slots", "batch"),
            ("pending", "losses"),
            training_options(spec),
        )
        self.evaluate = arguments.program(
            f"evaluation {own}",
            self._evaluate,
            ("base", "params", "settings", "slots", "batch"),
            "losses",
            evaluation_options(spec),
        )
        step = functools.partial(slot_step, linears=spec.linears_of_stacks)
        self.step = arguments.program(
            "optimizer step of a slot",
            step,
            ("state", "slot", "inputs", "rank"),
            ("state", "result"),
        )
        self.read = steps.read_slot
        self.read_finite = arguments.program(
            "reading whether gradients are finite",
            lambda is_finite, slot: is_finite[slot],
            ("finite", "slot"),
            "one",
        )
        self.write = arguments.program(
            "bringing a slot back", _with_rows, ("state", "slot", "flat"), "state"
        )
        self.write_gradients = arguments.program(
            "bringing gradients back",
            _with_gradients,
            ("pending", "slot", "gradient", "one"),
            "pending",
        )

    def _accumulate(
        self,
        base: Base,
        params: Tables,
        pending: Pending,
        settings: SlotSettings,
        slots: Slots,
        batch: PackedBatch,
    ) -> tuple[Pending, JobLosses]:
        """Runs both passes.

        Args:
            base: Frozen weights.
            params: Weights of all slots.
            pending: Gradients of all slots.
            settings: Settings of all slots.
            slots: The slots that rows of the batch can have, each once.
            batch: The rows, each with the place of its slot among `slots`.

        Returns:
            The gradients of all slots with those of the batch, and its losses.
        """
        own, losses, _ = self._passes.accumulate(
            *(base, _take(params, slots), _take(pending, slots)),
            *(_settings(settings, slots), batch, SlotKeys()),
        )
        return _put(pending, slots, own), losses

    def _evaluate(
        self,
        base: Base,
        params: Tables,
        settings: SlotSettings,
        slots: Slots,
        batch: PackedBatch,
    ) -> JobLosses:
        """Runs a forward pass; see `_accumulate`."""
        found = self._passes.evaluate(
            *(base, _take(params, slots)),
            *(_settings(settings, slots), batch, SlotKeys()),
        )
        assert isinstance(found, JobLosses)
        return found

    def taken(self, slots: Sequence[int], num_slots: int) -> np.ndarray:
        """Returns slots for a pass: these, and others that have no rows.

        Args:
            slots: The slots that have rows, at most `most` of them.
            num_slots: Number of all slots.
        """
        others = (slot for slot in range(num_slots) if slot not in slots)
        found = [*slots, *itertools.islice(others, self.most - len(slots))]
        return np.array(found, np.int32)

    def prepare(
        self,
        limits: Limits,
        sizes: Sequence[int],
        inputs: OptimizerInputs,
        *,
        is_training: bool = False,
    ) -> Iterator[Prepared]:
        """Starts to load or to compile all programs as a session calls them.

        Args:
            limits: Limits of the largest microbatch.
            sizes: The sizes of microbatches, in tokens.
            inputs: Inputs of an optimizer step of one slot.
            is_training: Whether forward passes alone are left out.
        """
        steps = self._steps
        arguments, spec = steps.arguments, steps.arguments.spec
        shapes = steps.shapes(limits)
        row = sum(math.prod(x.shape[1:]) for x in spec.adapter_shapes().values())
        flat = jax.ShapeDtypeStruct((row,), "float32")
        kinds = PARAMS, *shapes["optimizer_state"]
        shapes |= {
            "slots": jax.ShapeDtypeStruct((self.most,), "int32"),
            "inputs": inputs,
            "finite": shapes["pending"].is_finite,
            "one": jax.ShapeDtypeStruct((), "bool"),
            "flat": dict.fromkeys(kinds, flat),
            "gradient": flat,
        }
        for size in sorted(sizes, reverse=True):
            given = dataclasses.replace(limits, capacity=size)
            batch = batch_shapes(given, arguments.placement, spec.options.objectives)
            own = shapes | arguments.placed({"batch": batch})
            suffix = f", {size} tokens"
            yield self.accumulate.prepare_from(own, suffix)
            if not is_training:
                yield self.evaluate.prepare_from(own, suffix)
        for one in (self.step, self.read_finite, self.write, self.write_gradients):
            yield one.prepare_from(shapes, "")
        yield from steps.prepare_slots(shapes, "")

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the name of their attribute."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Program)}

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return sum(one.num_compilations() for one in self.programs.values())


@functools.lru_cache(maxsize=32)
def slot_programs(steps: CompiledSteps, most: int) -> SlotPrograms:
    """The programs, which sessions of a process share."""
    return SlotPrograms(steps, most)


_UNIQUE: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}


def _take[T](tree: T, slots: Slots) -> T:
    """Gathers rows of tables."""
    return jax.tree.map(lambda table: table.at[slots].get(**_UNIQUE), tree)


def _put[T](tree: T, slots: Slots, rows: T) -> T:
    """Writes rows into tables."""

    def put(table: Array, own: Array) -> Array:
        return table.at[slots].set(own, **_UNIQUE)

    return jax.tree.map(put, tree, rows)


def _with_rows(
    state: AdapterState, slot: Any, flat: dict[Kind, Float[Array, " N"]]
) -> AdapterState:
    """Replaces the rows of a slot, and empties its gradients."""
    shapes = {name: table.shape[1:] for name, table in state.params.items()}
    rows = {kind: divided_rows(own, shapes) for kind, own in flat.items()}
    return write_slot(state, slot, rows)


def _with_gradients(
    pending: Pending, slot: Any, flat: Float[Array, " N"], is_finite: Any
) -> Pending:
    """Replaces the gradients of a slot."""
    put = jax.lax.dynamic_update_index_in_dim
    tables = pending.gradients
    rows = divided_rows(flat, {name: table.shape[1:] for name, table in tables.items()})
    own: Any = {name: put(t, rows[name], slot, 0) for name, t in tables.items()}
    finite = put(pending.is_finite, is_finite, slot, 0)
    return Pending(gradients=own, is_finite=finite)


def _settings(settings: SlotSettings, slots: Slots) -> SlotSettings:
    return SlotSettings((key, x[:, slots]) for key, x in settings.items())
