"""The ledger: all that a server must not forget, in its database.

It holds the operations of models, their outcomes, the layouts of the microbatches that
ran and the order of optimizer steps among them, and which snapshot each model has.
Everything is written by one thread, in the order in which it was handed in, and many
entries share a transaction. So what is on disk after a crash is all that was handed in
before some moment, and nothing later.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from jaxlora.errors import ConfigError, StorageError
from jaxlora.serve.database import Database, metadata
from jaxlora.serve.ids import ONLY, Ids
from jaxlora.serve.operation import (
    Done,
    Encoded,
    Failed,
    decode_outcome,
    encode_outcome,
)

logger = logging.getLogger(__name__)

_OPERATIONS = sa.Table(
    "operations",
    metadata,
    sa.Column("model", sa.String(512), primary_key=True),
    sa.Column("seq_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("request_id", sa.String(32), nullable=False, unique=True),
    sa.Column("tenant", sa.String(63), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("data", sa.LargeBinary),
    sa.Column("digest", sa.LargeBinary(32), nullable=False),
    sa.Column("has_begun", sa.Boolean, nullable=False),
    sa.Column("outcome", sa.LargeBinary),
    sa.Column("finished_at", sa.Double),
)
_PIECES = sa.Table(
    "pieces",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("parts", sa.Text, nullable=False),
)
_MODELS = sa.Table(
    "hub_models",
    metadata,
    sa.Column("id", sa.String(512), primary_key=True),
    sa.Column("tenant", sa.String(63), nullable=False),
    sa.Column("covered_seq", sa.BigInteger, nullable=False),
    sa.Column("snapshot", sa.String(1024)),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("is_unloaded", sa.Boolean, nullable=False),
    sa.Column("failure", sa.Text),
)
_ATTEMPTS = sa.Table(
    "attempts",
    metadata,
    sa.Column("model", sa.String(512), primary_key=True),
    sa.Column("seq_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("strikes", sa.Integer, nullable=False),
)
_OWNERS = sa.Table(
    "hub_owner",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("token", sa.String(32), nullable=False),
)
EVERYTHING = 2**62  # above all numbers of operations
_MOST_AT_ONCE = 500  # entries of a transaction
_MOST_BYTES_AT_ONCE = 64 * 2**20
_RETRY_SECONDS = 0.05, 2.0  # between attempts to write, the first and the longest
_ADVISORY_LOCK = 0x6C656467

# A datum: its model, its operation, and its number there; 0 for a step.
DatumKey = tuple[str, int, int]


class Fenced(ConfigError):
    """Another server has taken the database, so this one writes nothing more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logged:
    """An operation in the ledger.

    Attributes:
        model: Its model.
        seq_id: Its number among the operations of the model.
        request_id: Its id.
        tenant: The tenant that owns the model.
        encoded: The operation; it has no data if it is not to be done again.
        digest: The digest that it had with its data.
        has_begun: Whether it may have left files in the storage.
        outcome: Its outcome; None: it has none yet.
    """

    model: str
    seq_id: int
    request_id: str
    tenant: str
    encoded: Encoded
    digest: bytes
    has_begun: bool = False
    outcome: Done | Failed | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of a datum in a microbatch, or an optimizer step.

    Attributes:
        model: The model.
        seq_id: The operation.
        number: Number of the datum in it; 0 for a step.
        num_tokens: Its tokens; 0 for a step.
        is_alone: Whether its rows stay empty in the microbatch, before which it runs in
            one of its own.
    """

    model: str
    seq_id: int
    number: int
    num_tokens: int
    is_alone: bool = False

    @property
    def key(self) -> DatumKey:
        """The datum."""
        return self.model, self.seq_id, self.number


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedPiece:
    """A training microbatch or an optimizer step that the device was given.

    Attributes:
        number: Its number in the order of all of them.
        rows: Rows of the microbatch; 0: it is an optimizer step.
        parts: Its parts, in the order of the rows.
    """

    number: int
    rows: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedModel:
    """The last snapshot of a model, and whether it can go on.

    Attributes:
        id: Its id.
        tenant: The tenant that owns it.
        covered_seq: The operations up to this number are in the snapshot.
        snapshot: Key of the snapshot in the storage; None: it has none.
        steps: Optimizer steps behind the snapshot.
        is_unloaded: Whether the last covered operation has unloaded it.
        failure: Why it cannot go on; None: it can.
    """

    id: str
    tenant: str
    covered_seq: int
    snapshot: str | None
    steps: int = 0
    is_unloaded: bool = False
    failure: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """The state from which a server goes on.

    Attributes:
        models: The models that have a snapshot, were unloaded or have failed.
        operations: The operations that no snapshot covers or that have no outcome, by
            model and number.
        pieces: The pieces of work with parts that no snapshot covers, in their order.
        attempts: What was on the device when the server died, if it was noted.
    """

    models: tuple[LoggedModel, ...]
    operations: tuple[Logged, ...]
    pieces: tuple[LoggedPiece, ...]
    attempts: Mapping[DatumKey, int]


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Statements that are executed together, with the future that says so."""

    statements: Sequence[tuple[sa.Executable, Any]]
    num_bytes: int
    is_written: Future[None]


class Ledger:
    """The ledger of one engine. Any thread may use it.

    Attributes:
        ids: The ids of the engine.
        trouble: Why nothing can be written at the moment; None: all is well.
        is_fenced: Whether another server has become this engine, for good.
        commits: Transactions that are on disk.
        commits_seconds: How long these took, in all.
        last_seconds: How long the last of them took; None: there was none.
    """

    def __init__(
        self,
        database: Database,
        ids: Ids = ONLY,
        *,
        clock: Callable[[], float] = time.time,
    ):
        """Takes an engine's part of a database, and starts the thread that writes.

        Args:
            database: The database.
            ids: The ids of the engine.
            clock: Returns Unix seconds.

        Raises:
            ConfigError: Another process is this engine.
            StorageError: The database cannot be written.
        """
        self._database, self.ids, self._clock = database, ids, clock
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert
        self.trouble: str | None = None
        self.is_fenced = False
        self.commits, self.commits_seconds = 0, 0.0
        self.last_seconds: float | None = None
        self._token = secrets.token_hex(16)
        self._lock = _Lock(database, ids.engine)
        try:
            self._take()
        except BaseException:
            self._lock.close()
            raise
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._putting, self._is_closed = threading.Lock(), False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        """Makes this process the only one that can write."""
        statement = self._insert(_OWNERS).values(id=self.ids.engine, token=self._token)
        with self._database.writing() as connection:
            connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["id"], set_={"token": self._token}
                )
            )

    def give_up(self) -> None:
        """Tries once more to write, and breaks off what still cannot be written."""
        self._is_closing.set()

    def close(self) -> None:
        """Writes what was handed in, and lets another process take its place.

        What cannot be written now never will be, and its futures raise, as do those of
        all that is handed in later.
        """
        self.give_up()
        with self._putting:
            self._is_closed = True
            self._entries.put(None)
        self._thread.join()
        self._lock.close()

    # ---- writing ---------------------------------------------------------------------

    def accept(self, one: Logged) -> Future[None]:
        """Hands in an operation."""
        row = {
            "model": one.model,
            "seq_id": one.seq_id,
            "request_id": one.request_id,
            "tenant": one.tenant,
            "kind": one.encoded.kind,
            "text": one.encoded.text,
            "data": one.encoded.data,
            "digest": one.digest,
            "has_begun": False,
        }
        return self._put(
            (self._new(_OPERATIONS), row), num_bytes=len(one.encoded.data or b"")
        )

    def begin(self, model: str, seq_id: int) -> Future[None]:
        """Hands in that an operation may leave files in the storage from now on."""
        return self._put((_of(model, seq_id).values(has_begun=True), {}))

    def finish(
        self,
        model: str,
        seq_id: int,
        outcome: Done | Failed,
        *,
        keeps_data: bool = True,
    ) -> Future[None]:
        """Hands in the outcome of an operation.

        Args:
            model: The model.
            seq_id: Number of the operation.
            outcome: The outcome.
            keeps_data: Whether it is done again after a restart that no snapshot
                covers; else its datums are dropped.
        """
        encoded = encode_outcome(outcome)
        values: dict[str, Any] = {"outcome": encoded, "finished_at": self._clock()}
        if not keeps_data:
            values["data"] = None
        return self._put(
            (_of(model, seq_id).values(**values), {}), num_bytes=len(encoded)
        )

    def queue(self, piece: LoggedPiece) -> Future[None]:
        """Hands in a piece of work that the device was given, or is given otherwise."""
        parts = [[*p.key, p.num_tokens, *[True] * p.is_alone] for p in piece.parts]
        row = {"rows": piece.rows, "parts": json.dumps(parts)}
        insert = self._insert(_PIECES).values(number=piece.number, **row)
        upsert = insert.on_conflict_do_update(index_elements=["number"], set_=row)
        return self._put((upsert, {}))

    def attempt(self, strikes: Mapping[DatumKey, int]) -> Future[None]:
        """Hands in what may be to blame if the server dies now, in place of the last.

        Args:
            strikes: How often each datum was on the device then, with this time.
        """
        columns = "model", "seq_id", "number"
        rows = [
            dict(zip(columns, key, strict=True)) | {"strikes": number}
            for key, number in strikes.items()
        ]
        insertion = [(_ATTEMPTS.insert(), rows)] if rows else []
        own = self.ids.are_in(_ATTEMPTS.c.model)
        return self._put((_ATTEMPTS.delete().where(own), {}), *insertion)

    def cover(self, model: LoggedModel, pieces: Iterable[int]) -> Future[None]:
        """Hands in that a model has a snapshot, was unloaded or has failed.

        Args:
            model: The model.
            pieces: Numbers of the pieces of work that no model needs any more.
        """
        row = dataclasses.asdict(model)
        insert = self._insert(_MODELS).values(**row)
        upsert = insert.on_conflict_do_update(index_elements=["id"], set_=row)
        covered = (
            sa.update(_OPERATIONS)
            .where(_OPERATIONS.c.model == model.id)
            .where(_OPERATIONS.c.seq_id <= model.covered_seq)
            .where(_OPERATIONS.c.data.is_not(None))
            .values(data=None)
        )
        done = sa.delete(_PIECES).where(_PIECES.c.number == sa.bindparam("done"))
        rows = [{"done": number} for number in pieces]
        deletion = [(done, rows)] if rows else []
        return self._put((upsert, {}), (covered, {}), *deletion)

    def forget(self, keep_seconds: float) -> Future[None]:
        """Hands in that covered operations are not kept which ended earlier than so."""
        before = self._clock() - keep_seconds
        covered = (
            sa.select(_MODELS.c.id)
            .where(_MODELS.c.id == _OPERATIONS.c.model)
            .where(_MODELS.c.covered_seq >= _OPERATIONS.c.seq_id)
        )
        old = (
            sa.delete(_OPERATIONS)
            .where(_OPERATIONS.c.finished_at < before)
            .where(self.ids.are_in(_OPERATIONS.c.model))
            .where(sa.exists(covered))
        )
        return self._put((old, {}))

    def drop(self, model: str) -> Future[None]:
        """Hands in that nothing is known of a model any more."""
        operations = sa.delete(_OPERATIONS).where(_OPERATIONS.c.model == model)
        row = sa.delete(_MODELS).where(_MODELS.c.id == model)
        return self._put((operations, {}), (row, {}))

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all that was handed in is on disk.

        Raises:
            TimeoutError: That is not so after `timeout` seconds.
        """
        self._put().result(timeout)

    def _new(self, table: sa.Table) -> sa.Executable:
        # A transaction may be on disk although the connection broke before the server
        # said so. It is then written again.
        return self._insert(table).on_conflict_do_nothing()

    def _put(
        self, *statements: tuple[sa.Executable, Any], num_bytes: int = 0
    ) -> Future[None]:
        is_written: Future[None] = Future()
        with self._putting:
            if not self._is_closed:
                self._entries.put(_Entry(statements, num_bytes, is_written))
                return is_written
        is_written.set_exception(StorageError("the server has ended."))
        return is_written

    # ---- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        is_open, broken = True, None
        while is_open:
            entries, is_open = self._next()
            # Entries after one that is never written are not written, either.
            if entries and broken is None:
                try:
                    self._write(entries)
                except BaseException as error:
                    broken = error
            for entry in entries:
                if broken is None:
                    entry.is_written.set_result(None)
                else:
                    entry.is_written.set_exception(broken)

    def _next(self) -> tuple[list[_Entry], bool]:
        """Waits for entries; returns them, and whether there can be more."""
        found: list[_Entry] = []
        num_bytes = 0
        while len(found) < _MOST_AT_ONCE and num_bytes < _MOST_BYTES_AT_ONCE:
            try:
                entry = self._entries.get(block=not found)
            except queue.Empty:
                break
            if entry is None:
                return found, False
            found.append(entry)
            num_bytes += entry.num_bytes
        return found, True

    def _write(self, entries: Sequence[_Entry]) -> None:
        """Writes entries in one transaction, as often as it takes."""
        seconds, longest = _RETRY_SECONDS
        while True:
            begun = time.monotonic()
            try:
                self._commit(entries)
            except Exception as error:
                self.is_fenced |= isinstance(error, Fenced)
                if self.trouble is None:
                    logger.error("nothing is acknowledged: %s", error)
                self.trouble = str(error)
                if self.is_fenced or self._is_closing.wait(seconds):
                    raise
                seconds = min(longest, 2 * seconds)
            else:
                if self.trouble is not None:
                    logger.info("the database can be written again")
                self.trouble = None
                self.last_seconds = time.monotonic() - begun
                self.commits += 1
                self.commits_seconds += self.last_seconds
                return

    def _commit(self, entries: Sequence[_Entry]) -> None:
        mine = (
            sa.update(_OWNERS)
            .where(_OWNERS.c.id == self.ids.engine)
            .where(_OWNERS.c.token == self._token)
            .values(token=self._token)
        )
        with self._database.writing() as connection:
            if connection.execute(mine).rowcount != 1:
                raise Fenced(
                    "another server has taken the database, and goes on in place of "
                    "this one. Stop this one."
                )
            for entry in entries:
                for statement, values in entry.statements:
                    connection.execute(statement, values)

    # ---- reading ---------------------------------------------------------------------

    def read(self) -> Contents:
        """Reads what a server goes on from.

        Raises:
            StorageError: The database cannot be read.
        """
        is_covered = sa.and_(
            _MODELS.c.id == _OPERATIONS.c.model,
            _MODELS.c.covered_seq >= _OPERATIONS.c.seq_id,
        )
        uncovered = (
            sa.select(_OPERATIONS)
            .where(self.ids.are_in(_OPERATIONS.c.model))
            .where(
                sa.or_(
                    _OPERATIONS.c.outcome.is_(None),
                    ~sa.exists(sa.select(_MODELS.c.id).where(is_covered)),
                )
            )
            .order_by(_OPERATIONS.c.model, _OPERATIONS.c.seq_id)
        )
        own = self.ids.are_in(_MODELS.c.id)
        models = sa.select(_MODELS).where(own).order_by(_MODELS.c.id)
        numbers, number = self.ids.pieces, _PIECES.c.number
        is_own = sa.and_(number >= numbers.start, number < numbers.stop)
        pieces = sa.select(_PIECES).where(is_own).order_by(number)
        with self._database.reading() as connection:
            found = tuple(map(_logged_model, connection.execute(models)))
            operations = connection.execute(uncovered)
            logged = tuple(map(_logged, operations))
            queued = tuple(map(_logged_piece, connection.execute(pieces)))
            own = self.ids.are_in(_ATTEMPTS.c.model)
            attempts = connection.execute(sa.select(_ATTEMPTS).where(own))
            strikes = {
                (one.model, one.seq_id, one.number): one.strikes for one in attempts
            }
        return Contents(
            models=found, operations=logged, pieces=queued, attempts=strikes
        )

    def find(self, model: str, seq_id: int) -> Logged | None:
        """Finds an operation by its number.

        Raises:
            StorageError: The database cannot be read.
        """
        c = _OPERATIONS.c
        return self._find(sa.and_(c.model == model, c.seq_id == seq_id))

    def find_request(self, request_id: str) -> Logged | None:
        """Finds an operation by its id.

        Raises:
            StorageError: The database cannot be read.
        """
        return self._find(_OPERATIONS.c.request_id == request_id)

    def _find(self, condition: sa.ColumnElement[bool]) -> Logged | None:
        with self._database.reading() as connection:
            row = connection.execute(sa.select(_OPERATIONS).where(condition)).first()
        return None if row is None else _logged(row)


class _Lock:
    """Keeps a second process from being an engine as long as this one is."""

    def __init__(self, database: Database, engine: int):
        self._handle, self._connection = -1, None
        self._number = _ADVISORY_LOCK + engine
        if database.is_sqlite:
            which = f".{engine}" if engine else ""
            path = f"{database.engine.url.database}{which}.lock"
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._handle)
                raise _taken(str(database.engine.url.database)) from None
        else:
            self._connection = database.engine.connect()
            self._connection.detach()  # the lock ends when it is closed
            lock = sa.select(sa.func.pg_try_advisory_lock(self._number))
            is_mine = self._connection.scalar(lock)
            self._connection.commit()
            if not is_mine:
                self._connection.close()
                raise _taken(str(database.engine.url.database))

    def close(self) -> None:
        """Gives the lock back."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
        connection, self._connection = self._connection, None
        if connection is not None:
            # Postgres notices later that a connection is closed, and another server may
            # be starting. If it is away, it has dropped the lock.
            with contextlib.suppress(sa.exc.DBAPIError):
                unlock = sa.func.pg_advisory_unlock(self._number)
                connection.execute(sa.select(unlock))
                connection.commit()
            connection.close()


def _taken(name: str) -> ConfigError:
    return ConfigError(
        f"another server uses the database {name}. Stop it first, or set another "
        "folder or database."
    )


def _of(model: str, seq_id: int) -> sa.Update:
    c = _OPERATIONS.c
    return sa.update(_OPERATIONS).where(c.model == model, c.seq_id == seq_id)


def _logged_model(row: Any) -> LoggedModel:
    return LoggedModel(**row._mapping)


def _logged(row: Any) -> Logged:
    return Logged(
        model=row.model,
        seq_id=row.seq_id,
        request_id=row.request_id,
        tenant=row.tenant,
        encoded=Encoded(kind=row.kind, text=row.text, data=row.data),
        digest=row.digest,
        has_begun=row.has_begun,
        outcome=None if row.outcome is None else decode_outcome(row.outcome),
    )


def _logged_piece(row: Any) -> LoggedPiece:
    parts = tuple(
        Part(
            model=model,
            seq_id=seq_id,
            number=number,
            num_tokens=num_tokens,
            is_alone=any(is_alone),
        )
        for model, seq_id, number, num_tokens, *is_alone in json.loads(row.parts)
    )
    return LoggedPiece(number=row.number, rows=row.rows, parts=parts)
