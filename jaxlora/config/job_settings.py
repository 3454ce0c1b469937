"""Settings of a job by name: which there are, their values, and those of a sweep."""

import dataclasses
import graphlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from jaxlora.config.space import Axis, Space, value_at
from jaxlora.config.strict import StrictModel
from jaxlora.problems import RULE, UNKNOWN, Path, Problem


def path_of(parameter: str) -> Path:
    return "sweep", "parameters", parameter


def axes_of(
    parameters: Mapping[str, Space], kind: type[StrictModel], problems: list[Problem]
) -> list[Axis]:
    """Returns the axes of a space, and adds its problems."""
    axes = []
    for key, space in parameters.items():
        found = check_axis(key, space, kind)
        if not found:
            axes.append(_axis(key, space, kind))
        problems += found
    problems += given_twice(axes, kind)
    problems += _never_met(axes, kind)
    try:
        return _in_order(axes, kind)
    except graphlib.CycleError as error:
        names = list(dict.fromkeys(axis.name for axis in error.args[1]))
        how = " follow from each other" if names[1:] else " follows from itself"
        text = f"{' and '.join(names)}{how}. Remove a times or a when."
        problems.append(make_problem(error.args[1][0].path, RULE, text))
        return []


def _axis(key: str, space: Space, kind: type[StrictModel]) -> Axis:
    name = key if key.startswith("_") else our_name(key, kind)[0]
    is_whole = not key.startswith("_") and is_integer(field_of(name, kind))
    return Axis(name=name, path=path_of(key), space=space, is_integer=is_whole)


def given_by(axis: Axis, kind: type[StrictModel]) -> dict[str, Path]:
    """Returns the path of each setting that an axis gives, by our name.

    Settings within `data` and the like are among them, if its values have these.
    """
    found: dict[str, Path] = {}
    values: Any = axis.space.values or (None,)
    for number, value in enumerate(values):
        is_group = axis.name.startswith("_")
        given = value if is_group else {axis.name: value}
        for key, inside in given.items():
            name = our_name(key, kind)[0]
            path = (*axis.path, number, key) if is_group else axis.path
            found.setdefault(name, path)
            part = None if "." in name else part_of(name, kind)
            if part is not None and isinstance(inside, dict):
                inner = part.known(inside)[0].values()
                found |= {f"{name}.{one}": path for one in inner}
    return found


def given_twice(axes: Sequence[Axis], kind: type[StrictModel]) -> list[Problem]:
    """Returns a problem for each setting that two of the axes give."""
    found: list[Problem] = []
    seen: dict[str, Axis] = {}
    for axis in axes:
        for name, path in given_by(axis, kind).items():
            other = seen.setdefault(name, axis)
            if other is not axis:
                where = ".".join(map(str, other.path))
                text = f"{where} gives {name!r}, too. Keep one of them."
                found.append(make_problem(path, RULE, text))
    return found


def _never_met(axes: Sequence[Axis], kind: type[StrictModel]) -> list[Problem]:
    """Returns a problem for each condition that no value in a list of the sweep meets.

    Such a setting would be left as it is in all configurations.
    """
    lists = {
        axis.name: axis.space.values
        for axis in axes
        if axis.space.values is not None and axis.space.times is None
        if not axis.space.when
    }
    found = []
    for axis in axes:
        for key, wanted in axis.space.when.items():
            values = lists.get(our_name(key, kind)[0])
            text = ""
            if isinstance(wanted, list | tuple) and not wanted:
                text = "the list is empty. Give the values that the setting must have."
            elif values is not None and not any(_is_met(v, wanted) for v in values):
                shown = ", ".join(map(repr, values[:10]))
                text = f"no value of {key} in the sweep is that: {shown}."
            if text:
                path = *axis.path, "when", key
                found.append(make_problem(path, RULE, text, wanted))
    return found


def _in_order(axes: Sequence[Axis], kind: type[StrictModel]) -> list[Axis]:
    """Returns axes that know the order in which their values are looked up.

    Raises:
        CycleError: There is none.
    """
    places = {n: i for i, axis in enumerate(axes) for n in given_by(axis, kind)}
    needs = [
        {our_name(key, kind)[0] for key in (axis.space.times, *axis.space.when) if key}
        for axis in axes
    ]
    graph = {
        i: {
            places[n]
            for name in names
            for n in (name, name.partition(".")[0])
            if n in places
        }
        for i, names in enumerate(needs)
    }
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise graphlib.CycleError("", [axes[i] for i in error.args[1]]) from None
    return [
        dataclasses.replace(axis, order=order.index(i)) for i, axis in enumerate(axes)
    ]


def check_axis(key: str, space: Space, kind: type[StrictModel]) -> list[Problem]:
    """Returns the problems of one parameter of a sweep."""
    found, path = [], path_of(key)
    names: list[tuple[Path, str]] = [] if key.startswith("_") else [(path, key)]
    if key.startswith("_"):
        for number, value in enumerate(space.values or ()):
            where = *path, number
            if not isinstance(value, dict):
                text = "expected a mapping of settings, such as {rank: 8}"
                found.append(make_problem(where, "dict_type", text, value))
                continue
            names += [((*where, name), name) for name in value]
            found += _two_names(where, value, kind)
        if space.values is None:
            text = "settings that belong together have a list of values."
            found.append(make_problem(path, RULE, text))
    names += [((*path, "when", name), name) for name in space.when]
    found += _two_names((*path, "when"), space.when, kind)
    if space.times is not None:
        names.append(((*path, "times"), space.times))
    for where, name in names:
        ours, reason = our_name(name, kind)
        if reason:
            found.append(make_problem(where, UNKNOWN, reason, ()))
        elif where[-1] == "times" and where == (*path, "times"):
            field = field_of(ours, kind)
            if field is not None and not types_of(field.annotation) & {int, float}:
                text = f"{name} is not a number, so a value cannot be multiplied by it."
                found.append(make_problem(where, RULE, text, name))
    if not found and (reason := _axis(key, space, kind).problem()):
        found.append(make_problem(path, RULE, reason))
    return found


def _two_names(
    where: Path, values: Mapping[str, Any], kind: type[StrictModel]
) -> list[Problem]:
    found, seen = [], dict[str, str]()
    for key in values:
        name = our_name(key, kind)[0]
        if name and (other := seen.setdefault(name, key)) != key:
            text = f"{other!r} and {key!r} are two names of {name!r}. Keep one."
            found.append(make_problem((*where, key), RULE, text))
    return found


def make_problem(path: Path, kind: str, text: str, given: Any = ()) -> Problem:
    return Problem(path=path, kind=kind, text=text, given=given)


def our_name(key: str, kind: type[StrictModel]) -> tuple[str, str]:
    """Returns our name of a setting of a job, or else why it cannot be used."""
    head, *rest = key.split(".")
    if head == "name":
        return "", "names are made from the values. Leave it out."
    ours, refused = kind.known({head: 1})
    if refused:
        return "", refused[head]
    if not rest:
        return ours[head], ""
    part = part_of(ours[head], kind)
    if part is None and dict not in types_of(kind.model_fields[ours[head]].annotation):
        return "", f"{head!r} has no settings within it."
    if part is not None:
        inner, refused = part.known({rest[0]: 1})
        if refused:
            return "", refused[rest[0]]
        if len(rest) > 1:
            return "", f"no part of {head}.{rest[0]} can be varied. Vary it as a whole."
        rest[0] = inner[rest[0]]
    return ".".join([ours[head], *rest]), ""


def types_of(annotation: Any) -> set[Any]:
    """Returns the types in an annotation, without their parameters."""
    origin = get_origin(annotation)
    if origin in (tuple, list, dict):
        return {origin}
    if hasattr(annotation, "__metadata__"):
        return types_of(get_args(annotation)[0])
    if arguments := get_args(annotation):
        return set().union(*map(types_of, arguments))
    return {annotation}


def part_of(name: str, kind: type[StrictModel]) -> type[StrictModel] | None:
    """Returns the configuration that a setting holds; None if it holds none."""
    types = types_of(kind.model_fields[name].annotation)
    parts = [t for t in types if isinstance(t, type) and issubclass(t, StrictModel)]
    return parts[0] if parts else None


def field_of(name: str, kind: type[StrictModel]) -> FieldInfo | None:
    head, _, inner = name.partition(".")
    if not inner:
        return kind.model_fields[head]
    part = part_of(head, kind)
    return None if part is None else part.model_fields.get(inner)


def is_integer(field: FieldInfo | None) -> bool:
    types = set() if field is None else types_of(field.annotation)
    return int in types and float not in types


# ---- values ------------------------------------------------------------------------


def values_at(axes: Sequence[Axis], places: Mapping[str, float]) -> dict[str, Any]:
    """Returns the values at places on axes, by name."""
    return {axis.name: value_at(axis, places[axis.name]) for axis in axes}


def resolve_point(
    point: Mapping[str, Any],
    axes: Sequence[Axis],
    template: Mapping[str, Any],
    kind: type[StrictModel],
) -> dict[str, Any]:
    """Returns the settings at a point, after conditions and products."""
    settings: dict[str, Any] = {}

    def value_of(key: str) -> Any:
        name = our_name(key, kind)[0]
        if name in settings:
            return settings[name]
        # A setting may be within another one that is varied.
        has_whole = name.partition(".")[0] in settings
        whole = with_settings(template, settings, kind) if has_whole else template
        return setting_of(whole, name, kind)

    for axis in sorted(axes, key=lambda a: a.order):
        if not all(_is_met(value_of(k), v) for k, v in axis.space.when.items()):
            continue
        value = point[axis.name]
        if axis.name.startswith("_"):
            settings |= {our_name(key, kind)[0]: v for key, v in value.items()}
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
    try:
        product = value * factor
        return round(product) if is_integer and math.isfinite(product) else product
    except OverflowError:  # of a whole number that no float is as large as
        return math.inf


def _is_met(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple) else value == wanted


def setting_of(job: Mapping[str, Any], name: str, kind: type[StrictModel]) -> Any:
    """Returns a setting of a job, or its default."""
    head, _, inner = name.partition(".")
    ours, _ = kind.known(job)
    keys = {our: key for key, our in ours.items()}
    value = job[keys[head]] if head in keys else kind.model_fields[head].default
    if not inner:
        return value
    part = part_of(head, kind)
    if isinstance(value, StrictModel):
        return getattr(value, inner)
    if isinstance(value, dict):
        named = {key: key for key in value} if part is None else part.known(value)[0]
        for key, ours_within in named.items():
            if ours_within == inner:
                return value[key]
    field = None if part is None else part.model_fields[inner]
    return None if field is None or field.is_required() else field.default


def with_settings(
    job: Mapping[str, Any], settings: Mapping[str, Any], kind: type[StrictModel]
) -> dict[str, Any]:
    """Returns a job with other settings, whatever it calls them."""
    heads = {name.partition(".")[0] for name in settings}
    ours, _ = kind.known(job)
    out = {key: v for key, v in job.items() if ours.get(key) not in heads}
    # A part of a setting comes behind the whole.
    for name, value in sorted(settings.items(), key=lambda item: "." in item[0]):
        head, _, inner = name.partition(".")
        if not inner:
            out[head] = value
            continue
        before = out.get(head, setting_of(job, head, kind))
        if isinstance(before, StrictModel):
            before = {n: getattr(before, n) for n in before.model_fields_set}
        before = before if isinstance(before, dict) else {}
        if (part := part_of(head, kind)) is not None:
            names, _ = part.known(before)
            before = {k: v for k, v in before.items() if names.get(k) != inner}
        out[head] = before | {inner: value}
    return out


def settings_key(job: Mapping[str, Any]) -> str:
    """Returns a text that two jobs share if their settings are equal."""
    plain = {key: value for key, value in job.items() if key != "name"}
    try:
        return json.dumps(plain, sort_keys=True, default=repr)
    except (ValueError, TypeError):
        # Keys of several types, or thousands of digits, which the checks refuse.
        return object.__repr__(job)
