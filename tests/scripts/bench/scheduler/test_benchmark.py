"""The scheduler's benchmark, on a few small cases."""

import json

import pytest

from jaxlora.bench import subjects
from jaxlora.bench.scheduler import benchmark, kinds
from jaxlora.scheduler import Limits


def case(table, lengths, count):
    return benchmark.Case(
        table=table,
        lengths=lengths,
        names=(lengths,) * count,
        batch_size=2,
        num_batches=2,
        capacity=6144,
    )


@pytest.fixture
def small(monkeypatch):
    """Replaces the cases of the benchmark by small ones of each kind."""
    adapters, grid = [case("adapters", "mix", 2)], [case("grid", "xsum", 2)]
    monkeypatch.setattr(benchmark, "adapters", lambda quick: adapters)
    monkeypatch.setattr(benchmark, "grid", lambda quick: grid)
    monkeypatch.setattr(benchmark, "FILL_STEPS", 8)
    kind = kinds.Kind(lengths="mix", num_samples=(8, 4), batch_size=4)
    monkeypatch.setattr(kinds, "KINDS", {"2 jobs": kind})


def test_rows_and_tables(small, tmp_path, capsys):
    options = ["--quick", "--num-workers", "1", "--output-dir", str(tmp_path)]
    subjects.run("scheduler", options)
    tables = (tmp_path / "scheduler.md").read_text()
    assert tables.strip() in capsys.readouterr().out
    bubbles, speeds, planning, by_kind, fill = tables.split("### ")[1:]
    head = "| paper | no merge | no milp | greedy | mlora | joint |"
    assert f"| cost | jobs {head}" in bubbles and "| last stage +6 % | 2 |" in bubbles
    assert "| even | xsum | 2 | 1.0 | " in speeds
    assert f"| jobs {head}" in planning
    assert "| mlora | paper | plain | joint |" in by_kind
    assert "| 2 jobs | 1 | 1.0 | 4 | " in by_kind
    assert "greedy | joint" in fill
    lines = (tmp_path / "scheduler.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    grid = [row for row in rows if row["table"] == "grid"]
    assert {row["packer"] for row in grid} == {"paper", "greedy", "mlora", "joint"}
    assert {row["cost"] for row in grid} == set(benchmark.COSTS)
    assert all(row["over_lower_bound_percent"] >= 0 for row in grid)


def test_a_speed_is_that_of_the_best_capacity():
    def row(packer, capacity, makespan):
        names = {"cost": "even", "lengths": "mix", "batch_size": 8, "packer": packer}
        return {**names, "capacity": capacity, "makespan": makespan}

    rows = [row("paper", 1, 30), row("paper", 2, 20), row("joint", 1, 16)]
    rows += [row("joint", 2, 40)]
    found = {row["packer"]: row["speed"] for row in benchmark._speeds(rows)}
    assert found == {"paper": 1.0, "joint": 1.25}


def test_a_stream_needs_fewer_microbatches_than_steps_on_their_own():
    given = benchmark.fill_samples((2, 5, 3))
    limits = Limits(capacity=4096, block_tokens=64)
    numbers = []
    for packer in benchmark.STREAMED:
        found = benchmark.fill(given, limits, packer)
        number = found["microbatches"]
        assert found["fewest"] <= number
        real = 100 * sum(s.num_tokens for s in given) / (number * 4096)
        assert found["fill_percent"] == pytest.approx(real, abs=0.06)
        numbers.append(number)
    assert numbers[0] > numbers[1]


def test_kinds_on_several_lanes():
    """Every packer makes legal ticks, and joint packing is the shortest."""
    kind = kinds.Kind(lengths="mix", num_samples=(8, 4, 4), batch_size=4)
    rows = list(kinds._of_case(kind, 2, 1.0, 2, 0.1))
    times = {row["packer"]: row["makespan_over_bound"] for row in rows}
    assert set(times) == {"mlora", "paper", "plain", "joint"}
    assert min(times.values()) >= 1
    assert times["joint"] <= times["plain"]
