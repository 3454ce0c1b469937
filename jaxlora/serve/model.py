"""Promises of operations, and the models whose operations run in their order."""

import dataclasses
import time
from concurrent.futures import Future

from jaxlora.serve.ledger import Logged, LoggedModel
from jaxlora.serve.operation import (
    Create,
    Done,
    Failed,
    Load,
    Operation,
    Pass,
    Step,
    Unload,
)
from jaxlora.serve.status import ModelStatus, Recent
from jaxlora.session.engine import Call, OpenAdapter
from jaxlora.session.residence import Place


@dataclasses.dataclass(kw_only=True, eq=False)
class Promise:
    """An operation that was taken.

    Attributes:
        request_id: Its id, 128 random bits in hexadecimal digits.
        tenant: Whose it is.
        model: The model.
        seq_id: Its number among the operations of the model, from 1.
        operation: The operation. A pass that ended before a restart has no datums.
        digest: Digest of the operation.
        accepted: Is done as soon as the operation is on disk; until then no client may
            be told that it was accepted. It raises if the server ends before.
        outcome: Holds `Done` or `Failed` as soon as it is there and durable.
        has_begun: Whether it may have left files in the storage.
        taken_at: When it was taken, or was read after a restart, in seconds of
            `time.monotonic`.
    """

    request_id: str
    tenant: str
    model: str
    seq_id: int
    operation: Operation
    digest: bytes
    accepted: Future[None] = dataclasses.field(default_factory=Future)
    outcome: Future[Done | Failed] = dataclasses.field(default_factory=Future)
    has_begun: bool = False
    taken_at: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self):
        # A caller that stops waiting may cancel them; others still wait.
        self.accepted.set_running_or_notify_cancel()
        self.outcome.set_running_or_notify_cancel()

    @staticmethod
    def of(logged: Logged, operation: Operation) -> "Promise":
        """Makes the promise of an operation that is, or will be, in the ledger."""
        return Promise(
            request_id=logged.request_id,
            tenant=logged.tenant,
            model=logged.model,
            seq_id=logged.seq_id,
            operation=operation,
            digest=logged.digest,
            has_begun=logged.has_begun,
        )

    def accept(self, written: Future[None]) -> None:
        """Takes what became of its entry in the ledger."""
        if (error := written.exception()) is not None:
            self.accepted.set_exception(error)
        else:
            self.accepted.set_result(None)

    @property
    def changes_weights(self) -> bool:
        """Whether weights, moments or gradients are others after it."""
        match self.operation:
            case Pass(is_training=is_training):
                return is_training
            case operation:
                return isinstance(operation, Create | Load | Step | Unload)

    @property
    def size(self) -> tuple[int, int]:
        """Its datums, and their tokens."""
        data = self.operation.data if isinstance(self.operation, Pass) else ()
        return len(data), sum(len(datum.tokens) for datum in data)


@dataclasses.dataclass(kw_only=True, eq=False)
class Model:
    """A model of a tenant.

    Attributes:
        id: Its id.
        tenant: Whose it is.
        next_seq: The number that is next.
        held: Promises by number, from `next_seq` on; a gap holds those after it.
        adapter: Its adapter in the engine; None: it has none (yet).
        running: Calls that the engine has and that have no results, by number.
        is_blocked: Whether another thread works on its last operation.
        is_unloaded: Whether its last operation has unloaded it.
        failure: Why no operation can be done any more; None: they can.
        gap_since: When it was noticed that `next_seq` is missing; None: it is not.
        covered_seq: The operations up to this one are in its snapshot.
        snapshot: Key of its snapshot; None: it has none.
        pieces: Numbers of the pieces of work that no snapshot covers.
        last_step: The last of them, if it is a step; None: it is a microbatch.
        changed_at: When the first of them was queued; None: there is none.
        steps_since: Steps among them.
        is_snapshotting: Whether a snapshot is being written.
        pending_datums: Datums that were accepted and whose results are not there.
        pending_tokens: Tokens of these datums.
        steps: Optimizer steps behind its weights.
        loss_per_token: Loss of the last training pass for each position that counts.
        recent: Its tokens of the last minute.
        ended_at: When its last operation ended, in seconds of the hub's clock; None:
            none has since the start.
    """

    id: str
    tenant: str
    next_seq: int = 1
    held: dict[int, Promise] = dataclasses.field(default_factory=dict)
    adapter: OpenAdapter | None = None
    running: dict[int, Call] = dataclasses.field(default_factory=dict)
    is_blocked: bool = False
    is_unloaded: bool = False
    failure: str | None = None
    gap_since: float | None = None
    covered_seq: int = 0
    snapshot: str | None = None
    pieces: set[int] = dataclasses.field(default_factory=set)
    last_step: Promise | None = None
    changed_at: float | None = None
    steps_since: int = 0
    is_snapshotting: bool = False
    pending_datums: int = 0
    pending_tokens: int = 0
    steps: int = 0
    loss_per_token: float | None = None
    recent: Recent = dataclasses.field(default_factory=lambda: Recent(1))
    ended_at: float | None = None

    @staticmethod
    def of(logged: LoggedModel) -> "Model":
        """Makes a model as the ledger has it, which is not in the engine."""
        return Model(
            id=logged.id,
            tenant=logged.tenant,
            next_seq=logged.covered_seq + 1,
            covered_seq=logged.covered_seq,
            snapshot=logged.snapshot,
            steps=logged.steps,
            is_unloaded=logged.is_unloaded,
            failure=logged.failure,
        )

    def hold(self, promise: Promise) -> None:
        """Takes an operation, unless it was begun or is held."""
        if promise.seq_id < self.next_seq or promise.seq_id in self.held:
            return
        self.held[promise.seq_id] = promise
        if not promise.outcome.done():
            datums, tokens = promise.size
            self.pending_datums += datums
            self.pending_tokens += tokens

    def next_promise(self) -> Promise | None:
        """Returns the operation that may begin now."""
        promise = self.held.get(self.next_seq)
        if promise is None or self.is_blocked:
            return None
        if self.running and not isinstance(promise.operation, Pass | Step):
            return None  # it reads or replaces what the calls before it change
        return promise

    def end(self, promise: Promise) -> None:
        """Notes that an operation has ended."""
        if promise.outcome.done():
            return
        datums, tokens = promise.size
        self.pending_datums -= datums
        self.pending_tokens -= tokens

    @property
    def has_state(self) -> bool:
        """Whether it has an adapter, or is about to have one."""
        is_busy = self.held or self.running or self.is_blocked
        return bool(is_busy) or self.adapter is not None or self.snapshot is not None

    @property
    def _place(self) -> Place | None:
        if self.adapter is not None:
            return self.adapter.place
        return None if self.snapshot is None else "file"  # no restart has opened it

    def status(self, now: float) -> ModelStatus:
        """Returns its numbers."""
        (tokens,) = self.recent.rates(now)
        return ModelStatus(
            id=self.id,
            tenant=self.tenant,
            next_seq=self.next_seq,
            pending_datums=self.pending_datums,
            pending_tokens=self.pending_tokens,
            steps=self.steps,
            loss_per_token=self.loss_per_token,
            tokens_per_second=tokens,
            failure=self.failure,
            place=self._place,
        )
