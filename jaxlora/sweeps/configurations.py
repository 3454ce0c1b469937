"""The configurations of a sweep, and the settings in which they differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxlora.common.console import literal, plain_table, show
from jaxlora.common.counted import counted
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.configuration_names import value_text


def varied_settings(jobs: Sequence[LoraJob]) -> dict[str, dict[str, Any]]:
    """Returns the settings in which jobs differ, in the order of `LoraJob`.

    Args:
        jobs: The jobs.

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


def print_configurations(run: RunConfig, console: Console) -> None:
    """Prints a row for each configuration, with the settings in which they differ.

    Args:
        run: A run with a sweep.
        console: Console to print to.
    """
    assert run.sweep is not None
    rules = ", ".join(rule.type for rule in run.sweep.early_exit) or "none"
    show(console, f"{counted(len(run.jobs), 'configuration')}, early exit: {rules}")
    table = plain_table()
    columns = varied_settings(run.jobs)
    table.add_column("configuration", overflow="fold")
    for name in columns:
        table.add_column(literal(name), overflow="fold")
    for job in run.jobs:
        cells = [literal(value_text(column[job.name])) for column in columns.values()]
        table.add_row(literal(job.name), *cells)
    show(console, table)
