"""The comparison of training with the fused kernels and without."""

import json
import pathlib
import subprocess

import pytest
import yaml

from jaxlora.bench import convergence
from jaxlora.config.run_file import run_config
from jaxlora.errors import JaxloraError
from scripts import demo


def test_the_run_is_the_demos_with_more_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "has_gpu", lambda: True)
    data = {name: ("train", "val") for name in (*demo.ASPECTS, "code")}
    run = demo.run_file(tmp_path / "model", data, str(tmp_path / "run"))
    longer = convergence.lengthened(run, 200)
    assert longer["defaults"]["steps"] == 200
    for job, old in zip(longer["jobs"], run["jobs"], strict=True):
        removed = {"eval_data", "epochs"}
        assert job == {key: old[key] for key in old if key not in removed}
    assert not {"epochs", "eval_every", "keep_best"} & longer["defaults"].keys()
    run_config(longer)


def write_events(command, check):
    """Stands in for `jaxlora train`: writes the metrics of a run of 20 steps."""
    run = yaml.safe_load(pathlib.Path(command[-1]).read_text())
    fused = convergence.WAYS["fused"]["implementation"]
    is_fused = run["implementation"] == fused
    steps = [
        {
            "event": "step",
            "round": i,
            "job": "a",
            "step": i,
            "loss": 10 - i + 0.5 * (is_fused and i == 3),
        }
        for i in range(1, 21)
    ]
    folder = pathlib.Path(run["output_dir"])
    folder.mkdir()
    lines = map(json.dumps, [{"event": "window", "round": 1}, *steps])
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def options(tmp_path):
    """A run file with one job, and a folder for the results."""
    job = {"name": "a", "data": {"path": "x.jsonl"}}
    run = {"model": "m", "output_dir": "o", "jobs": [job]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return [str(tmp_path / "run.yaml"), "--output-dir", str(tmp_path / "out")]


def test_losses_are_read_compared_and_written(options, monkeypatch, capsys):
    monkeypatch.setattr(convergence.subprocess, "run", write_events)
    monkeypatch.setattr(convergence, "about", lambda device: {"device": device})
    convergence.main(options)
    out = pathlib.Path(options[-1])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "| a | 20 | 0.0250 | 0.5000 | -9.5000 | -9.5000 |"
    assert (out / "convergence.csv").exists() and (out / "convergence.png").exists()


def test_a_run_that_fails_ends_the_comparison(options, monkeypatch):
    failed = lambda command, check: subprocess.CompletedProcess(command, 1)
    monkeypatch.setattr(convergence.subprocess, "run", failed)
    with pytest.raises(JaxloraError, match=r"fused.yaml: `jaxlora train` failed"):
        convergence.main(options)
