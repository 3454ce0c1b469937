"""Adapters are written side by side, and a checkpoint after those before it."""

import concurrent.futures as futures_of_python
import threading
from unittest.mock import Mock

import pytest

from jaxlora.adapters.adapter import Adapter
from jaxlora.errors import ConfigError
from jaxlora.run.events import CheckpointEvent, ExportEvent
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.lock import RunLock
from jaxlora.run.saved_run import RunRecord, SavedRun
from jaxlora.train.job_state import JobState
from jaxlora.train.saved import checkpoint, run_store
from jaxlora.train.saved.run_store import RunStore


class Disk:
    """Records writes in their order; each waits until it may go on."""

    def __init__(self):
        self.written, self.running = [], set()
        self.changed, self.allowed = threading.Condition(), set()

    def write(self, name):
        with self.changed:
            self.running.add(name)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: name in self.allowed, 30), name
            self.running.remove(name)
            self.written.append(name)
            self.changed.notify_all()

    def allow(self, *names):
        with self.changed:
            self.allowed.update(names)
            self.changed.notify_all()

    def wait_for_running(self, *names):
        with self.changed:
            assert self.changed.wait_for(lambda: self.running == set(names), 30)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()

    def write_adapter(adapter, target, record, job, progress, tokenizer):
        if job == "broken":
            raise OSError("the disk is full")
        disk.write(f"{job}{progress.step}")

    class Checkpoints:
        def __init__(self, folder, *, keep, make):
            pass

        def save(self, number, parked, run):
            disk.write(number)

        def close(self):
            pass

    monkeypatch.setattr(run_store, "write_adapter", write_adapter)
    monkeypatch.setattr(checkpoint, "Checkpoints", Checkpoints)
    return disk


@pytest.fixture
def store(disk, tmp_path):
    with RunLock(tmp_path) as lock:
        store = RunStore(tmp_path, lock, None, keep=1)
        store.record = Mock(spec=RunRecord)
        yield store


def export(store, name, step=1):
    job = Mock(spec=JobState)
    job.name, job.progress = name, JobProgress(step=step)
    store.export(1, job, lambda: Mock(spec=Adapter))


def save(store, number):
    store.save(number, dict, Mock(spec=SavedRun))


def test_adapters_are_written_side_by_side_and_a_checkpoint_after_them(store, disk):
    for name in "abc":
        export(store, name)
    disk.wait_for_running("a1", "b1", "c1")
    save(store, 7)
    export(store, "d")
    disk.wait_for_running("a1", "b1", "c1", "d1")
    disk.allow("c1", "d1")
    disk.wait_for_running("a1", "b1")
    assert store.written() == []  # events come in the order of the calls
    disk.allow("b1", 7)
    disk.wait_for_running("a1")
    disk.allow("a1")
    found = store.written(waits=True)
    assert [type(event) for event in found] == [ExportEvent] * 3 + [
        CheckpointEvent,
        ExportEvent,
    ]
    assert disk.written.index(7) == 4
    store.close()


def test_exports_of_a_job_keep_their_order(store, disk):
    for step in range(1, 7):
        export(store, "a", step)
    export(store, "b")
    disk.wait_for_running("a1", "b1")
    disk.allow("a2", "a3", "a4", "a5", "a6")
    disk.allow("a1", "b1")
    store.close()
    assert [name for name in disk.written if name != "b1"] == [
        f"a{step}" for step in range(1, 7)
    ]


def test_what_waits_is_bounded(store, disk, monkeypatch):
    is_full = threading.Event()

    def wait(futures, **options):
        if len(futures) == 16:
            is_full.set()
        return futures_of_python.wait(futures, **options)

    monkeypatch.setattr(run_store, "wait", wait)
    names = [f"j{number}-" for number in range(40)]
    thread = threading.Thread(target=lambda: [export(store, name) for name in names])
    thread.start()
    assert is_full.wait(30)
    disk.allow(*(f"{name}1" for name in names))
    thread.join(30)
    store.close()
    assert len(disk.written) == 40


def test_after_a_failure_no_checkpoint_is_written(store, disk):
    export(store, "a")
    disk.wait_for_running("a1")
    export(store, "broken")
    save(store, 3)
    export(store, "a", step=2)
    disk.allow("a1", "a2", 3)
    with pytest.raises(OSError, match="the disk is full"):
        store.written(waits=True)
    store.close()
    assert 3 not in disk.written


def test_all_processes_see_one_newest_checkpoint(tmp_path, monkeypatch):
    def gathered(value):
        host, values = value
        return [(host, values), ("other", dict.fromkeys(values, 3))]

    monkeypatch.setattr(run_store, "newest_checkpoint", lambda folder: 4)
    monkeypatch.setattr(run_store.processes, "gather", gathered)
    with pytest.raises(ConfigError, match="is 4 on process 0 and 3 on process 1"):
        RunStore(tmp_path, Mock(RunLock), None, keep=2)
