"""The display of a run: what is shown on few lines, on narrow ones, and in the log."""

import io
import logging
import sys
import types

import pytest
from rich.console import Console

from jaxlora.run import status
from jaxlora.run.events import JobAddEvent, RunEndEvent
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.status import StatusTracker
from jaxlora.run.status_view import StatusView, format_seconds
from jaxlora.train.report.progress import Progress, log_line
from tests.jaxlora.run import made_events

NUM_JOBS = 40


def many_jobs() -> StatusTracker:
    """Forty jobs: 3 finished, 1 failed, 1 paused, 8 running and 27 waiting."""
    tracker = StatusTracker()
    infos = [made_events.info(f"job-{i:02}") for i in range(NUM_JOBS)]
    infos[4] = made_events.info(
        "job-04", progress=JobProgress(status="paused", reason="lunch", step=3)
    )
    tracker.on_event(made_events.run_start(*infos, num_slots=8))
    for i in range(3):
        tracker.on_event(made_events.job_end(f"job-{i:02}", 10))
    tracker.on_event(made_events.job_end("job-03", 2, "failed"))
    for i in range(5, 13):
        tracker.on_event(made_events.step(f"job-{i:02}", i - 3, loss=1 + i / 10))
    tracker.on_event(made_events.window(9))
    return tracker


def shown(tracker: StatusTracker, width: int, max_lines: int | None) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(StatusView(status=tracker.status(), max_lines=max_lines))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [120, 80, 40])
def test_forty_jobs_on_a_small_terminal(width):
    """The running ones are there, and no line is lost or wrapped."""
    lines = shown(many_jobs(), width, max_lines=23)
    assert len(lines) <= 23 and max(map(len, lines)) <= width
    counts = "8 running, 1 failed, 27 waiting, 1 paused, 3 finished"
    assert lines[1].startswith(counts[: width - 1])
    names = [line.split()[0] for line in lines[2:-1]]
    assert names[:9] == [f"job-{i:02}" for i in (*range(5, 13), 4)]
    words = ["2/10", "1.500"] if width == 40 else ["2/10", "loss", "1.500"]
    assert lines[2].split()[-len(words) :] == words
    assert lines[-1] == f"+ {NUM_JOBS - 4 - len(names)} more"


def test_numbers_are_whole_where_names_are_cut():
    tracker = StatusTracker()
    name = "a-long-name-" * 5
    tracker.on_event(made_events.run_start(made_events.info(name)))
    tracker.on_event(made_events.step(name, 7, loss=1.25))
    (line,) = shown(tracker, 40, max_lines=10)[2:]
    assert line.startswith("a-long-name-") and "…" in line
    assert line.split()[-2:] == ["7/10", "1.250"]


def test_lines_of_the_log_go_above_the_display(monkeypatch):
    raw, screen = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", raw)
    handler = logging.StreamHandler()  # as logging.basicConfig makes it
    logger = logging.getLogger("jaxlora")
    monkeypatch.setattr(logger, "handlers", [handler])
    progress = Progress(many_jobs(), on=Console(file=screen, force_terminal=True))
    progress.start()
    logger.warning("a line of the log")
    progress.close()
    assert "a line of the log" in screen.getvalue() and not raw.getvalue()
    assert handler.stream is raw


def test_all_jobs_that_fit_are_shown():
    lines = shown(many_jobs(), 80, max_lines=None)
    assert len(lines) == 2 + NUM_JOBS - 4 and "more" not in lines[-1]


def after_an_interrupt(tracker: StatusTracker) -> StatusTracker:
    tracker.on_event(RunEndEvent(round=9, is_interrupted=True))
    return tracker


def test_no_job_is_running_once_the_run_has_ended():
    lines = shown(after_an_interrupt(many_jobs()), 120, max_lines=23)
    assert lines[1].startswith("8 interrupted, 1 failed, 27 waiting, 1 paused")
    assert lines[2].split()[-2:] == ["2/10", "interrupted"]
    assert "running" not in "".join(lines)


class Clock:
    """A clock that a test sets, in the place of time.perf_counter."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(status.time, "perf_counter", lambda: self.now)


def test_time_left_leaves_out_the_start(monkeypatch):
    """The first window compiles; within one, only some of the work shows in steps."""
    clock, tracker = Clock(monkeypatch), StatusTracker()
    tracker.on_event(made_events.run_start(*map(made_events.info, "ab")))

    def after(seconds: float, *events) -> float | None:
        clock.now += seconds
        for event in events:
            tracker.on_event(event)
        return tracker.status().seconds_left

    assert after(300, made_events.evaluation("a", 0)) is None  # compiles
    assert after(300, made_events.step("a", 1)) is None
    assert after(1, made_events.step("b", 1), made_events.window(1)) is None
    assert after(9, made_events.step("a", 2)) is None
    # From here on, a step of both jobs takes 10 s.
    assert after(1, made_events.step("b", 2), made_events.window(2)) == 80
    assert after(9, made_events.step("a", 3)) == 71
    assert after(1, made_events.step("b", 3), made_events.window(3)) == 70
    ends = [made_events.job_end(name, 3, "stopped") for name in "ab"]
    assert after(1, ends[0]) == 69
    assert after(1, ends[1]) == 0
    texts = [format_seconds(s) for s in (None, 50.2, 4000)]
    assert texts == ["?", "0:00:50", "1:06:40"]


def test_time_left_counts_the_tokens_of_this_process(monkeypatch):
    """Not those before a resume, nor those of a job that was trained elsewhere."""
    clock, tracker = Clock(monkeypatch), StatusTracker()
    resumed = made_events.info("a", progress=JobProgress(status="running", step=4))
    tracker.on_event(made_events.run_start(resumed))
    for step in (5, 6):
        if step == 6:
            other = JobProgress(status="paused", step=8)
            info = made_events.info("b", progress=other)
            tracker.on_event(JobAddEvent(round=5, info=info))
        clock.now += 10
        tracker.on_event(made_events.step("a", step))
        tracker.on_event(made_events.window(step))
    assert tracker.status().seconds_left == 60  # 4 steps of a, and 2 of b


def test_a_line_of_the_log_names_a_few_jobs():
    losses = {f"job-{i:02}": 1.5 for i in range(5, 13)}
    line = log_line(many_jobs().status(), losses)
    assert line.startswith("round 9: job-05 1.500, job-06 1.500, job-07 1.500, job-08")
    assert (
        "and 4 more | 8 running, 1 failed, 27 waiting" in line and "200 tok/s" in line
    )


@pytest.mark.parametrize(("log_every", "num_lines"), [(1, 3), (2, 1)])
def test_log_lines_without_a_terminal(caplog, log_every, num_lines):
    caplog.set_level(logging.INFO, "jaxlora")
    tracker = StatusTracker()
    progress = Progress(tracker, log_every=log_every, on=Console(file=io.StringIO()))
    progress.start()
    events = [made_events.run_start(made_events.info("a"))]
    for i in (1, 2, 3):
        events += [made_events.step("a", i, loss=i), made_events.window(i)]
    for event in events:
        tracker.on_event(event)
        progress.on_event(event)
    progress.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == num_lines
    assert texts[-1].startswith("round 2: a 2.0" if log_every == 2 else "round 3: a 3.")


def test_a_display_on_a_terminal(caplog):
    """It stays on the screen with the last state, and no lines are logged."""
    caplog.set_level(logging.INFO, "jaxlora")
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24)
    tracker = many_jobs()
    progress = Progress(tracker, on=console)
    progress.start()
    progress.on_event(made_events.window(10))
    progress.close()
    assert not caplog.records
    last = file.getvalue().rsplit("running", 1)[-1]
    assert "job-05" in last and "more" in last


def test_a_display_in_a_notebook(monkeypatch):
    """The state is shown in an output widget, which is refreshed in place."""
    displayed = []

    class Output:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def clear_output(self, wait):
            displayed.clear()

    widgets = types.ModuleType("ipywidgets")
    widgets.Output = Output
    widgets.__spec__ = types.SimpleNamespace()
    display = types.ModuleType("IPython.display")
    display.display = displayed.append
    for name, module in (
        ("ipywidgets", widgets),
        ("IPython", types.ModuleType("IPython")),
        ("IPython.display", display),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    console = Console(force_jupyter=True, width=80)
    progress = Progress(many_jobs(), on=console)
    progress.start()
    progress.on_event(RunEndEvent(round=9, is_interrupted=False))
    progress.close()
    shown = [d for d in displayed if not isinstance(d, Output)]
    html = "".join(d._repr_mimebundle_([], [])["text/html"] for d in shown)
    assert "job-05" in html and "8 running" in html
