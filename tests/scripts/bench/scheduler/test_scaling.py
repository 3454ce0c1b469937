"""The simulated throughput of meshes, on a few small cases."""

import pytest

from jaxlora.bench.scheduler import scaling
from tests.scripts.bench.tables import read_csv


def test_rows_and_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scaling, "MESHES", ("fsdp=1", "stage=2", "data=2,stage=2"))
    monkeypatch.setattr(scaling, "NUM_STEPS", 4)
    options = ["--model", "tiny", "--jobs", "2", "6", "--output-dir", str(tmp_path)]
    scaling.main(options)
    assert "Simulated, not measured." in capsys.readouterr().out
    rows = read_csv(tmp_path / "scaling.csv")
    layouts = [(r["mesh"], r["gpus"], r["in_flight"], r["pinned"]) for r in rows]
    assert layouts[5:] == [
        ("fsdp=1", "1", "1", "no"),
        ("stage=2", "2", "2", "no"),
        ("stage=2", "2", "3", "no"),
        ("data=2,stage=2", "4", "2", "yes"),
        ("data=2,stage=2", "4", "3", "yes"),
    ]
    assert [float(r["of_one_gpu"]) for r in rows if r["mesh"] == "fsdp=1"] == [1, 1]
    assert all(float(r["of_one_gpu"]) <= 1 for r in rows)
    assert all(0 <= float(r["bubble_percent"]) <= 100 for r in rows)


def test_costs_of_a_mesh():
    given = scaling.Assumptions(capacity=1024, fsdp_factor=1.5, node_bytes=1e9)
    spec = scaling.decoder("llama-3.1-8b")

    def cost(words):
        return scaling.stage_costs(spec, scaling.MeshSizes.parse(words), given)

    one, near, far = cost("stage=2"), cost("stage=2,fsdp=2"), cost("stage=16")
    sent = 1024 * 4096 * 2
    assert far.communication == sent / 1e9 > near.communication == one.communication
    for stage, gathered in zip(one.stages, near.stages, strict=True):
        ratio = gathered.forward.per_token / stage.forward.per_token
        assert ratio == pytest.approx(1.5)
