"""Shows a run on the terminal: a progress bar per job, speed and time left."""

import logging
import time
from collections.abc import Mapping, Sequence

import rich.progress

from jaxlora import console
from jaxlora.train.executor import StepOutcome
from jaxlora.train.job_run import JobRun

logger = logging.getLogger(__name__)


class Progress:
    """Shows progress bars on a terminal, and log lines otherwise."""

    def __init__(self, runs: Sequence[JobRun], *, is_shown: bool = True):
        """Shows the progress of `runs`, which may grow during the run.

        Args:
            runs: The jobs.
            is_shown: Whether anything is shown at all.
        """
        self._runs, self._is_shown = runs, is_shown
        self._on_terminal = is_shown and console.stderr.is_terminal
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[loss]}", markup=False),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console.stderr,
            disable=not self._on_terminal,
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._began = time.perf_counter()
        self._num_done_before = 0  # steps before this process resumed the run
        self._speed = ""

    def __enter__(self) -> "Progress":
        self._bars.start()
        self._began = time.perf_counter()
        self._num_done_before = self._num_done()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def update(self, speed: str | None = None) -> None:
        """Updates the bars.

        Args:
            speed: Speed in the latest window, as words; None: unchanged.
        """
        if speed is not None:
            self._speed = f"  {speed}"
        for run in self._runs:
            name = run.job.name
            if run.progress.status == "waiting":
                continue
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(
                    name, total=run.num_steps, loss=""
                )
            loss = run.progress.last_loss
            self._bars.update(
                self._tasks[name],
                completed=run.progress.step,
                loss=f"loss {loss:.3f}{self._speed}" if loss is not None else "",
            )

    def log_line(
        self,
        number: int,
        outcomes: Mapping[str, StepOutcome],
        speed: str,
    ) -> None:
        """Logs one line, if no bars are shown.

        Args:
            number: Rounds done.
            outcomes: The latest step of each job, by job name.
            speed: Speed in the latest window, as words.
        """
        if self._on_terminal or not self._is_shown:
            return
        losses = ", ".join(f"{name} {o.loss:.3f}" for name, o in outcomes.items())
        logger.info(
            "round %d: %s | %s | %s left",
            number,
            losses,
            speed,
            self._time_left(),
        )

    def _time_left(self) -> str:
        """Estimates the time left from the share of all jobs' optimizer steps done."""
        done = self._num_done()
        total = sum(
            run.progress.step if run.progress.is_over else run.num_steps
            for run in self._runs
        )
        done_here = done - self._num_done_before
        if not done_here:
            return "?"
        seconds = (time.perf_counter() - self._began) * (total - done) / done_here
        return f"{seconds:.0f} s"

    def _num_done(self) -> int:
        return sum(run.progress.step for run in self._runs)
