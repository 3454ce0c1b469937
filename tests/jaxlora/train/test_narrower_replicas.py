"""A run moves to replicas that could not hold the samples of a job that has left."""

import dataclasses
import pathlib
import shutil

import pytest

from jaxlora import LoraJob, Trainer
from jaxlora.costs.device_speed import find_speed
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.memory.device_memory import DeviceMemory
from jaxlora.run.folder import CHECKPOINTS, read_run_record
from jaxlora.sweeps.suggesting import Suggestions
from jaxlora.train.plan import prepare_run
from jaxlora.train.plan.auto_mesh.machine import this_machine
from jaxlora.train.plan.auto_replicas import moving
from jaxlora.train.plan.auto_replicas.room import RoomFinder
from jaxlora.train.plan.prepared_job import longest_group
from jaxlora.train.replanning import Replanning
from jaxlora.train.saved.read_checkpoint import read_newest
from jaxlora.train.saved.run_adapters import load_run_adapters
from tests import tiny
from tests.jaxlora.memory_formula import estimated_by_formula
from tests.jaxlora.train.at_window import Copies, InterruptAt, at_windows
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.outcome import Outcome
from tests.jaxlora.train.test_replanning import assert_same_bits
from tests.jaxlora.train.test_replicas import ONE, Runs, resumed

pytestmark = pytest.mark.needs_devices(3)

AUTO = {"replicas": "auto", "window_steps": 2, "remat": "layer"}
# Tokens that fit on replicas of so many devices.
ROOM = {1: 64, 2: 192}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model) -> Runs:
    return Runs(tmp_path_factory.mktemp("narrower"), model)


@pytest.fixture(scope="module")
def own_jobs(jobs, tmp_path_factory):
    """A job with long samples that ends early, and two with short ones."""
    folder = tmp_path_factory.mktemp("short")
    own = []
    for number, steps in ((0, 2), (2, 9), (3, 10)):
        changes = {"adam_eps": 1e-4, "max_grad_norm": 0.05, "steps": steps}
        if number:
            path = folder / f"{number}.jsonl"
            data = tiny.write_records(path, 18 + 3 * number, number, longest=20)
            changes |= {"data": {"path": data}, "max_length": 48}
        own.append(LoraJob(**jobs[number].model_dump(mode="json") | changes))
    return tuple(own)


@pytest.fixture(scope="module", autouse=True)
def machine():
    """Three devices that PCIe joins, of which two together hold the long samples.

    Layers take no time but that of their products, as those of large models. Moving
    takes no time.
    """
    speed = dataclasses.replace(find_speed("NVIDIA L40S"), layer_seconds=0.0)
    memory = DeviceMemory(num_bytes=2**34, source="a test")
    here = dataclasses.replace(
        this_machine(), num_devices=3, speed=speed, memory=memory
    )

    def fitting(self, config, tensor, available):
        return min(ROOM[tensor], self._bounds.largest)

    with pytest.MonkeyPatch.context() as patch, estimated_by_formula():
        patch.setattr(prepare_run, "this_machine", lambda *_: here)
        patch.setattr(RoomFinder, "_fitting", fitting)
        patch.setattr(moving, "_moving_seconds", lambda *_: 0.0)
        yield


@pytest.fixture(scope="module")
def moved(runs, own_jobs, machine, tmp_path_factory) -> tuple[Outcome, Copies]:
    """A run that has moved, and what a kill at each of its checkpoints would leave."""
    copies = Copies(tmp_path_factory.mktemp("copies"))
    trainer = Trainer(
        runs.config(own_jobs, **AUTO | {"checkpoint_every": 1}), runs.model
    )
    return Outcome(trainer, trainer.train(callbacks=[copies]), runs.model), copies


def is_wide(trainer: Trainer) -> bool:
    """Whether the largest microbatches hold the long samples."""
    return trainer.config.limits.capacity >= 96


def progress(folder: pathlib.Path):
    return read_newest(folder / CHECKPOINTS).run.progress


def test_a_run_moves_where_the_job_would_not_fit(runs, own_jobs, moved):
    """With what one device gives; the adapters of all jobs can be read."""
    outcome, _ = moved
    trainer, folder = outcome.trainer, outcome.result.output_dir
    assert_same_on_meshes(runs.once(own_jobs, **ONE), outcome)
    assert trainer.config.mesh == "data=3" and not is_wide(trainer)
    assert longest_group(trainer.jobs[0].prepared) > trainer.config.limits.capacity
    assert trainer.plan.ended == ("job0",)
    assert read_run_record(folder).ended == ["job0"]
    adapters = load_run_adapters(folder).adapters
    assert adapters.keys() == outcome.adapters.keys()


def test_a_kill_at_any_checkpoint(runs, own_jobs, moved, tmp_path):
    whole, copies = moved
    numbers: dict[str, list[int]] = {"before": [], "at": [], "after": []}
    for number, folder in enumerate(copies.copies):
        saved = read_newest(folder / CHECKPOINTS).run
        steps = sum(one.step for one in saved.progress.values())
        if read_run_record(folder).ended:
            numbers["after"].append(number)
        elif saved.replan.steps:
            is_due = steps >= saved.replan.due
            numbers["at" if is_due else "before"].append(number)
    assert all(numbers.values()), numbers
    for number in (found[-1] for found in numbers.values()):
        folder = shutil.copytree(copies.copies[number], tmp_path / f"{number}")
        again = resumed(runs, own_jobs, folder, **AUTO | {"checkpoint_every": 1})
        assert_same_bits(whole, again)
        assert again.trainer.plan.ended == ("job0",)
        assert again.result.num_compilations == 0
    # With the settings of `settings.yaml`, which has them in the place of `auto`.
    folder = shutil.copytree(copies.copies[numbers["after"][-1]], tmp_path / "given")
    given = {"replicas": None, "mesh": "data=3", "microbatch_tokens": 64}
    again = resumed(runs, own_jobs, folder, **AUTO | given)
    assert_same_bits(whole, again)
    assert again.trainer.plan.ended == ("job0",)
    # This trainer cannot begin again with the job.
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"not hold job0, .* Make a new Trainer"):
        again.trainer.train()


def test_a_checkpoint_from_before_the_job_had_left(
    runs, own_jobs, moved, tmp_path, caplog
):
    """The record has the new replicas; the run goes back to ones that hold the job."""
    whole, copies = moved
    old = next(c for c in copies.copies if not progress(c)["job0"].is_over)
    folder = shutil.copytree(copies.copies[-1], tmp_path / "run")
    shutil.rmtree(folder / CHECKPOINTS)
    shutil.copytree(old / CHECKPOINTS, folder / CHECKPOINTS)
    with caplog.at_level("INFO"):
        again = resumed(runs, own_jobs, folder, **AUTO | {"checkpoint_every": 1})
    text = "replicas: auto: chosen anew, as those so far cannot go on: job 'job0' has"
    assert any(one.startswith(text) for one in caplog.messages)
    assert_same_bits(whole, again)
    assert again.trainer.plan.ended == ("job0",)


def test_jobs_that_join_after_the_move(runs, own_jobs, caplog):
    """A long one is refused, and its cure works; a copy of a live job joins."""
    late = own_jobs[0].replace(name="late", steps=4)
    errors = []

    def join(trainer):
        if trainer.plan.ended and not errors:
            with pytest.raises(ConfigError) as caught:
                trainer.add_job(late)
            errors.append(str(caught.value))
            trainer.clone_job(own_jobs[2].name, "copy", steps=12)

    rest = own_jobs[2].replace(steps=16)
    given = (*own_jobs[:2], rest)
    config = runs.config(given, **AUTO | {"checkpoint_every": 1})
    trainer = Trainer(config, runs.model)
    stop = InterruptAt(8)
    result = trainer.train(callbacks=[*at_windows(join), stop])
    assert result.interrupted and "copy" in {job.name for job in result.jobs}
    (text,) = errors
    assert text.startswith("job 'late' has a sample of ")
    assert "this run supports samples of at most 48" in text
    assert text.endswith(
        "resume it: replicas: auto then chooses replicas that hold it."
    )
    again = resumed(runs, (*given, late), config.output_dir, **AUTO)
    assert {one.status for one in again.progress.values()} == {"finished"}
    alone = runs.train((late,), **ONE)
    assert again.losses["late"] == pytest.approx(alone.losses["late"], rel=2e-6)


def test_configurations_that_may_follow_are_held(runs, own_jobs, monkeypatch):
    """A search suggests more of the kind of the job that has left."""
    monkeypatch.setattr(Suggestions, "is_open", property(lambda self: True))
    trainer = runs.train(own_jobs, **AUTO).trainer
    assert is_wide(trainer) and not trainer.plan.ended


@pytest.mark.grid
def test_slots_hold_what_is_left(runs, own_jobs):
    """Rank, tensors and optimizers of the job that has left are gone from them."""
    first = own_jobs[0].replace(use_dora=True, optimizer="sgd", adam_eps=1e-8)
    jobs, open_slots = (first, *own_jobs[1:]), {"slot_rank": None, "slot_dropout": None}
    moved = runs.train(jobs, **AUTO | open_slots)
    assert_same_on_meshes(runs.train(jobs, **ONE | open_slots), moved)
    slots = moved.trainer.plan.spec.slots
    assert (slots.num_slots, slots.rank) == (3, max(job.rank for job in jobs[1:]))
    assert (slots.settings, slots.optimizers) == ((), ("adamw",))


def test_a_job_that_has_ended_is_not_continued(runs, own_jobs, moved):
    folder = str(moved[0].result.output_dir)
    job = own_jobs[0].replace(continue_from=folder)
    with pytest.raises(CheckpointError, match="job 'job0' cannot continue from"):
        Trainer(runs.config((job,), **AUTO), runs.model)


def test_a_job_that_joins_as_the_run_is_to_move(runs, own_jobs, monkeypatch, caplog):
    """It was accepted for the replicas that run, so the run stays there."""
    late = own_jobs[0].replace(name="late", steps=4)
    look, drafts = Replanning.look, []
    config = runs.config(own_jobs, **AUTO)
    trainer = Trainer(config, runs.model)

    def joining(self):
        draft = look(self)
        if draft is not None and not drafts:
            drafts.append(draft)
            trainer.add_job(late)
        return draft

    monkeypatch.setattr(Replanning, "look", joining)
    with caplog.at_level("INFO"):
        outcome = Outcome(trainer, trainer.train(), runs.model)
    text = "replicas: auto: not moving, as a job has joined meanwhile: job 'late' has"
    assert any(one.startswith(text) for one in caplog.messages)
    assert {one.status for one in outcome.progress.values()} == {"finished"}
    one = runs.once(own_jobs, **ONE)
    for name in one.bytes:
        assert outcome.losses[name] == pytest.approx(one.losses[name], rel=2e-6)


def test_a_paused_job_is_held_until_it_is_stopped(runs, own_jobs):
    """Its samples bound the choice, although it does not train."""
    long, *rest = own_jobs
    jobs = (long.replace(steps=9), *(job.replace(steps=16) for job in rest))
    seen = []

    def on_window(trainer):
        seen.append(is_wide(trainer))
        if len(seen) == 1:
            trainer.pause_job("job0")
        if len(seen) == 5:
            trainer.stop_job("job0")

    outcome = runs.train(jobs, on_window=on_window, **AUTO)
    assert all(seen[:5]) and not is_wide(outcome.trainer), seen
    assert outcome.progress["job0"].status == "stopped"
    assert outcome.trainer.plan.ended == ("job0",)
