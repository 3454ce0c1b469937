"""Runs that are resumed with something else, or in the same process."""

import contextlib
import dataclasses
import pathlib
import re
import shutil

import jax
import pytest

from jaxlora import LoraJob, RunConfig, Trainer, import_peft
from jaxlora.errors import CheckpointError, DeviceError
from jaxlora.models.structure import linear_shapes
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.run import folder as run_folder
from jaxlora.train import open_run
from jaxlora.train.execute.in_flight import InFlight
from jaxlora.train.run import Run
from jaxlora.train.saved import read_checkpoint
from jaxlora.train.saved.checkpoint import Checkpoints
from jaxlora.train.saved.read_checkpoint import newest_checkpoint, read_newest
from jaxlora.train.saved.resume import FoundRun
from tests.jaxlora.train import made_run
from tests.jaxlora.train.runs import InterruptAt, adapter_bytes, two_slots
from tests.oracle import relative_error


@pytest.fixture
def config(model, jobs, tmp_path):
    """A run of two jobs, the first with a checkpoint after every round."""
    return two_slots(
        model, tmp_path / "run", jobs[:2], checkpoint_every=1, window_steps=1
    )


@pytest.fixture(scope="module")
def done():
    """The runs that nothing stopped; each is trained once."""
    return {}


@pytest.fixture
def train_whole(config, model, tmp_path, done):
    """Trains the run in another folder, without a stop; returns its settings."""

    def run(**changes) -> RunConfig:
        key = repr(changes)
        if key not in done:
            done[key] = config.replace(output_dir=str(tmp_path / "whole"), **changes)
            Trainer(done[key], model).train()
        return done[key]

    return run


def test_other_slots_and_a_job_added_on_resume(config, model, jobs, train_whole):
    """The jobs go into one slot in turn, of another rank and on other linears.

    The job whose slot is gone is paused, with its whole state, until the slot is free.
    """
    whole = train_whole()
    Trainer(config, model).train(callbacks=[InterruptAt(1)])
    new = jobs[2].replace(steps=1)
    other = config.replace(
        jobs=(new, *config.jobs),
        slot_targets=["k_proj"],
        slot_rank=12,
        max_concurrent_jobs=1,
    )
    assert not Trainer(other, model).train(resume=True).interrupted
    assert new.name in adapter_bytes(other.output_dir)
    shapes = linear_shapes(model.config)
    for job in config.jobs:
        wanted, found = (
            import_peft(pathlib.Path(c.output_dir) / "adapters" / job.name, shapes)
            for c in (whole, other)
        )
        for path, tensor in wanted.by_path().items():
            assert relative_error(found.by_path()[path], tensor) < 2e-4


def saved_step(config: RunConfig) -> int:
    """Returns the steps of the only job in the newest checkpoint."""
    found = read_newest(pathlib.Path(config.output_dir) / "checkpoints")
    (progress,) = found.run.progress.values()
    return progress.step


def test_more_steps_on_resume(config, model, tmp_path, monkeypatch):
    """At a constant rate, the job ends as one that had these steps from the start."""
    job = config.jobs[0].replace(lr_schedule="constant", steps=6)
    longer = job.replace(steps=9)
    config = config.replace(jobs=(job,), window_steps=1)
    whole = config.replace(jobs=(longer,), output_dir=str(tmp_path / "whole"))
    Trainer(whole, model).train()
    Trainer(config, model).train(callbacks=[InterruptAt(2)])
    Trainer(config.replace(jobs=(longer,)), model).train(resume=True)
    assert adapter_bytes(config.output_dir) == adapter_bytes(whole.output_dir)
    longest = longer.replace(steps=10)
    monkeypatch.setattr(open_run, "load_model", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(CheckpointError, match="has finished its 9 steps, and 10 are"):
        Trainer(config.replace(jobs=(longest,)))


def test_fewer_steps_than_are_done_need_a_word(
    config, model, tmp_path, caplog, monkeypatch
):
    """Without it nothing is lost: the way back to the settings before is open."""
    job = config.jobs[0].replace(lr_schedule="constant", steps=9)
    shorter = job.replace(steps=2)
    config = config.replace(jobs=(job,), window_steps=1)
    whole = config.replace(output_dir=str(tmp_path / "whole"))
    Trainer(whole, model).train()
    Trainer(config, model).train(callbacks=[InterruptAt(4)])
    done_steps = saved_step(config)
    assert 4 <= done_steps < 9
    cut = config.replace(jobs=(shorter,))
    with pytest.raises(CheckpointError) as refused:
        Trainer(cut, model).train(resume=True)
    for words in (
        f"job {job.name!r} has done {done_steps} steps, and the number wanted now is 2",
        "optimizer states be dropped",
        "Set these settings back",
        "drop_state=True (--drop-state)",
    ):
        assert words in str(refused.value)
    kept = pathlib.Path(config.output_dir)
    elsewhere = str(shutil.copytree(kept, tmp_path / "dropped"))
    Trainer(config, model).train(resume=True)
    assert adapter_bytes(config.output_dir) == adapter_bytes(whole.output_dir)
    cut = cut.replace(output_dir=elsewhere)
    (done,) = Trainer(cut, model).train(resume=True, drop_state=True).jobs
    assert "their optimizer states are dropped, so they cannot go on" in caplog.text
    assert (done.progress.status, done.progress.step) == ("finished", done_steps)
    reason = f"{done_steps} steps done, and the number wanted is 2"
    assert done.progress.reason == reason
    other = shorter.replace(continue_from=str(tmp_path / "stopped"))
    stopped = config.replace(output_dir=str(tmp_path / "stopped"))
    Trainer(stopped, model).train(callbacks=[InterruptAt(4)])
    message = r"has done [4-8] steps in .*, and the number wanted here is 2, "
    new = config.replace(jobs=(other,), output_dir=str(tmp_path / "new"))
    monkeypatch.setattr(Run, "_fit", lambda _: pytest.fail("it was compiled"))
    with pytest.raises(CheckpointError, match=message):
        Trainer(new, model).train()
    assert not (tmp_path / "new").exists()


def test_less_patience_needs_a_word_too(tmp_path):
    jobs = {"now": dataclasses.replace(made_run.JOBS["now"], evals_without_gain=2)}
    states = {"now": made_run.parked()}
    folder = made_run.write_run(tmp_path / "run", (), jobs)
    with contextlib.closing(Checkpoints(folder / "checkpoints", keep=9)) as checkpoints:
        checkpoints.save(4, states, made_run.saved_run(jobs))
    found, identity = FoundRun.read(folder), made_run.identity(jobs)
    often = {"eval_every": 1, "early_stopping": 2}
    job = LoraJob(name="now", data={"path": "x"}, eval_fraction=0.1, **often)

    class Job(PreparedJob):
        name, num_steps = "now", 9

        def __init__(self, settings: LoraJob):
            object.__setattr__(self, "settings", settings)

    with pytest.raises(CheckpointError, match="has had 2 evaluations without a gain, "):
        found.check(identity, [Job(job)], drop_state=False)
    found.check(identity, [Job(job)], drop_state=True)
    patient = job.replace(early_stopping=3)
    found.check(identity, [Job(patient)], drop_state=False)


def test_a_refused_resume_leaves_the_folder(config, model, monkeypatch):
    """One that is not refused reads each of its files once."""
    config = config.replace(jobs=config.jobs[:1], microbatch_tokens="auto")
    Trainer(config, model).train(callbacks=[InterruptAt(1)])
    folder = pathlib.Path(config.output_dir)
    before = (folder / "run.json").read_text()
    other = config.jobs[0].replace(batch_size=1)
    with pytest.raises(CheckpointError, match="batch_size is"):
        Trainer(config.replace(jobs=(other,)), model).train(resume=True)
    assert (folder / "run.json").read_text() == before
    read = []

    def counted(path, *args, read_sealed=read_checkpoint.read_sealed, **kwargs):
        read.append(path.name)
        return read_sealed(path, *args, **kwargs)

    for module in (run_folder, read_checkpoint):
        monkeypatch.setattr(module, "read_sealed", counted)
    assert not Trainer(config, model).train(resume=True).interrupted
    assert sorted(read) == ["meta.json", "run.json"]


def test_an_older_checkpoint_cannot_follow(config, model):
    config = config.replace(jobs=config.jobs[:1])
    trainer = Trainer(config, model)
    trainer.train(callbacks=[InterruptAt(2)])
    folder = trainer.output_dir / "checkpoints"
    found = read_newest(folder)
    with contextlib.closing(Checkpoints(folder, keep=9)) as saved:
        match = f"checkpoint {found.number}, so that checkpoint 1"
        with pytest.raises(CheckpointError, match=match):
            saved.save(1, {}, found.run)
    assert newest_checkpoint(folder) == found.number >= 2


@pytest.mark.parametrize("at", [0, 1])
def test_the_same_trainer_goes_on_after_an_error(
    config, model, train_whole, monkeypatch, at
):
    """In the middle of a batch; before the first checkpoint, and after some."""
    whole = train_whole(microbatch_tokens=128)
    config = config.replace(microbatch_tokens=128)
    trainer, run, left = Trainer(config, model), InFlight.run, [3]

    def fails(self, *args, **kwargs):
        if trainer.round >= at:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return run(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(InFlight, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer.train(resume=True)
    assert adapter_bytes(config.output_dir) == adapter_bytes(whole.output_dir)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", r"out of memory: .*microbatch_tokens"),
        ("INTERNAL: device 3 was lost", r"a device failed: INTERNAL: device 3"),
    ],
)
def test_a_device_that_fails_ends_the_run_in_words(
    config, model, train_whole, status, words
):
    """And the run goes on from its checkpoint in the same bits."""
    whole = train_whole()
    trainer, run = Trainer(config, model), InFlight._run

    def fails(self, one, baseline):
        if trainer.round >= 2:
            raise jax.errors.JaxRuntimeError(status)
        return run(self, one, baseline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "_run", fails)
        with pytest.raises(DeviceError, match=words) as raised:
            trainer.train()
    assert re.search(
        r"after round 2 is whole; continue with --resume", str(raised.value)
    )
    Trainer(config, model).train(resume=True)
    assert adapter_bytes(config.output_dir) == adapter_bytes(whole.output_dir)


def test_other_held_out_data_is_refused(config, model, tmp_path, monkeypatch):
    """Before the base is read."""
    job = config.jobs[0]
    held_out = tmp_path / "eval.jsonl"
    lines = pathlib.Path(job.data.path).read_text().splitlines()
    held_out.write_text("\n".join(lines[:3]))
    data = {"path": str(held_out)}
    job = type(job)(**job.model_dump(exclude={"eval_fraction"}) | {"eval_data": data})
    config = config.replace(jobs=(job,))
    Trainer(config, model).train(callbacks=[InterruptAt(1)])
    held_out.write_text("\n".join(lines[3:6]))
    monkeypatch.setattr(open_run, "load_model", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(CheckpointError, match="eval_data_fingerprint is"):
        Trainer(config)


def test_a_folder_with_checkpoints_is_not_begun_anew(config, model):
    Trainer(config, model).train(callbacks=[InterruptAt(2)])
    (pathlib.Path(config.output_dir) / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match="already holds a run"):
        Trainer(config, model).train()


def test_a_file_in_the_place_of_a_checkpoint_is_refused_by_a_listing(tmp_path):
    """Neither the data nor the base are looked for; both are missing."""
    run = made_run.write_run(tmp_path / "run")
    (run / "checkpoints" / "9").mkdir()
    (run / "checkpoints" / "9" / "notes.txt").write_text("mine")
    data = {
        "data": {"path": str(tmp_path / "none.jsonl")},
        "target_modules": ["q_proj"],
    }
    jobs = [LoraJob(name=name, **data) for name in made_run.JOBS]
    config = RunConfig(model=str(tmp_path / "none"), output_dir=str(run), jobs=jobs)
    with pytest.raises(CheckpointError, match="9 has the name of a checkpoint, and"):
        Trainer(config)
    assert (run / "checkpoints" / "9" / "notes.txt").exists()


def test_a_run_that_has_ended_was_not_interrupted(config, model):
    last = max(job.steps for job in config.jobs)
    result = Trainer(config, model).train(callbacks=[InterruptAt(last)])
    assert not result.interrupted
    assert {job.progress.status for job in result.jobs} == {"finished"}
