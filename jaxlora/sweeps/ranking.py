"""The ranked configurations of a sweep, which tables, pictures and the page show."""

import csv
import dataclasses
import io
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlora.config import LoraJob
from jaxlora.config.configuration_names import value_text
from jaxlora.config.sweep_config import Sweep
from jaxlora.printable import one_line
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.configurations import varied_settings

Points = tuple[tuple[int, float], ...]  # (steps done, held-out loss)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A configuration and what became of it.

    Attributes:
        settings: Its settings.
        num_steps: Its optimizer steps in all.
        progress: Its steps, losses and status.
        folder: Its PEFT folder; None if there is none.
    """

    settings: LoraJob
    num_steps: int
    progress: JobProgress
    folder: pathlib.Path | None

    @property
    def loss(self) -> float:
        """Lowest held-out loss; infinite if it was never evaluated."""
        best = self.progress.best_eval
        return math.inf if best is None else best

    @property
    def parent(self) -> str:
        """Names the job and step that it is a copy of; empty if it started anew."""
        origin = self.settings.clone_of
        return "" if origin is None else f"{origin.job} at {origin.step}"

    @property
    def ending(self) -> str:
        """Says how it ended, or where it stands."""
        p = self.progress
        status = p.shown_status(is_live=False)
        return f"{p.stopped_by} at {p.step}" if p.stopped_by else status


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The result of a sweep.

    Attributes:
        trials: The configurations, the lowest held-out loss first.
        kept: Names of the best ones, as many as `Sweep.keep`.
        varied: JSON value of each setting in which they differ, by setting and name.
        curves: The evaluations of each, by name.
        seconds: The share of the training time of each, by its tokens; by name.
    """

    trials: tuple[Trial, ...]
    kept: tuple[str, ...]
    varied: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Points]
    seconds: Mapping[str, float]

    @staticmethod
    def of(
        sweep: Sweep, trials: Sequence[Trial], events: Iterable[Mapping[str, Any]]
    ) -> "SweepReport":
        """Ranks configurations; of equal losses, the one given first is better.

        Args:
            sweep: The sweep.
            trials: The configurations.
            events: The events of the run, as metrics.jsonl has them.
        """
        ranked = sorted(trials, key=lambda trial: trial.loss)
        events = list(events)
        return SweepReport(
            trials=tuple(ranked),
            kept=tuple(
                trial.settings.name
                for trial in ranked[: sweep.keep]
                if trial.loss < math.inf
            ),
            varied=varied_settings([trial.settings for trial in trials]),
            curves=_curves(events),
            seconds=_seconds(events),
        )

    @property
    def best(self) -> Trial:
        """The configuration with the lowest held-out loss."""
        return self.trials[0]

    @property
    def has_copies(self) -> bool:
        """Whether a configuration is a copy of another one."""
        return any(trial.parent for trial in self.trials)

    def family(self) -> dict[str, list[str]]:
        """Returns the copies of each configuration that has some, in their order."""
        found: dict[str, list[str]] = {}
        for trial in self.trials:
            if trial.settings.clone_of is not None:
                copies = found.setdefault(trial.settings.clone_of.job, [])
                copies.append(trial.settings.name)
        return found

    def header(self) -> list[str]:
        """Names the columns of `row`."""
        return [
            "place",
            "configuration",
            "held-out loss",
            "at step",
            "steps",
            "tokens",
            "seconds",
            "ended",
            *(["copy of"] if self.has_copies else []),
            *self.varied,
        ]

    def row(self, place: int) -> list[Any]:
        """Returns the values of a configuration; None where there is none.

        Args:
            place: Its place, from 0.
        """
        trial = self.trials[place]
        p, name = trial.progress, trial.settings.name
        return [
            place + 1,
            name,
            p.best_eval,
            p.best_step,
            p.step,
            p.num_tokens,
            round(self.seconds.get(name, 0.0), 2),
            trial.ending,
            *([trial.parent] if self.has_copies else []),
            *(column[name] for column in self.varied.values()),
        ]

    def csv(self) -> str:
        """Returns the table with a column for each varied setting, and the reasons."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.header(), "kept", "reason", "folder"])
        for place, trial in enumerate(self.trials):
            cells = [
                value
                if value is None or isinstance(value, int | float)
                else _cell(value)
                for value in self.row(place)
            ]
            kept = trial.settings.name in self.kept
            folder = "" if trial.folder is None else trial.folder
            writer.writerow([*cells, kept, one_line(trial.progress.reason), folder])
        return text.getvalue()


def _cell(value: Any) -> str:
    """Returns a value as a spreadsheet shows it; none is taken for a formula."""
    text = one_line(value if isinstance(value, str) else value_text(value))
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _curves(events: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if event["event"] == "eval":
            point = event["step"], event["eval_loss"]
            found.setdefault(event["job"], []).append(point)
    return {name: tuple(points) for name, points in found.items()}


def _seconds(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Divides the time of each window among the jobs by the tokens of their steps."""
    total: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for event in events:
        if event["event"] == "step":
            tokens[event["job"]] += event["num_tokens"]
        elif event["event"] == "window" and tokens:
            whole = sum(tokens.values())
            for name, own in tokens.items():
                total[name] += event["seconds"] * own / whole  # pyrefly: ignore
            tokens.clear()
    return dict(total)
