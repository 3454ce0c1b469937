"""Renders docs/progress.svg: the display of a run with forty jobs on 24 lines.

    python -m scripts.picture_of_progress

The display is the one that `jaxlora train` shows; only the losses are made up.
"""

import io
import pathlib

from rich.console import Console

from jaxlora.run.job_progress import JobProgress, JobStatus
from jaxlora.run.status import RunStatus
from jaxlora.run.status_view import StatusView

PICTURE = pathlib.Path(__file__).parent.parent / "docs" / "progress.svg"
NUM_JOBS, NUM_SLOTS, WIDTH, HEIGHT = 40, 16, 88, 24


def made_job(number: int) -> JobStatus:
    """Makes a job: the first ones have ended, the next ones run, the others wait."""
    num_steps = 200 + 40 * (number % 4)
    place = number - 13  # of the job among those that run
    progress = JobProgress()
    if number == 7:
        progress = JobProgress(status="failed", step=31)
    elif place < 0:
        progress = JobProgress(status="finished", step=num_steps)
    elif place < NUM_SLOTS:
        step = num_steps - 12 * place - 9
        progress = JobProgress(
            status="running",
            slot=place,
            step=step,
            last_loss=1.2 + 0.9 * (1 - step / num_steps) + 0.05 * (number % 5),
            best_eval=1.35 + 0.04 * (number % 7),
        )
    return JobStatus(
        name=f"lr{1 + number % 5}e-4-rank{2 ** (3 + number % 3)}-seed{number // 8}",
        rank=2 ** (3 + number % 3),
        num_modules=7,
        num_steps=num_steps,
        batch_tokens=4000.0,
        progress=progress,
    )


def main() -> None:
    """Writes the picture."""
    status = RunStatus(
        jobs=tuple(made_job(number) for number in range(NUM_JOBS)),
        round=312,
        num_slots=NUM_SLOTS,
        tokens_per_second=48_213.0,
        seconds_left=2_520.0,
    )
    console = Console(
        record=True,
        width=WIDTH,
        height=HEIGHT,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(StatusView(status=status, max_lines=HEIGHT - 1))
    svg = console.export_svg(title="jaxlora train sweep.yaml", unique_id="progress")
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
