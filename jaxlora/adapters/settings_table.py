"""The settings of the slots of a decoder, on the host and on its devices."""

from collections.abc import Mapping

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.stage_sharding import ONE_DEVICE, REPLICATED, StageSharding
from jaxlora.models.config import shared_path
from jaxlora.models.slot_settings import (
    SlotSetting,
    SlotSettings,
    settings_in,
    settings_of_base,
)
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_path
from jaxlora.modules.trained_tensors import unpadded
from jaxlora.sharding.global_arrays import put


class SettingsTable:
    """The settings of the slots, by the table of `jaxlora.models.slot_settings`."""

    def __init__(self, spec: DecoderSpec, placement: StageSharding = ONE_DEVICE):
        """Makes the settings of empty slots, with which each gives the base.

        Args:
            spec: The decoder, or one stage of it.
            placement: Where the slots live.
        """
        self._where = placement.sharding(REPLICATED)
        self._places = {path: i for i, path in enumerate(spec.adapted)}
        self._host = settings_of_base(spec.settings_shapes())
        self._of_base: SlotSettings | None = None
        self._settings = self._put(self._host)
        self._changed = SlotSettings()  # since they were put on the devices

    @property
    def settings(self) -> SlotSettings:
        """The settings, on the devices.

        They are put there when they are needed, because many slots may change before.
        """
        if self._changed:
            self._settings = self._settings | self._put(self._changed)
            self._changed = SlotSettings()
        return self._settings

    @property
    def of_base(self) -> SlotSettings:
        """Settings with which every slot gives the base, whatever its weights are."""
        if self._of_base is None:
            base = settings_of_base(self._host, self.settings)
            self._of_base = put(base, self._where)
        return self._of_base

    def on_host(self) -> SlotSettings:
        """Returns a copy of the settings, as arrays of the host."""
        return SlotSettings((key, x.copy()) for key, x in self._host.items())

    def set(self, adapters: Mapping[int, Adapter | None]) -> None:
        """Gives slots the settings of adapters.

        Args:
            adapters: The adapters by slot; None: the slot gives the base.
        """
        for setting in settings_in(self._host):
            values = self._host[setting.key]
            for slot, adapter in adapters.items():
                new = self._of_slot(setting, adapter)
                if not np.array_equal(new, values[:, slot]):
                    values[:, slot] = new
                    self._changed[setting.key] = values
        self._of_base = None

    def _of_slot(self, setting: SlotSetting, adapter: Adapter | None) -> np.ndarray:
        """Makes a setting of a slot, M or 1 and its sizes."""
        num, _, *sizes = self._host[setting.key].shape
        new = np.full((num, *sizes), setting.fill, setting.dtype)
        if adapter is None:
            return new
        if setting.is_of_linears:
            for name, weights in adapter.modules.items():
                place = self._places[shared_path(linear_path(name))]
                new[place] = setting.value(adapter, weights)
        elif (value := setting.value(adapter)) is not None:
            value = np.asarray(value)
            if setting.is_shared:  # the linears here may have fewer features
                value = value[unpadded(tuple(sizes))]
            new[0, *unpadded(value.shape)] = value
        return new

    def _put(self, settings: SlotSettings) -> SlotSettings:
        # Copies, as a pending upload may read or share the memory of its arrays.
        copies = SlotSettings((key, x.copy()) for key, x in settings.items())
        return put(copies, self._where)
