"""Checkpoints and adapters are written while training goes on, and nothing is lost."""

import errno
import os
import pathlib
import signal
import threading

import jax
import numpy as np
import pytest

from jaxlora import Callback, RunConfig, Trainer
from jaxlora.adapters.files.export_record import read_record
from jaxlora.errors import CheckpointError, StorageError
from jaxlora.sharding import global_arrays
from jaxlora.train.saved import checkpoint, run_store
from jaxlora.train.saved.read_checkpoint import newest_checkpoint, read_newest
from tests.jaxlora.train.runs import AtWindow, adapter_bytes, outcome, two_slots


@pytest.fixture(scope="module")
def make_config(model, jobs):
    """A checkpoint after every second round; the first job exports its best."""

    def make(folder: pathlib.Path) -> RunConfig:
        return two_slots(
            model,
            folder,
            (
                jobs[0].replace(keep_best=True, steps=6),
                jobs[1].replace(steps=5),
            ),
            checkpoint_every=2,
            window_steps=1,
        )

    return make


@pytest.fixture
def config(make_config, tmp_path) -> RunConfig:
    return make_config(tmp_path / "run")


@pytest.fixture(scope="module")
def whole(make_config, model, tmp_path_factory):
    """The adapters of a run that nothing stopped and nothing slowed down."""
    config = make_config(tmp_path_factory.mktemp("whole") / "run")
    return outcome(config, model).bytes


def checkpoints(config) -> pathlib.Path:
    return pathlib.Path(config.output_dir) / "checkpoints"


def while_writing(monkeypatch, act) -> None:
    """Calls a function in each write of a checkpoint, before its files are synced."""
    sync, numbers = checkpoint.sync_files, iter(range(1, 1000))

    def acting(folder):
        act(next(numbers))
        sync(folder)

    monkeypatch.setattr(checkpoint, "sync_files", acting)


class Recorder(Callback):
    """Keeps the kind and the round of each event, and the checkpoint that is there."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.seen = folder, []

    def on_event(self, event) -> None:
        self.seen.append((event.kind, event.round, newest_checkpoint(self.folder)))


def test_training_goes_on_while_a_checkpoint_is_written(
    config, model, monkeypatch, whole
):
    """It waits for the write only where the next checkpoint is due."""
    may_end = threading.Event()
    while_writing(monkeypatch, lambda number: may_end.wait())
    recorder = Recorder(checkpoints(config))

    def let_it_end(trainer):
        if trainer.round == 3:
            assert newest_checkpoint(checkpoints(config)) is None
            may_end.set()

    result = Trainer(config, model).train(callbacks=[recorder, AtWindow(let_it_end)])
    assert ("step", 3, None) in recorder.seen
    # The event comes when the checkpoint is there, and before the next one begins.
    events = [seen for seen in recorder.seen if seen[0] == "checkpoint"]
    assert [number for _, number, _ in events] == [2, 4, 6]
    assert all(newest is not None and newest >= n for _, n, newest in events)
    assert recorder.seen[-1] == ("run_end", 6, 6)
    assert adapter_bytes(result.output_dir) == whole


@pytest.mark.parametrize("most_locked", [1 << 30, 3000, 0])
def test_a_snapshot_does_not_follow_the_slots(config, model, monkeypatch, most_locked):
    """Weights and moments stay, whatever the programs do with the slots' memory."""
    monkeypatch.setattr(global_arrays, "_MOST_LOCKED", most_locked)
    trainer = Trainer(config, model)
    job = trainer.jobs[1]
    trainer.slots.load(1, job.start, "adamw")
    rng = np.random.default_rng(5)
    state = trainer.slots.copy(1)
    for tensors in state.by_kind().values():
        for tensor in tensors.values():
            tensor[...] = rng.normal(size=tensor.shape)
    trainer.slots.restore(1, state, job.start)
    read_slot = trainer.slots.snapshot()
    trainer.slots.clear(1)
    trainer.slots.load(0, trainer.jobs[0].start, "adamw")
    kinds = read_slot(1).by_kind()
    assert kinds.keys() == {"params", "mu", "nu"}
    jax.tree.map(np.testing.assert_array_equal, kinds, state.by_kind())


def test_a_write_that_fails_ends_the_run(config, model, monkeypatch, whole):
    """With the error of the write; the checkpoint before resumes to the same bits."""

    def fail(number):
        if number == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        while_writing(patched, fail)
        with pytest.raises(CheckpointError, match=r"could not be written.*No space"):
            Trainer(config, model).train()
    assert newest_checkpoint(checkpoints(config)) == 2
    assert outcome(config, model, resume=True).bytes == whole


def test_no_checkpoint_follows_an_export_that_failed(config, model, monkeypatch, whole):
    """It would say that the job has ended, though its adapter is not there."""
    write = run_store.write_adapter

    def fail(adapter, folder, *settings):
        if folder.name == "job1":
            raise StorageError(f"{folder} cannot be written: it is full.")
        write(adapter, folder, *settings)

    with monkeypatch.context() as patched:
        patched.setattr(run_store, "write_adapter", fail)
        with pytest.raises(StorageError, match="it is full"):
            Trainer(config, model).train()
    saved = read_newest(checkpoints(config))
    assert saved.run.progress["job1"].status == "running"
    assert outcome(config, model, resume=True).bytes == whole


def test_a_signal_during_a_write(config, model, monkeypatch, whole):
    """The checkpoint under way and the last are whole."""
    is_sent = threading.Event()

    def stop(number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            is_sent.set()

    class Waits(Callback):
        def on_window(self, event) -> None:
            if event.round == 3:  # the first checkpoint was taken in the round before
                is_sent.wait()

    with monkeypatch.context() as patched:
        while_writing(patched, stop)
        result = Trainer(config, model).train(callbacks=[Waits()])
    assert result.interrupted
    numbers = [int(path.name) for path in checkpoints(config).iterdir()]
    assert 1 <= len(numbers) <= 2
    assert outcome(config, model, resume=True).bytes == whole


class Exports(Callback):
    """Compares the steps that events tell with those of the files."""

    def __init__(self):
        self.steps: list[tuple[str, int]] = []
        self.ended: set[str] = set()

    def on_export(self, event) -> None:
        record = read_record(event.folder)
        assert record is not None and record.job == event.job
        assert record.step >= event.step
        self.steps.append((event.job, event.step))

    def on_job_end(self, event) -> None:
        self.ended.add(event.job)

    def on_checkpoint(self, event) -> None:
        progress = read_newest(event.folder.parent).run.progress
        for name, done in progress.items():
            if done.is_over:
                adapters = event.folder.parents[1] / "adapters"
                assert read_record(adapters / name) is not None


def test_an_export_is_on_the_disk_when_its_event_comes(config, model):
    exports = Exports()
    keep = config.replace(keep_checkpoints=1)
    result = Trainer(keep, model).train(callbacks=[exports])
    assert exports.ended == {"job0", "job1"}
    assert ("job1", 5) in exports.steps
    best = result.jobs[0].progress.best_step
    assert [step for name, step in exports.steps if name == "job0"][-1] == best
    assert [path.name for path in checkpoints(config).iterdir()] == ["6"]
