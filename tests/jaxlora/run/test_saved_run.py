"""Checkpoints and run files that are damaged, or made up, are refused in words."""

import copy
import dataclasses
import json
import os
import pathlib
import shutil
import traceback

import jax
import numpy as np
import pytest

from jaxlora.errors import CheckpointError
from jaxlora.run import folder
from jaxlora.run.folder import read_run_record
from jaxlora.run.saved_run import sealed, sealed_json
from jaxlora.train.saved import read_checkpoint
from jaxlora.train.saved.checkpoint import Checkpoints
from jaxlora.train.saved.export import export_checkpoint
from jaxlora.train.saved.read_checkpoint import read_newest
from jaxlora.train.saved.resume import FoundRun
from tests.jaxlora.train import made_run


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with two checkpoints."""
    return made_run.write_run(tmp_path_factory.mktemp("saved") / "run", (4, 6))


@pytest.fixture
def run(original, tmp_path):
    return pathlib.Path(shutil.copytree(original, tmp_path / "run"))


def is_refused(run: pathlib.Path, message: str) -> None:
    """By a resume and by an export, without a word from a thread."""
    with pytest.raises(CheckpointError, match=message):
        read_newest(run / "checkpoints", has_tensors=True)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(run, run.parent / "out")
    assert not (run.parent / "out").exists()


def test_a_checkpoint_comes_back_to_the_bit(run):
    found = read_newest(run / "checkpoints", has_tensors=True)
    assert found.number == 6
    again = sealed_json(dataclasses.replace(found.run, checksums={}))
    assert again == sealed_json(made_run.saved_run())
    wanted = made_run.states(6)
    assert found.tensors.keys() == wanted.keys()
    for job, state in wanted.items():
        kept = found.parked(job).by_kind()
        for kind, tensors in state.by_kind().items():
            for path, tensor in tensors.items():
                np.testing.assert_array_equal(kept[kind][path], tensor)


def test_no_changed_byte_is_restored(run, capfd, tmp_path):
    """Any byte of any file: the same tensors come back, or an error does."""
    place = run / "checkpoints" / "6"
    wanted = read_newest(run / "checkpoints", has_tensors=True)
    refused = 0
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for position in sorted({0, len(data) // 3, len(data) // 2, len(data) - 1}):
            changed = bytearray(data)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            try:
                found = read_newest(run / "checkpoints", has_tensors=True)
            except CheckpointError as error:
                refused += 1
                assert str(place) in str(error)
                assert "go on from checkpoint 4, remove" in str(error)
            else:
                assert sealed_json(found.run) == sealed_json(wanted.run)
                jax.tree.map(
                    np.testing.assert_array_equal, found.tensors, wanted.tensors
                )
        path.write_bytes(data)
    assert refused >= 8  # every change of the two files that are read
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "how", ["removed", "emptied", "cut", "a folder", "no file", "a pipe"]
)
def test_damaged_files(run, how):
    place = run / "checkpoints" / "6"
    for name in ("tensors.safetensors", "meta.json"):
        path = place / "run" / name
        data = path.read_bytes()
        path.unlink()
        if how == "emptied":
            path.write_bytes(b"")
        elif how == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif how == "a folder":
            path.mkdir()
        elif how == "no file":
            path.symlink_to(path)
        elif how == "a pipe":  # of which nothing would ever be read
            os.mkfifo(path)
        is_refused(run, rf"{path} .*To go on from checkpoint 4, remove {place} and")
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(data)
    shutil.rmtree(place / "run")
    is_refused(run, "6/run/meta.json cannot be read: No such file")
    shutil.rmtree(place)
    assert read_newest(run / "checkpoints").number == 4


def test_the_only_checkpoint_is_damaged(run):
    shutil.rmtree(run / "checkpoints" / "4")
    (run / "checkpoints" / "6" / "run" / "meta.json").write_text("{")
    is_refused(run, "There is no checkpoint before it. Restore it from a copy; or rem")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "it holds a list, not an object"),
        (b'{"a": "\xff"}', "is damaged: 'utf-8' codec"),
        (b"[" * 100_000, "is damaged: maximum recursion"),
        (b'{"format": ' + b"9" * 5000 + b"}", "is damaged: Exceeds the limit"),
        (b'{"format": 5, "layout": {}}', "has format 5, and this version .* format 11"),
        (b"{}", "has format None"),
        (b'{"format": 11}', "its checksum does not match its contents"),
        (b'{"format": 11, "a": NaN, "checksum": ""}', "Out of range float values"),
    ],
)
def test_metadata_that_is_none(run, text, message):
    path = run / "checkpoints" / "6" / "run" / "meta.json"
    path.write_bytes(text)
    is_refused(run, f"{path} .*{message}")


def rename(mapping: dict, old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def rename_job(meta: dict, new: str) -> None:
    for jobs in (meta["progress"], meta["adapters"]):
        rename(jobs, "now", new)


def set_in(*path_and_value):
    def change(meta):
        *path, key, value = path_and_value
        for name in path:
            meta = meta[name]
        meta[key] = value

    return change


PROGRESS = ("progress", "now")
ADAPTER = ("adapters", "now")
MODULE = (*ADAPTER, "modules", made_run.LINEARS[0])
SHAPES = (*MODULE, "tensors")
LINEAR = made_run.LINEARS[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: rename_job(m, "../../escaped"), r"'\.\./\.\./escaped' must be a pl"),
        (lambda m: rename_job(m, "a" * 200), "must be a plain folder name"),
        (lambda m: rename_job(m, "/etc"), "must be a plain folder name"),
        (lambda m: m["progress"].pop("now"), "adapters has the jobs"),
        (set_in(*MODULE, "rank", 4), "do not match each other and rank 4"),
        (set_in(*MODULE, "rank", "2"), "expected a whole number"),
        (set_in(*MODULE, "other", 1), "other: Unexpected"),
        (set_in(*MODULE, "tensors", "lora_c", [1]), "got lora_a, lora_b, lora_c"),
        (set_in(*ADAPTER, "dropout", "x"), "expected a number"),
        (set_in(*ADAPTER, "use_rslora", 1), "expected true or false"),
        (set_in(*ADAPTER, "other", 1), "other: Unexpected"),
        (set_in(*ADAPTER, "outside", {"score": {"array": "x"}}), "'x' is no shape"),
        (set_in(*PROGRESS, "slot", -1), r"slots \[-1, 3\] are not different ones"),
        (set_in(*PROGRESS, "slot", 3), r"slots \[3, 3\] are not different ones"),
        (set_in(*PROGRESS, "slot", None), "is running at step 4 in slot None"),
        (set_in(*PROGRESS, "step", -1), "is running at step -1"),
        (set_in(*PROGRESS, "step", 10**30), "running at step 1000"),
        (set_in(*PROGRESS, "status", "asleep"), "status: must be"),
        (set_in(*PROGRESS, "unknown", 1), "unknown: Unexpected"),
        (set_in(*SHAPES, {}), "has the tensors lora_a, lora_b, got ."),
        (set_in(*SHAPES, "lora_a", [6]), "do not match each other and rank 2"),
        (set_in(*SHAPES, "lora_a", [6, -3]), "is no shape"),
        (set_in(*SHAPES, "lora_a", [6, 3]), "do not match each other and rank 2"),
        (set_in(*SHAPES, "lora_a", [7, 2]), "cannot reshape"),
        (set_in(*SHAPES, "lora_a", [2**62, 2]), "is damaged|is too"),
        (set_in("optimizers", {}), "adapters has the jobs"),
        (set_in("checksums", {}), "checksum of params does not match"),
        (set_in("adapters", {}), "adapters has the jobs"),
        (set_in(*PROGRESS, "status", "waiting"), "is waiting at step 4 in slot 1"),
        (set_in("progress", "later", "slot", 2), "is waiting at step 0 in slot"),
        (lambda m: m.pop("progress"), "progress: this key is required"),
    ],
)
def test_made_up_metadata(run, change, message):
    """Its checksum is right; what it says is checked as if a user had typed it."""
    path = run / "checkpoints" / "6" / "run" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["checksum"]
    before = copy.deepcopy(meta)
    change(meta)
    assert meta != before
    path.write_text(json.dumps(sealed(meta)))
    is_refused(run, f"(?s){run / 'checkpoints' / '6'}.*{message}.*go on from check")


def test_hints_of_older_versions_are_ignored(run):
    path = run / "checkpoints" / "6" / "run" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["checksum"]
    hint = {"target": 3, "num_fixed": 0, "num_jobs": 2}
    meta["stream"]["hint"] = meta["stream"]["state"]["hint"] = hint
    path.write_text(json.dumps(sealed(meta)))
    found = read_newest(run / "checkpoints").run
    assert found.stream == made_run.saved_run().stream


def test_the_tensors_of_another_checkpoint(run):
    folder = run / "checkpoints"
    name = "run/tensors.safetensors"
    shutil.copy(folder / "4" / name, folder / "6" / name)
    is_refused(run, f"6/{name} is damaged: the checksum of params does not match")


@pytest.mark.parametrize("name", ["notes", "7.orbax-checkpoint-tmp", "9" * 40, "07"])
def test_other_folders_are_no_checkpoints(run, name):
    (run / "checkpoints" / name).mkdir()
    assert read_newest(run / "checkpoints").number == 6


def test_old_checkpoints_make_way(run):
    """Also what a kill left of one that was being removed."""
    (run / "checkpoints" / "4" / "run" / "meta.json").unlink()
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.save(8, made_run.states(8), made_run.saved_run())
    checkpoints.close()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["8"]


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_metadata_of_orbax_is_not_needed(run, text):
    path = run / "checkpoints" / "6" / "_CHECKPOINT_METADATA"
    path.unlink()
    if text is not None:
        path.write_text(text)
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    number = read_newest(run / "checkpoints", has_tensors=True).number
    checkpoints.save(8, made_run.states(8), made_run.saved_run())
    checkpoints.close()
    assert number == 6
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["8"]


def test_what_was_found_is_read_again_only_if_it_has_changed(run, monkeypatch):
    """The folder is not locked yet when it is read first."""
    found = FoundRun.read(run)
    assert found.checkpoint is not None and found.checkpoint.number == 6
    with monkeypatch.context() as patched:
        for module in (folder, read_checkpoint):
            patched.setattr(module, "read_sealed", lambda *_, **__: pytest.fail("read"))
        assert found.current() is found
    Checkpoints(run / "checkpoints", keep=1).save(
        8, made_run.states(8), made_run.saved_run()
    )
    newer = found.current()
    assert newer.checkpoint is not None and newer.checkpoint.number == 8
    record = dataclasses.replace(newer.record, added=["later"])
    folder.write_run_record(run, record)
    assert newer.current().record == record
    shutil.rmtree(run / "checkpoints" / "8")
    assert newer.current().checkpoint is None


def test_only_jobs_that_a_checkpoint_has_are_compared(run):
    """A job that was added and has not been saved may begin with other settings."""
    identity = made_run.identity([*made_run.JOBS, "new"])
    before = dataclasses.replace(made_run.record(), identity=identity)
    folder.write_run_record(run, before)
    other = copy.deepcopy(identity)
    other.jobs["new"]["seed"] = 99
    FoundRun.read(run).check(other)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="job 'new': seed is 5 in run"):
        FoundRun.read(run).check(other)


# ---- run.json ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: text.replace("64", "65"), "its checksum does not match"),
        (lambda text: "5" * 5000, "is damaged: Exceeds the limit"),
        (lambda text: "[" * 100_000, "is damaged: maximum recursion"),
        (lambda text: text.replace('"format": 11', '"format": 8'), "has format 8"),
    ],
)
def test_a_damaged_run_file(run, change, message):
    path = run / "run.json"
    path.write_text(change(path.read_text()))
    match = f"{path} .*{message}.*Restore the file from a copy, or choose another"
    with pytest.raises(CheckpointError, match=match):
        read_run_record(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("started", "yesterday"), "started: Invalid isoformat"),
        (set_in("base_model", "a\nb"), "base_model: wanted one line"),
        (set_in("base_model", ""), "base_model: wanted one line"),
        (set_in("linear_names", ["a\nb"]), "wanted one line"),
        (set_in("identity", "jobs", {"..": {}}), "must be a plain folder name"),
        (set_in("ended", ["b"]), "ended has other jobs than identity"),
    ],
)
def test_a_made_up_run_file(run, change, message):
    path = run / "run.json"
    values = json.loads(path.read_text())
    del values["checksum"]
    change(values)
    path.write_text(json.dumps(sealed(values)))
    with pytest.raises(CheckpointError, match=f"{path}: .*{message}") as error:
        read_run_record(run)
    assert "Traceback" not in "".join(traceback.format_exception_only(error.value))
