"""The benchmark of replicas, on a small case."""

import dataclasses
import json

import numpy as np

from scripts.bench import __main__ as bench
from scripts.bench.scheduler import replica_setups, replicas
from scripts.bench.shapes import config_json
from tests.jaxlora.memory_formula import estimated_by_formula

TABLES = ("gpu_seconds", "saved", "deployments", "parts", "idle", "bounds", "scaling")


def test_rows_and_tables(monkeypatch, tmp_path, capsys):
    small = dataclasses.replace(
        replicas.SETUPS[0], name="1B", config=config_json("llama-3.2-1b", 2)
    )
    monkeypatch.setattr(replicas, "SETUPS", (small,))
    monkeypatch.setattr(replicas, "JOBS", replicas.JOBS[::6])
    scaling = dataclasses.replace(replicas.SCALING, config=small.config)
    monkeypatch.setattr(replicas, "SCALING", scaling)
    monkeypatch.setattr(replicas.lobra, "_MAX_SOLVED", 1)
    with estimated_by_formula():
        bench.run("replicas", ["--quick", "--output-dir", str(tmp_path)])
    tables = (tmp_path / "replicas.md").read_text()
    assert tables.strip() in capsys.readouterr().out
    parts = dict(zip(TABLES, tables.split("### ")[1:], strict=True))
    assert "| model | gpus | costs | task_fused |" in parts["gpu_seconds"]
    assert "| 1B | 16 | data sheet | 45.03 % |" in parts["saved"]
    assert "| 16 | 512 | 2 | 1.0" in parts["bounds"]
    lines = (tmp_path / "replicas.jsonl").read_text().splitlines()
    rows = {row["table"]: row for row in map(json.loads, lines)}
    assert set(rows) == set(TABLES)
    assert rows["scaling"]["gpus"] == 8 and 0 < rows["scaling"]["rate"] <= 1
    seconds = rows["gpu_seconds"]
    # Packed samples on the best replicas take less than padded ones, however sent.
    assert seconds["this_planner"] <= seconds["packed_alike"] * 1.001
    assert seconds["this_planner"] < min(seconds["lobra"], seconds["task_fused"])


def test_lengths_have_about_the_mix_of_the_paper():
    """Figure 4 has 196, 62, 16 and 4 of 278 samples in its buckets."""
    steps = replica_setups.together(replica_setups.draw_jobs(replica_setups.JOBS, 30))
    lengths = np.concatenate(steps)
    edges = [0, 2048, 4096, 8192, 16384]
    shares = np.histogram(lengths, edges)[0] / len(lengths)
    np.testing.assert_allclose(shares, [0.75, 0.17, 0.07, 0.01], atol=0.01)


def test_lossy_tensor_parallelism_takes_longer():
    kind = replica_setups.plain_kinds()[3]
    cost = replica_setups.lossy(kind).cost
    assert cost.base == kind.cost.base
    assert cost.per_token == kind.cost.per_token / 0.88**3
    assert replica_setups.lossy(replica_setups.plain_kinds()[0]).cost.per_token == 1.0
