"""What tenants have on a server: sessions, models, checkpoints, uploads, jobs."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import sqlalchemy as sa
import sqlalchemy.exc

from jaxlora.errors import JaxloraError
from jaxlora.serve.database import Database, metadata
from jaxlora.serve.ids import ONLY, Ids

Kind = Literal["session", "model", "sampler", "checkpoint", "upload", "job"]

_ENTRIES = sa.Table(
    "entries",
    metadata,
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("id", sa.String(512), primary_key=True),
    sa.Column("tenant", sa.String(63), nullable=False),
    sa.Column("parent", sa.String(512)),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("touched_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("is_public", sa.Boolean, nullable=False),
    sa.Column("fields", sa.JSON, nullable=False),
    sa.Index("entries_of_tenants", "tenant", "kind", "created_at"),
    sa.Index("entries_of_parents", "kind", "parent"),
    sa.Index("entries_that_expire", "kind", "expires_at"),
    sa.Index("entries_in_use", "kind", "touched_at"),
)
_NOTE_SECONDS = 60.0  # between two notes that an entry is in use
_COLUMNS = ("parent", "touched_at", "expires_at", "num_bytes", "is_public")


_IS_UNLOADED = sa.func.coalesce(_ENTRIES.c.fields["unloaded"].as_boolean(), False)


class NotFound(JaxloraError):
    """A tenant has no such thing; whether another has it, nobody learns."""


class Conflict(JaxloraError):
    """What is there does not allow a request now; after a change it may."""


class Taken(Conflict):
    """There is something by this id already."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A session, model, sampler, checkpoint, upload or job.

    Attributes:
        kind: What it is.
        id: Its id, which is unique among those of its kind.
        tenant: Whose it is.
        parent: Id of what it belongs to: a model's session, a checkpoint's model.
        created_at: When it was made, in Unix seconds.
        touched_at: When it was used last: a session's last heartbeat.
        expires_at: When it is deleted; None: never.
        num_bytes: Bytes that it has in the storage.
        is_public: Whether all tenants may read it.
        fields: Whatever else is known about it, as JSON.
    """

    kind: Kind
    id: str
    tenant: str
    parent: str | None
    created_at: float
    touched_at: float
    expires_at: float | None
    num_bytes: int
    is_public: bool
    fields: Mapping[str, Any]


class Registry:
    """The entries of all tenants. Any thread may use it; calls take milliseconds."""

    def __init__(
        self,
        database: Database,
        ids: Ids = ONLY,
        *,
        clock: Callable[[], float] = time.time,
    ):
        """Makes the object.

        Args:
            database: Where the entries are.
            ids: Makes ids.
            clock: Returns Unix seconds.
        """
        self._database, self._ids, self._clock = database, ids, clock

    def add(
        self,
        kind: Kind,
        tenant: str,
        id: str | None = None,
        *,
        parent: str | None = None,
        expires_in: float | None = None,
        num_bytes: int = 0,
        **fields: Any,
    ) -> str:
        """Adds an entry; returns its id.

        Args:
            kind: What it is.
            tenant: Whose it is.
            id: Its id; None: a new one.
            parent: What it belongs to.
            expires_in: Seconds until it is deleted; None: never.
            num_bytes: Bytes that it has in the storage.
            **fields: Whatever else is to be known about it, as JSON.

        Raises:
            Taken: There is one by this id.
        """
        now = self._clock()
        row = {
            "kind": kind,
            "id": self._ids.new() if id is None else id,
            "tenant": tenant,
            "parent": parent,
            "created_at": now,
            "touched_at": now,
            "expires_at": None if expires_in is None else now + expires_in,
            "num_bytes": num_bytes,
            "is_public": False,
            "fields": fields,
        }
        try:
            with self._database.writing() as connection:
                connection.execute(_ENTRIES.insert().values(row))
        except sa.exc.IntegrityError:
            raise Taken(f"there is a {kind} {id!r} already.") from None
        return row["id"]

    def owned(
        self, tenant: str, kind: Kind, id: str, *, or_public: bool = False
    ) -> Entry:
        """Returns an entry of a tenant. All checks of ownership are this one.

        Args:
            tenant: Whose it must be.
            kind: What it must be.
            id: Its id.
            or_public: Whether it may be another tenant's that all may read.

        Raises:
            NotFound: The tenant has none; the text is the same if another has it.
        """
        with self._database.reading() as connection:
            return _owned(connection, tenant, kind, id, or_public=or_public)

    def list(
        self,
        tenant: str | None,
        kind: Kind,
        *,
        parent: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Sequence[Entry]:
        """Returns a tenant's entries of a kind, the newest first.

        Args:
            tenant: The tenant; None: all, for the server itself and for `admin`.
            kind: The kind.
            parent: Only those that belong to this.
            limit: At most so many.
            offset: Without the first ones.
        """
        order = _ENTRIES.c.created_at.desc(), _ENTRIES.c.id
        found = self._of(sa.select(_ENTRIES), tenant, kind, parent).order_by(*order)
        with self._database.reading() as connection:
            rows = connection.execute(found.limit(limit).offset(offset))
            return [Entry(**row._asdict()) for row in rows]

    def count(
        self, tenant: str | None, kind: Kind, *, parent: str | None = None
    ) -> int:
        """Returns how many entries `list` has without a limit."""
        found = self._of(sa.select(sa.func.count()), tenant, kind, parent)
        with self._database.reading() as connection:
            return connection.scalar(found.select_from(_ENTRIES)) or 0

    def stored_bytes(self, tenant: str) -> int:
        """Returns the bytes that a tenant's entries have in the storage."""
        total = sa.func.coalesce(sa.func.sum(_ENTRIES.c.num_bytes), 0)
        with self._database.reading() as connection:
            found = connection.scalar(
                sa.select(total).where(_ENTRIES.c.tenant == tenant)
            )
        return int(found or 0)

    def update(self, tenant: str, kind: Kind, id: str, **changes: Any) -> Entry:
        """Changes an entry; returns it.

        Args:
            tenant: Whose it must be.
            kind: What it must be.
            id: Its id.
            **changes: Attributes of `Entry`, or fields, which are added to the others.

        Raises:
            NotFound: As for `owned`.
        """
        return self.change(tenant, kind, id, lambda entry: changes)

    def change(
        self,
        tenant: str,
        kind: Kind,
        id: str,
        changes_of: Callable[[Entry], Mapping[str, Any]],
    ) -> Entry:
        """Changes an entry by what a function makes of it, as one change; returns it.

        Args:
            tenant: Whose it must be.
            kind: What it must be.
            id: Its id.
            changes_of: Returns the changes, as for `update`.

        Raises:
            NotFound: As for `owned`.
        """
        with self._database.writing() as connection:
            entry = _owned(connection, tenant, kind, id)
            changes = dict(changes_of(entry))
            columns = {key: changes.pop(key) for key in _COLUMNS if key in changes}
            columns["fields"] = dict(entry.fields) | changes
            connection.execute(self._one(_ENTRIES.update(), entry).values(columns))
        return dataclasses.replace(entry, **columns)

    def touch(self, tenant: str, kind: Kind, id: str) -> Entry:
        """Notes that an entry is in use, such as by a heartbeat.

        Raises:
            NotFound: As for `owned`.
        """
        return self.update(tenant, kind, id, touched_at=self._clock())

    def note_use(self, entry: Entry) -> None:
        """Notes that an entry is in use, unless it was noted a moment ago.

        Raises:
            NotFound: As for `owned`.
        """
        if self._clock() - entry.touched_at >= _NOTE_SECONDS:
            self.touch(entry.tenant, entry.kind, entry.id)

    def delete(self, tenant: str, kind: Kind, id: str) -> None:
        """Deletes an entry, and nothing in the storage.

        Raises:
            NotFound: As for `owned`.
        """
        with self._database.writing() as connection:
            entry = _owned(connection, tenant, kind, id)
            connection.execute(self._one(_ENTRIES.delete(), entry))

    def expired(self, kind: Kind) -> Sequence[Entry]:
        """Returns the entries of a kind, of all tenants, whose time is over."""
        c = _ENTRIES.c
        found = sa.select(_ENTRIES).where(c.kind == kind, c.expires_at <= self._clock())
        with self._database.reading() as connection:
            return [Entry(**row._asdict()) for row in connection.execute(found)]

    def used(self, kind: Kind, seconds: float) -> Sequence[Entry]:
        """Returns the entries of a kind, of all tenants, that were used lately.

        Args:
            kind: The kind.
            seconds: Within so many seconds.
        """
        c, since = _ENTRIES.c, self._clock() - seconds
        found = sa.select(_ENTRIES).where(c.kind == kind, c.touched_at > since)
        with self._database.reading() as connection:
            return [Entry(**row._asdict()) for row in connection.execute(found)]

    def lapsed(self, kind: Kind, seconds: float, since: float) -> Sequence[Entry]:
        """Returns the entries of a kind, of all tenants, that are not used any more.

        Args:
            kind: The kind.
            seconds: Seconds without a use after which they are not.
            since: Only those for which that is so since at most so many seconds.
        """
        c, before = _ENTRIES.c, self._clock() - seconds
        found = sa.select(_ENTRIES).where(
            c.kind == kind, c.touched_at <= before, c.touched_at > before - since
        )
        with self._database.reading() as connection:
            return [Entry(**row._asdict()) for row in connection.execute(found)]

    def unused_models(self, seconds: float) -> Sequence[Entry]:
        """Returns the models of all tenants that are to be unloaded.

        Args:
            seconds: Seconds without a use of the model and of its session.
        """
        c = _ENTRIES.c
        found = sa.select(_ENTRIES).where(
            c.kind == "model", self._is_unused(seconds), ~_IS_UNLOADED
        )
        with self._database.reading() as connection:
            return [Entry(**row._asdict()) for row in connection.execute(found)]

    def delete_unused(self, seconds: float) -> None:
        """Deletes samplers, models and sessions of all tenants that are in no use.

        Models that are not unloaded or have checkpoints stay, and so do sessions that
        have models or samplers.

        Args:
            seconds: As for `unused_models`.
        """
        of_kind = lambda kind: sa.delete(_ENTRIES).where(
            _ENTRIES.c.kind == kind, self._is_unused(seconds)
        )
        with self._database.writing() as connection:
            connection.execute(of_kind("sampler"))
            models = of_kind("model").where(_IS_UNLOADED, ~_has("checkpoint"))
            connection.execute(models)
            connection.execute(of_kind("session").where(~_has("model", "sampler")))

    def _is_unused(self, seconds: float) -> sa.ColumnElement[bool]:
        """Whether an entry and its parent, if it has one, were not used for so long."""
        before, parent = self._clock() - seconds, _ENTRIES.alias()
        is_used = sa.exists().where(
            parent.c.kind == "session",
            parent.c.id == _ENTRIES.c.parent,
            parent.c.touched_at > before,
        )
        return sa.and_(_ENTRIES.c.touched_at <= before, ~is_used)

    def _of[T: sa.Select](
        self, found: T, tenant: str | None, kind: Kind, parent: str | None
    ) -> T:
        found = found.where(_ENTRIES.c.kind == kind)
        if tenant is not None:
            found = found.where(_ENTRIES.c.tenant == tenant)
        return found if parent is None else found.where(_ENTRIES.c.parent == parent)

    def _one(self, statement: Any, entry: Entry) -> Any:
        c = _ENTRIES.c
        return statement.where(c.kind == entry.kind, c.id == entry.id)


def _has(*kinds: str) -> sa.ColumnElement[bool]:
    """Whether entries of some kinds belong to an entry."""
    child = _ENTRIES.alias()
    return sa.exists().where(child.c.kind.in_(kinds), child.c.parent == _ENTRIES.c.id)


def _owned(
    connection: sa.Connection,
    tenant: str,
    kind: str,
    id: Any,
    *,
    or_public: bool = False,
) -> Entry:
    found = sa.select(_ENTRIES).where(_ENTRIES.c.kind == kind, _ENTRIES.c.id == id)
    row = None
    if _is_text(id):
        row = connection.execute(found.with_for_update()).one_or_none()
    if row is None or not (row.tenant == tenant or (or_public and row.is_public)):
        raise NotFound(f"there is no {kind} {id!r:.600} of yours.")
    return Entry(**row._asdict())


def _is_text(id: Any) -> bool:
    """Whether a database can hold a text, which comes from a client."""
    try:
        return "\0" not in id and len(id.encode()) <= 512
    except (AttributeError, TypeError, UnicodeEncodeError):
        return False
