"""What the ledger holds is always all that was handed in before some moment."""

import contextlib
import dataclasses
import pathlib
import shutil

import numpy as np
import pytest
import sqlalchemy as sa

from jaxlora.errors import ConfigError, StorageError
from jaxlora.serve import ledger as module
from jaxlora.serve.database import Database
from jaxlora.serve.ids import Ids, engine_of
from jaxlora.serve.ledger import (
    EVERYTHING,
    Ledger,
    Logged,
    LoggedModel,
    LoggedPiece,
    Part,
)
from jaxlora.serve.operation import Done, Failed, Refused, Unload, encode
from jaxlora.session.engine import StepResult
from tests.jaxlora.serve.test_hub import CREATE, STEP, training_pass

OPERATIONS = (CREATE, STEP, training_pass(), Unload(), Refused(message="no"))


@pytest.fixture
def ledger(database, clock):
    made = Ledger(database, clock=clock)
    yield made
    made.close()


def logged(model: str, seq_id: int, operation) -> Logged:
    encoded = encode(operation)
    return Logged(
        model=model,
        seq_id=seq_id,
        request_id=f"{model}-{seq_id}"[-32:],
        tenant="t",
        encoded=encoded,
        digest=encoded.digest,
    )


def piece(number: int, rows: int, *parts: tuple) -> LoggedPiece:
    return LoggedPiece(
        number=number,
        rows=rows,
        parts=tuple(
            Part(model=model, seq_id=seq_id, number=0, num_tokens=3 if rows else 0)
            for model, seq_id in parts
        ),
    )


def test_everything_is_as_it_was_handed_in(ledger):
    given = [logged(m, n, one) for m in "ab" for n, one in enumerate(OPERATIONS, 1)]
    for one in given:
        ledger.accept(one)
    done = Done(result=StepResult(step=1, grad_norm=0.1, is_finite=True))
    failed = Failed(message="wrong", category="user")
    ledger.begin("a", 4)
    ledger.finish("a", 2, done)
    ledger.finish("b", 5, failed)
    pieces = [piece(0, 96, ("a", 3), ("b", 3)), piece(1, 0, ("a", 2))]
    for one in pieces:
        ledger.queue(one)
    alone = dataclasses.replace(pieces[0].parts[1], is_alone=True)
    pieces[0] = dataclasses.replace(pieces[0], parts=(pieces[0].parts[0], alone))
    ledger.queue(pieces[0])  # it runs otherwise from now on
    ledger.attempt({("a", 3, 0): 2, ("b", 3, 0): 2})
    ledger.attempt({("a", 3, 0): 3})
    ledger.flush()
    found = ledger.read()
    assert [(one.model, one.seq_id) for one in found.operations] == [
        (one.model, one.seq_id) for one in given
    ]
    assert [one.encoded for one in found.operations] == [one.encoded for one in given]
    assert [one.digest for one in found.operations] == [one.digest for one in given]
    assert ledger.find("a", 2).outcome == done
    assert ledger.find_request("b-5").outcome == failed
    assert ledger.find("a", 4).has_begun and not ledger.find("b", 4).has_begun
    assert ledger.find("a", 9) is None and ledger.find_request("b-9") is None
    assert found.pieces == tuple(pieces) and found.models == ()
    assert found.attempts == {("a", 3, 0): 3}


def test_snapshots_cut_the_log(ledger, clock):
    for one in [logged(m, n, training_pass()) for m in "ab" for n in (1, 2)]:
        ledger.accept(one)
    for m in "ab":
        ledger.finish(m, 1, Done())
    for number in range(4):
        ledger.queue(piece(number, 96, ("a", 1)))
    model = LoggedModel(id="a", tenant="t", covered_seq=1, snapshot="t/a/1", steps=7)
    ledger.cover(model, [0, 2])
    ledger.flush()
    found = ledger.read()
    assert found.models == (model,)
    assert [(o.model, o.seq_id) for o in found.operations] == [
        ("a", 2),
        ("b", 1),
        ("b", 2),
    ]
    assert [one.number for one in found.pieces] == [1, 3]
    covered = ledger.find("a", 1)
    assert covered.encoded.data is None and covered.outcome == Done()
    assert ledger.find("b", 1).encoded.data is not None
    clock.now += 100.0
    ledger.forget(keep_seconds=100.0)
    ledger.flush()
    assert ledger.find("a", 1) is not None
    ledger.forget(keep_seconds=99.0)
    ledger.flush()
    assert ledger.find("a", 1) is None and ledger.find("b", 1) is not None
    gone = LoggedModel(
        id="a", tenant="t", covered_seq=EVERYTHING, snapshot=None, failure="a gap"
    )
    ledger.cover(gone, [])
    ledger.flush()
    assert ledger.read().models == (gone,)


def test_one_server_has_a_database(database, ledger):
    with pytest.raises(ConfigError, match="another server uses the database"):
        Ledger(database)
    ledger.close()
    Ledger(database).close()


def test_what_is_handed_in_after_the_end_fails_at_once(ledger):
    ledger.close()
    with pytest.raises(StorageError, match="the server has ended"):
        ledger.flush(timeout=5)


def test_an_old_server_cannot_write(database, ledger):
    """Such as one that was cut off from Postgres, and has lost its lock."""
    ledger._lock.close()
    other = Ledger(database)
    with pytest.raises(module.Fenced):
        ledger.accept(logged("a", 1, CREATE)).result(timeout=30)
    assert ledger.is_fenced
    other.accept(logged("a", 1, STEP)).result(timeout=30)
    other.close()


def fill(ledger: Ledger, seed: int, number: int) -> list:
    """Hands in entries of all kinds; returns their futures."""
    rng, futures = np.random.default_rng(seed), []
    for index in range(number):
        model, seq_id = "ab"[index % 2], 1 + index // 6
        kind = index % 6 // 2
        if kind == 0:
            operation = OPERATIONS[rng.integers(len(OPERATIONS))]
            futures.append(ledger.accept(logged(model, seq_id, operation)))
        elif kind == 1:
            futures.append(ledger.queue(piece(index, 96, (model, seq_id))))
        else:
            futures.append(ledger.finish(model, seq_id, Done()))
    return futures


def is_there(database: Database, number: int) -> list[bool]:
    """Whether each entry of `fill` is there."""
    with database.reading() as connection:
        operations = {
            (row.model, row.seq_id): row.outcome is not None
            for row in connection.execute(sa.text("select * from operations"))
        }
        pieces = {
            n for (n,) in connection.execute(sa.text("select number from pieces"))
        }
    found = []
    for index in range(number):
        key, kind = ("ab"[index % 2], 1 + index // 6), index % 6 // 2
        found.append([key in operations, index in pieces, operations.get(key)][kind])
    return list(map(bool, found))


@pytest.mark.parametrize("seed", range(6))
def test_faults_of_the_database(database, monkeypatch, seed):
    """Before a transaction, in it, and after it was written, though nobody knows."""
    monkeypatch.setattr(module, "_RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 5)
    rng, writing, faults = np.random.default_rng(seed), database.writing, []
    ledger = Ledger(database)

    @contextlib.contextmanager
    def faulty():
        where = rng.integers(6)
        faults.append(where)
        if where == 0:
            raise StorageError("the database is away")
        with writing() as connection:
            yield connection
            if where == 1:
                raise StorageError("the disk is full")
        if where == 2:
            raise StorageError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(database, "writing", faulty)
        futures = fill(ledger, seed, 60)
        for future in futures[: 20 + seed]:
            future.result(timeout=60)
        ledger._is_closing.set()  # what fails once more is never written
        ledger._entries.put(None)
        ledger._thread.join()
    ledger.close()
    assert {0, 1, 2} & {*faults}
    found = is_there(database, 60)
    assert found == sorted(found, reverse=True)  # all up to one, and none after it
    written = [future.done() and future.exception() is None for future in futures]
    assert all(there for there, told in zip(found, written, strict=True) if told)
    assert all(future.done() for future in futures)


@pytest.mark.parametrize("seed", range(8))
def test_files_that_are_cut(tmp_path, seed):
    """A power cut may lose the end of SQLite's log, and nothing before it."""
    path = tmp_path / "serve.db"
    database = Database(f"sqlite:///{path}")
    ledger = Ledger(database)
    for future in fill(ledger, seed, 60):
        future.result(timeout=60)
    rng = np.random.default_rng(seed)
    wal = pathlib.Path(f"{path}-wal").read_bytes()
    cut = tmp_path / "cut.db"
    shutil.copy(path, cut)
    end = int(rng.integers(len(wal) // 4, len(wal) + 1))
    pathlib.Path(f"{cut}-wal").write_bytes(wal[:end] + bytes(rng.integers(2) * 100))
    ledger.close()
    database.close()
    with contextlib.closing(Database(f"sqlite:///{cut}")) as other:
        found = is_there(other, 60)
        assert found == sorted(found, reverse=True)
        again = Ledger(other)
        for future in fill(again, seed, 60):  # what is there already stays
            future.result(timeout=60)
        again.close()
        assert all(is_there(other, 60))


def covered(model: str) -> LoggedModel:
    return LoggedModel(id=model, tenant="t", covered_seq=1, snapshot=None)


def test_engines_of_a_database_do_not_see_each_others_work(database, clock):
    one, other = Ids(), Ids(3)
    with contextlib.closing(Ledger(database, one, clock=clock)) as first:
        with pytest.raises(ConfigError, match="another server uses the database"):
            Ledger(database, one)
        with contextlib.closing(Ledger(database, other, clock=clock)) as second:
            with pytest.raises(ConfigError, match="another server uses the database"):
                Ledger(database, other)
            for ids, ledger in ((one, first), (other, second)):
                model = f"{ids.new()}:train:0"
                one_more = logged(model, 1, CREATE)
                ledger.accept(dataclasses.replace(one_more, request_id=ids.new()))
                ledger.queue(piece(ids.pieces.start, 96, (model, 1)))
                ledger.finish(model, 1, Done())
                ledger.cover(covered(model), [])
            for ids, ledger in ((one, first), (other, second)):
                ledger.flush()
                found = ledger.read()
                assert len(found.models) == len(found.pieces) == 1
                assert engine_of(found.models[0].id) == ids.engine
            # What nobody asks for any more is forgotten by its own engine.
            clock.now += 100
            first.forget(50)
            first.flush()
            model = second.read().models[0].id
            assert second.find(model, 1) is not None
            second.forget(50)
            second.flush()
            assert second.find(model, 1) is None


def test_a_reference_of_a_job_is_on_the_engine_of_its_job(database):
    """Its id has an ending, and may begin with an e as those of other engines do."""
    model = f"e{'0' * 31}-reference"
    assert engine_of(model) == 0
    with contextlib.closing(Ledger(database)) as ledger:
        ledger.accept(logged(model, 1, CREATE))
        ledger.flush()
        assert [one.model for one in ledger.read().operations] == [model]
