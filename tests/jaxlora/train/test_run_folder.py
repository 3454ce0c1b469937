"""A run's folder: which run may go on in it, and what is never written over."""

import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from jaxlora import Callback, RunConfig, Trainer, load_run
from jaxlora.cli.main import main
from jaxlora.errors import CheckpointError, StorageError
from jaxlora.inspect import inspect_path
from jaxlora.run.folder import (
    REPLACED,
    check_folder,
    clean_up,
    prepare_export_folder,
)
from jaxlora.train.saved.checkpoint import Checkpoints
from jaxlora.train.saved.export import export_checkpoint
from tests.jaxlora.train import made_run
from tests.jaxlora.train.runs import (
    AtWindow,
    InterruptAt,
    contents,
    events_of,
    two_slots,
)

pytestmark = pytest.mark.usefixtures("no_device")


@pytest.fixture
def config(model, jobs, tmp_path):
    """A checkpoint after each round; the first job exports its best evaluations."""
    first = jobs[0].replace(keep_best=True, learning_rate=1e-3)
    return two_slots(
        model, tmp_path / "run", (first, jobs[1]), checkpoint_every=1, window_steps=1
    )


@pytest.mark.usefixtures("pictures")
def test_beside_a_run_that_goes_on(config, model, tmp_path):
    """A second run is refused; what only reads works, and changes nothing."""
    # No evaluation is due in the third round, so no adapter is being written then.
    rare = {"eval_every": None, "steps": 6}
    first = config.jobs[0].replace(**rare)
    config = config.replace(jobs=(first, config.jobs[1]))
    said = []

    def beside(trainer):
        if trainer.round != 3:
            return  # from here on, the first round's checkpoint is on the disk
        before = contents(trainer.output_dir / "adapters")
        with pytest.raises(
            CheckpointError, match=f"in use by process {os.getpid()} of"
        ):
            Trainer(config, model)
        with pytest.raises(CheckpointError, match="in use by"):
            second.train(resume=True)
        exported = export_checkpoint(trainer.output_dir, tmp_path / "out")
        assert [folder.name for folder in exported.folders] == ["job0", "job1"]
        text = io.StringIO()
        inspect_path(config.output_dir, Console(file=text, width=400))
        said.append(text.getvalue())
        assert contents(trainer.output_dir / "adapters") == before

    second = Trainer(config, model)
    trainer = Trainer(config, model)
    trainer.train(callbacks=[AtWindow(beside)])
    assert f"in use by process {os.getpid()} of" in said[0]
    assert re.search("checkpoint after round [12]", said[0])
    folder = trainer.output_dir
    steps = [e["step"] for e in events_of(folder) if "loss" in e]
    assert len(steps) == sum(job.steps for job in config.jobs)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapters",
        "checkpoints",
        "control",
        "losses.png",
        "metrics.jsonl",
        "run.json",
        "settings.yaml",
        "status.json",
        "summary.json",
        "tensorboard",
        "tokenizer",
    ]


def test_a_run_without_its_checkpoints(config, model):
    """It starts anew if it is the same run, and keeps what is trained further."""

    def changed(**changes) -> RunConfig:
        return config.replace(**changes)

    def is_refused(other, message):
        before = contents(folder)
        with pytest.raises(CheckpointError, match=message):
            Trainer(other, model).train(resume=True)
        assert contents(folder) == before

    folder = pathlib.Path(config.output_dir)
    trainer = Trainer(config, model)
    trainer.train(callbacks=[InterruptAt(3)])
    other_seed = config.jobs[1].replace(seed=5)
    other = changed(jobs=(config.jobs[0], other_seed))
    is_refused(other, "job 'job1': seed is 101 in run.json and 5 now")
    shutil.rmtree(folder / "checkpoints")
    record = folder / "adapters" / "job0" / "jaxlora.json"
    step = json.loads(record.read_text())["step"]
    assert step > 0
    where = r"run\.json is of another run:\n- "
    is_refused(other, f"{where}job 'job1': seed is 101 in run.json and 5 now")
    fewer = changed(jobs=config.jobs[:1])
    is_refused(fewer, f"{where}job 'job1' is in run.json but not in this run")
    before = contents(folder / "adapters")
    Trainer(config, model).train(resume=True, callbacks=[InterruptAt(1)])
    assert contents(folder / "adapters") == before  # not the first evaluation's
    (folder / "run.json").unlink()
    is_refused(config, r"a run without run\.json")


def test_jobs_that_were_added_are_part_of_the_run(config, model):
    """Also where there is no checkpoint that says so."""
    changes = {"jobs": config.jobs[1:], "checkpoint_every": None}
    one = config.replace(**changes)

    class Killed(Exception):
        pass

    def add(trainer):
        if trainer.round == 2:
            raise Killed
        late = config.jobs[1].replace(name="late", steps=1)
        trainer.add_job(late)

    with pytest.raises(Killed):
        Trainer(one, model).train(callbacks=[AtWindow(add)])
    shutil.rmtree(pathlib.Path(one.output_dir) / "checkpoints")
    result = Trainer(one, model).train(resume=True)
    assert [job.name for job in result.jobs] == ["job1", "late"]
    assert all(job.progress.status == "finished" for job in result.jobs)


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
@pytest.mark.parametrize("within", [False, True])
def test_a_folder_that_is_removed_while_the_run_trains(
    config, model, tmp_path, how, within
):
    """Between two windows or in one; the run does not make a new folder with parts.

    No checkpoint or adapter is being written just then: those make their own folders.
    """
    rare = {"keep_best": False, "eval_every": None, "steps": 6}
    first = config.jobs[0].replace(**rare)
    update = {"jobs": (first, config.jobs[1]), "checkpoint_every": 3}
    config = config.replace(**update)
    folder = pathlib.Path(config.output_dir)

    class Remover(Callback):
        def on_event(self, event):
            if event.round != 2 or event.kind != ("step" if within else "window"):
                return
            if folder.exists():
                folder.rename(tmp_path / "moved")
            if how == "replaced":
                folder.mkdir()

    match = "run was removed or renamed while the run trained.*lost too: restore"
    with pytest.raises(CheckpointError, match=match):
        Trainer(config, model).train(callbacks=[Remover()])
    assert folder.exists() == (how == "replaced")
    assert sorted(folder.rglob("*")) == []
    if how == "renamed":
        (tmp_path / "moved").rename(folder)
        assert not Trainer(config, model).train(resume=True).interrupted


def test_a_used_folder_is_refused_before_anything_is_read(tmp_path, capsys):
    """By the command, and for another run by Python too."""
    folder = made_run.write_run(tmp_path / "run")
    run_file = tmp_path / "run.yaml"
    settings = {
        "model": "nowhere/at-all",
        "output_dir": str(folder),
        "jobs": [{"name": "other", "data": {"path": "nowhere.jsonl"}}],
    }
    run_file.write_text(json.dumps(settings))
    assert main(["train", str(run_file)]) == 1
    assert "run already holds a run. Resume it" in capsys.readouterr().err
    assert main(["train", str(run_file), "--resume"]) == 1
    assert "job 'done' is in run.json but not in this" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"job 'done' is in run\.json but"):
        Trainer(load_run(run_file))
    shutil.rmtree(folder)
    assert main(["train", str(run_file), "--resume"]) == 1
    assert "holds no run to resume" in capsys.readouterr().err


# ---- without training --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "checkpoints/3/x", "adapters/job0/x"]
)
def test_a_run_without_its_record(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    with pytest.raises(CheckpointError, match=r"already holds a run\. Resume it"):
        check_folder(tmp_path, resume=False)
    match = r"without run\.json, which was removed"
    with pytest.raises(CheckpointError, match=match):
        check_folder(tmp_path, resume=True)


def test_folders_without_a_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "run.yaml").write_text("")
    check_folder(tmp_path, resume=False)
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        check_folder(tmp_path, resume=True)


def test_a_further_trained_adapter_stays(tmp_path):
    folder = made_run.write_export(tmp_path / "job", "job", 5)
    assert prepare_export_folder(tmp_path / "new", 0)
    assert [prepare_export_folder(folder, step) for step in (4, 5, 6)] == [
        False,
        True,
        True,
    ]
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert prepare_export_folder(folder, 4)  # it is damaged


def test_what_others_put_there_is_moved_away(tmp_path):
    folder = made_run.write_export(tmp_path / "job", "job", 5)
    (folder / "README.md").write_text("mine")
    assert prepare_export_folder(folder, 6)
    assert (tmp_path / "job~1" / "README.md").read_text() == "mine"
    (tmp_path / "job").write_text("a file")
    assert prepare_export_folder(folder, 6)
    assert (tmp_path / "job~2").read_text() == "a file"
    folder.symlink_to(tmp_path / "job~1")
    assert prepare_export_folder(folder, 6)
    assert (tmp_path / "job~3").is_symlink() and not os.path.lexists(folder)


KILLED = """
import os, pathlib, sys
from jaxlora.common import atomic
with atomic.new_file(sys.argv[1]), atomic.new_folder(sys.argv[2]):
    os._exit(9)
"""


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    """And nothing else, whatever its name is."""
    adapters = tmp_path / "adapters"
    command = [sys.executable, "-c", KILLED, tmp_path / "run.json", adapters / "job"]
    assert subprocess.run(command, check=False).returncode == 9
    assert [len(names(tmp_path)), len(names(adapters))] == [2, 1]
    mine = (
        tmp_path / ".metrics.jsonl.0123abcd.jaxlora-tmp",
        adapters / ".job.0123abcd.jaxlora-tmp" / "adapter_config.json",
        adapters / ".job.old" / "adapter_config.json",
        adapters / ".mine" / "notes",
        tmp_path / "notes.jaxlora-tmp",
    )
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    clean_up(tmp_path)
    assert all(path.exists() for path in mine)
    assert len(names(tmp_path)) == len(names(adapters)) == 3


def test_checkpoints_that_are_none_stay(tmp_path):
    """A folder is not removed because of its number, nor a note in a checkpoint."""
    folder = tmp_path / "checkpoints"
    for name in ("0", "7.orbax-checkpoint-tmp-1"):
        path = folder / name / "notes.txt"
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        match = f"{name} has the name of a checkpoint, and holds none. Move it away"
        with pytest.raises(CheckpointError, match=re.escape(match)):
            Checkpoints(folder, keep=9)
        path.parent.rename(tmp_path / name)
    run = made_run.saved_run()
    with contextlib.closing(Checkpoints(folder, keep=2)) as checkpoints:
        for number in (1, 2, 3, 4):
            checkpoints.save(number, made_run.states(number), run)
            if number == 2:
                (folder / "2" / "run" / "notes.txt").write_text("mine")
    assert names(folder) == ["2", "3", "4"]
    assert (folder / "2" / "run" / "notes.txt").read_text() == "mine"


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", REPLACED)
def test_a_new_run_replaces_no_file_of_another_origin(tmp_path, name):
    (tmp_path / "notes.txt").write_text("a name that no run uses")
    check_folder(tmp_path, resume=False)
    (tmp_path / name).write_text("mine")
    message = rf"holds {re.escape(name)} of another origin.* Move what is there, or "
    with pytest.raises(StorageError, match=message):
        check_folder(tmp_path, resume=False)
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(StorageError, match=message):
        check_folder(tmp_path, resume=False)
