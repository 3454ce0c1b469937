"""The ticks that are in a pipeline, and what they hand from stage to stage."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax

from jaxlora.adapters.slots import SlotTable
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.sharding.pipeline import RUN_AHEAD, Pass
from jaxlora.train.execute.feed import ReplicaRows
from jaxlora.train.execute.layout import Stage


class InFlight:
    """Queues the passes of ticks, and keeps what they need between two passes."""

    def __init__(
        self,
        stages: Sequence[Stage],
        bases: Sequence[Base],
        tables: Sequence[SlotTable],
    ):
        """Starts without ticks.

        Args:
            stages: The stages.
            bases: Frozen weights of each stage.
            tables: Slots of each stage.
        """
        self._stages, self._bases, self._tables = stages, bases, tables
        # By tick, its rows, and the keys of its dropout masks.
        self._ticks: dict[int, tuple[ReplicaRows, SlotKeys]] = {}
        # By stage and tick: what a pass waits for, and what a backward pass needs.
        self._hidden: dict[tuple[int, int], jax.Array] = {}
        self._gradients: dict[tuple[int, int], jax.Array] = {}
        self._residuals: dict[tuple[int, int], Sequence[jax.Array]] = {}
        self._of_reference: dict[tuple[int, int], jax.Array] = {}  # its hidden states
        self._unfinished: deque[jax.Array] = deque()  # losses of the last ticks

    def enter(self, tick: int, rows: ReplicaRows, keys: SlotKeys) -> None:
        """Takes in a tick, given its rows and the keys of its dropout masks.

        If references run with it, a forward pass of them on each stage comes just
        before the tick's own.
        """
        self._ticks[tick] = rows, keys

    def __contains__(self, tick: int) -> bool:
        return tick in self._ticks

    def ticks_of(self, slot: int) -> list[int]:
        """Returns the ticks with rows of a slot that have not left the first stage."""
        return [tick for tick, (rows, _) in self._ticks.items() if slot in rows.slots]

    def run(self, one: Pass, baseline: jax.Array | None) -> JobLosses | None:
        """Queues a pass of a tick; returns the losses on the last stage.

        Args:
            one: The pass.
            baseline: The baselines of the slots' global batches, which the last stage
                reads; None: no objective of the run has one.
        """
        try:
            return self._run(one, baseline)
        except jax.errors.JaxRuntimeError as error:
            if len(self._stages) > 1:
                error.add_note(f"stage {one.stage + 1} of {len(self._stages)}")
            raise

    def _run(self, one: Pass, baseline: jax.Array | None) -> JobLosses | None:
        if one.kind == "forward":
            self._forward(one.stage, one.tick)
            return None
        losses = None
        if one.kind == "backward":
            self._backward(one.stage, one.tick)
        else:
            losses = self._forward_backward(one.stage, one.tick, baseline)
            if len(self._stages) > 1:  # few ticks may be unfinished on the last stage
                self._unfinished.append(losses.loss)
                if len(self._unfinished) > RUN_AHEAD:
                    self._unfinished.popleft().block_until_ready()
        if one.stage == 0:
            del self._ticks[one.tick]
        return losses

    def _inputs(
        self, stage: int, tick: int, baseline: jax.Array | None = None
    ) -> tuple[Any, ...]:
        """Settings, rows, keys and hidden states that a forward pass takes."""
        (entered, keys), table = self._ticks[tick], self._tables[stage]
        rows = entered.rows[stage]
        if entered.runs_reference:
            rows = self._refer(stage, tick, rows, baseline)
        keys = dataclasses.replace(keys, baseline=baseline)
        inputs = table.settings, rows, keys
        return inputs if stage == 0 else (*inputs, self._hidden.pop((stage, tick)))

    def _refer(
        self, stage: int, tick: int, rows: PackedBatch, baseline: jax.Array | None
    ) -> PackedBatch:
        """Queues the references' pass over a tick's rows; returns them with its nll."""
        h = () if stage == 0 else (self._of_reference.pop((stage, tick)),)
        params, settings = self._tables[stage].of_reference
        found = self._stages[stage].steps.evaluate(
            *(self._bases[stage], params, settings, rows),
            *(SlotKeys(baseline=baseline), *h),
        )
        if stage == len(self._stages) - 1:
            return dataclasses.replace(rows, reference_nll=found.nll)
        self._of_reference[stage + 1, tick] = self._send(found, stage + 1)
        return rows

    def _forward(self, stage: int, tick: int) -> None:
        params = self._tables[stage].state.params
        run = self._stages[stage].steps.forward
        h, kept = run(self._bases[stage], params, *self._inputs(stage, tick))
        self._residuals[stage, tick] = kept
        self._hidden[stage + 1, tick] = self._send(h, stage + 1)

    def _forward_backward(
        self, stage: int, tick: int, baseline: jax.Array | None
    ) -> JobLosses:
        state = self._tables[stage].state
        run = self._stages[stage].steps.accumulate
        pending, losses, dh = run(
            self._bases[stage],
            state.params,
            state.pending,
            *self._inputs(stage, tick, baseline),
        )
        self._finish(stage, tick, pending, dh)
        return losses

    def _backward(self, stage: int, tick: int) -> None:
        state, key = self._tables[stage].state, (stage, tick)
        kept, dh = self._residuals.pop(key), self._gradients.pop(key)
        run = self._stages[stage].steps.backward
        pending, dh = run(self._bases[stage], state.params, kept, state.pending, dh)
        self._finish(stage, tick, pending, dh)

    def _finish(self, stage: int, tick: int, pending: Any, dh: Any) -> None:
        """Keeps the gradients of a backward pass, and sends on that of its input."""
        table = self._tables[stage]
        table.state = dataclasses.replace(table.state, pending=pending)
        if stage:
            self._gradients[stage - 1, tick] = self._send(dh, stage - 1)

    def _send(self, rows: jax.Array, stage: int) -> jax.Array:
        """Starts the copy of rows to another stage, device by device."""
        placement = self._stages[stage].placement
        return jax.device_put(rows, placement.sharding(placement.hidden))
