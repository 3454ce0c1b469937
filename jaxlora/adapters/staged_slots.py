"""The slots of a decoder whose layers are divided among pipeline stages."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.parked_slot import ParkedSlot, ReadSlot
from jaxlora.adapters.slots import PaddedAdapter, SlotTable
from jaxlora.common.background import in_background
from jaxlora.models.spec import DecoderSpec
from jaxlora.sharding.global_arrays import reserve_host

# Bounds on the copies of slots that wait to be read: their number, and their bytes on
# the devices, for which a run has not planned. One copy is always allowed.
_MOST_UNREAD, _MOST_UNREAD_BYTES = 8, 1 << 28
# An adapter as it is written to the slots of each stage.
Padded = tuple[PaddedAdapter, ...]


class StagedSlots:
    """The slots of all stages. Every job has the same slot on each stage.

    What goes in and comes out is whole adapters, so it does not depend on the stages.

    Attributes:
        tables: The slots of each stage, each for the stage's own linears.
    """

    def __init__(self, specs: Sequence[DecoderSpec], tables: Sequence[SlotTable]):
        """Joins the tables of stages.

        Args:
            specs: The decoder of each stage; of the only one, the whole decoder.
            tables: The slots of each stage.
        """
        self._adapted = [spec.trained_modules for spec in specs]
        self.tables = tuple(tables)
        copy_bytes = sum(table.copy_bytes for table in self.tables)
        most = min(_MOST_UNREAD, _MOST_UNREAD_BYTES // max(1, copy_bytes))
        self._room = threading.Semaphore(max(1, most))

    @property
    def row_bytes(self) -> int:
        """Bytes of the weights of a slot."""
        return sum(table.row_bytes for table in self.tables)

    def pad(self, adapter: Adapter) -> Padded:
        """Pads an adapter to the rows of a slot; any thread may call this."""
        pairs = zip(self.tables, self._adapted, strict=True)
        return tuple(table.pad(adapter.limited_to(paths)) for table, paths in pairs)

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        """Puts an adapter into a slot, with empty optimizer state.

        Args:
            slot: An empty slot.
            adapter: The adapter.
            optimizer: Name of its optimizer, which is one of the run's.
        """
        self.load_padded(slot, self.pad(adapter), optimizer)

    def load_padded(self, slot: int, padded: Padded, optimizer: str) -> None:
        """Does the same with an adapter that `pad` has returned."""
        for table, part in zip(self.tables, padded, strict=True):
            table.load_padded(slot, part, optimizer)

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        """Puts a parked state into a slot, which need not be the one that it left.

        Args:
            slot: An empty slot.
            parked: The state, possibly of a run with other stages.
            like: An adapter with the ranks, scalings and dropout of the parked one.

        Raises:
            ValueError: The state has other modules or ranks than `like`, or is of an
                optimizer that is none of the run's.
        """
        parked.check_like(like)
        for table, paths in zip(self.tables, self._adapted, strict=True):
            table.restore(slot, parked.limited_to(paths), like.limited_to(paths))

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot, until the slot is cleared."""
        for table, paths in zip(self.tables, self._adapted, strict=True):
            table.refer(slot, adapter.limited_to(paths))

    def has_job(self, slot: int) -> bool:
        """Whether a slot has an adapter in it."""
        return self.tables[0].has_job(slot)

    def clear(self, slot: int) -> None:
        """Empties a slot: weights, optimizer state and settings."""
        for table in self.tables:
            table.clear(slot)

    def read(self, slot: int, like: Adapter) -> Adapter:
        """Returns the adapter in a slot, with the modules and ranks of `like`."""
        return self.begin_reading(slot, like).result()

    def begin_reading(self, slot: int, like: Adapter) -> Future[Adapter]:
        """Reads the adapter in a slot in a thread; the slot may change meanwhile.

        Copies on the devices are bounded: this waits until some of those before have
        come to the host, if they are many or large.

        Args:
            slot: A slot.
            like: Adapter whose modules and ranks are taken.
        """
        self._room.acquire()
        try:
            pairs = zip(self.tables, self._adapted, strict=True)
            begun = [
                table.begin_reading(slot, like.limited_to(p)) for table, p in pairs
            ]
        except BaseException:
            self._room.release()
            raise

        def read() -> Adapter:
            try:
                parts = [part() for part in begun]
            finally:
                begun.clear()  # frees the copies before another one is made
                self._room.release()
            found = {name: one for part in parts for name, one in part.modules.items()}
            outside = {name: x for part in parts for name, x in part.outside.items()}
            modules = {name: found[name] for name in like.modules}
            return dataclasses.replace(like, modules=modules, outside=outside)

        return in_background(read)

    def copy(self, slot: int) -> ParkedSlot:
        """Returns the state of a slot, between two global batches; the slot keeps it.

        Raises:
            ValueError: The slot is empty.
        """
        return ParkedSlot.join([table.copy(slot) for table in self.tables])

    def snapshot(self) -> ReadSlot:
        """Copies all slots to the host, between two global batches; see `ReadSlot`."""
        return self.joined(dict(enumerate(t.snapshot() for t in self.tables)))

    def joined(self, reads: Mapping[int, ReadSlot]) -> ReadSlot:
        """Joins the copies of all stages, which are given by their numbers."""
        ordered = [reads[stage] for stage in range(len(self.tables))]
        return lambda slot: ParkedSlot.join([read(slot) for read in ordered])

    def reserve_snapshot(self) -> Callable[[], None]:
        """Returns a function that reserves the memory of a snapshot, in any thread."""
        return reserve_host([table.kept for table in self.tables])
