"""The step benchmark, end to end on a tiny model."""

import json
import shlex

import pytest

from scripts.bench import __main__ as bench
from scripts.bench.kernel_times import KINDS
from scripts.bench.report import needs_gpu
from scripts.bench.step import benchmark
from scripts.bench.step.cases import FROZEN, PEER, Case

TINY = (
    "--models tiny --layers 1 --microbatch-tokens 128 --block-tokens 32 "
    "--median-tokens 20 --longest-tokens 40 --adapters 2 --repeats 2 --microbatches 2 "
    "--profile --at-once 2"
)


def parsed(options):
    return bench.parse(benchmark, "step", shlex.split(options))


def test_step(tmp_path, capsys):
    """One row, in a process of its own as on a GPU."""
    rows = ["--rows", "jaxlora xla"]
    bench.run("step", [*TINY.split(), "--output-dir", str(tmp_path), *rows])
    (row,) = map(json.loads, (tmp_path / "step.jsonl").read_text().splitlines())
    assert (row["row"], row["adapters"], row["tokens"]) == ("jaxlora xla", 2, 256)
    assert row["step_ms"] > 0 and row["compile_seconds"] > 0
    assert list(row["parts"]) == [*KINDS, "optimizer", "gaps"]
    products, element_wise, optimizer, gaps = [*row["parts"].values()][-4:]
    assert products > 0 and element_wise > 0 and optimizer > 0 <= gaps
    printed = capsys.readouterr().out
    assert f"| jaxlora xla | 2 | {row['tokens_per_second']} |" in printed
    assert "| part, ms | jaxlora xla, 2 adapters |" in printed
    assert (tmp_path / "step.md").read_text() in printed


def test_parsed_options_are_fields_of_a_case():
    options = "--models tiny --layers 3 --microbatches 2 --rows 'peft, packed' "
    (case,) = benchmark.cases(parsed(options + "--adapters 7 --profile --rank 4"))
    assert case == Case(
        model="tiny", row=PEER, layers=3, microbatches=2, adapters=7, rank=4
    )


def test_a_failed_row_says_why():
    trace = ["Traceback (most recent call last):", "    return run()", "  ^^^^^"]
    why = "jax.errors.JaxRuntimeError: INTERNAL: out of memory"
    after = ["=== Source Location Trace: ===", "xla/pjrt/status_utils.cc:146"]
    assert benchmark.reason([*trace, "ValueError: first", why, *after]) == why
    assert benchmark.reason(["Killed"]) == "Killed"
    assert not benchmark.reason([])


def test_a_row_that_takes_too_long_is_skipped(tmp_path):
    (tmp_path / "turn").touch()
    case = Case(model="tiny", row=FROZEN)
    found = benchmark.measure_alone(case, 0.01, str(tmp_path / "turn"))
    assert found == {"skipped": "it took more than 0.01 s"}


def test_ratios():
    rows = [
        {"model": "m", "row": FROZEN, "tokens_per_second": 30},
        {"model": "m", "row": PEER, "tokens_per_second": 10},
        {"model": "m", "row": "jaxlora xla", "tokens_per_second": 20},
        {"model": "m", "row": "jaxlora mosaic", "skipped": "no Hopper"},
    ]
    found = benchmark.with_ratios(rows)
    assert [row["over_frozen"] for row in found] == [1.0, 3.0, 1.5, None]
    assert [row["over_peer"] for row in found] == [3.0, 1.0, 2.0, None]


def test_rows_of_other_settings_are_not_compared():
    rows = [
        {"model": "m", "layers": n, "row": row, "adapters": 1, "tokens_per_second": v}
        for n, row, v in ((4, FROZEN, 30), (4, PEER, 15), (8, PEER, 10))
    ]
    first, second = benchmark.tables(rows).split("model m, layers ")[1:]
    assert f"| {PEER} | 1 | 15 |  | 2.0 | 1.0 |" in first
    assert f"| {PEER} | 1 | 10 |  |  | 1.0 |" in second


def test_rows_without_several_adapters_appear_once():
    args = parsed(f"--adapters 1 4 --rows '{FROZEN}' '{PEER}' 'jaxlora xla'")
    found = [(case.row, case.adapters) for case in benchmark.cases(args)]
    first = [(FROZEN, 1), (PEER, 1), ("jaxlora xla", 1)]
    assert found == [*first, ("jaxlora xla", 4)]


def test_a_skipped_row_says_why_in_the_table():
    row = {"model": "m", "row": PEER, "adapters": 1, "skipped": "peft not installed"}
    line = benchmark.tables([row]).splitlines()[-1]
    assert line.startswith(f"| {PEER} | 1 |  |")
    assert line.endswith("| peft not installed |")


@pytest.mark.parametrize("model", ["tiny", "llama-3.1-8b"])
def test_only_small_models_run_without_a_gpu(model):
    reason = needs_gpu(model, has_gpu=False)
    assert (reason is None) == (model == "tiny")
    assert needs_gpu(model, has_gpu=True) is None
