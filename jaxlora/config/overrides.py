"""Settings of the command line, such as `jobs.orders.rank=32`, in a run file."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.strict import StrictModel, closest, types_of
from jaxlora.errors import ConfigError
from jaxlora.problems import Path

_EXAMPLES = "such as defaults.learning_rate=1e-4 or jobs.NAME.rank=32"


def override(
    values: Mapping[str, Any],
    texts: Sequence[str],
    whole: type[StrictModel] = RunConfig,
) -> tuple[dict[str, Any], dict[Path, str], list[str]]:
    """Replaces settings of a run file, or of another one, one after the other.

    Args:
        values: The contents of the file, which stay as they are.
        texts: Arguments of the form `KEY=VALUE`. A key is that of a setting of the run,
            `defaults.SETTING` or `jobs.NAME.SETTING`, and may go on into a setting, as
            in `jobs.orders.data.limit`. Items of lists are counted from 0. Values are
            YAML.
        whole: What the file describes; only that of a run has `defaults` and `jobs`.

    Returns:
        The contents with the other values; the argument of each path that it has
        replaced; and for each argument a note of what was replaced.

    Raises:
        ConfigError: An argument has no value, or names an unknown setting or job.
    """
    out = dict(values)
    found: dict[Path, str] = {}
    notes = []
    examples = f", {_EXAMPLES}" if whole is RunConfig else ""
    for text in texts:
        key, is_given, yaml_text = text.partition("=")
        if not is_given:
            raise ConfigError(f"{text!r}: give settings as KEY=VALUE{examples}.")
        value = parse_yaml(yaml_text, key)
        try:
            path, out = _find(out, key, value, whole)
        except ConfigError as error:
            raise ConfigError(f"{text}: {error}") from None
        if path in found:
            raise ConfigError(f"{text}: {key} is given twice. Keep one.")
        found[path] = text
        said = [f"job {name} has its own" for name in _with_own(out, path)]
        if (before := _at(out, path)) is not None:
            said.insert(0, f"before: {json.dumps(before, default=str):.60}")
        notes.append(f"{text} ({'; '.join(said)})" if said else text)
        out = _put(out, path, value)
    return out, found, notes


def _find(
    values: dict[str, Any], key: str, value: Any, whole: type[StrictModel]
) -> tuple[Path, dict[str, Any]]:
    """Finds a setting in a file.

    Returns:
        Its path, and the contents of the file, in which a job has its own copy of a
        default that is about to change in part.
    """
    if whole is not RunConfig:
        return _within(whole, values, key, value), values
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
        raise ConfigError(f"there is no job {wanted!r}. {hint}")
    name = max(fitting, key=len)
    setting = rest[len(name) + 1 :]
    if not setting:
        raise ConfigError(f"name a setting of the job, as in jobs.{name}.rank=32.")
    return names[name], setting


def _filled(job: dict[str, Any], values: dict[str, Any], rest: str) -> dict[str, Any]:
    """Returns a job with the default of the setting that is looked for, if it has none.

    Only a setting in parts needs it, as its other parts are kept.
    """
    head, is_in_parts, _ = rest.partition(".")
    defaults = values.get("defaults") or {}
    if not is_in_parts or LoraJob.key_of(head, job) is not None:
        return job
    key = LoraJob.key_of(head, defaults)
    return job if key is None else {key: defaults[key], **job}


def _within(kind: type[StrictModel], values: Any, key: str, value: Any) -> Path:
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
            raise ConfigError(
                f"{head!r} is a setting of a job. Write defaults.{key}=... for all "
                f"jobs, or jobs.NAME.{key}=... for one."
            )
        raise ConfigError(refused[head])
    used = kind.key_of(head, values) or head  # the file may have another name of it
    if not rest:
        return (used,)
    if dict in types_of(kind.model_fields[ours[head]].annotation):
        held, part = values.get(used), kind.part(ours[head])
        name, _, within = rest.partition(".")
        if part is None or head == "parameters" or not within:
            return used, rest  # a name, parameter or pattern, which may have dots
        held = held.get(name) if isinstance(held, dict) else None
        return used, name, *_inside(f"{used}.{name}", held, part, within, value)
    if (part := kind.part(ours[head])) is None:
        raise ConfigError(f"{used!r} has no settings within it. Write {used}=...")
    return used, *_inside(used, values.get(used), part, rest, value)


def _inside(
    name: str, held: Any, part: type[StrictModel], rest: str, value: Any
) -> Path:
    """Returns the path within a setting that holds configurations."""
    if isinstance(held, list):
        number, _, rest = rest.partition(".")
        if not number.isdecimal() or int(number) >= len(held):
            raise ConfigError(
                f"{name!r} is a list of {len(held)}, whose items are counted from 0: "
                f"there is no {number!r}."
            )
        if not rest:
            return (int(number),)
        item = f"{name}.{number}"
        return int(number), *_inside(item, held[int(number)], part, rest, value)
    if held is not None and not isinstance(held, dict):
        raise ConfigError(
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
    return tuple(
        str(job.get("name", number))
        for number, job in enumerate(jobs)
        if LoraJob.key_of(path[1], job) is not None
    )
