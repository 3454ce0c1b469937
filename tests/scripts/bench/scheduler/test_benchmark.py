"""The scheduler's benchmark, on a few small cases."""

import pytest

from jaxlora.bench.scheduler import benchmark
from tests.scripts.bench.tables import read_csv


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
    limits = [dict.fromkeys(benchmark.LIMIT_FIELDS, 1)]
    monkeypatch.setattr(benchmark, "adapters", lambda quick: adapters)
    monkeypatch.setattr(benchmark, "grid", lambda quick: grid)
    monkeypatch.setattr(benchmark, "limit_rows", lambda quick, workers: limits)
    monkeypatch.setattr(benchmark, "growth_rows", lambda quick: [{"seconds": 0.1}])


def test_tables_and_files(small, tmp_path, capsys):
    options = ["--quick", "--num-workers", "1", "--output-dir", str(tmp_path)]
    benchmark.main(options)
    printed = capsys.readouterr().out
    assert (tmp_path / "scheduler_tables.md").read_text().strip() in printed
    assert "## Bubbles, % (stages alike / last stage +6 %)" in printed
    runs = read_csv(tmp_path / "scheduler_runs.csv")
    packers = {row["packer"] for row in runs if row["table"] == "grid"}
    assert packers == {"paper", "greedy", "mlora", "joint", "joint, full"}
    assert all(float(row["over_lower_bound"]) >= 0 for row in runs)
    assert (tmp_path / "scheduler_bubbles.png").exists()
