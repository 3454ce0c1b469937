"""Expands a sweep into the jobs of a run: a pure function of the run file.

The same file gives the same jobs with the same names, on any machine. The first draws
of a random search are the same whatever `count` is, so a sweep can be continued with
more of them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from jaxlora.config.configuration_names import Namer
from jaxlora.config.space_values import Axis, draw, grid
from jaxlora.config.strict import StrictModel
from jaxlora.config.sweep_config import Space, Sweep
from jaxlora.problems import RULE, UNKNOWN, Path, Problem

# Draws for each configuration that is wanted, until a small space counts as exhausted.
_DRAWS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The place in the run file that a job comes from.

    Attributes:
        template: Index of the job that it is made from.
        varied: Path of each setting that a sweep has given it, by our name.
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
    swept = [] if sweep is None else _axes(sweep.parameters, kind, problems)
    expander = _Expander(kind, sweep or Sweep(), swept)
    for number, job in enumerate(jobs):
        expander.add(number, job)
    out = {**values, "jobs": expander.jobs}
    if sweep is not None and not problems:
        out["sweep"] = sweep.replace(parameters={}, method=None, count=None)
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
        for key in parameters if isinstance(parameters, dict) else ():
            if not str(key).startswith("_"):
                problems += _check_axis(key, Space(values=(1,)), kind, _path_of(key))
        return None


def _path_of(parameter: str) -> Path:
    return "sweep", "parameters", parameter


def _axes(
    parameters: Mapping[str, Space], kind: type[StrictModel], problems: list[Problem]
) -> list[Axis]:
    """Returns the axes of a space, and adds its problems."""
    axes = []
    for key, space in parameters.items():
        path = _path_of(key)
        found = _check_axis(key, space, kind, path)
        if found:
            problems += found
            continue
        name = key if key.startswith("_") else _our_name(key, kind)[0]
        is_integer = not key.startswith("_") and _is_integer(_field(name, kind))
        axes.append(Axis(name=name, path=path, space=space, is_integer=is_integer))
    seen: dict[str, Axis] = {}
    for axis in axes:
        other = seen.setdefault(axis.name, axis)
        if other is not axis:
            text = f"{other.path[-1]!r} and {axis.path[-1]!r} are two names of one."
            problems.append(_problem(axis.path, RULE, text + " Keep one."))
    return axes


def _check_axis(
    key: str, space: Space, kind: type[StrictModel], path: Path
) -> list[Problem]:
    found = []
    names: list[tuple[Path, str]] = [] if key.startswith("_") else [(path, key)]
    if key.startswith("_"):
        for number, value in enumerate(space.values or ()):
            where = *path, number
            if not isinstance(value, dict):
                text = "expected a mapping of settings, such as {rank: 8}"
                found.append(_problem(where, "dict_type", text, value))
                continue
            names += [((*where, name), name) for name in value]
        if space.values is None:
            text = "settings that belong together have a list of values."
            found.append(_problem(path, RULE, text))
    names += [((*path, "when", name), name) for name in space.when]
    if space.times is not None:
        names.append(((*path, "times"), space.times))
    for where, name in names:
        if reason := _our_name(name, kind)[1]:
            found.append(_problem(where, UNKNOWN, reason, ()))
    return found


def _our_name(key: str, kind: type[StrictModel]) -> tuple[str, str]:
    """Returns our name of a setting of a job, or else why it cannot be used."""
    head, *rest = key.split(".")
    if head == "name":
        return "", "names are made from the values. Leave it out."
    ours, refused = kind.known({head: 1})
    if refused:
        return "", refused[head]
    if not rest:
        return ours[head], ""
    part = _part(ours[head], kind)
    if part is None and dict not in _types(kind.model_fields[ours[head]].annotation):
        return "", f"{head!r} has no settings within it."
    if part is not None:
        inner, refused = part.known({rest[0]: 1})
        if refused:
            return "", refused[rest[0]]
        rest[0] = inner[rest[0]]
    return ".".join([ours[head], *rest]), ""


def _types(annotation: Any) -> set[Any]:
    """Returns the types in an annotation, without their parameters."""
    origin = get_origin(annotation)
    if origin in (tuple, list, dict):
        return {origin}
    if hasattr(annotation, "__metadata__"):
        return _types(get_args(annotation)[0])
    if arguments := get_args(annotation):
        return set().union(*map(_types, arguments))
    return {annotation}


def _part(name: str, kind: type[StrictModel]) -> type[StrictModel] | None:
    """Returns the configuration that a setting holds; None if it holds none."""
    types = _types(kind.model_fields[name].annotation)
    parts = [t for t in types if isinstance(t, type) and issubclass(t, StrictModel)]
    return parts[0] if parts else None


def _field(name: str, kind: type[StrictModel]) -> FieldInfo | None:
    head, _, inner = name.partition(".")
    if not inner:
        return kind.model_fields[head]
    part = _part(head, kind)
    return None if part is None else part.model_fields.get(inner)


def _is_integer(field: FieldInfo | None) -> bool:
    types = set() if field is None else _types(field.annotation)
    return int in types and float not in types


def _problem(path: Path, kind: str, text: str, given: Any = ()) -> Problem:
    return Problem(path=path, kind=kind, text=text, given=given)


# ---- the jobs ----------------------------------------------------------------------


class _Expander:
    """Collects the jobs that templates become.

    Attributes:
        jobs: The jobs.
        origins: The origin of each.
        notes: Lines that say what was made.
    """

    def __init__(self, kind: type[StrictModel], sweep: Sweep, swept: Sequence[Axis]):
        self.jobs: list[Any] = []
        self.origins: list[Origin] = []
        self.notes: list[str] = []
        self._kind, self._sweep, self._swept = kind, sweep, swept
        self._namer = Namer()

    def add(self, number: int, job: Any) -> None:
        """Adds the configurations of a job of the run file, or the job itself."""
        template = job
        if isinstance(job, self._kind):
            template = {name: getattr(job, name) for name in job.model_fields_set}
        if not isinstance(template, dict):
            return self._keep(number, job)
        listed = self._listed(number, template)
        if not (listed or self._swept):
            return self._keep(number, job)
        axes = [*listed, *self._swept]
        for settings in self._distinct(template, listed):
            name = template.get("name", "")
            if isinstance(name, str):
                name = self._namer.name(name, settings, axes)
            made = _with(template, settings, self._kind) | {"name": name}
            self.jobs.append(made)
            varied = {s.partition(".")[0]: _axis_of(s, axes).path for s in settings}
            self.origins.append(Origin(template=number, varied=varied))
        return None

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
                _types(self._kind.model_fields[name].annotation),
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
            self.notes.append(
                f"jobs.{number}.{key} is a list of {len(value)} values: one job for "
                "each of them"
            )
        return axes

    def _is_path_list(self, name: str, value: list[Any]) -> bool:
        """Whether a list stands for a mapping, which is an error of its own."""
        is_mapping = _part(name, self._kind) is not None
        return is_mapping and not all(isinstance(item, dict) for item in value)

    def _distinct(
        self, template: Mapping[str, Any], listed: Sequence[Axis]
    ) -> list[dict[str, Any]]:
        """Returns the settings of each configuration of a job, all different."""
        found: dict[str, dict[str, Any]] = {}
        num_equal = 0
        for row in grid(listed):
            own = _with(template, row, self._kind)
            wanted = len(found) + (self._sweep.count or 0)
            for point in self._points():
                if self._sweep.is_random and len(found) == wanted:
                    break
                settings = row | _resolve(point, self._swept, own, self._kind)
                key = _key(_with(template, settings, self._kind))
                num_equal += key in found
                found.setdefault(key, settings)
            if self._sweep.is_random and self._swept and len(found) < wanted:
                self.notes.append(
                    f"count is {self._sweep.count}, and the space has only "
                    f"{len(found)} different configurations"
                )
        if num_equal and not self._sweep.is_random:
            text = "configurations that equal another one are left out"
            self.notes.append(f"{num_equal} {text}")
        return list(found.values())

    def _points(self) -> Iterator[dict[str, Any]]:
        if not self._sweep.is_random or not self._swept:
            return grid(self._swept)
        num_draws = _DRAWS * (self._sweep.count or 0)
        return (
            {axis.name: draw(axis, self._sweep.seed, i) for axis in self._swept}
            for i in range(num_draws)
        )


def _resolve(
    point: Mapping[str, Any],
    axes: Sequence[Axis],
    template: Mapping[str, Any],
    kind: type[StrictModel],
) -> dict[str, Any]:
    """Returns the settings at a point, after conditions and products."""
    settings: dict[str, Any] = {}

    def value_of(key: str) -> Any:
        name = _our_name(key, kind)[0]
        if name in settings:
            return settings[name]
        return _setting(template, name, kind)

    # Products come last, as they may be of a setting that has a condition.
    for axis in sorted(
        axes, key=lambda a: (a.space.times is not None, bool(a.space.when))
    ):
        if not all(_is_met(value_of(k), v) for k, v in axis.space.when.items()):
            continue
        value = point[axis.name]
        if axis.name.startswith("_"):
            settings |= {_our_name(key, kind)[0]: v for key, v in value.items()}
            continue
        if axis.space.times is not None:
            value = _product(value, value_of(axis.space.times), axis.is_integer)
        settings[axis.name] = value
    order = {axis.name: number for number, axis in enumerate(axes)}
    last = len(order)
    return dict(sorted(settings.items(), key=lambda s: order.get(s[0], last)))


def _product(value: Any, factor: Any, is_integer: bool) -> Any:
    """Multiplies two numbers; what is none is left to the checks that follow."""
    for number in (value, factor):
        if isinstance(number, bool) or not isinstance(number, int | float):
            return number
    return round(value * factor) if is_integer else value * factor


def _axis_of(setting: str, axes: Sequence[Axis]) -> Axis:
    """Returns the axis that gives a setting, by itself or with others."""
    own = [axis for axis in axes if axis.name == setting]
    return (own or [axis for axis in axes if axis.name.startswith("_")])[0]


def _is_met(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple) else value == wanted


def _setting(job: Mapping[str, Any], name: str, kind: type[StrictModel]) -> Any:
    """Returns a setting of a job, or its default."""
    head, _, inner = name.partition(".")
    ours, _ = kind.known(job)
    keys = {our: key for key, our in ours.items()}
    value = job[keys[head]] if head in keys else kind.model_fields[head].default
    if not inner:
        return value
    part = _part(head, kind)
    if isinstance(value, StrictModel):
        return getattr(value, inner)
    if isinstance(value, dict) and inner in value:
        return value[inner]
    return None if part is None else part.model_fields[inner].default


def _with(
    job: Mapping[str, Any], settings: Mapping[str, Any], kind: type[StrictModel]
) -> dict[str, Any]:
    """Returns a job with other settings, whatever it calls them."""
    heads = {name.partition(".")[0] for name in settings}
    ours, _ = kind.known(job)
    out = {key: v for key, v in job.items() if ours.get(key) not in heads}
    for name, value in settings.items():
        head, _, inner = name.partition(".")
        if not inner:
            out[head] = value
            continue
        before = out.get(head, _setting(job, head, kind))
        if isinstance(before, StrictModel):
            before = {n: getattr(before, n) for n in before.model_fields_set}
        out[head] = (before if isinstance(before, dict) else {}) | {inner: value}
    return out


def _key(job: Mapping[str, Any]) -> str:
    """Returns a text that two jobs share if their settings are equal."""
    plain = {key: value for key, value in job.items() if key != "name"}
    return json.dumps(plain, sort_keys=True, default=repr)
