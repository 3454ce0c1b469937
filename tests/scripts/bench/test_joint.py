"""The benchmark of joint training, end to end on a tiny model."""

import pytest

from jaxlora.bench import joint
from jaxlora.errors import JaxloraError
from tests.scripts.bench.tables import broken_base, read_csv

TINY = (
    "--model tiny --layers 1 --implementation xla --jobs 1 2 --step-tokens 64 "
    "--median-tokens 20 --longest-tokens 40 --microbatch-tokens 128 "
    "--block-tokens 32 --repeats 2 --dtype float32 --output-dir"
)


def test_joint(tmp_path, capsys):
    joint.main([*TINY.split(), str(tmp_path)])
    one, two = read_csv(tmp_path / "joint.csv")
    assert (one["alone_microbatches"], one["together_microbatches"]) == ("1", "1")
    assert (two["alone_microbatches"], two["together_microbatches"]) == ("2", "1")
    assert float(two["speedup"]) > 0
    assert (tmp_path / "joint.png").exists()
    line = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert line[:2] == ["| 64", "20"]
    assert line[2] == f"{int(one['alone_tokens_per_second']):,}"
    assert line[4] == f"{float(two['speedup']):.2f} |"


def test_joint_stops_at_gradients_that_are_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(joint, "random_base", broken_base)
    with pytest.raises(JaxloraError, match=r"num_jobs=1.*gradients are not finite"):
        joint.main([*TINY.split(), str(tmp_path)])
    assert not (tmp_path / "joint.csv").exists()
