"""The benchmark of sweeps, on a small case."""

import json

from jaxlora.bench import subjects


def test_rows_and_tables(tmp_path, capsys):
    subjects.run("sweeps", ["--quick", "--output-dir", str(tmp_path)])
    table = (tmp_path / "sweeps.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert "| configurations | gpus | seed | over_bound |" in table
    (row,) = map(json.loads, (tmp_path / "sweeps.jsonl").read_text().splitlines())
    assert 1 <= row["over_bound"] < 1.2
    assert row["over_fewest_gpus"] >= row["plora_over_fewest_gpus"] > 1
