"""Speeds that follow from the rows of `python -m scripts.bench together`."""

import dataclasses
import json
import pathlib

import pytest

from jaxlora.config.run_file import RunFile
from jaxlora.run.log import METRICS_FILE
from scripts.bench.kernels import benchmark
from scripts.bench.kernels.methods import METHODS
from scripts.bench.report import Timing
from scripts.bench.run import together
from scripts.bench.run.commands import Done
from scripts.bench.run.packed_kernels import kernel_rows
from scripts.bench.run.together import Bench, phases, speeds, tables


def test_speeds_follow_from_the_batches_of_the_sweep():
    batches = {"1": 2, "3": 1, "4": 1}
    run: dict = {"steady_tokens_per_second": 300, "training_s": 2.0, "model": "tiny"}
    rows = [
        run | {"row": "sweep", "seconds": 10.0, "batches": batches},
        run | {"row": "halving", "seconds": 8.0, "training_s": 1.0, "batches": batches},
        run
        | {"row": "alone batch 1", "seconds": 20.0, "steady_tokens_per_second": 100},
        run | {"row": "alone batch 4", "seconds": 30.0},
        run | {"row": "packed 8", "seconds": 9.0},
        {"row": "peft", "model": "tiny", "seconds": 100.0, "step_s": 0.4},
    ]
    found = {
        (s["row"], s["over"]): s["speed"] for s in speeds({r["row"]: r for r in rows})
    }
    assert found == {
        ("sweep", "one at a time"): 9.67,  # 20 + 20 + 26.67 + 30 over 10
        ("sweep", "peft"): 40.0,
        ("halving", "one at a time"): 12.08,
        ("halving", "peft"): 50.0,
        ("halving", "sweep"): 1.25,
        ("halving", "sweep, training"): 2.0,
        ("packed 8", "one alone, tokens/s"): 3.0,
    }
    assert not list(speeds({"alone batch 1": rows[2], "sweep": rows[0]}))
    kernel = {
        "row": "kernels",
        "model": "tiny",
        "adapters": 2,
        "linear_forward_speed": 1.5,
    }
    text = tables([*rows, kernel])
    assert "speed of tiny" in text and "linear_forward_speed" in text


def test_kernels_in_one_call_over_as_many_calls(monkeypatch):
    def times(case, repeats, methods, seconds):
        assert set(methods) <= METHODS.keys() and case.tokens == 1024 * len(case.ranks)
        for method, adapters in zip(methods, (0.0, 5.0), strict=True):
            us = case.tokens / 1024 * 2 + 8 + adapters
            yield method, "forward", Timing.of([us])
            yield method, "both", Timing.of([3 * us])
            yield method, "both, sustained", Timing.of([4 * us])

    monkeypatch.setattr(benchmark, "time_jax", times)
    rows = list(kernel_rows())
    assert len(rows) == 12
    row = next(row for row in rows if row["adapters"] == 8)
    for key in ("linear_forward", "linear_backward", "back_to_back"):
        assert row[f"{key}_speed"] == round(8 * 15 / 29, 2)
    assert row["adapters_backward_us"] == 10.0
    assert row["adapters_backward_speed"] == 8.0  # as long for one as for eight


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A benchmark whose commands end at once; returns it and what they were given."""
    given = []

    def run_command(arguments, environment, *, kill_when, python):
        folder = pathlib.Path(
            json.loads(pathlib.Path(arguments[2]).read_text())["output_dir"]
        )
        given.append(
            (arguments[1], RunFile.read(pathlib.Path(arguments[2])).config({}))
        )
        folder.mkdir()
        window = {"event": "window", "round": 1, "seconds": 1.0, "num_tokens": 10}
        (folder / METRICS_FILE).write_text(json.dumps(window) + "\n")
        summary = {"seconds": {"predicted": 1.0}, "jobs": {"a": {"best_eval": 2.0}}}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "settings.yaml").write_text("jobs: [{batch_size: 2}]")
        kill_when()
        return Done(began=0.0, seconds=5.0, lines=((1.0, "line"),))

    monkeypatch.setattr(together, "run_command", run_command)
    made = Bench(model="tiny", count=3, steps=8, work=tmp_path)
    made.write()
    return made, given


def test_what_is_compared_has_the_same_batches(bench):
    made, given = bench
    rows = list(made.rows(["sweep", "alone", "packed"]))
    assert [row["row"] for row in rows] == [
        "sweep", "alone batch 1", "alone batch 4", "packed 8", "packed 32",
    ]  # fmt: skip
    runs = dict(zip((row["row"] for row in rows), given, strict=True))
    assert [len(config.jobs) for _, config in runs.values()] == [3, 1, 1, 8, 32]
    for name in ("alone batch 1", "packed 8", "packed 32"):
        kind, config = runs[name]
        assert kind == ("train" if name.startswith("alone") else "sweep")
        assert {(job.batch_size, job.rank) for job in config.jobs} == {(1, 32)}
    assert {job.batch_size for job in runs["sweep"][1].jobs} <= {1, 2, 3, 4}


def test_programs_are_compiled_once(bench):
    made, given = bench
    made.compile(["sweep", "halving", "alone"])
    assert [config.jobs[0].steps for _, config in given] == [2, 2]
    made.compile(["sweep", "halving", "alone"])
    assert len(given) == 2


def test_nothing_is_measured_after_the_limit(bench):
    made, _ = bench
    with pytest.raises(TimeoutError):
        dataclasses.replace(made, end=0.0).compile(["alone"])


def test_phases_follow_from_the_lines_of_the_log():
    lines = (
        (9.0, "10:00:09 a starts in slot 0"),
        (9.5, "10:00:09 b-32 starts in slot 1"),
        (40.0, "10:00:40 b-32: finished (all steps are done)"),
        (40.6, "10:00:40 a: stopped early (halving: it is not among the best)"),
        (42.0, f"10:00:42 {together._SPENT}training 30.5, evaluation 0.2"),
    )
    assert phases(Done(began=0.0, seconds=45.0, lines=lines)) == {
        "first_start_s": 9.0,
        "starts_s": 0.5,
        "ends_s": 0.6,
        "after_ends_s": 4.4,
        "after_run_s": 3.0,
        "spent": "training 30.5, evaluation 0.2",
    }
    assert phases(Done(began=0.0, seconds=45.0, lines=lines[:-1])) == {}
