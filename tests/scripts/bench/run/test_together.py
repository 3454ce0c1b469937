"""Speeds that follow from the rows of `jaxlora bench together`."""

from jaxlora.bench.kernels import benchmark
from jaxlora.bench.kernels.methods import METHODS
from jaxlora.bench.report import Timing
from jaxlora.bench.run.together import kernel_rows, speeds, tables


def test_speeds_follow_from_the_batches_of_the_sweep():
    batches = {"1": 2, "3": 1, "4": 1}
    run: dict = {"steady_tokens_per_second": 300, "training_s": 2.0, "model": "tiny"}
    rows = [
        run | {"row": "sweep", "seconds": 10.0, "batches": batches},
        run | {"row": "halving", "seconds": 8.0, "training_s": 1.0, "batches": batches},
        run
        | {"row": "alone batch 1", "seconds": 20.0, "steady_tokens_per_second": 100},
        run | {"row": "alone batch 2", "seconds": 24.0},
        run | {"row": "alone batch 4", "seconds": 30.0},
        run | {"row": "packed 8", "seconds": 9.0},
        {"row": "peft", "model": "tiny", "seconds": 100.0, "step_s": 0.4},
    ]
    found = {
        (s["row"], s["over"]): s["speed"] for s in speeds({r["row"]: r for r in rows})
    }
    assert found == {
        ("sweep", "one at a time"): 9.7,  # 20 + 20 + 27 + 30 over 10
        ("sweep", "peft"): 40.0,
        ("halving", "one at a time"): 12.12,
        ("halving", "peft"): 50.0,
        ("halving", "sweep"): 1.25,
        ("halving", "sweep, training"): 2.0,
        ("packed 8", "one alone, tokens/s"): 3.0,
    }
    assert not list(speeds({"alone batch 1": rows[2], "sweep": rows[0]}))
    kernel = {"row": "kernels", "model": "tiny", "adapters": 2, "both_speedup": 1.5}
    text = tables([*rows, kernel])
    assert "speed of tiny" in text and "both_speedup" in text


def test_kernels_in_one_call_over_as_many_calls(monkeypatch):
    def times(case, repeats, methods, seconds):
        assert set(methods) <= METHODS.keys() and case.tokens == 1024 * len(case.ranks)
        for method, adapters in zip(methods, (0.0, 5.0), strict=True):
            for what in ("forward", "both"):
                us = case.tokens / 1024 * 2 + 8 + adapters
                yield method, what, Timing.of([us])

    monkeypatch.setattr(benchmark, "time_jax", times)
    rows = list(kernel_rows())
    assert len(rows) == 12
    row = next(row for row in rows if row["adapters"] == 8)
    assert row["both_speedup"] == round(8 * 15 / 29, 2)
    assert row["both_adapters_alone"] == 8.0  # five microseconds each, or all together
