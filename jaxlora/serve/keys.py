"""Keys, each of a tenant, and the check that every route makes."""

import asyncio
import dataclasses
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import sqlalchemy as sa
from fastapi import HTTPException, Request

from jaxlora.config.serve_config import TENANT
from jaxlora.errors import ConfigError
from jaxlora.serve.database import Database, metadata

SCOPES = ("train", "sample", "read", "admin")
# Clients of the Tinker API refuse keys with another beginning.
PREFIX = "tml-"
LOCAL = "local"  # the tenant of a server without keys
_KEY = re.compile(rf"{PREFIX}([0-9a-f]{{16}})-([0-9a-f]{{64}})")
# How long a key that was found counts without another look at the database.
REMEMBERED_SECONDS = 5.0
_MOST_REMEMBERED = 10_000

_KEYS = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("tenant", sa.String(63), nullable=False, index=True),
    sa.Column("scopes", sa.String(64), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("note", sa.String(200), nullable=False, default=""),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double),
    sa.Column("revoked_at", sa.Double),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Principal:
    """The sender of a request.

    Attributes:
        tenant: The tenant, who owns all that the request makes.
        scopes: Kinds of requests that the key allows. With `admin` it allows all, and
            to see the whole server.
        key_id: The key; None: the server has none.
    """

    tenant: str
    scopes: frozenset[str]
    key_id: str | None = None

    def may(self, scope: str) -> bool:
        """Whether it allows a kind of request."""
        return scope in self.scopes or "admin" in self.scopes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key as the server knows it, without its secret.

    Attributes:
        id: Its public part.
        tenant: The tenant.
        scopes: Kinds of requests that it allows.
        note: What the operator wrote about it.
        created_at: When it was made, in Unix seconds.
        expires_at: When it ends; None: never.
        revoked_at: When it was revoked; None: it was not.
    """

    id: str
    tenant: str
    scopes: tuple[str, ...]
    note: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def is_valid(self, now: float) -> bool:
        """Whether it can be used."""
        is_over = self.expires_at is not None and self.expires_at <= now
        return self.revoked_at is None and not is_over


class Keys:
    """The keys of a server. Any thread may use it."""

    def __init__(
        self,
        database: Database,
        *,
        demanded: bool = True,
        clock: Callable[[], float] = time.time,
    ):
        """Makes the object.

        Args:
            database: Where the keys are.
            demanded: Whether requests need a key. Without, all are of one tenant.
            clock: Returns Unix seconds.
        """
        self._database, self._clock = database, clock
        self.demanded = demanded
        self._lock = threading.Lock()
        self._remembered: dict[str, tuple[float, Principal]] = {}

    def add(
        self,
        tenant: str,
        scopes: Collection[str] = ("train", "sample", "read"),
        *,
        expires_in: float | None = None,
        note: str = "",
    ) -> str:
        """Makes a key; returns it. The server keeps only its hash.

        Args:
            tenant: The tenant.
            scopes: Kinds of requests that it allows, among `SCOPES`.
            expires_in: Seconds until it ends; None: never.
            note: A remark.

        Raises:
            ConfigError: The tenant's name or a scope cannot be used.
        """
        check_tenant(tenant)
        if not scopes or (unknown := [s for s in scopes if s not in SCOPES]):
            given = ", ".join(unknown) if scopes else "no scope"
            raise ConfigError(
                f"a key cannot have {given}. Give some of: {', '.join(SCOPES)}."
            )
        public, secret = secrets.token_hex(8), secrets.token_hex(32)
        now = self._clock()
        row = {
            "id": public,
            "tenant": tenant,
            "scopes": ",".join(s for s in SCOPES if s in scopes),
            "digest": _digest(secret),
            "note": note[:200],
            "created_at": now,
            "expires_at": None if expires_in is None else now + expires_in,
        }
        with self._database.writing() as connection:
            connection.execute(_KEYS.insert().values(row))
        return f"{PREFIX}{public}-{secret}"

    def list(self, tenant: str | None = None) -> list[Key]:
        """Returns the keys of a tenant, or all, the oldest first."""
        found = sa.select(_KEYS).order_by(_KEYS.c.created_at)
        if tenant is not None:
            found = found.where(_KEYS.c.tenant == tenant)
        with self._database.reading() as connection:
            return [_key(row) for row in connection.execute(found)]

    def revoke(self, key_id: str) -> Key:
        """Ends a key now; servers that have seen it follow in `REMEMBERED_SECONDS`.

        Raises:
            ConfigError: There is no such key.
        """
        return self._change(key_id, "revoked_at", self._clock())

    def rotate(self, key_id: str, *, grace: float = 86_400.0) -> str:
        """Makes another key of the same tenant and scopes; returns it.

        Args:
            key_id: The key that it replaces.
            grace: Seconds for which the old one is still valid.

        Raises:
            ConfigError: There is no such key, or it is not valid.
        """
        old = next((key for key in self.list() if key.id == key_id), None)
        if old is None or not old.is_valid(self._clock()):
            raise ConfigError(f"{key_id!r} is no valid key. See jaxlora keys list.")
        lasts = None if old.expires_at is None else old.expires_at - old.created_at
        new = self.add(old.tenant, old.scopes, expires_in=lasts, note=old.note)
        ends = self._clock() + grace
        if old.expires_at is None or ends < old.expires_at:
            self._change(key_id, "expires_at", ends)
        return new

    def remembered(self, text: str) -> Principal | None:
        """Returns who a key stands for; None: the database has to be asked.

        It takes microseconds.
        """
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        with self._lock:
            until, principal = self._remembered.get(digest, (0.0, None))
        return principal if self._clock() < until else None

    def principal(self, text: str) -> Principal | None:
        """Returns who a key stands for; None: it is unknown, has ended, or is none."""
        if (principal := self.remembered(text)) is not None:
            return principal
        now = self._clock()
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        match = _KEY.fullmatch(text)
        if match is None:
            return None
        public, secret = match.groups()
        with self._database.reading() as connection:
            row = connection.execute(
                sa.select(_KEYS).where(_KEYS.c.id == public)
            ).one_or_none()
        # An unknown key takes as long as one with a wrong secret.
        expected = _digest("") if row is None else row.digest
        is_right = hmac.compare_digest(_digest(secret), expected)
        if row is None or not is_right or not (key := _key(row)).is_valid(now):
            return None
        principal = Principal(
            tenant=key.tenant, scopes=frozenset(key.scopes), key_id=key.id
        )
        until = min(now + REMEMBERED_SECONDS, key.expires_at or now + 1e9)
        with self._lock:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[digest] = until, principal
        return principal

    def _change(self, key_id: str, column: str, value: float) -> Key:
        with self._database.writing() as connection:
            connection.execute(
                _KEYS.update().where(_KEYS.c.id == key_id).values({column: value})
            )
            row = connection.execute(
                sa.select(_KEYS).where(_KEYS.c.id == key_id)
            ).one_or_none()
        if row is None:
            raise ConfigError(f"there is no key {key_id!r}. See jaxlora keys list.")
        with self._lock:
            self._remembered.clear()
        return _key(row)


def check_tenant(name: str) -> str:
    """Returns the name of a tenant, which also names its folder.

    Raises:
        ConfigError: It cannot be one.
    """
    if not isinstance(name, str) or not TENANT.fullmatch(name):
        raise ConfigError(
            f"tenant {name!r:.100} must have 1 to 63 small letters, digits, '_' and "
            "'-', and begin with a letter or digit."
        )
    return name


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _key(row: Any) -> Key:
    values = row._asdict()
    del values["digest"]
    return Key(**values | {"scopes": tuple(row.scopes.split(","))})


async def authenticate(request: Request) -> Principal:
    """Returns who sends a request.

    Raises:
        HTTPException: 401, as it has no valid key.
    """
    if (known := getattr(request.state, "principal", None)) is not None:
        return known
    keys: Keys = request.app.state.server.keys
    if not keys.demanded:
        return Principal(tenant=LOCAL, scopes=frozenset(SCOPES))
    text = request.headers.get("x-api-key") or ""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if not text and scheme.lower() == "bearer":
        text = token.strip()
    principal = keys.remembered(text)
    if principal is None and text:
        principal = await asyncio.to_thread(keys.principal, text)
    if principal is None:
        what = "this key is not valid" if text else "this request has no key"
        raise HTTPException(
            401,
            f"{what}. Send the key that the operator of this server gave you, as "
            "X-API-Key or as Authorization: Bearer.",
            {"WWW-Authenticate": "Bearer"},
        )
    request.state.principal = principal
    return principal


def allowed(scope: str) -> Callable[[Request], Any]:
    """Returns the dependency of a route that needs a scope; it gives the principal.

    The app has the server as `app.state.server`. The dependency answers 401 without a
    valid key, and 403 if the key lacks the scope.
    """
    assert scope in SCOPES

    async def dependency(request: Request) -> Principal:
        principal = await authenticate(request)
        if not principal.may(scope):
            raise HTTPException(
                403,
                f"this key does not allow {scope}, only "
                f"{', '.join(sorted(principal.scopes))}. Ask the operator of this "
                "server for another key.",
            )
        return principal

    return dependency
