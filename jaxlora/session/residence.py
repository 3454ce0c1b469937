"""Where open adapters are: in slots, parked on the host, or in files."""

import contextlib
import dataclasses
import itertools
import logging
import pathlib
import shutil
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Sharding

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Kind
from jaxlora.adapters.optimizers.table import ADAMW
from jaxlora.adapters.parked_slot import PARAMS, ParkedSlot, adapter_from_rows
from jaxlora.adapters.slots import SlotTable
from jaxlora.common.host_memory import available_bytes
from jaxlora.plan.memory.device_memory import format_bytes
from jaxlora.session.slot_programs import SlotPrograms

logger = logging.getLogger(__name__)

Place = Literal["slot", "host", "file"]
PENDING: Kind = "pending"  # of gradients beside the kinds of a slot's state
_MOST_LEAVING = 4  # adapters whose copies are still on the device
_HOST_SHARE = 0.5  # of the available memory of the host, for parked adapters
# Most of that in memory that the device reads by itself, and its share.
_PINNED_BYTES, _PINNED_SHARE = 32 * 2**30, 0.5
# Of files. An engine that has failed may still write some into the folder of the next.
_NUMBERS = itertools.count(1)


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

    @property
    def num_bytes(self) -> int:
        """Its memory on the host."""
        kinds = [*self.parked.by_kind().values()]
        if self.gradients is not None:
            kinds.append(self.gradients.tensors)
        return sum(array.nbytes for kind in kinds for array in kind.values())


@dataclasses.dataclass(slots=True)
class _Rows:
    """Rows of a slot by kind, flat, in the host's memory.

    Attributes:
        flat: The rows. As arrays of JAX they are in memory that the device can read and
            write by itself, and they may still be on their way.
        is_finite: Goes with those of gradients; None: there are none.
    """

    flat: Mapping[Kind, jax.Array | np.ndarray]
    is_finite: jax.Array | np.ndarray | None

    def on_host(self) -> dict[Kind, np.ndarray]:
        """Waits for the rows, and returns them."""
        return {kind: np.asarray(rows) for kind, rows in self.flat.items()}

    def unpin(self) -> None:
        """Moves the rows to memory of which there is more."""
        self.flat = {kind: np.array(rows) for kind, rows in self.flat.items()}

    @property
    def is_pinned(self) -> bool:
        return any(isinstance(rows, jax.Array) for rows in self.flat.values())

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.flat.values())


@dataclasses.dataclass(slots=True)
class _File:
    """Rows in a file.

    Attributes:
        path: The file.
        is_finite: As in `_Rows`.
        rows: The rows, until they are written.
        written: Done when they are, or cannot be.
    """

    path: pathlib.Path
    is_finite: jax.Array | np.ndarray | None
    rows: _Rows | None
    written: Future[None] = dataclasses.field(default_factory=Future)

    def write(self) -> None:
        """Writes the file; if that fails, the rows stay in memory."""
        assert self.rows is not None
        try:
            safetensors.numpy.save_file(self.rows.on_host(), self.path)
            self.rows = None
        except Exception as error:  # of the disk, or of the device that has the rows
            logger.warning("an adapter stays in memory: %s: %s", self.path, error)
            with contextlib.suppress(OSError):
                self.path.unlink()  # a part of it would keep the disk full
        self.written.set_result(None)

    def read(self) -> _Rows:
        """Reads the rows."""
        self.written.result()
        if self.rows is not None:
            return self.rows
        return _Rows(safetensors.numpy.load_file(self.path), self.is_finite)

    def remove(self) -> None:
        """Removes the file."""
        self.written.result()
        self.path.unlink(missing_ok=True)


# The state of an adapter that is in no slot; an `Adapter` has taken no step.
_Away = Adapter | WholeState | _Rows | _File | None


@dataclasses.dataclass(kw_only=True, eq=False)
class Resident:
    """An adapter, wherever it is.

    Attributes:
        like: The adapter without its values, which says its modules and ranks.
        tenant: Whose it is.
        slot: Its slot; None: it is in none.
        has_gradients: Whether there are gradients since its last optimizer step.
        came: When it came into its slot, in the units of `Residence.bring`.
        away: Its state while it is in no slot.
    """

    like: Adapter
    tenant: str = ""
    slot: int | None = None
    has_gradients: bool = False
    came: int = 0
    away: _Away = dataclasses.field(default=None, init=False, repr=False)

    @property
    def place(self) -> Place:
        """Where it is."""
        if self.slot is not None:
            return "slot"
        return "file" if isinstance(self.away, _File) else "host"


class Residence:
    """Brings adapters into slots when their turn comes, and parks others for them.

    An adapter takes weights, moments and pending gradients with it, so it goes on with
    the same bits. Copies to the host and back are queued behind the work of the device,
    which makes them by itself while the host goes on.
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
        most_of: Callable[[str], int | None] = lambda tenant: None,
    ):
        """Starts with empty slots.

        Args:
            table: The slots.
            programs: The programs of a session.
            num_slots: Their number.
            min_stay: How long an adapter stays in its slot if another one can leave.
            host_bytes: Memory of the host for parked adapters, half of which, up to
                32 GiB, the device reads by itself; None: half of what is available.
            folder: Folder for files of those that were used least recently beyond
                this, which no one else uses. What is in it is removed. None: there are
                no files, and no bound.
            most_of: Returns the most slots of a tenant; None: any number.
        """
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier process
        if host_bytes is None:
            host_bytes = default_host_bytes()
        self._most_pinned = min(_PINNED_BYTES, int(_PINNED_SHARE * host_bytes))
        self._table, self._programs = table, programs
        self._min_stay, self._folder = min_stay, folder
        self._bound = None if folder is None else host_bytes
        if folder is not None:
            logger.info(
                "adapters in no slot have %s of the host's memory, %s of it pinned; "
                "beyond that they go to files",
                format_bytes(host_bytes),
                format_bytes(self._most_pinned),
            )
        self._most_of, self._free = most_of, deque(range(num_slots))
        # The least recently used are first.
        self._here: dict[Resident, None] = {}
        self._parked: dict[Resident, int] = {}  # bytes of the host's memory
        self._leaving: deque[_Rows] = deque()
        self._writer: ThreadPoolExecutor | None = None
        self.num_moves = 0

    def add(self, one: Resident, state: Adapter | WholeState) -> None:
        """Takes an adapter, which gets a slot if one is free.

        Args:
            one: The adapter.
            state: Its state; an adapter has taken no step.
        """
        one.away = state
        if self._free and not self._is_full(one.tenant):
            self._enter(one)
        else:
            self._parked[one] = _host_bytes(state)
            self._make_room()

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
            if one.slot is None:
                if (victim := self._victim(one, some, busy, now)) is not None:
                    self.park(victim)
                self._enter(one)
                one.came = now
            self._here.pop(one)
            self._here[one] = None  # as the one that was used last
        return [one.slot for one in some if one.slot is not None]

    def _is_full(self, tenant: str) -> bool:
        """Whether a tenant has as many slots as it may have."""
        most = self._most_of(tenant)
        return most is not None and most <= sum(
            one.tenant == tenant for one in self._here
        )

    def _victim(
        self,
        coming: Resident,
        some: Sequence[Resident],
        busy: Collection[Resident],
        now: int,
    ) -> Resident | None:
        """Returns the adapter that leaves its slot for another one; None: none does."""
        others = [one for one in self._here if one not in some]
        own = [one for one in others if one.tenant == coming.tenant]
        # A microbatch that runs again may have more adapters of a tenant than its quota
        # allows by now. Then there is no own one to leave.
        if self._is_full(coming.tenant) and (own or self._free):
            others = own
        elif self._free:
            return None
        return min(
            others,
            key=lambda one: (
                one in busy,
                now - one.came < self._min_stay,
                one.has_gradients,
            ),
            default=None,
        )

    def remove(self, one: Resident) -> None:
        """Forgets an adapter, and empties its slot."""
        if one.slot is not None:
            self._table.clear(one.slot)
            self._free.appendleft(one.slot)
            del self._here[one]
        self._parked.pop(one, None)
        if isinstance(one.away, _File):
            one.away.remove()
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
        """Queues a copy of a slot, and its way to the host."""
        assert one.slot is not None
        flat, is_finite = self._table.lift(one.slot), None
        if one.has_gradients:
            pending, number = self._table.state.pending, np.int32(one.slot)
            flat[PENDING] = self._programs.read(pending.gradients, number)
            is_finite = self._programs.read_finite(pending.is_finite, number)
        where = {kind: _pinned(rows) for kind, rows in flat.items()}
        return _Rows(jax.device_put(flat, where), is_finite)

    def park(self, one: Resident) -> None:
        """Takes an adapter out of its slot, if it is in one."""
        if one.slot is None:
            return
        slot, rows = one.slot, self._lift(one)
        one.away, one.slot = rows, None
        del self._here[one]
        self._parked[one] = rows.num_bytes
        self._table.forget(slot)
        self._free.append(slot)
        self.num_moves += 1
        self._leaving.append(rows)
        while len(self._leaving) > _MOST_LEAVING:
            jax.block_until_ready(self._leaving.popleft().flat)
        self._make_room()

    def _enter(self, one: Resident) -> None:
        """Puts an adapter into a free slot."""
        slot, table, away = self._free[0], self._table, one.away
        if isinstance(away, Adapter):
            table.load(slot, away, ADAMW.name)
        elif isinstance(away, WholeState):
            table.restore(slot, away.parked, one.like)
            if (gradients := away.gradients) is not None:
                flat = table.flat(gradients.tensors)
                self._write_gradients(slot, flat, gradients.is_finite)
        else:
            rows = self._rows(one)
            flat = {**rows.flat}
            if rows.is_pinned:
                where = table.state.pending.is_finite.sharding
                flat = jax.device_put(flat, where)
            pending = flat.pop(PENDING, None)
            state = self._programs.write(table.state, np.int32(slot), flat)
            table.adopt(slot, state, one.like)
            if pending is not None:
                self._write_gradients(slot, pending, rows.is_finite)
        self._free.popleft()
        self._parked.pop(one, None)
        if isinstance(away, _File):
            away.remove()
        one.slot, one.away = slot, None
        self._here[one] = None

    def _write_gradients(
        self, slot: int, flat: jax.Array | np.ndarray, is_finite: Any
    ) -> None:
        state = self._table.state
        if not isinstance(is_finite, jax.Array):
            is_finite = np.asarray(is_finite, np.bool_)
        given = state.pending, np.int32(slot), flat, is_finite
        pending = self._programs.write_gradients(*given)
        self._table.state = dataclasses.replace(state, pending=pending)

    # ---- files -----------------------------------------------------------------------

    def _rows(self, one: Resident) -> _Rows:
        """Returns the rows of an adapter in no slot, read from its file if need be."""
        if isinstance(one.away, _File):
            return one.away.read()
        assert isinstance(one.away, _Rows)
        return one.away

    def _make_room(self) -> None:
        """Moves adapters that were used least recently to where there is more room."""
        rows = {o: o.away for o in self._parked if isinstance(o.away, _Rows)}
        pinned = sum(self._parked[one] for one, own in rows.items() if own.is_pinned)
        used = sum(self._parked.values())
        for one, size in self._parked.items():
            is_pinned = one in rows and rows[one].is_pinned
            if self._bound is not None and used > self._bound and size:
                used -= size
                pinned -= size * is_pinned
                one.away, self._parked[one] = self._write(self._as_rows(one.away)), 0
            elif is_pinned and pinned > self._most_pinned:
                pinned -= size
                rows[one].unpin()

    def _as_rows(self, away: _Away) -> _Rows:
        """Returns a state in the host's memory as the rows of a slot."""
        if isinstance(away, Adapter):
            away = WholeState(parked=_fresh(away))
        if isinstance(away, WholeState):
            kinds, gradients, finite = away.parked.by_kind(), away.gradients, None
            kinds = {kind: kinds.get(kind, {}) for kind in self._table.kept}
            if gradients is not None:
                kinds[PENDING] = gradients.tensors
                finite = np.asarray(gradients.is_finite)
            flat = {kind: self._table.flat(own) for kind, own in kinds.items()}
            return _Rows(flat, finite)
        assert isinstance(away, _Rows)
        return away

    def _write(self, rows: _Rows) -> _File:
        """Begins to write rows into a file."""
        assert self._folder is not None
        if self._writer is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = ThreadPoolExecutor(1, "jaxlora-cold")
        path = self._folder / f"{next(_NUMBERS)}.safetensors"
        file = _File(path, rows.is_finite, rows)
        self._writer.submit(file.write)
        return file


def default_host_bytes() -> int:
    """Returns the memory of the host for parked adapters if no setting gives it."""
    return int(_HOST_SHARE * available_bytes())


def _pinned(rows: jax.Array) -> Sharding:
    """Returns the memory of the host that the device of an array uses by itself."""
    return rows.sharding.with_memory_kind("pinned_host")


def _host_bytes(state: Adapter | WholeState) -> int:
    """Returns the memory of a state on the host."""
    if isinstance(state, Adapter):
        return sum(array.nbytes for array in state.by_path().values())
    return state.num_bytes


def _fresh(adapter: Adapter) -> ParkedSlot:
    """Returns the state of an adapter that has taken no step."""
    weights = adapter.by_path()
    zeros = {path: np.zeros_like(array) for path, array in weights.items()}
    kinds = {PARAMS: weights, "mu": zeros, "nu": zeros}
    return ParkedSlot.of(kinds, ADAMW.name)
