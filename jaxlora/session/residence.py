"""Where open adapters are: in slots, parked on the host, or in files."""

import dataclasses
import logging
import pathlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Kind
from jaxlora.adapters.optimizers.table import ADAMW
from jaxlora.adapters.parked_slot import PARAMS, ParkedSlot, adapter_from_rows
from jaxlora.adapters.slots import SlotTable
from jaxlora.session.slot_programs import SlotPrograms

logger = logging.getLogger(__name__)

PENDING: Kind = "pending"  # of gradients beside the kinds of a slot's state
_MOST_LEAVING = 2  # adapters whose copies are still on the device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Gradients of an adapter that no optimizer step has used yet, on the host.

    Attributes:
        tensors: The gradients at the adapter's own rank, float32, by dotted path.
        is_finite: Whether the losses and hidden states behind them are finite.
    """

    tensors: dict[str, np.ndarray]
    is_finite: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeState:
    """All that an adapter needs to go on with the same bits.

    Attributes:
        parked: Weights and moments.
        gradients: Gradients since the last optimizer step; None: there are none.
    """

    parked: ParkedSlot
    gradients: Gradients | None = None


@dataclasses.dataclass(slots=True)
class _Rows:
    """Rows of a slot by kind, flat; on the device until they have been copied.

    Attributes:
        flat: The rows.
        is_finite: Goes with those of gradients; None: there are none.
    """

    flat: dict[Kind, jax.Array | np.ndarray]
    is_finite: jax.Array | np.ndarray | None

    def on_host(self) -> dict[Kind, np.ndarray]:
        """Waits for the copies, and returns them."""
        host = {kind: np.asarray(rows) for kind, rows in self.flat.items()}
        if self.is_finite is not None:
            self.is_finite = np.asarray(self.is_finite)
        self.flat = dict(host)
        return host

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.flat.values())


@dataclasses.dataclass(slots=True)
class _File:
    """Rows in a file.

    Attributes:
        path: The file.
        written: Done when it is written.
        is_finite: As in `_Rows`.
    """

    path: pathlib.Path
    written: Future[None]
    is_finite: jax.Array | np.ndarray | None

    def read(self) -> _Rows:
        """Reads the rows, and removes the file."""
        self.written.result()
        rows = _Rows({**safetensors.numpy.load_file(self.path)}, self.is_finite)
        self.path.unlink()
        return rows


@dataclasses.dataclass(kw_only=True, eq=False)
class Resident:
    """An adapter, wherever it is.

    Attributes:
        like: The adapter without its values, which says its modules and ranks.
        slot: Its slot; None: it is in none.
        has_gradients: Whether there are gradients since its last optimizer step.
        came: When it came into its slot, in the units of `Residence.bring`.
        away: Its state while it is in no slot; an adapter has taken no step.
    """

    like: Adapter
    slot: int | None = None
    has_gradients: bool = False
    came: int = 0
    away: "Adapter | WholeState | _Rows | _File | None" = dataclasses.field(
        default=None, init=False, repr=False
    )


class Residence:
    """Brings adapters into slots when their turn comes, and parks others for them.

    An adapter takes weights, moments and pending gradients with it, so it goes on with
    the same bits. Copies to the host are queued behind the work of the device, and no
    one waits for them before the adapter comes back.
    """

    def __init__(
        self,
        table: SlotTable,
        programs: SlotPrograms,
        num_slots: int,
        *,
        min_stay: int,
        host_bytes: int | None = None,
        folder: pathlib.Path | None = None,
    ):
        """Starts with empty slots.

        Args:
            table: The slots.
            programs: The programs of a session.
            num_slots: Their number.
            min_stay: How long an adapter stays in its slot if another one can leave.
            host_bytes: Memory of the host for parked adapters, beyond which those that
                were used least recently go to files; None: there is no bound.
            folder: Folder for these files, which no one else uses.
        """
        assert host_bytes is None or folder is not None, "the rest needs a folder"
        self._table, self._programs = table, programs
        self._min_stay, self._bound, self._folder = min_stay, host_bytes, folder
        self._free = deque(range(num_slots))
        # The least recently used are first.
        self._here: dict[Resident, None] = {}
        self._parked: dict[Resident, None] = {}
        self._leaving: deque[_Rows] = deque()
        self._files = 0
        self._writer: ThreadPoolExecutor | None = None
        self.num_moves = 0

    def add(self, one: Resident, state: Adapter | WholeState) -> None:
        """Takes an adapter, which gets a slot if one is free.

        Args:
            one: The adapter.
            state: Its state; an adapter has taken no step.
        """
        one.away = state
        if self._free:
            self._enter(one)
        else:
            self._parked[one] = None

    def bring(
        self, some: Sequence[Resident], busy: Collection[Resident], now: int
    ) -> list[int]:
        """Brings adapters into slots, of which there are enough.

        Args:
            some: The adapters.
            busy: Those that have work, which leave only if no others can.
            now: The present time.

        Returns:
            The slot of each.
        """
        for one in some:
            if one.slot is None and not self._free:
                self._park(self._victim(some, busy, now))
            if one.slot is None:
                self._enter(one)
                one.came = now
            self._here.pop(one)
            self._here[one] = None  # as the one that was used last
        return [one.slot for one in some if one.slot is not None]

    def _victim(
        self, some: Sequence[Resident], busy: Collection[Resident], now: int
    ) -> Resident:
        """Returns the adapter that leaves its slot."""
        others = [one for one in self._here if one not in some]
        return min(
            others,
            key=lambda one: (
                one in busy,
                now - one.came < self._min_stay,
                one.has_gradients,
            ),
        )

    def remove(self, one: Resident) -> None:
        """Forgets an adapter, and empties its slot."""
        if one.slot is not None:
            self._table.clear(one.slot)
            self._free.appendleft(one.slot)
            del self._here[one]
        self._parked.pop(one, None)
        if isinstance(one.away, _File):
            one.away.read()
        one.slot = one.away = None

    # ---- reading ---------------------------------------------------------------------

    def begin_reading(self, one: Resident) -> Callable[[], Adapter]:
        """Queues a copy of the weights of an adapter, wherever it is.

        Returns:
            A function that brings the copy to the host. Any thread may call it.
        """
        like, away = one.like, one.away
        if one.slot is not None:
            return self._table.begin_reading(one.slot, like)
        if isinstance(away, Adapter):
            return lambda: away
        if isinstance(away, WholeState):
            return lambda: away.parked.adapter(like)
        rows = self._rows(one)

        def read() -> Adapter:
            flat = {PARAMS: rows.on_host()[PARAMS]}
            return adapter_from_rows(self._table.unpad(flat, like)[PARAMS], like)

        return read

    def begin_copy(self, one: Resident) -> Callable[[], WholeState]:
        """Queues a copy of all of an adapter; see `begin_reading`."""
        like, away = one.like, one.away
        if isinstance(away, WholeState):
            return lambda: away
        if isinstance(away, Adapter):
            return lambda: WholeState(parked=_fresh(away))
        rows = self._rows(one) if one.slot is None else self._lift(one)

        def read() -> WholeState:
            kinds = self._table.unpad(rows.on_host(), like)
            tensors, gradients = kinds.pop(PENDING, None), None
            if tensors is not None:
                is_finite = bool(np.asarray(rows.is_finite))
                gradients = Gradients(tensors=tensors, is_finite=is_finite)
            return WholeState(parked=ParkedSlot.of(kinds), gradients=gradients)

        return read

    # ---- moving ----------------------------------------------------------------------

    def _lift(self, one: Resident) -> _Rows:
        """Queues a copy of a slot, whose rows begin their way to the host."""
        assert one.slot is not None
        flat, is_finite = self._table.lift(one.slot), None
        if one.has_gradients:
            pending, number = self._table.state.pending, np.int32(one.slot)
            flat[PENDING] = self._programs.read(pending.gradients, number)
            is_finite = self._programs.read_finite(pending.is_finite, number)
            is_finite.copy_to_host_async()
        for rows in flat.values():
            rows.copy_to_host_async()
        return _Rows({**flat}, is_finite)

    def _park(self, one: Resident) -> None:
        """Takes an adapter out of its slot."""
        assert one.slot is not None
        slot, rows = one.slot, self._lift(one)
        one.away, one.slot = rows, None
        del self._here[one]
        self._parked[one] = None
        self._table.forget(slot)
        self._free.append(slot)
        self.num_moves += 1
        self._leaving.append(rows)
        while len(self._leaving) > _MOST_LEAVING:
            self._leaving.popleft().on_host()  # and leaves the device
        self._write_files()

    def _enter(self, one: Resident) -> None:
        """Puts an adapter into a free slot."""
        slot, table = self._free[0], self._table
        if isinstance(one.away, Adapter):
            table.load(slot, one.away, ADAMW.name)
        elif isinstance(one.away, WholeState):
            table.restore(slot, one.away.parked, one.like)
            if (gradients := one.away.gradients) is not None:
                rows = table.pad_tensors(gradients.tensors)
                self._write_gradients(slot, rows, gradients.is_finite)
        else:
            rows = self._rows(one)
            flat = rows.on_host()
            pending = flat.pop(PENDING, None)
            table.lower(slot, flat, one.like)
            if pending is not None:
                own = table.divide(PENDING, pending)
                self._write_gradients(slot, own, rows.is_finite)
        self._free.popleft()
        self._parked.pop(one, None)
        one.slot, one.away = slot, None
        self._here[one] = None

    def _write_gradients(
        self, slot: int, rows: Mapping[str, np.ndarray], is_finite: object
    ) -> None:
        state = self._table.state
        pending = self._programs.write_gradients(
            state.pending, np.int32(slot), rows, np.asarray(is_finite, np.bool_)
        )
        self._table.state = dataclasses.replace(state, pending=pending)

    # ---- files -----------------------------------------------------------------------

    def _rows(self, one: Resident) -> _Rows:
        """Returns the rows of an adapter in no slot, from its file if need be."""
        if isinstance(one.away, _File):
            one.away = one.away.read()
            self._parked.pop(one, None)
            self._parked[one] = None
        assert isinstance(one.away, _Rows)
        return one.away

    def _write_files(self) -> None:
        """Writes adapters to files as long as the others need too much memory."""
        if self._bound is None:
            return
        here = [one for one in self._parked if isinstance(one.away, _Rows)]
        used = sum(one.away.num_bytes for one in here if isinstance(one.away, _Rows))
        for one in here:
            rows = one.away
            if used <= self._bound or not isinstance(rows, _Rows):
                return
            used -= rows.num_bytes
            one.away = self._write(rows)

    def _write(self, rows: _Rows) -> _File:
        """Begins to write rows into a file."""
        assert self._folder is not None
        if self._writer is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = ThreadPoolExecutor(1, "jaxlora-cold")
        self._files += 1
        path = self._folder / f"{self._files}.safetensors"

        def write() -> None:
            safetensors.numpy.save_file(rows.on_host(), path)

        return _File(path, self._writer.submit(write), rows.is_finite)


def _fresh(adapter: Adapter) -> ParkedSlot:
    """Returns the state of an adapter that has taken no step."""
    weights = adapter.by_path()
    zeros = {path: np.zeros_like(array) for path, array in weights.items()}
    kinds = {PARAMS: weights, "mu": zeros, "nu": zeros}
    return ParkedSlot.of(kinds, ADAMW.name)
