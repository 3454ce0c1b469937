"""Every job of a run leaves as a PEFT folder, and nothing else is touched."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import safetensors.numpy

from jaxlora.adapters.files.export_record import read_export
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.files.tokenizer_copy import TokenizerCopy
from jaxlora.cli.main import main
from jaxlora.common import atomic
from jaxlora.data.tokenizer_files import read_template
from jaxlora.errors import AdapterError, CheckpointError, JaxloraError, StorageError
from jaxlora.run.folder import read_run_record, write_run_record
from jaxlora.train.saved.export import export_checkpoint
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint, newest_checkpoint
from tests import tiny
from tests.jaxlora.train import made_run

OWN = ("adapter_config.json", "adapter_model.safetensors", "jaxlora.json")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return made_run.write_run(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture
def run(original, tmp_path):
    return pathlib.Path(shutil.copytree(original, tmp_path / "run"))


def weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "adapter_model.safetensors")


def first_value(folder: pathlib.Path) -> float:
    name = f"base_model.model.{made_run.LINEARS[0]}.lora_A.weight"
    return float(weights(folder)[name][0, 0])


def contents(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_job_that_has_weights_is_written(run, tmp_path):
    before = contents(run)
    exported = export_checkpoint(run, tmp_path / "out")
    out = tmp_path / "out"
    assert [folder.name for folder in exported.folders] == ["done", "now", "best"]
    assert sorted(path.name for path in out.iterdir()) == ["best", "done", "now"]
    assert exported.left_out == {
        "nan": "it failed: loss nan is not finite",
        "later": "it waits for a slot, so nothing has been trained yet",
    }
    assert first_value(out / "done") == 9
    assert first_value(out / "best") == 2  # its best evaluation, not the newest
    wanted = made_run.weights(made_run.parked(4))
    for name, array in weights(out / "now").items():
        np.testing.assert_array_equal(array, wanted[name])
    assert contents(run) == before
    again = export_checkpoint(run, out, ["now", "now"])
    assert [folder.name for folder in again.folders] == ["now"]


def test_chat_template_kwargs_stay_with_the_adapter(tmp_path, monkeypatch):
    """They are those of all data sets of the job, if these agree."""
    off, plain = {"enable_thinking": False}, made_run.identity
    thinks_not = {"path": "a.jsonl", "chat_template_kwargs": off}
    jobs = {
        "now": {"datasets": [thinks_not, thinks_not]},
        "best": {"datasets": [thinks_not, {"path": "b.jsonl"}]},
    }

    def identity(names):
        found = plain(names)
        return dataclasses.replace(
            found,
            jobs={n: job | {"data": jobs.get(n, {})} for n, job in found.jobs.items()},
        )

    monkeypatch.setattr(made_run, "identity", identity)
    run, out = made_run.write_run(tmp_path / "run"), tmp_path / "out"
    export_checkpoint(run, out)
    shapes = dict.fromkeys(made_run.LINEARS, (made_run.K, made_run.N))
    kwargs = [import_peft(out / n, shapes).chat_template_kwargs for n in jobs]
    assert kwargs == [off, {}]
    assert "kwargs" not in (out / "done" / "jaxlora.json").read_text()


def test_the_tokenizer_and_the_template_of_each_job(run, tmp_path):
    """The run has kept both: the base and the template's file may be gone."""
    template = "{{ messages }} by the run"
    (run / "tokenizer").mkdir()
    tiny.write_tokenizer(run / "tokenizer")
    record = read_run_record(run)
    jobs = record.identity.jobs
    jobs["now"] |= {"data": {"path": "x", "chat_template": "gone.jinja"}}
    jobs["best"] |= {"data": {"path": "x", "chat_template": "gone.jinja"}}
    templates = {"gone.jinja": template}
    write_run_record(run, dataclasses.replace(record, chat_templates=templates))
    best = run / "adapters" / "best"
    shutil.rmtree(best)
    copy = TokenizerCopy(folder=run / "tokenizer", template=template)
    made_run.write_export(best, "best", 2, tokenizer=copy)
    out = tmp_path / "out"
    for _ in range(2):  # the second time, it replaces the first
        export_checkpoint(run, out)
        for name in ("now", "best"):  # of the checkpoint, and the run's own export
            assert read_template(out / name) == template
            assert (out / name / "tokenizer.json").read_bytes() == (
                run / "tokenizer" / "tokenizer.json"
            ).read_bytes()
            assert "the chat template that" in (out / name / "README.md").read_text()
            assert read_export(out / name) is not None
    bare = export_checkpoint(run, tmp_path / "bare", tokenizers=False)
    assert not [f for folder in bare.folders for f in folder.glob("*token*")]


def test_an_export_that_is_newer_than_the_checkpoint_goes_first(run, tmp_path):
    """The job ended after the newest checkpoint, and the run was killed."""
    made_run.write_export(run / "adapters" / "now", "now", 7)
    export_checkpoint(run, tmp_path / "out")
    assert first_value(tmp_path / "out" / "now") == 7
    made_run.write_export(run / "adapters" / "now", "now", 3)  # of an earlier life
    export_checkpoint(run, tmp_path / "out")
    assert first_value(tmp_path / "out" / "now") != 3


def test_exit_status_and_words(run, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["export", str(run), out, "--job", "done"]) == 0
    assert main(["export", str(run), out]) == 1
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["wrote"] * 4
    assert "not exported: nan: it failed: loss nan is not finite" in said.err
    assert "not exported: later: it waits for a slot" in said.err


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (["done", "other"], "no job 'other'; it has: done, now, best, nan, later"),
        (["done", "../../escaped"], r"no job '\.\./\.\./escaped'"),
        (["done", "nan"], r"nothing was exported, as of\n- nan: it failed"),
    ],
)
def test_a_job_that_cannot_be_written_stops_all(run, tmp_path, jobs, message):
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(run, tmp_path / "out", jobs)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint(run, tmp_path):
    shutil.rmtree(run / "checkpoints")
    exported = export_checkpoint(run, tmp_path / "out")
    assert [folder.name for folder in exported.folders] == ["done", "best"]
    assert exported.left_out["now"] == "it has not been in a checkpoint yet"
    shutil.rmtree(run / "adapters")
    with pytest.raises(CheckpointError, match="nothing was exported"):
        export_checkpoint(run, tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no run: there is no run\.json"):
        export_checkpoint(tmp_path, tmp_path / "none")


def test_an_adapter_that_was_removed_is_told(run, tmp_path):
    shutil.rmtree(run / "adapters" / "done")
    exported = export_checkpoint(run, tmp_path / "out")
    assert "adapters/done has been removed" in exported.left_out["done"]


def test_a_replacement_that_was_cut_short_is_found(run, tmp_path):
    adapters = run / "adapters"
    place = adapters / ".done.0123abcd.jaxlora-tmp"
    (adapters / ".done.old").mkdir()  # somebody else's
    place.mkdir()
    (place / atomic._MARK).write_text(atomic._MARK_TEXT)
    (adapters / "done").rename(place / "old0")
    export_checkpoint(run, tmp_path / "out", ["done"])
    assert first_value(tmp_path / "out" / "done") == 9
    assert (place / "old0").is_dir()


@pytest.mark.parametrize("name", OWN)
def test_a_damaged_adapter_is_not_exported(run, tmp_path, name):
    path = run / "adapters" / "done" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(AdapterError, match=name):
        export_checkpoint(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_job_is_not_exported(run, tmp_path):
    shutil.rmtree(run / "adapters" / "done")
    (run / "adapters" / "best").rename(run / "adapters" / "done")
    with pytest.raises(AdapterError, match="adapters/done holds the adapter of job 'b"):
        export_checkpoint(run, tmp_path / "out", ["done"])


# ---- the place to write to ---------------------------------------------------------


def is_refused(run, out, message, **options) -> None:
    kept = contents(out) if out.is_dir() else None
    for _ in range(2):
        with pytest.raises(JaxloraError, match=message):
            export_checkpoint(run, out, ["best", "now"], **options)
    assert (contents(out) if out.is_dir() else None) == kept


def test_folders_of_others_are_not_replaced(run, tmp_path):
    out = tmp_path / "out"
    (out / "now").mkdir(parents=True)
    (out / "now" / "notes.txt").write_text("mine")
    is_refused(run, out, "out/now holds files that jaxlora did not write.*--overwrite")
    assert main(["export", str(run), str(out), "--job", "now", "--overwrite"]) == 0
    assert {path.name for path in (out / "now").iterdir()} == {"README.md", *OWN}
    (out / "now" / "notes.txt").write_text("mine")  # beside an export
    is_refused(run, out, "out/now holds files that jaxlora did not write")
    (out / "now" / "notes.txt").unlink()
    export_checkpoint(run, out, ["now"])


def test_names_of_an_export_are_no_proof(run, tmp_path):
    """Weights that another program wrote beside our record, and folders inside."""
    out = tmp_path / "out"
    export_checkpoint(run, out, ["now"])
    file = out / "now" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes() + b"trained further")
    is_refused(run, out, "out/now holds files that jaxlora did not write")
    shutil.rmtree(out / "now")
    export_checkpoint(run, out, ["now"])
    (out / "now" / "README.md").unlink()
    (out / "now" / "README.md").mkdir()
    is_refused(run, out, "out/now holds files that jaxlora did not write")


@pytest.mark.parametrize("name", [*OWN, "README.md"])
def test_a_pipe_in_an_export_holds_nobody_up(run, tmp_path, name):
    out = tmp_path / "out"
    export_checkpoint(run, out, ["now"])
    (out / "now" / name).unlink()
    os.mkfifo(out / "now" / name)
    is_refused(run, out, "out/now holds files that jaxlora did not write")
    if name != "README.md":
        (run / "adapters" / "done" / name).unlink()
        os.mkfifo(run / "adapters" / "done" / name)
        with pytest.raises(AdapterError, match="it is not a regular file"):
            export_checkpoint(run, tmp_path / "other", ["done"])


def test_exports_at_the_same_time(run, tmp_path):
    """Two threads write the same jobs into one folder; each adapter is whole."""
    out, barrier, errors = tmp_path / "out", threading.Barrier(2), []

    def export():
        try:
            for _ in range(40):
                barrier.wait()
                export_checkpoint(run, out, ["done", "now"])
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=export) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(path.name for path in out.iterdir()) == ["done", "now"]
    assert first_value(out / "done") == 9
    assert all(read_export(out / name) is not None for name in ("done", "now"))


def test_exports_of_earlier_versions_and_of_python_are_replaced(run, tmp_path):
    out = tmp_path / "out"
    made_run.write_export(out / "now", "now", 1)
    (out / "now" / "jaxlora.json").unlink()
    export_checkpoint(run, out, ["now"])
    # peft writes more settings than jaxlora.
    (out / "now" / "jaxlora.json").unlink()
    path = out / "now" / "adapter_config.json"
    config = json.loads(path.read_text()) | {"peft_version": "0.21.0"}
    path.write_text(json.dumps(config))
    is_refused(run, out, "out/now holds files that jaxlora did not write")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_file_or_a_link_in_the_way(run, tmp_path, kind, overwrite):
    out = tmp_path / "out"
    out.mkdir()
    if kind == "file":
        (out / "now").write_text("mine")
    else:
        target = tmp_path / "elsewhere"
        if kind == "link":
            made_run.write_export(target, "now", 1)
        (out / "now").symlink_to(target)
    is_refused(run, out, r"out/now is a (file|symbolic link)", overwrite=overwrite)
    assert os.path.lexists(out / "now") and not (out / "best").exists()
    assert [path.name for path in out.iterdir()] == ["now"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("run", "inside .*, the run's own folder"),
        ("run/adapters", "inside .*, the run's own folder"),
        ("run/new/folder", "inside .*, the run's own folder"),
        ("linked/adapters", "inside .*, the run's own folder"),
        ("other/adapters", "has the adapters of another run"),
        ("run/run.json", "is no folder"),
        ("run/run.json/below", "inside .*, the run's own folder"),
        ("nowhere", "is no folder"),
        ("taken/below", "cannot be written: Not a directory"),
    ],
)
def test_places_that_are_refused(run, tmp_path, out, message):
    (tmp_path / "linked").symlink_to(run)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "taken").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    before = contents(run)
    for overwrite in (False, True):
        is_refused(run, tmp_path / out, message, overwrite=overwrite)
    assert contents(run) == before


def test_the_run_itself_is_not_replaced(run, tmp_path):
    run = run.rename(tmp_path / "now")
    is_refused(run, tmp_path, "now holds the run itself", overwrite=True)


# ---- kills, full disks, runs that are going on -------------------------------------

KILLED = """
import os, sys, pathlib
from jaxlora.common import atomic
from jaxlora.train.saved.export import export_checkpoint
atomic.sync_files = lambda folder: os._exit(9)
from jaxlora.train.saved import export
export.sync_files = atomic.sync_files
export_checkpoint(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), ["done"])
"""


def test_leftovers_of_a_killed_export_are_removed(run, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(run), str(out)]
    assert subprocess.run(command, check=False).returncode == 9
    left = [path.name for path in out.iterdir()]
    assert len(left) == 1 and left[0].startswith(".done.")
    mine = out / ".done.backup"
    mine.mkdir()
    export_checkpoint(run, out, ["best"])
    assert sorted(path.name for path in out.iterdir()) == [".done.backup", "best"]


def test_a_full_disk_leaves_the_export_before(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export_checkpoint(run, out)
    before = contents(out)

    def full(self, data):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"out/done cannot be written: No space lef"):
        export_checkpoint(run, out)
    assert contents(out) == before
    assert sorted(path.name for path in out.iterdir()) == ["best", "done", "now"]


def test_a_checkpoint_that_vanishes_makes_way_for_the_newer(run, tmp_path, monkeypatch):
    """The run goes on, and keeps one checkpoint."""
    read = ReadCheckpoint.with_tensors

    def replaced(*args, **options):
        if newest_checkpoint(run / "checkpoints") == 4:
            jobs = made_run.JOBS | {
                "now": dataclasses.replace(made_run.JOBS["now"], step=5)
            }
            made_run.write_checkpoints(run, (5,), jobs)
            shutil.rmtree(run / "checkpoints" / "4")
        return read(*args, **options)

    monkeypatch.setattr(ReadCheckpoint, "with_tensors", replaced)
    export_checkpoint(run, tmp_path / "out", ["now"])
    record = json.loads((tmp_path / "out" / "now" / "jaxlora.json").read_text())
    assert record["step"] == 5
    wanted = made_run.weights(made_run.parked(5))
    for name, array in weights(tmp_path / "out" / "now").items():
        np.testing.assert_array_equal(array, wanted[name])
