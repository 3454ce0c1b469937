"""The report of a sweep over several groups."""

import itertools
import json
import math
import pathlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from jaxlora.common.atomic import write_text
from jaxlora.config import RunConfig
from jaxlora.errors import CheckpointError
from jaxlora.run.log import DROPPED_FILE, METRICS_FILE, read_events
from jaxlora.sweeps import files
from jaxlora.sweeps.engine.state import GROUPS, Configuration, SweepState
from jaxlora.sweeps.ranking import SweepReport, Trial, is_number
from jaxlora.train.report.summary import Comparison, RunResult

_Event = dict[str, Any]


def write_result(
    config: RunConfig,
    state: SweepState,
    *,
    num_devices: Sequence[int],
    interrupted: bool,
    predicted: float | None = None,
) -> RunResult[SweepReport]:
    """Writes the report of all groups into the folder of the sweep; merges the best.

    Args:
        config: The run.
        state: The configurations.
        num_devices: Number of devices of each group.
        interrupted: Whether some are left that `--resume` continues.
        predicted: Seconds that the plan of the groups predicted; None: there is none.

    Raises:
        JaxloraError: The log of a group is damaged, the best configuration cannot be
            merged, or a file cannot be written.
    """
    folder = pathlib.Path(config.output_dir)
    found = list(state.configurations.values())
    known = state.configurations
    runs = sorted((folder / GROUPS).glob("*"))
    logs = {run: list(_logged(run, known)) for run in runs}
    events = itertools.chain.from_iterable(logs.values())
    events = sorted(events, key=lambda event: event.get("time", 0.0))
    _write_events(folder, events, state)
    assert config.sweep is not None
    trials = [_trial(folder, c) for c in found]
    work = work_of(logs, num_devices)
    report = SweepReport.of(config.sweep, trials, [*work, *_evaluations(state)])
    result = RunResult(
        jobs=tuple(trials),
        output_dir=folder,
        interrupted=interrupted,
        num_compilations=0,
        seconds=Comparison(predicted=predicted, measured=_seconds(logs) or None),
        sweep=report,
    )
    files.write_result(result, config)
    return result


# A job may pause and go on more than once at a step; all else happens once.
_OFTEN = "job_pause", "job_resume"


def _write_events(
    folder: pathlib.Path, events: Sequence[_Event], state: SweepState
) -> None:
    """Writes the events of all workers, each once.

    What a lost worker did after its last checkpoint happens again in another one. As in
    the log of a run, the earlier events are kept in a file of their own.
    """
    found: dict[str, list[_Event]] = {METRICS_FILE: [], DROPPED_FILE: []}
    seen = set()
    for event in reversed(events):
        is_dropped = False
        if "job" in event:
            one, step = state.configurations[event["job"]], event["step"]
            key = event["event"], one.name, step
            last = one.progress.step if one.is_closed else math.inf
            is_dropped = (key in seen and event["event"] not in _OFTEN) or not (
                one.first_step or 0
            ) <= step <= last
            seen.add(key)
        found[DROPPED_FILE if is_dropped else METRICS_FILE].append(event)
    for name, those in found.items():
        if those or name == METRICS_FILE:
            lines = (json.dumps(event) + "\n" for event in reversed(those))
            write_text(folder / name, "".join(lines))


def _trial(folder: pathlib.Path, found: Configuration) -> Trial:
    settings, facts = found.settings, found.facts
    adapter = None if found.folder is None else folder / found.folder
    return Trial(
        name=found.name,
        settings=settings,
        batch_tokens=1.0 if facts is None else facts.batch_tokens,
        rank=settings.rank if facts is None else facts.trained_rank,
        num_modules=0 if facts is None else facts.num_modules,
        num_steps=0 if facts is None else facts.num_steps,
        progress=found.progress,
        folder=adapter if adapter is not None and adapter.is_dir() else None,
    )


# Numbers of events that the report reads, beside those that every log must have.
_NUMBERS = {"window": "seconds", "step": "num_tokens"}


def _logged(run: pathlib.Path, jobs: Container[str]) -> Iterator[_Event]:
    """Yields what a worker has logged.

    Raises:
        CheckpointError: An event is damaged.
    """
    for event in read_events(run / METRICS_FILE):
        kind, numbers = event["event"], [event.get("time", 0.0)]
        if kind in _NUMBERS:
            numbers.append(event.get(_NUMBERS[kind]))
        is_of_job = "job" in event or kind == "step"
        if not all(map(is_number, numbers)) or (
            is_of_job and event.get("job", "") not in jobs
        ):
            raise CheckpointError(
                f"{run / METRICS_FILE} holds a {kind} of no configuration of this "
                "sweep, or without its numbers. Remove that line, or move the file "
                "away."
            )
        yield event


def work_of(
    logs: Mapping[pathlib.Path, Sequence[_Event]], num_devices: Sequence[int]
) -> Iterator[_Event]:
    """Yields the steps and windows of one worker after the other.

    The seconds of windows are those of all devices of the worker's group.
    """
    for run, events in logs.items():
        group = int(_group(run))
        devices = num_devices[group] if group < len(num_devices) else num_devices[0]
        for event in events:
            if event["event"] == "window":
                yield event | {"seconds": devices * event["seconds"]}
            elif event["event"] == "step":
                yield event
        yield {"event": "window", "seconds": 0.0}  # steps whose window was not reported


def _group(run: pathlib.Path) -> str:
    """Returns the number of the group whose worker had this folder."""
    return run.name.partition("-")[0]


def _seconds(logs: Mapping[pathlib.Path, Sequence[_Event]]) -> float:
    """Returns the time of all windows of the group in which they took longest."""
    found: Counter[str] = Counter()
    for run, events in logs.items():
        seconds = (e["seconds"] for e in events if e["event"] == "window")
        found[_group(run)] += sum(seconds)  # pyrefly: ignore
    return max(found.values(), default=0.0)


def _evaluations(state: SweepState) -> Iterator[_Event]:
    """Yields each evaluation once, as the decisions have seen it."""
    found = state.decisions
    for name, points in found.points.items():
        values = dict(found.metrics.get(name, ()))
        for step, loss in points:
            event = {"event": "eval", "job": name, "step": step, "eval_loss": loss}
            yield event | ({"metric": values[step]} if step in values else {})
