"""Frozen adapters with which the objectives of jobs compare, beside the slots."""

from collections.abc import Callable

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.settings_table import SettingsTable
from jaxlora.adapters.slot_state import padded_rows
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec

MakeTables = Callable[[], Tables]
# The compiled `write_reference`.
WriteReference = Callable[..., Tables]


class ReferenceTable:
    """Weights and settings of the shapes of the slots, for the reference of each slot.

    A pass of the references is then the program of an evaluation, with these in the
    place of the slots': the rows of a microbatch, and the slot of each block of them,
    are the same. Nothing here is trained, so there are neither gradients nor states of
    optimizers.

    Attributes:
        params: The weights; zero in slots whose reference is the base.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        empty: MakeTables,
        write: WriteReference,
        placement: StageSharding = ONE_DEVICE,
    ):
        """Makes references that are all the base.

        Args:
            spec: The decoder, or one stage of it.
            empty: Makes weights of zeros.
            write: The compiled function `write_reference` of the decoder.
            placement: Where the slots live.
        """
        self._spec, self._write = spec, write
        self._settings = SettingsTable(spec, placement)
        self.params = empty()

    @property
    def settings(self) -> SlotSettings:
        """Settings of the references."""
        return self._settings.settings

    def load(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot; of a stage, its own part of it."""
        rows = padded_rows(self._spec.stacks, self.params, adapter.by_path())
        self.params = self._write(self.params, np.int32(slot), rows)
        self._settings.set({slot: adapter})

    def clear(self, slot: int) -> None:
        """Makes the base the reference of a slot, whose weights then have no effect."""
        self._settings.set({slot: None})
