"""The benchmark of sweeps, on a few small cases."""

import json

from scripts.bench import __main__ as bench
from scripts.bench.scheduler import sweeps


def test_rows_and_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweeps, "MIXES", sweeps.MIXES[1:2])
    bench.run("sweeps", ["--quick", "--output-dir", str(tmp_path)])
    tables = (tmp_path / "sweeps.md").read_text()
    assert tables.strip() in capsys.readouterr().out
    models, ranks, bound = tables.split("### ")[1:]
    assert "| batches | full_at | model | fewest_gpus | hours |" in models
    assert "| 1, 2 | 16 | Qwen2.5-3B | 1 |" in models
    assert "| Qwen2.5-7B | " in ranks and "| 24 | 8 | 0 | 1." in bound
    lines = (tmp_path / "sweeps.jsonl").read_text().splitlines()
    assert {json.loads(line)["table"] for line in lines} == {"models", "ranks", "bound"}


def test_the_models_need_the_gpus_of_the_paper():
    """One A100 holds 3B to 8B; 14B takes two, and 32B four (section 7.2)."""
    sweep = sweeps.paper_sweep((1, 2, 4))
    found = {
        name: sweeps.fewest_gpus(sweep, sweeps.costs(model, full=16))
        for name, model in sweeps.MODELS.items()
    }
    assert list(found.values()) == [1, 1, 2, 4, 1, 1]
