"""Databases of a server, on SQLite and on Postgres, and a clock that tests set."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from jaxlora.serve.database import Database


@dataclasses.dataclass
class Clock:
    """A clock that tests set."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def _program(name: str) -> str | None:
    """Returns the path of a program of Postgres, which Debian has outside of PATH."""
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A server of Postgres that listens on a socket of a temporary folder."""
    initdb, postgres = _program("initdb"), _program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("Postgres is not installed here: apt install postgresql")
    with contextlib.ExitStack() as stack:
        # The path of a socket may have a hundred bytes.
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="jaxlora-pg-", ignore_cleanup_errors=True
            )
        )
        options: dict = {"cwd": folder}
        if os.getuid() == 0:  # Postgres refuses to run as root
            shutil.chown(folder, "nobody")
            options |= {"user": "nobody", "group": "nogroup", "extra_groups": []}
        new = f"{initdb} -D data -U jaxlora -A trust -E UTF8 --locale=C --no-sync"
        subprocess.run(new.split(), check=True, capture_output=True, **options)
        quick = "-c listen_addresses= -c fsync=off -c max_connections=50"
        process = stack.enter_context(
            subprocess.Popen(
                [postgres, "-D", "data", "-k", folder, *quick.split()],
                stderr=subprocess.PIPE,
                text=True,
                **options,
            )
        )
        stack.callback(process.send_signal, signal.SIGINT)  # clients are cut off
        assert process.stderr is not None
        assert any("ready to accept" in line for line in process.stderr)
        yield f"postgresql://jaxlora@/postgres?unix_sock={folder}/.s.PGSQL.5432"


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/serve.db"
        return
    url = request.getfixturevalue("postgres_url")
    yield url
    engine = sa.create_engine(url.replace("postgresql", "postgresql+pg8000", 1))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    engine.dispose()


@pytest.fixture
def database(database_url) -> Iterator[Database]:
    with contextlib.closing(Database(database_url)) as database:
        yield database
