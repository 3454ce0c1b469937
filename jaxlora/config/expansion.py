"""Expands a sweep into the jobs of a run: a pure function of the run file.

The same file gives the same jobs with the same names, on any machine. The first draws
of a random search are the same whatever `count` is, so a sweep can be continued with
more of them.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic

from jaxlora.common.note import Note
from jaxlora.config.configuration_names import Namer
from jaxlora.config.job_settings import (
    axes_of,
    by_our_names,
    given_by,
    given_twice,
    our_name,
    resolve_point,
    setting_of,
    settings_key,
    values_at,
    with_settings,
)
from jaxlora.config.lora_job import LoraJob
from jaxlora.config.space import Axis, Space, draw, grid, value_at
from jaxlora.config.strict import StrictModel, types_of
from jaxlora.config.sweep_config import Sweep
from jaxlora.problems import Path, Problem

# Configurations that a run may have, with those that a search is still to suggest.
MOST_CONFIGURATIONS = 100_000
# Draws without a new configuration, for each one that was found, or of the first ones
# that are wanted, until a small space counts as exhausted.
_DRAWS, _FIRST = 50, 400
_LEAST_INITIAL = 10  # draws before Optuna suggests
ONE_JOB = (
    "`method: optuna` searches the settings of one job, whose values are all in "
    "parameters. Give one job without lists, or set `method: random`."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The place in the run file that a job comes from.

    Attributes:
        template: Index of the job that it is made from.
        varied: Path of each setting that a sweep has given it, by our name, such as
            `rank` or `data.limit`.
    """

    template: int
    varied: Mapping[str, Path] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expansion:
    """A run whose jobs are the configurations of its sweep.

    Attributes:
        values: The settings of the run. Its sweep has no parameters any more.
        origins: The origin of each job.
        problems: Problems of the sweep.
        notes: Lines for the log that say what was made.
    """

    values: dict[str, Any]
    origins: tuple[Origin, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()


def expand_run(values: Mapping[str, Any]) -> Expansion:
    """Expands the jobs of a run by its sweep, and by lists in the jobs.

    A list in the place of a setting that takes none stands for one job for each value.

    Args:
        values: The settings of the run, unchecked. Jobs may be mappings or instances of
            `LoraJob`, and have their defaults.

    Returns:
        The expanded run. Settings that cannot be expanded are left as they are, for the
        checks that follow.
    """
    jobs = values.get("jobs")
    if not isinstance(jobs, list | tuple):
        return Expansion(values=dict(values))
    problems: list[Problem] = []
    given, sweep = values.get("sweep"), None
    with contextlib.suppress(pydantic.ValidationError):  # the checks that follow say it
        sweep = None if given is None else Sweep.model_validate(given)
    swept = [] if sweep is None else axes_of(sweep.parameters, problems)
    expander = _Expander(swept, sweep or Sweep(), _num_first(sweep, values))
    if problems or (sweep is None and given is not None):
        jobs = _named(jobs)
    expander.add_all(jobs)
    problems += expander.problems
    out = {**values, "jobs": expander.jobs}
    searches = sweep is not None and sweep.method == "optuna" and bool(swept)
    is_one_job = len(jobs) == 1 and len(expander.points) == len(expander.jobs)
    if searches and not problems and not is_one_job:
        problems.append(Problem(path=("sweep", "method"), text=ONE_JOB))
    if sweep is not None and not problems:
        over = {"parameters": {}, "method": None, "count": None, "initial": None}
        if searches:
            over |= _search_of(sweep, jobs[0], expander.points)
            out |= _slots_of(values, expander.jobs, swept)
        out["sweep"] = sweep.replace(**over)
    return Expansion(
        values=out,
        origins=tuple(expander.origins),
        problems=tuple(problems),
        notes=tuple(Note(f"sweep: {note}") for note in expander.notes),
    )


# ---- a search that goes on while the run trains --------------------------------------


def _num_first(sweep: Sweep | None, values: Mapping[str, Any]) -> int | None:
    """Returns the number of configurations that are drawn at the start, if any are."""
    if sweep is None or sweep.method != "optuna" or sweep.count is None:
        return None if sweep is None else sweep.count
    initial, slots = sweep.initial, values.get("max_concurrent_jobs")
    if initial is None:
        initial = max(_LEAST_INITIAL, slots if type(slots) is int else 0)
    return min(sweep.count, initial)


def _search_of(
    sweep: Sweep, job: Any, points: Mapping[str, dict[str, float]]
) -> dict[str, Any]:
    """Returns the settings of a sweep whose further configurations are suggested."""
    search = {
        "template": _plain(job),
        "parameters": sweep.parameters,
        "count": sweep.count,
        "seed": sweep.seed,
        "points": dict(points),
    }
    is_chosen = "early_exit" in sweep.model_fields_set
    return {"search": search} | ({} if is_chosen else {"early_exit": "asha"})


def _plain(job: Any) -> dict[str, Any]:
    """Returns the settings of a job as JSON values."""
    if isinstance(job, StrictModel):
        return job.model_dump(mode="json", exclude_unset=True)
    is_part = lambda value: isinstance(value, StrictModel)
    return {k: _plain(v) if is_part(v) else v for k, v in job.items()}


def _slots_of(
    values: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]], axes: Sequence[Axis]
) -> dict[str, Any]:
    """Returns the settings of slots that hold whatever may be suggested."""
    out: dict[str, Any] = {}
    for name, setting in (("rank", "slot_rank"), ("dropout", "slot_dropout")):
        if values.get(setting) is not None:
            continue
        found = [setting_of(job, name) for job in jobs]
        for axis in axes:
            given: Any = axis.space.values or ()
            if axis.name.startswith("_"):
                pairs = (pair for one in given for pair in one.items())
                found += [value for key, value in pairs if our_name(key) == name]
            elif axis.name == name and axis.space.times is None:
                found += given or [axis.range[1]]
        most = max((n for n in found if isinstance(n, int | float)), default=0)
        out[setting] = most > 0 if name == "dropout" else most
    return out


# ---- the jobs ----------------------------------------------------------------------


class _Expander:
    """Collects the jobs that templates become.

    Attributes:
        jobs: The jobs.
        points: The place on each axis of those that were drawn, by name.
        origins: The origin of each.
        notes: Lines that say what was made.
        problems: Values that cannot be combined.
    """

    def __init__(self, swept: Sequence[Axis], sweep: Sweep, num_drawn: int | None):
        self.jobs: list[Any] = []
        self.points: dict[str, dict[str, float]] = {}
        self.origins: list[Origin] = []
        self.notes: list[str] = []
        self.problems: list[Problem] = []
        self._swept, self._seed = swept, sweep.seed
        self._num_drawn = (num_drawn or 0) if swept and sweep.is_random else None
        self._num_all = sweep.count if self._num_drawn else None
        self._namer = Namer()

    def add_all(self, jobs: Sequence[Any]) -> None:
        """Adds the configurations of the jobs of a run file."""
        templates = list(map(_template, jobs))
        listed = [
            [] if template is None else _listed(number, template)
            for number, template in enumerate(templates)
        ]
        if self._are_too_many(listed):
            # One of each job is left for the other checks.
            jobs = list(jobs)
            for number, axes in enumerate(listed):
                if axes:
                    first = {axis.name: value_at(axis, 0) for axis in axes}
                    jobs[number] = with_settings(templates[number] or {}, first)
            jobs = _named(jobs)
            self._swept, listed = (), [[]] * len(jobs)
        for number, (job, template) in enumerate(zip(jobs, templates, strict=True)):
            if template is not None and (listed[number] or self._swept):
                self._add(number, template, listed[number])
                continue
            self.jobs.append(job)
            self.origins.append(Origin(template=number))
            self._namer.reserve(str(None if template is None else template.get("name")))

    def _add(
        self, number: int, template: dict[str, Any], listed: Sequence[Axis]
    ) -> None:
        self.notes += (
            f"{'.'.join(map(str, axis.path))} is a list of {int(axis.num_points)} "
            "values: one job for each of them"
            for axis in listed
        )
        axes = [*listed, *self._swept]
        self.problems += given_twice(axes) if listed else ()
        places = {name: axis.path for axis in axes for name in given_by(axis)}
        for settings, point in self._distinct(template, listed):
            name = template.get("name", "")
            if isinstance(name, str):
                name = self._namer.name(name, settings, axes)
            self.jobs.append(with_settings(template, settings) | {"name": name})
            if point is not None:
                self.points[str(name)] = point
            varied = {n: places[n] for n in settings}
            self.origins.append(Origin(template=number, varied=varied))

    def _are_too_many(self, listed: Sequence[Sequence[Axis]]) -> bool:
        """Counts all configurations before one is made; too many are a problem."""
        swept = self._num_all or math.prod(axis.num_points for axis in self._swept)
        nums = [
            swept * math.prod(axis.num_points for axis in axes)
            if axes or self._swept
            else 0.0
            for axes in listed
        ]
        total = sum(nums)
        if total <= MOST_CONFIGURATIONS:
            return False
        most = listed[nums.index(max(nums))]
        path: Path = (self._swept or most)[0].path[:2]
        cure = "Give fewer values, or set `method: random` and count to draw some."
        if self._num_all:
            path, cure = ("sweep", "count"), "Lower it."
        text = (
            f"there would be {total:,.0f} configurations, and a run has at most "
            f"{MOST_CONFIGURATIONS:,}. {cure}"
        )
        self.problems.append(Problem(path=path, text=text))
        return True

    def _distinct(
        self, template: Mapping[str, Any], listed: Sequence[Axis]
    ) -> list[tuple[dict[str, Any], dict[str, float] | None]]:
        """Returns the settings of each configuration of a job, all different.

        With them comes the place on each axis, if they were drawn.
        """
        found: dict[str, tuple[dict[str, Any], dict[str, float] | None]] = {}
        num_equal, count = 0, self._num_drawn
        for row in grid(listed):
            own = with_settings(template, row)
            wanted, num_missed = len(found) + (count or 0), 0
            for point, places in self._points():
                if count is not None:
                    most = _DRAWS * max(len(found), min(count, _FIRST))
                    if len(found) == wanted or num_missed == most:
                        break
                settings = row | resolve_point(point, self._swept, own)
                key = settings_key(with_settings(template, settings))
                num_equal += key in found
                num_missed = num_missed + 1 if key in found else 0
                found.setdefault(key, (settings, places))
            if len(found) < wanted:
                self.notes.append(
                    f"count is {count}, and the space has only {len(found)} different "
                    "configurations"
                )
        if num_equal and count is None:
            text = "configurations that equal another one are left out"
            self.notes.append(f"{num_equal} {text}")
        return list(found.values())

    def _points(self) -> Iterator[tuple[dict[str, Any], dict[str, float] | None]]:
        if self._num_drawn is None:
            yield from ((point, None) for point in grid(self._swept))
            return
        for i in itertools.count():
            places = {axis.name: draw(axis, self._seed, i) for axis in self._swept}
            yield values_at(self._swept, places), places


def _named(jobs: Sequence[Any]) -> list[Any]:
    """Returns jobs with names, which a sweep would have given them."""
    return [
        {"name": f"c{i}", **job} if isinstance(job, dict) else job
        for i, job in enumerate(jobs, start=1)
    ]


def _template(job: Any) -> dict[str, Any] | None:
    """Returns the settings of a job by our names; None if it has none."""
    if isinstance(job, LoraJob):
        return {name: getattr(job, name) for name in job.model_fields_set}
    return by_our_names(job) if isinstance(job, dict) else None


def _listed(number: int, template: Mapping[str, Any]) -> list[Axis]:
    """Returns an axis for each list that stands for several values.

    A list in the place of a mapping is an error of its own.
    """
    axes = []
    for name, value in template.items():
        if name not in LoraJob.model_fields or name == "name":
            continue
        if not isinstance(value, list) or len(value) < 2:
            continue
        is_mapping = LoraJob.part(name) is not None
        if tuple in types_of(LoraJob.model_fields[name].annotation) or (
            is_mapping and not all(isinstance(item, dict) for item in value)
        ):
            continue
        space = Space(values=tuple(value))
        path = "jobs", number, name
        axes.append(Axis(name=name, path=path, space=space, is_integer=False))
    return axes
