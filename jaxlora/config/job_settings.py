"""Settings of a job by name: which there are, their values, and those of a sweep."""

import dataclasses
import graphlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from jaxlora.config.lora_job import LoraJob
from jaxlora.config.space import Axis, Space, value_at
from jaxlora.config.strict import StrictModel, types_of
from jaxlora.problems import UNKNOWN, Path, Problem


def axes_of(parameters: Mapping[str, Space], problems: list[Problem]) -> list[Axis]:
    """Returns the axes of a space, and adds its problems."""
    axes = []
    for key, space in parameters.items():
        found = _check_axis(key, space)
        if not found:
            axes.append(_axis(key, space))
        problems += found
    problems += given_twice(axes)
    problems += _never_met(axes)
    try:
        return _in_order(axes)
    except graphlib.CycleError as error:
        names = list(dict.fromkeys(axis.name for axis in error.args[1]))
        how = " follow from each other" if names[1:] else " follows from itself"
        text = f"{' and '.join(names)}{how}. Remove a times or a when."
        problems.append(Problem(path=error.args[1][0].path, text=text))
        return []


def _axis(key: str, space: Space) -> Axis:
    name = key if key.startswith("_") else our_name(key)
    field = None if key.startswith("_") else _field(name)
    types = set() if field is None else types_of(field.annotation)
    is_integer = int in types and float not in types
    path = "sweep", "parameters", key
    return Axis(name=name, path=path, space=space, is_integer=is_integer)


def given_by(axis: Axis) -> dict[str, Path]:
    """Returns the path of each setting that an axis gives, by our name.

    Settings within `data` and the like are among them, if its values have these.
    """
    found: dict[str, Path] = {}
    values: Any = axis.space.values or (None,)
    for number, value in enumerate(values):
        is_group = axis.name.startswith("_")
        given = value if is_group else {axis.name: value}
        for key, inside in given.items():
            name = our_name(key)
            path = (*axis.path, number, key) if is_group else axis.path
            found.setdefault(name, path)
            part = None if "." in name else LoraJob.part(name)
            if part is not None and isinstance(inside, dict):
                inner = part.known(inside)[0].values()
                found |= {f"{name}.{one}": path for one in inner}
    return found


def given_twice(axes: Sequence[Axis]) -> list[Problem]:
    """Returns a problem for each setting that two of the axes give."""
    found: list[Problem] = []
    seen: dict[str, Axis] = {}
    for axis in axes:
        for name, path in given_by(axis).items():
            other = seen.setdefault(name, axis)
            if other is not axis:
                where = ".".join(map(str, other.path))
                text = f"{where} gives {name!r}, too. Keep one of them."
                found.append(Problem(path=path, text=text))
    return found


def _never_met(axes: Sequence[Axis]) -> list[Problem]:
    """Returns a problem for each condition that no value in a list of the sweep meets.

    Such a setting would be left as it is in all configurations.
    """
    own = {a.name: a.space for a in axes if a.space.times is None and not a.space.when}
    found = []
    for axis in axes:
        for key, wanted in axis.space.when.items():
            space = own.get(our_name(key))
            values = None if space is None else space.values
            if isinstance(wanted, list | tuple) and not wanted:
                text = "the list is empty. Give the values that the setting must have."
            elif values is not None and not any(_is_met(v, wanted) for v in values):
                shown = ", ".join(map(repr, values[:10]))
                text = f"no value of {key} in the sweep is that: {shown}."
            else:
                continue
            path = *axis.path, "when", key
            found.append(Problem(path=path, text=text, given=wanted))
    return found


def _in_order(axes: Sequence[Axis]) -> list[Axis]:
    """Returns axes that know the order in which their values are looked up.

    Raises:
        CycleError: There is none.
    """
    places = {name: i for i, axis in enumerate(axes) for name in given_by(axis)}
    graph: dict[int, set[int]] = {}
    for i, axis in enumerate(axes):
        names = [our_name(key) for key in (axis.space.times, *axis.space.when) if key]
        names += [name.partition(".")[0] for name in names]
        graph[i] = {places[name] for name in names if name in places}
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise graphlib.CycleError("", [axes[i] for i in error.args[1]]) from None
    return [
        dataclasses.replace(axis, order=order.index(i)) for i, axis in enumerate(axes)
    ]


def _check_axis(key: str, space: Space) -> list[Problem]:
    """Returns the problems of one parameter of a sweep."""
    found, path = [], ("sweep", "parameters", key)
    names: list[tuple[Path, str]] = [] if key.startswith("_") else [(path, key)]
    mappings: list[tuple[Path, Mapping[str, Any]]] = [((*path, "when"), space.when)]
    if key.startswith("_"):
        for number, value in enumerate(space.values or ()):
            if isinstance(value, dict):
                mappings.append(((*path, number), value))
                continue
            text = "expected a mapping of settings, such as {rank: 8}"
            found.append(
                Problem(path=(*path, number), text=text, kind="dict_type", given=value)
            )
        if space.values is None:
            text = "settings that belong together have a list of values."
            found.append(Problem(path=path, text=text))
    for where, mapping in mappings:
        names += [((*where, name), name) for name in mapping]
        found += _two_names(where, mapping)
    if space.times is not None:
        names.append(((*path, "times"), space.times))
    for where, name in names:
        ours, reason = find_setting(name)
        if reason:
            found.append(Problem(path=where, text=reason, kind=UNKNOWN))
        elif where == (*path, "times"):
            field = _field(ours)
            if field is not None and not types_of(field.annotation) & {int, float}:
                text = f"{name} is not a number, so a value cannot be multiplied by it."
                found.append(Problem(path=where, text=text, given=name))
    if not found and (reason := _axis(key, space).problem()):
        found.append(Problem(path=path, text=reason))
    return found


def _two_names(where: Path, values: Mapping[str, Any]) -> list[Problem]:
    found, seen = [], dict[str, str]()
    for key in values:
        name = our_name(key)
        if name and (other := seen.setdefault(name, key)) != key:
            text = f"{other!r} and {key!r} are two names of {name!r}. Keep one."
            found.append(Problem(path=(*where, key), text=text))
    return found


def our_name(key: str) -> str:
    """Returns our name of a setting of a job; empty if it cannot be used."""
    return find_setting(key)[0]


def find_setting(key: str) -> tuple[str, str]:
    """Returns our name of a setting of a job, or else why it cannot be used."""
    head, *rest = key.split(".")
    if head == "name":
        return "", "names are made from the values. Leave it out."
    ours, refused = LoraJob.known({head: 1})
    if refused:
        return "", refused[head]
    name = ours[head]
    if not rest:
        return name, ""
    if (part := LoraJob.part(name)) is not None:
        inner, refused = part.known({rest[0]: 1})
        if refused:
            return "", refused[rest[0]]
        if len(rest) > 1:
            return "", f"no part of {head}.{rest[0]} can be varied. Vary it as a whole."
        rest = [inner[rest[0]]]
    elif dict not in types_of(LoraJob.model_fields[name].annotation):
        return "", f"{head!r} has no settings within it."
    return ".".join([name, *rest]), ""


def _field(name: str) -> FieldInfo | None:
    head, _, inner = name.partition(".")
    if not inner:
        return LoraJob.model_fields[head]
    part = LoraJob.part(head)
    return None if part is None else part.model_fields.get(inner)


# ---- values ------------------------------------------------------------------------


def values_at(axes: Sequence[Axis], places: Mapping[str, float]) -> dict[str, Any]:
    """Returns the values at places on axes, by name."""
    return {axis.name: value_at(axis, places[axis.name]) for axis in axes}


def resolve_point(
    point: Mapping[str, Any], axes: Sequence[Axis], template: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings at a point, after conditions and products.

    Args:
        point: The value on each axis, by name.
        axes: The axes.
        template: The job that is varied, by our names.
    """
    settings: dict[str, Any] = {}

    def value_of(key: str) -> Any:
        return setting_of(with_settings(template, settings), our_name(key))

    for axis in sorted(axes, key=lambda a: a.order):
        if not all(_is_met(value_of(k), v) for k, v in axis.space.when.items()):
            continue
        value = point[axis.name]
        if axis.name.startswith("_"):
            settings |= {our_name(key): v for key, v in value.items()}
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


def by_our_names(given: Any, kind: type[StrictModel] = LoraJob) -> Any:
    """Returns settings that have our names, in mappings within them too.

    Keys that are refused stay as they are, for the checks that follow.
    """
    if not isinstance(given, dict):
        return given
    ours, refused = kind.known(given)
    if refused.keys() & set(ours.values()):  # one setting by two names
        return given
    parts = {key: kind.part(name) for key, name in ours.items()}
    return {
        ours.get(key, key): by_our_names(value, part) if (part := parts.get(key))
        else value
        for key, value in given.items()
    }  # fmt: skip


def setting_of(job: Mapping[str, Any], name: str) -> Any:
    """Returns a setting of a job with our names, or its default."""
    head, _, inner = name.partition(".")
    value = job.get(head, LoraJob.model_fields[head].default)
    if not inner:
        return value
    if isinstance(value, StrictModel):
        return getattr(value, inner)
    if isinstance(value, dict) and inner in value:
        return value[inner]
    field = _field(name)
    return None if field is None or field.is_required() else field.default


def with_settings(
    job: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a job with our names and other settings, which come last."""
    heads = {name.partition(".")[0] for name in settings}
    out = {key: value for key, value in job.items() if key not in heads}
    # A part of a setting comes behind the whole.
    for name, value in sorted(settings.items(), key=lambda item: "." in item[0]):
        head, _, inner = name.partition(".")
        if not inner:
            out |= by_our_names({head: value})
            continue
        before = out.get(head, setting_of(job, head))
        if isinstance(before, StrictModel):
            before = {n: getattr(before, n) for n in before.model_fields_set}
        before = before if isinstance(before, dict) else {}
        rest = {key: v for key, v in before.items() if key != inner}
        out[head] = rest | {inner: value}
    return out


def settings_key(job: Mapping[str, Any]) -> str:
    """Returns a text that two jobs share if their settings are equal."""
    plain = {key: value for key, value in job.items() if key != "name"}
    try:
        return json.dumps(plain, sort_keys=True, default=repr)
    except (ValueError, TypeError):
        # Keys of several types, or thousands of digits, which the checks refuse.
        return object.__repr__(job)
