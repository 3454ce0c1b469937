"""The page of a run follows the files in its folder."""

import http.client
import json
import urllib.parse

import pytest

from jaxlora.run.job_progress import JobProgress, JobStatus
from jaxlora.run.live.status_file import STATUS_FILE, write_status
from jaxlora.run.log import METRICS_FILE
from jaxlora.run.status import RunStatus
from jaxlora.serve.run_page import RunFiles, serve_run
from jaxlora.serve.view import Point

EVAL = {"event": "eval", "job": "one", "step": 2, "eval_loss": 2.75}


def status(**progress) -> RunStatus:
    job = JobStatus(
        name="one",
        rank=4,
        num_modules=2,
        num_steps=10,
        batch_tokens=100.0,
        progress=JobProgress(status="running", slot=0, **progress),
    )
    return RunStatus(jobs=(job,), round=1, num_slots=2, tokens_per_second=50.0)


def step(number: int, loss: float) -> dict:
    values = {"learning_rate": 1e-3, "grad_norm": 2.0, "loss": loss}
    return {"event": "step", "round": number, "job": "one", "step": number, **values}


def write(folder, *events: dict, mode: str = "a", end: str = "\n") -> None:
    with open(folder / METRICS_FILE, mode) as file:
        file.write("\n".join(map(json.dumps, events)) + end)


def test_it_shows_what_the_run_writes(tmp_path):
    files = RunFiles(tmp_path, "base")
    before = files.view()
    assert before.health.text == "preparing" and not before.models
    write_status(tmp_path / STATUS_FILE, status(step=1, last_loss=3.0))
    write(tmp_path, step(1, 3.0))
    first = files.view()
    assert first.health.text == "training" and first.figures.tokens_per_second == 50
    (row,) = first.models
    assert (row.state, row.step, row.loss, row.num_steps) == ("running", 1, 3.0, 10)
    # The log is ahead of status.json; a line may not be whole yet.
    window = {"event": "window", "time": 5.0, "tokens_per_second": 9.0, "fill": 0.5}
    write(tmp_path, step(2, 2.5), EVAL, window)
    write(tmp_path, {"event": "step"}, step(3, 2.0), end="")
    second = files.view(first.cursor, first.epoch)
    assert second.epoch == first.epoch
    assert second.points == {
        "one": [
            Point(2, loss=2.5, learning_rate=1e-3, grad_norm=2.0),
            Point(2, held_out=2.75),
        ]
    }
    assert (second.models[0].step, second.models[0].loss) == (2, 2.5)
    assert [*second.rates] == [(5.0, 9.0, 0.5)] and second.figures.fill == 0.5
    write(tmp_path, mode="a")
    assert [
        point.step for point in files.view(second.cursor, second.epoch).points["one"]
    ] == [3]


def test_a_log_that_is_written_anew_is_read_anew(tmp_path):
    """As a resumed run drops what happens again."""
    write_status(tmp_path / STATUS_FILE, status(step=2))
    files = RunFiles(tmp_path, "base")
    write(tmp_path, step(1, 3.0), step(2, 2.0))
    before = files.view()
    write(tmp_path, step(1, 3.0), mode="w")
    files.view(before.cursor, before.epoch)
    after = files.view(before.cursor, before.epoch)
    assert after.epoch != before.epoch
    assert [point.step for point in after.points["one"]] == [1]


def test_the_groups_of_a_sweep_have_logs_of_their_own(tmp_path):
    write_status(tmp_path / STATUS_FILE, status(step=1))
    files = RunFiles(tmp_path, "base")
    for group in ("0", "1"):
        folder = tmp_path / "groups" / group
        folder.mkdir(parents=True)
        write(folder, step(1 + int(group), 3.0))
    assert [point.step for point in files.view().points["one"]] == [1, 2]


def test_what_an_earlier_process_left_is_not_training(tmp_path):
    path = tmp_path / STATUS_FILE
    write_status(path, status(step=2))
    values = json.loads(path.read_text()) | {"written": "2020-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(values))
    view = RunFiles(tmp_path, "base").view()
    assert view.health.text == "preparing" and view.models[0].state == "interrupted"
    path.write_text("{")
    assert RunFiles(tmp_path, "base").view().health.level == "bad"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return serve_run(tmp_path_factory.mktemp("run"), "base", 0)


@pytest.mark.parametrize(
    ("path", "host", "code"),
    [
        ("/", None, 200),
        ("/page/state?after=x", "localhost:80", 200),
        ("/page/state", "[::1]:80", 200),
        ("/other", None, 404),
        ("/", "evil.example", 403),
        ("/page/state", "", 403),
    ],
)
def test_it_answers_this_machine_only(address, path, host, code):
    """A name of another site that leads here is refused."""
    where = urllib.parse.urlsplit(address)
    assert where.hostname == "127.0.0.1"
    connection = http.client.HTTPConnection(where.netloc)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == code
