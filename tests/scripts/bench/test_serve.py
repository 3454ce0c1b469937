"""The load test of an engine, on the tiny model."""

import json

from scripts.bench import __main__ as bench


def test_a_load_of_tenants(tmp_path):
    options = (
        "--model tiny --layers 1 --dtype float32 --sizes 32 128 --block-tokens 16"
        " --slots 2 --rank 4 --tenants 3 --samples 2 --mean-tokens 20 --seconds 0.4"
        " --first-seconds 0.4"
    )
    assert bench.main(["serve", "--output-dir", str(tmp_path), *options.split()]) == 0
    lines = (tmp_path / "serve.jsonl").read_text().splitlines()
    rows = {row["row"]: row for row in map(json.loads, lines)}
    loads = {name: row for name, row in rows.items() if "of_offline" in row}
    assert [*loads] == ["P: 3 tenants", "D: 3 tenants, one of 64 times the load"]
    for row in loads.values():
        assert row["requests"] and 0.3 < row["fill"] <= 1
        assert 0 < row["p50_s"] <= row["p99_s"] and row["of_offline"] > 0
    assert rows["P: 3 tenants"]["moves"]  # as there are two slots
    assert rows["L: lone request of 32 tokens, to the end"]["ms"] > 0
    assert rows["copy of a parked adapter"]["same_bits"]
    tables = (tmp_path / "serve.md").read_text()
    assert "| P: 3 tenants |" in tables and "| offline trainer |" in tables
