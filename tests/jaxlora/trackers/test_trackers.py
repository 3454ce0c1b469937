"""Each job is a run of its own in every tracker, with the same names of metrics."""

import os
import pathlib
import subprocess
import sys
import types

import pytest
from tensorboardX.proto import event_pb2

from jaxlora import RunConfig
from jaxlora.config.run_file import run_config
from jaxlora.errors import ConfigError, JaxloraError, StorageError
from jaxlora.trackers import table
from jaxlora.trackers.table import (
    check_installed,
    hyperparameters,
    job_metrics,
    open_trackers,
)
from tests.jaxlora.run import made_events

EVENTS = [
    made_events.run_start(made_events.info("a"), made_events.info("b", rank=8)),
    made_events.evaluation("a", 0, loss=3.5),
    made_events.sample("a", 0, "hello"),
    made_events.step("a", 1, loss=2.5),
    made_events.step("b", 1, loss=2.25),
    made_events.window(1),
    made_events.job_end("a", 1),
    made_events.step("b", 2, loss=2.0),
]


def report(name: str, folder: pathlib.Path) -> None:
    (tracker,) = open_trackers([name], folder)
    for event in EVENTS:
        tracker.on_event(event)
    tracker.close()


def records(folder: pathlib.Path) -> list:
    """Reads the events of a TensorBoard folder."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def test_tensorboard_has_a_run_for_each_job(tmp_path):
    report("tensorboard", tmp_path)
    board = tmp_path / "tensorboard"
    scalars = {
        folder.name: [
            (value.tag, event.step, round(value.simple_value, 4))
            for event in records(folder)
            for value in event.summary.value
            if value.HasField("simple_value")
        ]
        for folder in (board, board / "a", board / "b")
    }
    assert scalars["tensorboard"] == [
        ("run/tokens_per_second", 1, 200.0),
        ("run/fill", 1, 0.9),
    ]
    assert scalars["a"][:2] == [("eval/loss", 0, 3.5), ("train/loss", 1, 2.5)]
    losses = [(step, loss) for tag, step, loss in scalars["b"] if tag == "train/loss"]
    assert losses == [(1, 2.25), (2, 2.0)]
    assert {tag for tag, _, _ in scalars["b"]} < {tag for tag, _, _ in scalars["a"]}
    plugins = [
        v.metadata.plugin_data for e in records(board / "b") for v in e.summary.value
    ]
    hparams = [p.content for p in plugins if p.plugin_name == "hparams"]
    assert len(hparams) == 2 and b"learning_rate" in hparams[1]


class StandIn:
    """Stands for a run of W&B or of Trackio."""

    def __init__(self, opened: list, **options):
        self.options, self.logged, self.is_finished = options, [], False
        opened.append(self)

    def define_metric(self, *_, **__):
        return None

    def log(self, metrics, step=None):
        assert not self.is_finished
        self.logged.append((metrics, metrics.get("step", step)))

    def finish(self):
        self.is_finished = True


def stand_in(name: str, monkeypatch) -> list[StandIn]:
    """Puts a stand-in for a package in its place; returns the runs that it opens."""
    opened: list[StandIn] = []
    module = types.ModuleType(name)
    module.init = lambda **options: StandIn(opened, **options)
    module.Table = lambda **options: options
    monkeypatch.setitem(sys.modules, name, module)
    return opened


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio(name, tmp_path, monkeypatch):
    opened = stand_in(name, monkeypatch)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    report(name, tmp_path / "sweep")
    a, b = opened
    assert a.options["name"].endswith("a") and b.options["name"].endswith("b")
    for run, rank in ((a, 4), (b, 8)):
        assert run.options["project"] == "mine" and run.options["group"] == "sweep"
        assert run.options["resume"] == "allow" and run.is_finished
        assert run.options["config"]["rank"] == rank
        assert run.options["config"]["learning_rate"] == 1e-3
    assert a.logged[0][0]["eval/loss"] == 3.5 and a.logged[0][1] == 0
    assert [m["train/loss"] for m, _ in b.logged] == [2.25, 2.0]
    assert [step for _, step in b.logged] == [1, 2]
    row = {"step": 0, "prompt": "p", "text": "hello"}
    table = {"columns": list(row), "data": [[*row.values()]]}
    sent, step = a.logged[1]
    assert sent["samples/0"] == (table if name == "wandb" else {"data": [row]})
    assert step == 0


def lost(*_, **__):
    raise ConnectionError("no network")


def test_a_tracker_that_fails_is_switched_off_with_one_warning(
    tmp_path, monkeypatch, caplog
):
    opened = stand_in("wandb", monkeypatch)
    tracker, board = open_trackers(["wandb", "tensorboard"], tmp_path)
    for number, event in enumerate(EVENTS):
        if number == 3:
            monkeypatch.setattr(StandIn, "log", lost)
            monkeypatch.setattr(StandIn, "finish", lost)
        tracker.on_event(event)
        board.on_event(event)
    tracker.close()
    board.close()
    (run,) = opened
    assert len(run.logged) == 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "wandb has failed (ConnectionError: no network)" in record.message
    assert "The run goes on" in record.message
    assert list((tmp_path / "tensorboard" / "b").iterdir())


def test_a_tracker_that_cannot_be_closed(tmp_path, monkeypatch, caplog):
    """All runs are ended, and the run's result is not lost."""
    opened = stand_in("trackio", monkeypatch)
    monkeypatch.setattr(StandIn, "finish", lambda run: ended.append(run) or lost())
    ended: list[StandIn] = []
    (tracker,) = open_trackers(["trackio"], tmp_path)
    for event in EVENTS[:-3]:
        tracker.on_event(event)
    tracker.close()
    assert len(opened) == len(ended) == 2
    assert caplog.text.count("trackio has failed") == 1


def test_a_tracker_that_cannot_start_ends_the_run(tmp_path, monkeypatch):
    """Nothing is trained yet, and the user can correct a key or a folder."""
    stand_in("wandb", monkeypatch)
    monkeypatch.setattr(sys.modules["wandb"], "init", lost)
    (tmp_path / "tensorboard").write_text("no folder")
    tracker, board = open_trackers(["wandb", "tensorboard"], tmp_path)
    for one in (tracker, board):
        one.on_event(EVENTS[0])
    with pytest.raises(ConfigError, match=r"wandb cannot be used .*leave wandb out of"):
        tracker.on_event(EVENTS[1])
    with pytest.raises(StorageError, match="tensorboard"):
        board.on_event(EVENTS[1])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_package_that_is_missing(name, monkeypatch):
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    check_installed(["tensorboard"])
    with pytest.raises(ConfigError, match=rf"pip install 'jaxlora\[{name}\]'"):
        check_installed(["tensorboard", name])


RUN = {"model": "m", "jobs": [{"name": "a", "data": {"path": "a.jsonl"}}]}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ("tensorboard",)),
        ({"report_to": "wandb"}, ("wandb",)),
        ({"report_to": ["trackio", "tensorboard"]}, ("trackio", "tensorboard")),
        ({"report_to": "none"}, ()),
        ({"report_to": []}, ()),
    ],
)
def test_report_to(given, names):
    assert RunConfig.model_validate(RUN | given).report_to == names


def test_a_tracker_that_there_is_not():
    with pytest.raises(JaxloraError, match=r"report_to.*'tensorboard', 'wandb'"):
        run_config(RUN | {"report_to": "mlflow"})


def test_settings_are_plain_values():
    found = hyperparameters(made_events.info("a"))
    assert found["data"] == "none.jsonl" and found["num_steps"] == 10
    assert all(isinstance(value, str | int | float | bool) for value in found.values())
    assert not job_metrics(made_events.window(1))


def test_tensorboard_imports_no_torch(tmp_path):
    """tensorboardX would import it wherever it is installed, for seconds."""
    (tmp_path / "torch.py").write_text("Tensor = int\n")
    (tmp_path / "other.py").write_text("import torch\n")
    program = """
import sys, threading
import jaxlora.trackers.tensorboard
print("torch" in sys.modules)
with jaxlora.trackers.tensorboard._without("torch"):
    other = threading.Thread(target=__import__, args=("other",))
    other.start()
    other.join()
print("other" in sys.modules)
import torch  # others find it
print(torch.Tensor)
"""
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["False", "True", "<class 'int'>"]
