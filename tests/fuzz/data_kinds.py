"""Kinds of inputs: run files, data, templates over records, regular expressions."""

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pydantic
import yaml

from jaxlora import JaxloraError, LoraJob, load_run
from jaxlora.adapters.targets import resolve_targets
from jaxlora.config.run_file import run_config
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError
from jaxlora.inspect import inspect_path
from jaxlora.models.registry import model_config
from jaxlora.models.structure import linear_names
from jaxlora.problems import Source
from tests import tiny
from tests.fuzz.kind import Kind, quiet
from tests.fuzz.mutate import (
    Damage,
    damage_bytes,
    damage_json,
    damage_lines,
    damage_regex,
    damage_template,
    damage_value,
    to_json,
)

RUN = {
    "model": "models/tiny",
    "output_dir": "runs/x",
    "max_concurrent_jobs": 2,
    "microbatch_tokens": 512,
    "defaults": {"epochs": 2, "learning_rate": 1e-4, "eval_fraction": 0.1},
    "jobs": [
        {
            "name": "a",
            "data": {"path": "a.jsonl", "chat": True, "limit": 5},
            "rank": 4,
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"q_proj": 8},
            "eval_every": 2,
            "early_stopping": 2,
        },
        {"name": "b", "data": {"path": "b.csv"}, "dropout": 0.1, "seed": 3},
    ],
}


def make_run_file(folder: pathlib.Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))


def damage_yaml(content: bytes, rng: random.Random) -> Damage:
    if rng.random() < 0.4:
        return damage_bytes(content, rng)
    what, value = damage_value(yaml.safe_load(content), rng)
    return what, to_json(value)  # which is YAML


def read_run_file(folder: pathlib.Path) -> None:
    run = load_run(folder / "run.yaml")
    run.model_dump_json()
    inspect_path(str(folder / "run.yaml"), quiet())


# ---- data ----------------------------------------------------------------------------

PAIRS = [
    {"prompt": f"say {i}", "completion": f"number {i}", "note": None, "n": i}
    for i in range(4)
]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": f"say {i}"},
            {"role": "assistant", "content": "done"},
        ]
    }
    for i in range(3)
]
ALPACA = [
    {"instruction": f"say {i}", "input": "x" * (i % 2), "output": f"number {i}"}
    for i in range(4)
]
SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": f"say {i}"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "done"},
            {"from": "gpt", "value": "done"},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    for i in range(3)
]
TALKS = [
    {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": f"say {i}"}]}],
        "completion": [{"role": "assistant", "content": "done", "weight": 1}],
    }
    for i in range(3)
]


def make_tokenizer(folder: pathlib.Path) -> None:
    (folder / "model").mkdir(exist_ok=True)
    tiny.write_tokenizer(folder / "model")


def make_calls(folder: pathlib.Path) -> None:
    make_records("a.jsonl", SHAREGPT)(folder)
    template = tiny.CHATML.replace("}}", "}}{{ message.tool_calls or '' }}", 1)
    (folder / "model" / "chat_template.jinja").write_text(template)


def make_records(name: str, records: list[dict]) -> Callable[[pathlib.Path], None]:
    def make(folder: pathlib.Path) -> None:
        make_tokenizer(folder)
        path = folder / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(r) + "\n" for r in records))
        elif path.suffix == ".json":
            path.write_text(json.dumps(records))
        elif path.suffix == ".csv":
            rows = [f'"say {i}","number ""{i}""",{i}\n' for i in range(4)]
            path.write_text("prompt,completion,n\n" + "".join(rows))
        elif path.suffix == ".arrow":
            table = pa.Table.from_pylist(records)
            pyarrow.feather.write_feather(table, path, compression="uncompressed")
        elif path.suffix == ".feather":
            table = pa.Table.from_pylist(records)
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.ipc.new_stream(path, table.schema, options=options) as stream:
                stream.write_table(table, max_chunksize=2)
        elif not path.suffix:
            datasets.disable_progress_bars()
            rows = datasets.Dataset.from_list(records)
            rows.save_to_disk(path, num_shards=2)
        else:
            pyarrow.parquet.write_table(pa.Table.from_pylist(records), path)

    return make


def read_records(name: str, **options) -> Callable[[pathlib.Path], None]:
    def read(folder: pathlib.Path) -> None:
        asked = {
            "name": "a",
            "data": {"path": str(folder / name), **options},
            "max_length": 400,
            "eval_fraction": 0.2,
        }
        run = {"model": "m", "jobs": [asked]}
        (job,) = run_config(run, source=Source(str(folder))).jobs
        tokenizer = load_tokenizer(folder / "model")
        for which in ("train", "eval"):
            DataReader(tokenizer).read(job, which).summary()

    return read


_COLUMNS = (
    lambda n: pa.array([b"\xff"] * n),
    lambda n: pa.array([1.5] * n),
    lambda n: pa.array([None] * n),
    lambda n: pa.nulls(n),
    lambda n: pa.array([[["x"]]] * n),
    lambda n: pa.array([{"role": 1}] * n),
    lambda n: pa.array([10**18] * n, pa.timestamp("ns")),
    lambda n: pa.array([2**40] * n, pa.timestamp("s")),
    lambda n: pa.array([2**40] * n, pa.duration("s")),
    lambda n: pa.array([2**31 - 1] * n, pa.date32()),
    lambda n: pa.array(["x"] * n).dictionary_encode(),
    lambda n: pa.array([""] * n),
    lambda n: pa.array(["a" * 10_000] * n),
    lambda n: pa.array([[("a", "b")]] * n, pa.map_(pa.string(), pa.string())),
    lambda n: pa.array(["x"] * n, pa.large_string()),
    lambda n: pa.array([True] * n),
)


def damage_parquet(content: bytes, rng: random.Random) -> Damage:
    """Changes the types of columns, or bytes."""
    if rng.random() < 0.6:
        return damage_bytes(content, rng)
    table = pyarrow.parquet.read_table(pa.BufferReader(content))
    number = rng.randrange(table.num_columns)
    which = rng.randrange(len(_COLUMNS))
    name = rng.choice((table.column_names[number], "", "\0", "messages"))
    table = table.set_column(number, name, _COLUMNS[which](table.num_rows))
    out = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, out)
    return f"column {number} {name!r} of kind {which}", out.getvalue().to_pybytes()


def damage_saved(content: bytes, rng: random.Random) -> Damage:
    """Changes a value of a JSON file, or bytes of another one."""
    try:
        return damage_json(content, rng)
    except ValueError:
        return damage_bytes(content, rng)


def make_template(folder: pathlib.Path) -> None:
    make_records("a.jsonl", PAIRS)(folder)
    text = "{% if n %}{{ prompt | upper }}{% endif %} {{ n + 1 }} {{ note or 'x' }}"
    (folder / "template").write_text(text)


def read_template(folder: pathlib.Path) -> None:
    source = (folder / "template").read_bytes().decode("utf-8", "replace")
    read_records("a.jsonl", prompt=source + "{{ n }}", limit=2)(folder)


# ---- regular expressions -------------------------------------------------------------


def make_regex(folder: pathlib.Path) -> None:
    expression = r"model\.layers\.[01]\.self_attn\.(q|v)_proj"
    (folder / "regex").write_text(expression)


def damage_regex_file(content: bytes, rng: random.Random) -> Damage:
    expression = damage_regex(content.decode(), rng)
    return f"{expression!r:.80}", expression.encode("utf-8", "surrogatepass")


def read_regex(folder: pathlib.Path) -> None:
    """Uses the expressions as targets, as exclusions and as the key of a pattern."""
    expression = (folder / "regex").read_bytes().decode("utf-8", "surrogatepass")
    names = linear_names(model_config(tiny.CONFIG))
    job = {"name": "regex", "data": {"path": "a"}}
    failures = []
    for asked in (
        {"target_modules": expression},
        {"exclude_modules": expression},
        {"rank_pattern": {expression: 4}},
    ):
        try:
            # Pydantic raises as for a run file, where `load_run` makes it ours.
            valid = LoraJob.model_validate({**job, **asked})
            resolve_targets(valid, names)
        except (JaxloraError, pydantic.ValidationError) as error:
            failures.append(error)
    if failures:
        raise ConfigError("regex: " + "; ".join(map(str, failures)))


# ---- all of them ---------------------------------------------------------------------


def _data(name: str, records: list[dict], damage, num_cases: int, **options) -> Kind:
    return Kind(
        make=make_records(name, records),
        targets=(name,),
        damage=damage,
        read=read_records(name, **options),
        num_cases=num_cases,
    )


KINDS = {
    "run_file": Kind(
        make=make_run_file,
        targets=("run.yaml",),
        damage=damage_yaml,
        read=read_run_file,
        num_cases=250,
        # A run file may well come through a pipe, for whose writer it waits.
        entries=("folder", "missing", "loop", "dangling"),
    ),
    "jsonl": _data("a.jsonl", PAIRS, damage_lines, 60),
    "jsonl_chat": _data("a.jsonl", CHATS, damage_lines, 60),
    "jsonl_alpaca": _data("a.jsonl", ALPACA, damage_lines, 60),
    "jsonl_sharegpt": dataclasses.replace(
        _data("a.jsonl", SHAREGPT, damage_lines, 60), make=make_calls
    ),
    "jsonl_talks": _data("a.jsonl", TALKS, damage_lines, 60),
    "json": _data("a.json", PAIRS, damage_json, 150),
    "csv": _data("a.csv", PAIRS, damage_bytes, 150),
    "parquet": _data("a.parquet", PAIRS, damage_parquet, 150),
    "arrow": _data("a.arrow", PAIRS, damage_bytes, 150),
    "arrow_stream": _data("a.feather", PAIRS, damage_bytes, 150),
    "saved_dataset": dataclasses.replace(
        _data("saved", PAIRS, damage_saved, 60), targets=("saved/*",)
    ),
    "arrow_shards": dataclasses.replace(
        _data("saved", PAIRS, damage_bytes, 60),
        targets=("saved/*.arrow",),
        read=read_records("saved/*.arrow"),
    ),
    "jsonl_shards": dataclasses.replace(
        _data("a.jsonl", PAIRS, damage_lines, 60),
        read=read_records("*.jsonl", bad_records="drop"),
    ),
    "record_template": Kind(
        make=make_template,
        targets=("template",),
        damage=damage_template,
        read=read_template,
        num_cases=40,
        entries=(),
    ),
    "regex": Kind(
        make=make_regex,
        targets=("regex",),
        damage=damage_regex_file,
        read=read_regex,
        num_cases=150,
        entries=(),
    ),
}
