"""The settings of the slots of a decoder, on the host and on its devices."""

import dataclasses

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.stage_sharding import ONE_DEVICE, REPLICATED, StageSharding
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_path
from jaxlora.modules.trained_tensors import unpadded
from jaxlora.sharding.global_arrays import put


class SettingsTable:
    """Scaling, dropout, rank and more of the slots in every adapted linear.

    Attributes:
        settings: The settings, on the devices.
    """

    def __init__(self, spec: DecoderSpec, placement: StageSharding = ONE_DEVICE):
        """Makes the settings of empty slots, with which each gives the base.

        Args:
            spec: The decoder, or one stage of it.
            placement: Where the slots live.
        """
        assert spec.slots is not None
        slots, self._placement = spec.slots, placement
        self._places = {path: i for i, path in enumerate(spec.adapted)}
        shape = len(self._places), slots.num_slots
        self._host = SlotSettings(
            scaling=np.zeros(shape, np.float32),
            dropout=np.zeros(shape, np.float32),
            rank=np.zeros(shape, np.int32),
            trained_rank=np.zeros(shape, np.int32) if slots.keeps_start else None,
            vera=jax.tree.map(_host_zeros, spec.vera_shapes()),
            token_ids=jax.tree.map(_host_zeros, spec.token_id_shapes()),
            trains_whole=jax.tree.map(_host_zeros, spec.trains_whole_shapes()),
        )
        self._is_vera_new = True
        self._of_base: SlotSettings | None = None
        for slot in range(slots.num_slots):
            self._clear(slot)
        self._upload()

    @property
    def of_base(self) -> SlotSettings:
        """Settings with which every slot gives the base, whatever its weights are."""
        if self._of_base is None:
            self._of_base = self._put(base_settings(self._host))
        return dataclasses.replace(self._of_base, vera=self.settings.vera)

    def on_host(self) -> SlotSettings:
        """Returns a copy of the settings, as arrays of the host."""
        return jax.tree.map(np.copy, self._host)

    def set(self, slot: int, adapter: Adapter) -> None:
        """Gives a slot the settings of an adapter."""
        self._clear(slot)
        host = self._host
        for name, weights in adapter.modules.items():
            place = self._places[linear_path(name)], slot
            host.scaling[place] = adapter.scaling(weights)
            host.dropout[place] = adapter.dropout
            host.rank[place] = weights.rank
            if host.trained_rank is not None:
                host.trained_rank[place] = adapter.trained_rank(weights)
        self._set_vera(slot, adapter)
        for module, tokens in adapter.token_rows.items():
            if tokens.is_whole:
                host.trains_whole[module][0, slot] = True
            else:
                host.token_ids[module][0, slot, : len(tokens.ids)] = tokens.ids
        self._upload()

    def clear(self, slot: int) -> None:
        """Gives a slot settings with which it gives the base."""
        self._clear(slot)
        self._upload()

    def _clear(self, slot: int) -> None:
        vera = self._host.vera
        self._is_vera_new |= vera is not None and bool(vera.is_used[0, slot])
        for values in jax.tree.leaves(self._host):
            values[:, slot] = 0
        for ids in self._host.token_ids.values():
            ids[:, slot] = -1

    def _set_vera(self, slot: int, adapter: Adapter) -> None:
        """Sets the parts of VeRA's matrices that the linears here take."""
        tables = self._host.vera
        if tables is None or adapter.vera is None:
            return
        tables.is_used[0, slot] = self._is_vera_new = True
        for table, matrix in ((tables.a, adapter.vera.a), (tables.b, adapter.vera.b)):
            shape = map(min, table.shape[2:], matrix.shape)
            part = unpadded(tuple(shape))
            table[0, slot][part] = matrix[part]

    def _upload(self) -> None:
        # The arrays are copied, as a pending upload may read or share their memory.
        is_new, self._is_vera_new = self._is_vera_new, False
        host = self._host if is_new else dataclasses.replace(self._host, vera=None)
        settings = self._put(jax.tree.map(np.copy, host))
        if not is_new:  # as they are large
            settings = dataclasses.replace(settings, vera=self.settings.vera)
        self.settings = settings

    def _put(self, host: SlotSettings) -> SlotSettings:
        return put(host, self._placement.sharding(REPLICATED))


def base_settings(host: SlotSettings) -> SlotSettings:
    """Returns settings with which every slot gives the base, as arrays of the host.

    Those on the devices share the matrices of VeRA with other settings, as these are
    large, so they are None here.

    Args:
        host: Settings of these shapes.
    """
    zeros = jax.tree.map(np.zeros_like, dataclasses.replace(host, vera=None))
    for ids in zeros.token_ids.values():
        ids[:] = -1
    return zeros


def _host_zeros(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.zeros(shape.shape, shape.dtype)
