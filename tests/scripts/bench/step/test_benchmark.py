"""The step benchmark, end to end on a tiny model."""

import shlex

import pytest

from jaxlora.bench.report import needs_gpu
from jaxlora.bench.step import benchmark, measure
from jaxlora.bench.step.cases import FROZEN, PEER, Case
from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.triton.target import present_target
from jaxlora.profile.step_parts import CUBLAS, GAPS, OTHER, PARTS, QUANTIZING
from tests.scripts.bench.tables import read_csv

TINY = (
    "--models tiny --layers 1 --microbatch-tokens 128 --block-tokens 32 "
    "--median-tokens 20 --longest-tokens 40 --adapters 2 --repeats 2 --microbatches 2 "
    "--profile --at-once 2"
)


def test_step(tmp_path, capsys):
    rows = ["--rows", "jaxlora xla", "jaxlora mosaic"]
    benchmark.main([*TINY.split(), "--output-dir", str(tmp_path), *rows])
    ours, mosaic = read_csv(tmp_path / "steps.csv")
    assert (ours["row"], ours["adapters"]) == ("jaxlora xla", "2")
    assert ours["tokens"] == "256"
    assert float(ours["step_ms"]) > 0 and float(ours["compile_seconds"]) > 0
    if mosaic["device"] == "":  # there is no Hopper GPU here
        assert "mosaic cannot run this" in mosaic["skipped"]
    parts = read_csv(tmp_path / "breakdown.csv")
    parts = [row for row in parts if row["row"] == "jaxlora xla"]
    assert [row["part"] for row in parts] == [*PARTS, GAPS]
    maybe_zero = CUBLAS, OTHER, GAPS, QUANTIZING  # on a CPU, with a dense base
    assert all(float(row["ms"]) > 0 for row in parts if row["part"] not in maybe_zero)
    assert (tmp_path / "steps.png").exists() and (tmp_path / "breakdown.png").exists()
    printed = capsys.readouterr().out
    assert f"| jaxlora xla | 2 | {int(ours['tokens_per_second']):,} |" in printed
    assert "| part, ms | tiny, jaxlora xla, 2 adapters |" in printed


def test_triton_compiles_for_the_given_capability(monkeypatch):
    monkeypatch.setattr(device, "num_sms", lambda: 4)
    compiled = lambda *_: {"code": present_target().capability}
    monkeypatch.setattr(measure, "_measure_jaxlora", compiled)
    options = "--models tiny --rows jaxlora\\ xla --capability 80"
    args = benchmark.parser().parse_args(shlex.split(options))
    (case,) = benchmark.cases(args)
    assert measure.measure(case) == {"code": 80}


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
    benchmark.add_ratios(rows)
    assert [row["time_over_adapters_off"] for row in rows] == [1.0, 3.0, 1.5, None]
    assert [row["speed_over_peft"] for row in rows] == [3.0, 1.0, 2.0, None]


def test_rows_without_several_adapters_appear_once():
    args = benchmark.parser().parse_args(
        ["--adapters", "1", "4", "--rows", FROZEN, PEER, "jaxlora xla"]
    )
    found = [(case.row, case.num_jobs) for case in benchmark.cases(args)]
    first = [(FROZEN, 1), (PEER, 1), ("jaxlora xla", 1)]
    assert found == [*first, ("jaxlora xla", 4)]


def test_a_skipped_row_says_why_in_the_table():
    row = {"model": "m", "row": PEER, "adapters": 1, "skipped": "peft not installed"}
    line = benchmark.steps_table([row]).splitlines()[-1]
    assert line == f"| {PEER} | 1 | skipped: peft not installed |  |  |  |"


@pytest.mark.parametrize("model", ["tiny", "llama-3.1-8b"])
def test_only_small_models_run_without_a_gpu(model):
    reason = needs_gpu(model, has_gpu=False)
    assert (reason is None) == (model == "tiny")
    assert needs_gpu(model, has_gpu=True) is None
