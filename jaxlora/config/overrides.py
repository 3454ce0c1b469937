"""Settings of the command line, such as `jobs.orders.rank=32`, in a run file."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.strict import StrictModel, closest, types_of
from jaxlora.errors import ConfigError
from jaxlora.problems import Path

_EXAMPLES = "such as defaults.learning_rate=1e-4 or jobs.NAME.rank=32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """One setting of the command line.

    Attributes:
        text: The argument, as it was given.
        path: Keys and list indices of the setting in the run file.
        value: The value.
        before: The value that it replaces; None if there was none.
        untouched: Names of jobs that have their own value of an overridden default.
    """

    text: str
    path: Path
    value: Any
    before: Any
    untouched: tuple[str, ...] = ()

    def __str__(self) -> str:
        notes = [] if self.before is None else [f"before: {_short(self.before)}"]
        notes += [f"job {name} has its own" for name in self.untouched]
        return f"{self.text} ({'; '.join(notes)})" if notes else self.text


def _short(value: Any) -> str:
    return f"{json.dumps(value, default=str):.60}"


def override(
    values: Mapping[str, Any], texts: Sequence[str]
) -> tuple[dict[str, Any], tuple[Override, ...]]:
    """Replaces settings of a run file, one after the other.

    Args:
        values: The contents of the run file, which stay as they are.
        texts: Arguments of the form `KEY=VALUE`. A key is that of a setting of the run,
            `defaults.SETTING` or `jobs.NAME.SETTING`, and may go on into a setting, as
            in `jobs.orders.data.limit`. Items of lists are counted from 0. Values are
            YAML.

    Returns:
        The contents with the other values, and what was replaced.

    Raises:
        ConfigError: An argument has no value, or names an unknown setting or job.
    """
    out, found = dict(values), []
    for text in texts:
        key, is_given, yaml_text = text.partition("=")
        if not is_given:
            raise ConfigError(f"{text!r}: give settings as KEY=VALUE, {_EXAMPLES}.")
        value = parse_yaml(yaml_text, key)
        try:
            path, out = _find(out, key, value)
        except _UnknownError as error:
            raise ConfigError(f"{text}: {error}") from None
        if any(path == other.path for other in found):
            raise ConfigError(f"{text}: {key} is given twice. Keep one.")
        one = Override(
            text=text,
            path=path,
            value=value,
            before=_at(out, path),
            untouched=_with_own(out, path),
        )
        found.append(one)
        out = _put(out, path, value)
    return out, tuple(found)


class _UnknownError(Exception):
    """A key names no setting; the message says which there are."""


def _find(values: dict[str, Any], key: str, value: Any) -> tuple[Path, dict[str, Any]]:
    """Finds a setting in a run file.

    Returns:
        Its path, and the contents of the file, in which a job has its own copy of a
        default that is about to change in part.
    """
    head, _, rest = key.partition(".")
    if head == "jobs" and rest:
        number, rest = _find_job(values.get("jobs"), rest)
        job = _filled(values["jobs"][number], values, rest)
        path = _within(LoraJob, job, rest, value)
        return ("jobs", number, *path), _put(values, ("jobs", number), job)
    if head == "defaults":
        defaults = values.get("defaults") or {}
        if not rest or not isinstance(defaults, dict):
            return ("defaults",), values
        return ("defaults", *_within(LoraJob, defaults, rest, value)), values
    return _within(RunConfig, values, key, value), values


def _find_job(jobs: Any, rest: str) -> tuple[int, str]:
    """Returns the index of a job, and the setting that follows its name."""
    jobs = jobs if isinstance(jobs, list) else []
    names = {
        str(job.get("name", number)): number
        for number, job in enumerate(jobs)
        if isinstance(job, dict)
    }
    # Names may have dots.
    fitting = [name for name in names if f"{rest}.".startswith(f"{name}.")]
    if not fitting:
        wanted = rest.partition(".")[0]
        near = closest(wanted, names)
        hint = f"Did you mean {near!r}?" if near else f"There are: {', '.join(names)}."
        raise _UnknownError(f"there is no job {wanted!r}. {hint}")
    name = max(fitting, key=len)
    setting = rest[len(name) + 1 :]
    if not setting:
        raise _UnknownError(f"name a setting of the job, as in jobs.{name}.rank=32.")
    return names[name], setting


def _filled(job: dict[str, Any], values: dict[str, Any], rest: str) -> dict[str, Any]:
    """Returns a job with the default of the setting that is looked for, if it has none.

    Only a setting in parts needs it, as its other parts are kept.
    """
    defaults = values.get("defaults")
    if "." not in rest or not isinstance(defaults, dict):
        return job
    names = LoraJob.aliases.same
    own = {names.get(key, key) for key in job}
    wanted = names.get(rest.partition(".")[0], rest.partition(".")[0])
    return {
        key: default
        for key, default in defaults.items()
        if names.get(key, key) == wanted and wanted not in own
    } | job


def _within(
    kind: type[StrictModel], values: Mapping[str, Any], key: str, value: Any
) -> Path:
    """Returns the path of a setting in a configuration.

    Args:
        kind: Class of the configuration.
        values: Its settings in the file, unchecked.
        key: The rest of the key.
        value: The value of the setting, which hints at other tools' settings need.
    """
    head, _, rest = key.partition(".")
    ours, refused = kind.known({head: value})
    if head in refused:
        if kind is RunConfig and head in LoraJob.model_fields:
            raise _UnknownError(
                f"{head!r} is a setting of a job. Write defaults.{key}=... for all "
                f"jobs, or jobs.NAME.{key}=... for one."
            )
        raise _UnknownError(refused[head])
    name = ours[head]
    given, _ = kind.known(values)
    # The file may call the setting by another name.
    used = next((k for k, other in given.items() if other == name), head)
    if not rest:
        return (used,)
    annotation = kind.model_fields[name].annotation
    if dict in types_of(annotation):
        return used, rest  # a name or pattern, which may have dots
    return used, *_inside(used, values.get(used), _part(name, kind), rest, value)


def _part(name: str, kind: type[StrictModel]) -> type[StrictModel] | None:
    """Returns the configuration in a setting, or in the items of its list."""
    if (part := kind.part(name)) is not None:
        return part
    items = get_args(kind.model_fields[name].annotation)
    parts = [i for i in items if isinstance(i, type) and issubclass(i, StrictModel)]
    return parts[0] if parts else None


def _inside(
    name: str, held: Any, part: type[StrictModel] | None, rest: str, value: Any
) -> Path:
    """Returns the path within a setting that holds configurations."""
    if part is None:
        raise _UnknownError(f"{name!r} has no settings within it. Write {name}=...")
    if isinstance(held, list):
        number, _, rest = rest.partition(".")
        if not number.isdecimal() or int(number) >= len(held):
            raise _UnknownError(
                f"{name!r} is a list of {len(held)}, whose items are counted from 0: "
                f"there is no {number!r}."
            )
        if not rest:
            return (int(number),)
        item = f"{name}.{number}"
        return int(number), *_inside(item, held[int(number)], part, rest, value)
    if held is not None and not isinstance(held, dict):
        raise _UnknownError(
            f"{name!r} is {held!r:.60} in the run file, which has no settings within "
            f"it. Write {name}=..."
        )
    return _within(part, held or {}, rest, value)


def _at(values: Any, path: Path) -> Any:
    """Returns the value at a path; None if there is none."""
    for part in path:
        if isinstance(values, list):
            values = values[int(part)]
        else:
            values = values.get(part) if isinstance(values, dict) else None
    return values


def _put(values: Any, path: Path, value: Any) -> Any:
    """Returns a copy with another value at a path.

    Aliases of YAML may share parts, so these are copied.
    """
    if not path:
        return value
    first, *rest = path
    if isinstance(values, list):
        items = list(values)
        items[int(first)] = _put(items[int(first)], tuple(rest), value)
        return items
    inner = dict(values or {})
    inner[str(first)] = _put(inner.get(str(first)), tuple(rest), value)
    return inner


def _with_own(values: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Returns the names of the jobs that have a setting that defaults have, too."""
    jobs = values.get("jobs")
    if path[0] != "defaults" or len(path) < 2 or not isinstance(jobs, list):
        return ()
    names = LoraJob.aliases.same
    setting = names.get(str(path[1]), path[1])
    return tuple(
        str(job.get("name", number))
        for number, job in enumerate(jobs)
        if isinstance(job, dict) and setting in {names.get(k, k) for k in job}
    )
