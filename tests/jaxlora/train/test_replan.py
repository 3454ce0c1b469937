"""A run with `replicas: auto` keeps its replicas, unless `replan` has them chosen."""

import dataclasses
import pathlib
import shutil

import pytest

from jaxlora import LoraJob, Trainer
from jaxlora.costs.gpus import find_speed
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.plan.job import prepare_run
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh.candidates import Search
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.run.folder import (
    CHECKPOINTS,
    read_run_record,
    write_run_record,
)
from jaxlora.train.saved.read_checkpoint import read_newest
from jaxlora.train.saved.resume import as_begun
from tests import tiny
from tests.jaxlora.memory_formula import estimated_by_formula
from tests.jaxlora.train import made_run
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.runs import (
    AtWindow,
    Copies,
    Outcome,
    assert_same_bits,
)
from tests.jaxlora.train.test_replicas import ONE, Runs

pytestmark = pytest.mark.needs_devices(3)

AUTO = {"replicas": "auto", "window_steps": 2, "remat": "layer", "checkpoint_every": 1}
# Tokens that fit on replicas of so many devices.
ROOM = {1: 64, 2: 192}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model) -> Runs:
    return Runs(tmp_path_factory.mktemp("replan"), model)


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

    Layers take no time but that of their products, as those of large models.
    """
    speed = dataclasses.replace(find_speed("NVIDIA L40S"), layer_seconds=0.0)
    memory = DeviceMemory(num_bytes=2**34, source="a test")
    here = dataclasses.replace(
        this_machine(), num_devices=3, speed=speed, memory=memory
    )

    def largest(search, plan, bounds, limit):
        tokens = min(ROOM.get(plan.stages.sizes.tensor, 0), bounds.largest)
        return tokens if tokens >= bounds.smallest else None

    with pytest.MonkeyPatch.context() as patch, estimated_by_formula():
        patch.setattr(prepare_run, "this_machine", lambda *_: here)
        patch.setattr(Search, "largest", largest)
        yield


@pytest.fixture(scope="module")
def late(own_jobs) -> LoraJob:
    """A job with the long samples of the first one."""
    return own_jobs[0].replace(name="late", steps=4)


@pytest.fixture(scope="module")
def whole(runs, own_jobs, machine, tmp_path_factory) -> tuple[Outcome, Copies]:
    """A whole run, and what a kill at each of its checkpoints would leave."""
    copies = Copies(tmp_path_factory.mktemp("copies"))
    trainer = Trainer(runs.config(own_jobs, **AUTO), runs.model)
    return Outcome(trainer, trainer.train(callbacks=[copies])), copies


@pytest.fixture(scope="module")
def halfway(whole) -> pathlib.Path:
    """The run at its first checkpoint after the job with long samples has ended."""
    found = (c for c in whole[1].copies if progress(c)["job0"].is_over)
    return next(found)


@pytest.fixture(scope="module")
def replanned(
    runs, own_jobs, halfway, machine, tmp_path_factory
) -> tuple[Outcome, Copies]:
    """The run that has been resumed there, with other replicas."""
    folder = tmp_path_factory.mktemp("replanned")
    copies = Copies(folder / "copies")
    run = shutil.copytree(halfway, folder / "run")
    return resumed(runs, own_jobs, run, copies, replan=True), copies


def resumed(runs, jobs, folder, *callbacks, replan=False, **settings) -> Outcome:
    config = runs.config(jobs, **AUTO | settings | {"output_dir": str(folder)})
    trainer = Trainer(config, runs.model, replan=replan)
    result = trainer.train(resume=True, callbacks=callbacks)
    return Outcome(trainer, result)


def is_wide(trainer: Trainer) -> bool:
    """Whether the largest microbatches hold the long samples."""
    return trainer.config.limits.capacity >= 96


def progress(folder: pathlib.Path):
    return read_newest(folder / CHECKPOINTS).run.progress


def test_a_run_keeps_its_replicas(runs, own_jobs, whole, halfway, tmp_path):
    """Also if a job has ended for which they were chosen."""
    outcome, _ = whole
    assert is_wide(outcome.trainer)
    again = resumed(runs, own_jobs, shutil.copytree(halfway, tmp_path / "run"))
    assert again.trainer.config == outcome.trainer.config.replace(
        output_dir=again.trainer.config.output_dir
    )
    assert_same_bits(outcome, again)


def test_replan_chooses_for_the_jobs_that_are_left(runs, own_jobs, replanned):
    outcome, _ = replanned
    trainer, folder = outcome.trainer, outcome.result.output_dir
    assert trainer.config.mesh == "data=3" and not is_wide(trainer)
    assert trainer.plan.ended == ("job0",)
    record = read_run_record(folder)
    assert (record.ended, record.config["mesh"]) == (["job0"], "data=3")
    assert_same_on_meshes(runs.once(own_jobs, **ONE), outcome)


def test_what_was_chosen_anew_stays(runs, own_jobs, replanned, tmp_path):
    outcome, copies = replanned
    folder = shutil.copytree(copies.copies[1], tmp_path / "run")
    assert not all(one.is_over for one in progress(folder).values())
    again = resumed(runs, own_jobs, folder)
    assert again.trainer.config.mesh == "data=3"
    assert again.trainer.plan.ended == ("job0",)
    assert_same_bits(outcome, again)


def test_a_checkpoint_from_before_the_job_had_ended(
    runs, own_jobs, whole, replanned, tmp_path
):
    """The record has replicas that do not hold it."""
    _, copies = replanned
    old = next(c for c in whole[1].copies if not progress(c)["job0"].is_over)
    folder = shutil.copytree(copies.copies[-1], tmp_path / "run")
    shutil.rmtree(folder / CHECKPOINTS)
    shutil.copytree(old / CHECKPOINTS, folder / CHECKPOINTS)
    match = r"job 'job0' has .* Or have .* chosen anew, .* resume it with --replan"
    with pytest.raises(ConfigError, match=match):
        resumed(runs, own_jobs, folder)
    again = resumed(runs, own_jobs, folder, replan=True)
    assert is_wide(again.trainer) and not again.trainer.plan.ended
    assert_same_on_meshes(runs.once(own_jobs, **ONE), again)


def test_a_job_that_the_replicas_do_not_hold(runs, own_jobs, replanned, late, tmp_path):
    """It is refused while the run trains, and when it is resumed; its cure works."""
    _, copies = replanned
    folder, errors = shutil.copytree(copies.copies[0], tmp_path / "run"), []

    def join(trainer):
        if not errors:
            with pytest.raises(ConfigError) as caught:
                trainer.add_job(late)
            errors.append(str(caught.value))

    jobs = (*own_jobs[:2], own_jobs[2].replace(steps=12))
    resumed(runs, jobs, folder, AtWindow(join))
    (text,) = errors
    assert text.startswith("job 'late' has a sample of ")
    assert text.endswith(
        "resume it with --replan (Trainer(config, replan=True)): replicas: auto then "
        "chooses replicas that hold it."
    )
    folder = shutil.copytree(copies.copies[0], tmp_path / "again")
    with pytest.raises(ConfigError, match=r"'late' has a sample.* with --replan"):
        resumed(runs, (*own_jobs, late), folder)
    again = resumed(runs, (*own_jobs, late), folder, replan=True)
    assert is_wide(again.trainer)
    assert {one.status for one in again.progress.values()} == {"finished"}
    alone = runs.train((late,), **ONE)
    assert again.losses["late"] == pytest.approx(alone.losses["late"], rel=2e-6)


def test_a_job_that_has_ended_is_not_continued(runs, own_jobs, whole):
    folder = str(whole[0].result.output_dir)
    job = own_jobs[0].replace(continue_from=folder)
    with pytest.raises(CheckpointError, match="job 'job0' cannot continue from"):
        Trainer(runs.config((job,), **AUTO), runs.model)


def test_the_record_has_the_mesh_that_was_chosen(runs, own_jobs):
    """A resume takes it in the place of a list; a user may take it back."""
    config = runs.config(own_jobs, **AUTO)
    folder = pathlib.Path(config.output_dir)
    folder.mkdir()
    chosen = {"microbatch_tokens": 192, "remat": "layer"}
    write_run_record(folder, made_run.record({}, **chosen, mesh="data=3"))
    begun = as_begun(config)
    assert (begun.config.mesh, begun.config.replicas) == ("data=3", None)
    assert begun.config.microbatch_tokens == 192
    text = "replicas: auto: mesh data=3, as in the run so far"
    assert text in [note.text for note in begun.notes]
    given = config.replace(replicas=[{"microbatch_tokens": 192}])
    assert as_begun(given).config.replicas == given.replicas
    anew = as_begun(config, replan=True)
    assert anew.config == config and not anew.chosen and not anew.notes
    write_run_record(folder, made_run.record({}, **chosen, mesh="data=no"))
    with pytest.raises(CheckpointError, match=r"began with .*mesh: data=no"):
        as_begun(config)
