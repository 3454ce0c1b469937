"""The database has the tables of this version, and a writer waits for another."""

import contextlib
import threading

import pytest
import sqlalchemy as sa

from jaxlora.errors import ConfigError, StorageError
from jaxlora.serve import database as module
from jaxlora.serve.database import Database

NOTES = sa.table("notes", sa.column("text", sa.String), sa.column("n", sa.Integer))


def opened(url: str) -> contextlib.closing:
    return contextlib.closing(Database(url))


def test_an_older_database_is_upgraded_once(database_url, monkeypatch):
    """And a newer one is refused, before anything in it changes."""

    def add_notes(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE notes (text VARCHAR(9))"))

    def count_them(connection: sa.Connection) -> None:
        connection.execute(sa.text("ALTER TABLE notes ADD COLUMN n INTEGER"))
        connection.execute(NOTES.insert().values(text="once", n=1))

    with opened(database_url) as first:
        secret = first.secret("links")
    monkeypatch.setattr(module, "UPGRADES", [add_notes, count_them])
    for _ in range(2):
        with opened(database_url) as second, second.reading() as connection:
            assert second.secret("links") == secret
            assert connection.execute(sa.select(NOTES)).all() == [("once", 1)]
    monkeypatch.setattr(module, "UPGRADES", [])
    with pytest.raises(ConfigError, match="version 3, which a newer jaxlora wrote"):
        Database(database_url)


def test_an_upgrade_that_fails_changes_nothing(database_url, monkeypatch):
    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE notes (text VARCHAR(9))"))
        raise RuntimeError("power is out")

    Database(database_url).close()
    with monkeypatch.context() as patch:
        patch.setattr(module, "UPGRADES", [fail])
        with pytest.raises(RuntimeError):
            Database(database_url)
    with opened(database_url) as database:
        assert not sa.inspect(database.engine).has_table("notes")


def test_an_error_in_a_transaction_undoes_it(database):
    secret = database.secret("a")
    with pytest.raises(KeyError), database.writing() as connection:
        connection.execute(module._SECRETS.delete())
        raise KeyError
    assert database.secret("a") == secret != database.secret("b")


def test_threads_that_write_wait_for_each_other(database, database_url):
    """None of a hundred increments that read first is lost, and none fails.

    Half of them are those of another process, such as `jaxlora keys`.
    """
    value = module._SECRETS.c.value
    with database.writing() as connection:
        connection.execute(module._SECRETS.insert().values(name="n", value="0"))

    def count(own: Database) -> None:
        for _ in range(25):
            with own.writing() as connection:
                found = connection.scalar(sa.select(value).with_for_update())
                new = str(int(found) + 1)
                connection.execute(module._SECRETS.update().values(value=new))

    with opened(database_url) as other:
        some = (database, other) * 2
        threads = [threading.Thread(target=count, args=(own,)) for own in some]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with database.reading() as connection:
        assert connection.scalar(sa.select(value)) == "100"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("serve.db", "no URL of a database. Set sqlite:///PATH"),
        ("postgresql://u:p@[::/x", "no URL of a database. Set sqlite:///PATH"),
        ("postgresql://host/name", "has no user"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///a\0b", "has a null byte"),
        ("mysql://me@host/db", "neither sqlite:///PATH nor postgresql://"),
        ("nosql://me", "neither sqlite:///PATH nor postgresql://"),
    ],
)
def test_a_url_that_cannot_be_used(url, words):
    with pytest.raises(ConfigError, match=words):
        Database(url)


def test_a_database_that_is_away(tmp_path):
    """The error names the cause, and no statement."""
    with pytest.raises(StorageError, match="cannot be written") as found:
        Database(f"postgresql://me@/x?unix_sock={tmp_path}/no")
    assert "SELECT" not in str(found.value)
    (tmp_path / "broken.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError, match="file is not a database"):
        Database(f"sqlite:///{tmp_path}/broken.db")


def test_a_full_disk_is_an_error_that_changes_nothing(tmp_path):
    with opened(f"sqlite:///{tmp_path}/serve.db") as database:
        with database.reading() as connection:
            used = connection.exec_driver_sql("PRAGMA page_count").scalar()
        small = lambda dbapi, _: dbapi.execute(f"PRAGMA max_page_count={used}").close()
        sa.event.listen(database.engine, "checkout", lambda c, r, p: small(c, r))
        with pytest.raises(StorageError, match="disk is full"):
            for number in range(1000):
                database.secret(f"name {number}")
        database.secret("name 0")
