"""The reference pages have what the code has."""

import dataclasses
import pathlib
import re
from typing import get_args

import pydantic
import pytest

from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.config.generation_settings import SamplesConfig
from jaxlora.config.serve_config import (
    Quota,
    RequestLimits,
    Retention,
    ServeConfig,
    ServerSession,
    Snapshots,
)
from jaxlora.config.session_config import SamplingConfig
from jaxlora.config.space import Space
from jaxlora.config.sweep_config import Metric, RuleName, Sweep
from jaxlora.run import events
from jaxlora.run.job_progress import JobProgress
from jaxlora.trackers import table
from tests.docs import pages

_ROW = re.compile(r"^\| (`[^|]*) \|([^|]*)\|", re.M)


def rows(section: str, page: str = "run_file.md") -> dict[str, str]:
    """Returns the default of each key in the table of a section, as it is written."""
    text = (pages.DOCS / page).read_text()
    part = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert part is not None
    out = {}
    for cell, defaults in _ROW.findall(part[1]):
        keys = re.findall(r"`(\w+)`", cell)
        assert not out.keys() & keys, f"{cell} is there twice"
        given = [text.strip() for text in defaults.split(",")]
        for i, key in enumerate(keys):
            out[key] = given[i] if len(given) == len(keys) else defaults.strip()
    return out


@pytest.mark.parametrize(
    ("model", "section"),
    [
        (RunConfig, "The run"),
        (LoraJob, "A job"),
        (DataConfig, "Data"),
        (SamplesConfig, "Samples"),
        (Sweep, "Sweep"),
    ],
)
def test_defaults_of_the_run_file(model: type[pydantic.BaseModel], section: str):
    """Where a default is a plain value, the table has it."""
    table = rows(section)
    if model is Sweep:  # further tables have the keys of a parameter, and the rules
        further = {*Space.model_fields, *Metric.model_fields, "value"}
        for name in further | set(get_args(RuleName)):
            del table[name]
    check_defaults(model, table)


def check_defaults(model: type[pydantic.BaseModel], table: dict[str, str]) -> None:
    """Checks that a table has each setting, and its default if that is plain."""
    assert set(model.model_fields) == set(table)
    for name, field in model.model_fields.items():
        written = table[name].strip("`")
        if field.is_required():
            assert written == "required", name
        elif isinstance(field.default, bool):
            assert written == str(field.default).lower(), name
        elif isinstance(field.default, int | float) and written:
            assert float(written) == field.default, name


@pytest.mark.parametrize(
    ("model", "section"),
    [
        (ServeConfig, "Settings"),
        (ServerSession, "Slots and microbatches"),
        (SamplingConfig, "Sampling"),
        (Quota, "Quotas"),
        (RequestLimits, "Limits of a request"),
        (Retention, "Retention"),
        (Snapshots, "Snapshots"),
    ],
)
def test_defaults_of_a_server(model: type[pydantic.BaseModel], section: str):
    check_defaults(model, rows(section, "serve.md"))


def test_every_field_of_the_log():
    """The table of metrics.jsonl has the events that are logged, and their fields."""
    text = (pages.DOCS / "reference" / "metrics.md").read_text()
    part = text.split("## `metrics.jsonl`")[1].split("\n## ")[0]
    table: dict[str, set[str]] = {}
    for event, fields in re.findall(r"^\| (`\w+`)? ?\| ?([^|]*?) ?\|", part, re.M):
        if event:
            assert event.strip("`") not in table, f"{event} is there twice"
            current = table.setdefault(event.strip("`"), set())
        elif table:
            names = re.findall(r"`(\w+)`", fields)
            assert not current & set(names), f"{fields} are there twice"
            current.update(names)
    for kind in event_kinds():
        if kind.is_logged:
            names = {field.name for field in dataclasses.fields(kind)}
            names -= {"round", "job", "progress", "num_steps", "pipeline"}
            assert names <= table.pop(kind.kind), kind.kind
    assert not table


def test_no_tag_and_no_field_is_there_twice():
    text = (pages.DOCS / "reference" / "metrics.md").read_text()
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    assert len(tables) == 3
    for found in tables[1:]:  # the first one is that of the log
        cells = [row.split("|")[1] for row in found.splitlines()]
        names = re.findall(r"`([^`]+)`", " ".join(cells))
        assert sorted(set(names)) == sorted(names)


def event_kinds() -> list[type[events.Event]]:
    """Returns the classes of events that happen: those with a kind."""
    classes = vars(events).values()
    kinds = (c for c in classes if isinstance(c, type) and hasattr(c, "kind"))
    return [kind for kind in kinds if issubclass(kind, events.Event)]


def test_every_tag_and_every_field_of_the_summary():
    text = (pages.DOCS / "reference" / "metrics.md").read_text()
    source = pathlib.Path(table.__file__).read_text()
    tags = re.findall(r'"((?:train|eval|run)/\w+)"', source)
    names = [field.name for field in dataclasses.fields(JobProgress)]
    assert len(tags) >= 7
    assert [name for name in (*tags, *names) if f"`{name}`" not in text] == []
