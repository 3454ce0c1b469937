"""The server's database: SQLite beside its other files, or Postgres."""

import contextlib
import pathlib
import secrets
from collections.abc import Callable, Generator
from typing import Any

import sqlalchemy as sa
import sqlalchemy.exc

from jaxlora.common.file_lock import file_lock
from jaxlora.errors import ConfigError, StorageError

# All tables of the server. Each module declares its own on it.
metadata = sa.MetaData()

_VERSION = sa.Table(
    "schema_version", metadata, sa.Column("version", sa.Integer, nullable=False)
)
_SECRETS = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(64), nullable=False),
)

# The step at index i takes the tables of version i + 1 to version i + 2. A released
# step never changes. Tables that a database lacks are made without a step.
UPGRADES: list[Callable[[sa.Connection], None]] = []

_BUSY_SECONDS = 30
_UPGRADE_LOCK = 0x6A61786C  # any number that all servers agree on


class Database:
    """Connections to the database, whose tables are those of this version.

    Any thread may use it.
    """

    def __init__(self, url: str):
        """Opens a database, and makes or upgrades its tables.

        Args:
            url: `sqlite:///PATH`, or `postgresql://USER:PASSWORD@HOST/NAME`.

        Raises:
            ConfigError: The URL cannot be used, or a newer version wrote the database.
            StorageError: The database cannot be reached or written.
        """
        self.engine = _engine(url)
        try:
            with self.writing() as connection:
                _upgrade(connection)
        except BaseException:
            self.close()
            raise

    @property
    def is_sqlite(self) -> bool:
        """Whether it is SQLite."""
        return self.engine.dialect.name == "sqlite"

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Waits for the turn to write.

        SQLite lets one write at a time, and waiting there is not fair: with four
        threads, one in a hundred waits for half a second; with eight processes, for a
        second.
        """
        if not self.is_sqlite:
            return contextlib.nullcontext()
        return file_lock(f"{self.engine.url.database}.turn")

    @contextlib.contextmanager
    def reading(self) -> Generator[sa.Connection]:
        """Gives a connection that sees one state of the database.

        Raises:
            StorageError: The database cannot be read.
        """
        with _database_errors("read"), self.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Generator[sa.Connection]:
        """Gives a connection whose changes are on the disk when the block ends.

        An error in the block undoes them all. A block is not to begin another one.

        Raises:
            StorageError: The database cannot be written.
        """
        with (
            self._turn(),
            _database_errors("written"),
            self.engine.connect() as connection,
        ):
            connection = connection.execution_options(jaxlora_writes=True)
            with connection.begin():
                yield connection

    def secret(self, name: str) -> bytes:
        """Returns 256 random bits, which are the same ones for a name ever after."""
        found = sa.select(_SECRETS.c.value).where(_SECRETS.c.name == name)
        with self.reading() as connection:
            value = connection.scalar(found)
        if value is None:
            with self.writing() as connection:
                value = connection.scalar(found)
                if value is None:
                    value = secrets.token_hex(32)
                    connection.execute(_SECRETS.insert().values(name=name, value=value))
        return bytes.fromhex(value)

    def close(self) -> None:
        """Closes all connections."""
        self.engine.dispose()


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+pg8000")
        options: dict[str, Any] = {}
        if parsed.get_backend_name() == "sqlite":
            options["connect_args"] = {"timeout": _BUSY_SECONDS}
        elif parsed.get_backend_name() == "postgresql":
            options |= {"pool_pre_ping": True, "pool_size": 10, "max_overflow": 20}
        else:
            raise ConfigError(
                f"database={url!r:.100} is neither sqlite:///PATH nor "
                "postgresql://USER:PASSWORD@HOST/NAME. Set one of these, or leave it "
                "out for a file in the server's folder."
            )
        engine = sa.create_engine(parsed, **options)
    except ConfigError:
        raise
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ConfigError(
            f"database={url!r:.100} is no URL of a database. Set sqlite:///PATH or "
            "postgresql://USER:PASSWORD@HOST/NAME."
        ) from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the driver of this database is not installed: {error}. Install "
            "jaxlora[postgres], or set sqlite:///PATH."
        ) from error
    _check(url, parsed)
    if parsed.get_backend_name() == "sqlite":
        assert parsed.database is not None
        folder = pathlib.Path(parsed.database).parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sa.event.listen(engine, "connect", _set_up_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _check(url: str, parsed: sa.URL) -> None:
    """Checks what the drivers do not.

    Raises:
        ConfigError: The database would be in memory, or has no user.
    """
    backend, name = parsed.get_backend_name(), parsed.database or ""
    if backend == "sqlite" and name in ("", ":memory:"):
        raise ConfigError(
            f"database={url!r:.100} names no file, so all would be lost when the "
            "server ends. Set sqlite:///PATH, with three slashes."
        )
    if "\0" in name:
        raise ConfigError(f"database={url!r:.100} has a null byte. Remove it.")
    if backend == "postgresql" and not parsed.username:
        raise ConfigError(
            f"database={url!r:.100} has no user. Set "
            "postgresql://USER:PASSWORD@HOST/NAME."
        )


def _set_up_sqlite(connection: Any, record: Any) -> None:
    # The driver would begin transactions by itself, and only some of them.
    connection.isolation_level = None
    for setting in (
        f"busy_timeout={_BUSY_SECONDS * 1000}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        connection.execute(f"PRAGMA {setting}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later would fail if another wrote
    # between the two. One that begins as a writer waits.
    writes = connection.get_execution_options().get("jaxlora_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextlib.contextmanager
def _database_errors(done: str) -> Generator[None]:
    try:
        yield
    except (sa.exc.IntegrityError, sa.exc.ProgrammingError, sa.exc.DataError):
        raise
    except sa.exc.DBAPIError as error:
        # The statement and its values, which SQLAlchemy adds, are not for users.
        reason = str(error.orig).rstrip(".")
        raise StorageError(
            f"the server's database cannot be {done}: {reason}. Nothing was "
            "changed. Free disk space, or start the database, and try again."
        ) from error


def _upgrade(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
    newest = len(UPGRADES) + 1
    is_new = not sa.inspect(connection).has_table(_VERSION.name)
    if not is_new:
        found = connection.scalar(sa.select(_VERSION.c.version)) or newest
        if found > newest:
            raise ConfigError(
                f"the database has tables of version {found}, which a newer jaxlora "
                f"wrote; this one knows versions up to {newest}. Install that jaxlora."
            )
        for step in UPGRADES[found - 1 :]:
            step(connection)
        connection.execute(_VERSION.update().values(version=newest))
    metadata.create_all(connection)
    if is_new:
        connection.execute(_VERSION.insert().values(version=newest))
