"""The scheduler's benchmark, on a few small cases."""

import json

from scripts.bench import __main__ as bench
from scripts.bench.scheduler import benchmark

KIND = benchmark.Kind(lengths="mix", num_samples=(8, 4), batch_size=4)


def test_rows_and_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "KINDS", {"2 jobs": KIND})
    options = ["--quick", "--num-workers", "1", "--output-dir", str(tmp_path)]
    bench.run("scheduler", options)
    table = (tmp_path / "scheduler.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert (
        "| kind | lanes | last_stage | stages | mlora | paper | fewest | joint |"
        in table
    )
    assert "| 2 jobs | 1 | 1.0 | 4 | " in table
    lines = (tmp_path / "scheduler.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["packer"] for row in rows} == set(benchmark.PACKERS)
    assert all(row["makespan_over_bound"] >= 1 for row in rows)


def test_kinds_on_several_lanes():
    """Every packer makes legal ticks, and joint packing is the shortest."""
    kind = benchmark.Kind(lengths="mix", num_samples=(8, 4, 4), batch_size=4)
    solver = {"time_limit": 0.1, "num_workers": 1}
    rows = list(benchmark._of_case(kind, 2, 1.0, 2, solver, benchmark.PACKERS, 0.3))
    times = {row["packer"]: row["makespan_over_bound"] for row in rows}
    assert set(times) == set(benchmark.PACKERS)
    assert min(times.values()) == times["joint"] >= 1
