"""The passes of a section over a microbatch; see `jaxlora.models.sections`."""

import dataclasses
from collections.abc import Sequence

from jaxtyping import Array

from jaxlora.adapters.optimizer import Pending
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.stage_sharding import StageSharding
from jaxlora.data.pack import PackedBatch
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.sections import (
    Position,
    own_settings,
    own_tables,
    with_own_tables,
)
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.train.execute.stage_passes import Hidden, StagePasses


class SectionPasses:
    """The passes of `StagePasses` with the slots of a whole decoder.

    Each takes all slot tables, pending gradients and settings, and the position of the
    section, by which it finds its own.
    """

    def __init__(self, spec: DecoderSpec, placement: StageSharding):
        """Makes the functions.

        Args:
            spec: The section.
            placement: The devices of the decoder.
        """
        self._spec, self._passes = spec, StagePasses(spec, placement)
        self._parts = int(placement.num_devices > 1)  # axes of pending gradients more

    def accumulate(
        self,
        base: Base,
        params: Tables,
        pending: Pending,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
        at: Position,
        h: Hidden,
    ) -> tuple[Pending, JobLosses, Hidden | None]:
        """Runs the head forward and backward; see `StagePasses.accumulate`."""
        own = self._tables(params, at), self._pending(pending, at)
        inputs = self._inputs(settings, batch, keys, at)
        new, losses, dh = self._passes.accumulate(base, *own, *inputs, h)
        return self._replaced(pending, new, at), losses, dh

    def forward(
        self,
        base: Base,
        params: Tables,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
        at: Position,
        h: Hidden | None = None,
    ) -> tuple[Hidden, tuple[Array, ...]]:
        """Runs another section; see `StagePasses.forward`."""
        inputs = self._inputs(settings, batch, keys, at)
        return self._passes.forward(base, self._tables(params, at), *inputs, h)

    def backward(
        self,
        base: Base,
        params: Tables,
        residuals: Sequence[Array],
        pending: Pending,
        at: Position,
        dh: Hidden,
    ) -> tuple[Pending, Hidden | None]:
        """Runs another section backward; see `StagePasses.backward`."""
        own = self._pending(pending, at)
        new, dh_in = self._passes.backward(
            base, self._tables(params, at), residuals, own, dh
        )
        return self._replaced(pending, new, at), dh_in

    def evaluate(
        self,
        base: Base,
        params: Tables,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
        at: Position,
        h: Hidden | None = None,
    ) -> Hidden | JobLosses:
        """Runs a section without dropout; see `StagePasses.evaluate`."""
        inputs = self._inputs(settings, batch, keys, at)
        return self._passes.evaluate(base, self._tables(params, at), *inputs, h)

    def _tables(self, params: Tables, at: Position) -> dict[str, Array]:
        return own_tables(self._spec, params, at, axis=1)

    def _inputs(
        self, settings: SlotSettings, batch: PackedBatch, keys: SlotKeys, at: Position
    ) -> tuple[SlotSettings, PackedBatch, SlotKeys]:
        settings = own_settings(self._spec, settings, at)
        return settings, batch, dataclasses.replace(keys, first_layer=at.layer)

    def _pending(self, pending: Pending, at: Position) -> Pending:
        axis = 1 + self._parts
        own = own_tables(self._spec, pending.gradients, at, axis=axis)
        return dataclasses.replace(pending, gradients=own)

    def _replaced(self, pending: Pending, new: Pending, at: Position) -> Pending:
        axis, old = 1 + self._parts, pending.gradients
        found = with_own_tables(self._spec, old, new.gradients, at, axis=axis)
        return dataclasses.replace(new, gradients=found)
