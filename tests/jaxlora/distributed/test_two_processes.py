"""Two processes train a run as one process trains it on the same mesh."""

import json
import pathlib
import shutil
import signal
from typing import Any

import pytest

from jaxlora import Trainer, load_run
from jaxlora.cli.main import main
from jaxlora.distributed import processes
from jaxlora.errors import ConfigError
from jaxlora.run.live.mailbox import ControlRequest, Mailbox
from tests import tiny
from tests.jaxlora.distributed.conftest import (
    folder_of,
    results,
    train_in_two,
)

NEVER = -1, 0  # a process that sends itself no signal
_LATE_JOINS = 8  # windows after which no other job has a step left


@pytest.mark.grid
def test_two_processes_train_like_one_also_when_killed_and_interrupted(make_run, whole):
    """Process 1 is killed. A copy of the run then ends in one process, on the same
    mesh, with the bits of a run that nothing stopped.

    The run itself goes on in two processes, where requests wait that reach both: one
    job is stopped, and one joins when both processes have read its data. Then process 1
    alone gets a signal, and both stop.
    """
    run_file = make_run()
    folder = folder_of(run_file)
    killed = (6, signal.SIGKILL)
    first, second = train_in_two([run_file, run_file], signals=(NEVER, killed))
    assert second.status == -signal.SIGKILL
    # Either a computation fails, which is explained, or JAX's heartbeat comes first.
    assert first.status in (1, -signal.SIGABRT), first.stderr
    if first.status == 1:
        assert "start all processes again with --resume" in first.stderr
        assert "Traceback" not in first.stderr

    copy = make_run()
    shutil.copytree(folder, folder_of(copy))
    assert main(["train", str(copy), "--resume"]) == 0
    assert results(copy) == whole

    posted = _post_requests(run_file)
    stopped = (_LATE_JOINS, signal.SIGTERM)
    both = train_in_two([run_file, run_file], "--resume", signals=(NEVER, stopped))
    assert [one.status for one in both] == [130, 130], both
    assert "a checkpoint was written" in both[0].stdout
    # Process 1 writes nothing and has nothing to say.
    assert "adapters" not in both[1].stdout and "job0" not in both[1].stderr
    # The names of its files end in the process that wrote them, and another number.
    boards = (folder / "tensorboard").rglob("events.*")
    assert len({board.name.split(".")[-2] for board in boards}) == 2, "one each start"
    assert not (folder / "run.lock").exists()
    mailbox = Mailbox(folder)
    answers = [mailbox.take_answer(name) for name in posted]
    assert [answer.is_accepted for answer in answers] == [True, True, False]
    assert "no.jsonl" in answers[2].text

    assert main(["train", str(run_file), "--resume"]) == 0
    jobs = json.loads((folder / "summary.json").read_text())["jobs"]
    assert {name: jobs[name]["status"] for name in jobs} == {
        "job0": "stopped",
        "job1": "finished",
        "late": "finished",
    }
    # Other neighbours only round differently, so its state was restored in both.
    ours, theirs = losses_of("job1", results(run_file)), losses_of("job1", whole)
    assert ours.keys() == theirs.keys()
    assert [*ours.values()] == pytest.approx([*theirs.values()], rel=1e-4)


def losses_of(job: str, found) -> dict[tuple[str, int], float]:
    """Returns the losses of a job, by the kind of the event and the step."""
    _, losses = found
    return {(kind, step): loss for kind, name, step, loss in losses if name == job}


def _post_requests(run_file: pathlib.Path) -> list[str]:
    """Asks a run to stop a job, to add one, and to add one whose data are missing."""
    late = json.loads(run_file.read_text())["jobs"][1]
    late |= {"name": "late", "steps": _LATE_JOINS + 4}
    lost = late | {"name": "lost", "data": {"path": "no.jsonl"}}
    requests = (
        ControlRequest(action="stop", job="job0"),
        ControlRequest(action="add", job="late", settings=late),
        ControlRequest(action="add", job="lost", settings=lost),
    )
    mailbox = Mailbox(folder_of(run_file))
    return [mailbox.post(request) for request in requests]


@pytest.mark.grid
def test_a_microbatch_is_shared_by_two_processes(make_run):
    """Along `tensor`, which is wider than a process, and than the key-value heads.

    Between processes, the sums of its layers have another order.
    """
    run_file, alone = make_run(mesh="tensor=4"), make_run(mesh="tensor=4")
    both = train_in_two([run_file, run_file])
    assert [one.status for one in both] == [0, 0], both
    assert main(["train", str(alone)]) == 0
    (_, losses), (_, wanted) = results(run_file), results(alone)
    assert [row[:3] for row in losses] == [row[:3] for row in wanted]
    expected = pytest.approx([loss for *_, loss in wanted], rel=1e-5)
    assert [loss for *_, loss in losses] == expected


@pytest.fixture
def settings_of_another(monkeypatch):
    """Lets this process believe that there is another, whose settings may differ."""
    changes: dict[str, Any] = {}

    def gather(value):
        theirs = value
        if isinstance(value, tuple) and isinstance(value[1], dict):
            theirs = value[0], value[1] | changes
        return [value, theirs]

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", gather)
    return changes


def test_processes_with_different_run_files_refuse_to_train(
    make_run, settings_of_another
):
    run_file = make_run()
    settings_of_another["checkpoint_every"] = 3
    message = "checkpoint_every is 2 on process 0 and 3 on process 1"
    with pytest.raises(ConfigError, match=message):
        Trainer(load_run(run_file))
    assert not folder_of(run_file).exists()


def test_a_pipeline_over_processes_is_refused(make_run, settings_of_another, tmp_path):
    model = tiny.write_model(tmp_path / "two_layers")
    run_file = make_run(model=str(model), mesh="stage=2,fsdp=2")
    with pytest.raises(ConfigError, match="Pipelines run in one process only"):
        Trainer(load_run(run_file))
    assert not folder_of(run_file).exists()


@pytest.mark.grid
def test_a_process_whose_files_are_missing_ends_the_other(make_run, tmp_path):
    """The one that fails says why, and JAX ends the one that waits for it."""
    run_file = make_run()
    other = make_run(model=str(tmp_path / "nowhere"), output_dir=folder_of(run_file))
    first, second = train_in_two([run_file, other])
    assert second.status == 1 and "nowhere" in second.stderr
    assert first.status != 0
    assert not folder_of(run_file).exists()
