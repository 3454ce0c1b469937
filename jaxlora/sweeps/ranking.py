"""The ranked configurations of a sweep, which tables, pictures and the page show."""

import csv
import dataclasses
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlora.config import LoraJob
from jaxlora.config.configuration_names import value_text
from jaxlora.config.sweep_config import Metric, Sweep
from jaxlora.printable import one_line
from jaxlora.train.report.summary import JobResult

Points = tuple[tuple[int, float], ...]  # (steps done, value of the metric)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial(JobResult):
    """A configuration and what became of it."""

    @staticmethod
    def of(job: JobResult) -> "Trial":
        """Returns the configuration that a job has trained."""
        values = {f.name: getattr(job, f.name) for f in dataclasses.fields(job)}
        return Trial(**values)

    @property
    def loss(self) -> float:
        """Held-out loss at its best evaluation; infinite if there was none."""
        best = self.progress.best_eval
        return math.inf if best is None else best

    def value(self, metric: Metric) -> float | None:
        """Returns the best value of the metric; None if it was never evaluated."""
        return self.progress.best_eval if metric.is_loss else self.progress.best_metric

    def cost(self, metric: Metric) -> float:
        """Returns what is lower for better ones; infinite if it was never evaluated."""
        value = self.value(metric)
        return math.inf if value is None else metric.cost(value)

    def place(self, metric: Metric) -> tuple[float, float, int]:
        """Returns what configurations are sorted by, the best first.

        As within a job, of equal values of the metric, that with the lower held-out
        loss is better, and then the later step.
        """
        return self.cost(metric), self.loss, -(self.progress.best_step or 0)

    @property
    def warning(self) -> str:
        """Says whether its adapter, or its place, has seen no training; or empty."""
        p = self.progress
        if p.exported_step(keep_best=self.settings.keep_best) == 0:
            return "its adapter is that of step 0"
        if p.best_step == 0 and p.step:
            return "its best evaluation is that of step 0"
        return ""

    @property
    def parent(self) -> str:
        """Names the job and step that it is a copy of; empty if it started anew."""
        origin = self.settings.clone_of
        if origin is None or origin.step is None:
            return "" if origin is None else origin.job
        return f"{origin.job} at {origin.step}"

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
        trials: The configurations, the best first.
        metric: The metric by which they are ranked.
        kept: Names of the best ones, as many as `Sweep.keep`.
        varied: JSON value of each setting in which they differ, by setting and name.
        curves: The value of the metric at the evaluations of each, by name.
        seconds: The share of the training time of all devices of each, by its tokens;
            by name.
    """

    trials: tuple[Trial, ...]
    metric: Metric
    kept: tuple[str, ...]
    varied: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Points]
    seconds: Mapping[str, float]

    @staticmethod
    def of(
        sweep: Sweep,
        trials: Sequence[Trial],
        events: Iterable[Mapping[str, Any]],
        num_devices: int = 1,
    ) -> "SweepReport":
        """Ranks configurations by `Trial.place`; of equal ones, the first is better.

        Args:
            sweep: The sweep.
            trials: The configurations.
            events: The events of the run, as metrics.jsonl has them.
            num_devices: Number of devices of the run.
        """
        metric, events = sweep.metric, list(events)
        ranked = sorted(trials, key=lambda trial: trial.place(metric))
        return SweepReport(
            trials=tuple(ranked),
            metric=metric,
            kept=tuple(
                trial.settings.name
                for trial in ranked[: sweep.keep]
                if trial.cost(metric) < math.inf
            ),
            varied=varied_settings([trial.settings for trial in trials]),
            curves=curves_of(events, "eval_loss" if metric.is_loss else "metric"),
            seconds={n: num_devices * s for n, s in _seconds(events).items()},
        )

    @property
    def best(self) -> Trial:
        """The best configuration."""
        return self.trials[0]

    @property
    def metric_name(self) -> str:
        """The name of the metric for a heading."""
        return "held-out loss" if self.metric.is_loss else self.metric.name

    @property
    def costs(self) -> dict[str, float]:
        """Costs by name of configuration; better ones have lower costs."""
        return {t.settings.name: t.cost(self.metric) for t in self.trials}

    @property
    def has_copies(self) -> bool:
        """Whether a configuration is a copy of another one."""
        return any(trial.parent for trial in self.trials)

    @property
    def warnings(self) -> dict[str, list[str]]:
        """Names of the configurations of each warning, the best first."""
        found: dict[str, list[str]] = {}
        for trial in self.trials:
            if trial.warning:
                found.setdefault(trial.warning, []).append(trial.settings.name)
        return found

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
            *([] if self.metric.is_loss else [self.metric.name]),
            "held-out loss",
            "at step",
            "steps",
            "tokens",
            "device seconds",
            "ended",
            *(["warning"] if self.warnings else []),
            *(["copy of"] if self.has_copies else []),
            *self.varied,
        ]

    def row(self, place: int) -> list[Any]:
        """Returns the values of the configuration at a place, from 0; None for none."""
        trial = self.trials[place]
        p, name = trial.progress, trial.settings.name
        return [
            place + 1,
            name,
            *([] if self.metric.is_loss else [p.best_metric]),
            p.best_eval,
            p.best_step,
            p.step,
            p.num_tokens,
            round(self.seconds.get(name, 0.0), 2),
            trial.ending,
            *([trial.warning] if self.warnings else []),
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


def varied_settings(jobs: Sequence[LoraJob]) -> dict[str, dict[str, Any]]:
    """Returns the settings in which jobs differ, in the order of `LoraJob`.

    Returns:
        By setting (`data.limit` within `data`), its JSON value in each job, by name.
    """
    flat = {job.name: _flat(job.model_dump(mode="json")) for job in jobs}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    columns = {k: {n: values.get(k) for n, values in flat.items()} for k in keys}
    return {
        key: column
        for key, column in columns.items()
        if key not in ("name", "clone_of") and len(set(map(_key, column.values()))) > 1
    }


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with those of `data` and `eval_data` by dotted names."""
    out = {}
    for name, value in settings.items():
        if name in ("data", "eval_data") and isinstance(value, dict):
            out |= {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            out[name] = value
    return out


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def curves_of(events: Iterable[Mapping[str, Any]], key: str) -> dict[str, Points]:
    """Returns (steps done, value of a key) of the evaluations of each job, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if event["event"] == "eval":
            point = event["step"], event[key]
            found.setdefault(event["job"], []).append(point)
    return {name: tuple(points) for name, points in found.items()}


def _seconds(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Divides the time of each window among the jobs by the tokens of their steps."""
    total: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for event in events:
        if event["event"] == "step":
            tokens[event["job"]] += event["num_tokens"]
        elif event["event"] == "window" and tokens.total():
            whole = sum(tokens.values())
            for name, own in tokens.items():
                total[name] += event["seconds"] * own / whole  # pyrefly: ignore
            tokens.clear()
    return dict(total)
