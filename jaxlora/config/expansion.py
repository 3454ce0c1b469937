"""Expands a sweep into the jobs of a run: a pure function of the run file.

The same file gives the same jobs with the same names, on any machine. The first draws
of a random search are the same whatever `count` is, so a sweep can be continued with
more of them.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic

from jaxlora.config.configuration_names import Namer
from jaxlora.config.job_settings import (
    axes_of,
    check_axis,
    given_by,
    given_twice,
    make_problem,
    part_of,
    resolve_point,
    settings_key,
    types_of,
    values_at,
    with_settings,
)
from jaxlora.config.search import ONE_JOB, drawn_first, search_of, slots_of
from jaxlora.config.space import Axis, Space, draw, first_of, grid
from jaxlora.config.strict import StrictModel
from jaxlora.config.sweep_config import Sweep
from jaxlora.problems import RULE, Path, Problem

# Configurations that a run may have, with those that a search is still to suggest.
MOST_CONFIGURATIONS = 100_000
# Draws without a new configuration, for each one that was found, or of the first ones
# that are wanted, until a small space counts as exhausted.
_DRAWS, _FIRST = 50, 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The place in the run file that a job comes from.

    Attributes:
        template: Index of the job that it is made from.
        varied: Path of each setting that a sweep has given it, by our name, such as
            `rank` or `data.limit`.
    """

    template: int
    varied: Mapping[str, Path]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expansion:
    """A run whose jobs are the configurations of its sweep.

    Attributes:
        values: The settings of the run. Its sweep has no parameters any more.
        origins: The origin of each job.
        problems: Problems of the sweep.
        notes: Lines that say what was made.
    """

    values: dict[str, Any]
    origins: tuple[Origin, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def expand_run(values: Mapping[str, Any], kind: type[StrictModel]) -> Expansion:
    """Expands the jobs of a run by its sweep, and by lists in the jobs.

    A list in the place of a setting that takes none stands for one job for each value.

    Args:
        values: The settings of the run, unchecked. Jobs may be mappings or instances of
            `kind`, and have their defaults.
        kind: The class of a job.

    Returns:
        The expanded run. Settings that cannot be expanded are left as they are, for the
        checks that follow.
    """
    jobs = values.get("jobs")
    if not isinstance(jobs, list | tuple):
        return Expansion(values=dict(values))
    problems: list[Problem] = []
    sweep = _read_sweep(values.get("sweep"), kind, problems)
    swept = [] if sweep is None else axes_of(sweep.parameters, kind, problems)
    drawn = Sweep() if sweep is None else drawn_first(sweep, values)
    expander = _Expander(kind, drawn, swept)
    if sweep is not None and sweep.is_random:
        expander.num_drawn = sweep.count or 0
    is_broken = bool(problems) or (sweep is None and values.get("sweep") is not None)
    expander.count(jobs)
    for number, job in enumerate(jobs):
        if is_broken and isinstance(job, dict):
            job = {"name": f"c{number + 1}", **job}  # the sweep would have named it
        expander.add(number, job)
    out = {**values, "jobs": expander.jobs}
    problems += expander.problems
    searches = sweep is not None and sweep.method == "optuna" and bool(swept)
    if (
        searches
        and not problems
        and not (len(jobs) == 1 and len(expander.points) == len(out["jobs"]))
    ):
        problems.append(make_problem(("sweep", "method"), RULE, ONE_JOB))
    if sweep is not None and not problems:
        over = {"parameters": {}, "method": None, "count": None, "initial": None}
        if searches:
            over |= search_of(sweep, jobs[0], expander.points)
            out |= slots_of(values, expander.jobs, swept, kind)
        out["sweep"] = sweep.replace(**over)
    return Expansion(
        values=out,
        origins=tuple(expander.origins),
        problems=tuple(problems),
        notes=tuple(expander.notes),
    )


def _read_sweep(
    given: Any, kind: type[StrictModel], problems: list[Problem]
) -> Sweep | None:
    if given is None or isinstance(given, Sweep):
        return given
    try:
        return Sweep.model_validate(given)
    except pydantic.ValidationError:
        # The checks that follow report it; the names of settings are looked at here.
        parameters = given.get("parameters") if isinstance(given, dict) else None
        for name, one in parameters.items() if isinstance(parameters, dict) else ():
            key = str(name)
            try:
                space = Space.model_validate(one)
            except pydantic.ValidationError:
                space = Space(values=({},) if key.startswith("_") else (1,))
            problems += check_axis(key, space, kind)
        return None


# ---- the jobs ----------------------------------------------------------------------


class _Expander:
    """Collects the jobs that templates become.

    Attributes:
        jobs: The jobs.
        points: The place on each axis of those that were drawn, by name.
        origins: The origin of each.
        notes: Lines that say what was made.
        problems: Values that cannot be combined.
        num_drawn: Number of configurations of a search, for each job.
    """

    def __init__(self, kind: type[StrictModel], sweep: Sweep, swept: Sequence[Axis]):
        self.jobs: list[Any] = []
        self.points: dict[str, dict[str, float]] = {}
        self.origins: list[Origin] = []
        self.notes: list[str] = []
        self._kind, self._sweep, self._swept = kind, sweep, swept
        self._namer = Namer()
        self.problems: list[Problem] = []
        self.num_drawn, self._is_cut = 0, False

    def add(self, number: int, job: Any) -> None:
        """Adds the configurations of a job of the run file, or the job itself."""
        template = self._template(job)
        if template is None:
            return self._keep(number, job)
        listed = self._listed(number, template)
        self.notes += (
            f"{'.'.join(map(str, axis.path))} is a list of {int(axis.num_points)} "
            "values: one job for each of them"
            for axis in listed
        )
        if not (listed or self._swept):
            return self._keep(number, job)
        listed = list(map(first_of, listed)) if self._is_cut else listed
        axes = [*listed, *self._swept]
        self.problems += given_twice(axes, self._kind) if listed else ()
        places = {n: axis.path for axis in axes for n in given_by(axis, self._kind)}
        for settings, point in self._distinct(template, listed):
            name = template.get("name", "")
            if isinstance(name, str):
                name = self._namer.name(name, settings, axes)
            made = with_settings(template, settings, self._kind) | {"name": name}
            self.jobs.append(made)
            if point is not None:
                self.points[str(made["name"])] = point
            varied = {n: places[n] for n in settings}
            self.origins.append(Origin(template=number, varied=varied))
        return None

    def count(self, jobs: Sequence[Any]) -> None:
        """Counts all configurations before one is made; of too many, few are made."""
        drawn = self.num_drawn if self._swept else 0
        swept = drawn or math.prod(axis.num_points for axis in self._swept)
        total, largest = 0.0, 0.0
        path: Path = ()
        for number, job in enumerate(jobs):
            template = self._template(job)
            listed = [] if template is None else self._listed(number, template)
            if template is None or not (listed or self._swept):
                continue
            num = swept * math.prod(axis.num_points for axis in listed)
            total += num
            if num > largest:
                largest, path = num, (self._swept or listed)[0].path[:2]
        if total <= MOST_CONFIGURATIONS:
            return
        if not self.problems:
            path = ("sweep", "count") if drawn else path
            fewer = "Give fewer values, or set `method: random` and count to draw some."
            text = (
                f"there would be {total:,.0f} configurations, and a run has at most "
                f"{MOST_CONFIGURATIONS:,}. {'Lower it.' if drawn else fewer}"
            )
            self.problems.append(make_problem(path, RULE, text))
        self._swept, self._sweep = list(map(first_of, self._swept)), Sweep()
        self._is_cut = True

    def _template(self, job: Any) -> dict[str, Any] | None:
        """Returns the settings of a job of the run file; None if it has none."""
        if isinstance(job, self._kind):
            return {name: getattr(job, name) for name in job.model_fields_set}
        return job if isinstance(job, dict) else None

    def _keep(self, number: int, job: Any) -> None:
        self.jobs.append(job)
        self.origins.append(Origin(template=number, varied={}))
        name = job.get("name") if isinstance(job, dict) else getattr(job, "name", "")
        self._namer.reserve(str(name))

    def _listed(self, number: int, template: Mapping[str, Any]) -> list[Axis]:
        """Returns an axis for each list that stands for several values."""
        ours, _ = self._kind.known(template)
        axes = []
        for key, name in ours.items():
            value, types = (
                template[key],
                types_of(self._kind.model_fields[name].annotation),
            )
            if name == "name" or tuple in types or not isinstance(value, list):
                continue
            if len(value) < 2 or self._is_path_list(name, value):
                continue
            axis = Axis(
                name=name,
                path=("jobs", number, key),
                space=Space(values=tuple(value)),
                is_integer=False,
            )
            axes.append(axis)
        return axes

    def _is_path_list(self, name: str, value: list[Any]) -> bool:
        """Whether a list stands for a mapping, which is an error of its own."""
        is_mapping = part_of(name, self._kind) is not None
        return is_mapping and not all(isinstance(item, dict) for item in value)

    def _distinct(
        self, template: Mapping[str, Any], listed: Sequence[Axis]
    ) -> list[tuple[dict[str, Any], dict[str, float] | None]]:
        """Returns the settings of each configuration of a job, all different.

        With them comes the place on each axis, if they were drawn.
        """
        found: dict[str, tuple[dict[str, Any], dict[str, float] | None]] = {}
        num_equal = 0
        for row in grid(listed):
            own = with_settings(template, row, self._kind)
            count = self._sweep.count or 0
            wanted, num_missed = len(found) + count, 0
            for point, places in self._points():
                most = _DRAWS * max(len(found), min(count, _FIRST))
                if places and (len(found) == wanted or num_missed == most):
                    break
                settings = row | resolve_point(point, self._swept, own, self._kind)
                key = settings_key(with_settings(template, settings, self._kind))
                num_equal += key in found
                num_missed = num_missed + 1 if key in found else 0
                found.setdefault(key, (settings, places))
            if self._sweep.is_random and self._swept and len(found) < wanted:
                self.notes.append(
                    f"count is {self._sweep.count}, and the space has only "
                    f"{len(found)} different configurations"
                )
        if num_equal and not self._sweep.is_random:
            text = "configurations that equal another one are left out"
            self.notes.append(f"{num_equal} {text}")
        return list(found.values())

    def _points(self) -> Iterator[tuple[dict[str, Any], dict[str, float] | None]]:
        if not self._sweep.is_random or not self._swept:
            yield from ((point, None) for point in grid(self._swept))
            return
        for i in itertools.count():
            places = {a.name: draw(a, self._sweep.seed, i) for a in self._swept}
            yield values_at(self._swept, places), places
