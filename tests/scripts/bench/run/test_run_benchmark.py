import json

import numpy as np
import pytest

from jaxlora.config.run_file import RunFile
from jaxlora.errors import JaxloraError
from jaxlora.hf.load import load_model
from jaxlora.plan.job.prepare_run import prepare_run
from jaxlora.run.log import METRICS_FILE
from scripts.bench import __main__ as bench
from scripts.bench.run import benchmark
from scripts.bench.run.commands import Done, run_command
from scripts.bench.run.inputs import (
    Inputs,
    write_checkpoint,
    write_data,
    write_run_file,
)

INPUTS = Inputs(model="tiny", jobs=2, tokens=6000, median_tokens=200, batch_size=2)


def test_inputs_are_a_run(tmp_path):
    checkpoint, output_dir = tmp_path / "checkpoint", tmp_path / "run"
    write_checkpoint(INPUTS, checkpoint)
    data = write_data(INPUTS, tmp_path / "data")
    config = RunFile.read(write_run_file(INPUTS, checkpoint, data, output_dir)).config(
        {}
    )
    model = load_model(checkpoint)
    assert {bool(np.isfinite(np.asarray(w)).all()) for w in model.params.values()} == {
        True
    }
    assert float(np.std(model.params["layers.0.mlp.up_proj.kernel"])) > 0.05
    _, jobs, _ = prepare_run(config, lambda job: 0, model)
    lengths = [
        [len(s.token_ids) for part in (j.train_data, j.eval_data) for s in part.samples]
        for j in jobs
    ]
    assert all(abs(sum(one) - 3000) <= 2 * len(one) for one in lengths)
    assert len({tuple(one) for one in lengths}) == 2
    assert all(len(set(one)) > 3 and max(one) <= 2048 for one in lengths)
    assert all(j.train_data.num_truncated == 0 and j.eval_data for j in jobs)


def test_a_checkpoint_is_written_once(tmp_path):
    write_checkpoint(INPUTS, tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    write_checkpoint(INPUTS, tmp_path)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def _event(kind, time, **values):
    loss = {"loss": 1.0} if kind == "step" else {}
    event = {"event": kind, "time": time, "round": 1, **loss, **values}
    return json.dumps(event) + "\n"


def test_a_trained_row(tmp_path):
    window = {"num_tokens": 80, "fill": 0.8}
    text = (
        _event("step", 50, num_tokens=7)  # of an earlier process
        + _event("step", 110, num_tokens=50)
        + _event("step", 111, num_tokens=30)
        + _event("window", 111, seconds=3, **window)
        + _event("step", 113, num_tokens=80)
        + _event("window", 114, seconds=2, **window)
        + _event("step", 120, num_tokens=80)
        + _event("window", 120, seconds=4, num_tokens=80, fill=0.4)
        + '{"event": "st'
    )
    (tmp_path / METRICS_FILE).write_text(text)
    done = Done(began=100.0, seconds=25.0, lines=((2.0, "imported"),))
    row = benchmark._trained("cold", done, tmp_path)
    assert row["first_step_s"] == 10
    assert (row["tokens"], row["tokens_per_second"]) == (190, 19)
    assert row["outside_s"] == 3  # 1 before the second window, and 2 before the third
    assert row["fill"] == round(160 / 300, 3)
    assert row["log"] == ["2.00 imported"]
    assert "| cold | 10.0 | 25.0 | 190 | 19 | 3 |" in benchmark.tables([row])


def test_a_command_that_fails_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import sys; sys.exit('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JaxloraError, match="no such thing"):
        run_command(["broken"], {})


def test_a_command_is_killed_when_asked(tmp_path, monkeypatch):
    waiting = "import sys, time\nprint('up', file=sys.stderr, flush=True)\n"
    (tmp_path / "waiting.py").write_text(waiting + "time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = iter([False, True])
    done = run_command(["waiting"], {}, kill_when=lambda: next(asked))
    assert done.seconds < 30


def test_a_run_without_steps_is_refused(tmp_path):
    done = Done(began=100.0, seconds=1.0, lines=())
    with pytest.raises(JaxloraError, match=r"resumed: no step .* more --tokens"):
        benchmark._trained("resumed", done, tmp_path)


def test_options():
    args = bench.parse(benchmark, "run", ["--model", "tiny", "--set", "remat=mlp"])
    assert args.set == [("remat", "mlp")]


@pytest.mark.parametrize("text", ["remat", "=mlp", "remat=[1"])
def test_a_setting_that_cannot_be_read(text, capsys):
    with pytest.raises(SystemExit):
        bench.parse(benchmark, "run", ["--set", text])
    assert f"'{text}' is not NAME=VALUE" in capsys.readouterr().err


def test_generation_needs_adapters(tmp_path):
    args = bench.parse(benchmark, "run", ["--starts", "generate cold", "cold"])
    with pytest.raises(JaxloraError, match="Name cold before it"):
        next(benchmark.measured(args, tmp_path))
    assert not list(tmp_path.iterdir())
