"""Speeds that follow from the rows of `jaxlora bench together`."""

from jaxlora.bench.kernels import benchmark
from jaxlora.bench.kernels.methods import METHODS
from jaxlora.bench.report import Timing
from jaxlora.bench.run.packed_kernels import kernel_rows
from jaxlora.bench.run.together import speeds, tables


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
