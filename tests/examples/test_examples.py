"""The examples run as they are."""

import json
import pathlib
import runpy

import pytest

from jaxlora import load_run
from jaxlora.cli.main import main
from jaxlora.forecast import plan_run
from tests.jaxlora.memory_formula import estimated_by_formula


def run_script(name: str) -> dict:
    return runpy.run_path(f"examples/{name}.py", run_name="__main__")


def test_run_files_are_planned(clone):
    """With their data and objectives; some are also trained, here and in the grid."""
    paths = sorted(pathlib.Path("examples").glob("*.yaml"))
    runs = [load_run(path) for path in paths]
    assert len(runs) >= 5
    with estimated_by_formula():
        plans = [plan_run(run) for run in runs if run.sweep is None]
    assert all(plan.num_microbatches for plan in plans) and len(plans) >= 4


@pytest.mark.grid  # `tests/jaxlora/cli/test_main.py` trains jobs by this command
def test_two_jobs(clone):
    assert main(["train", "examples/two_jobs.yaml"]) == 0
    summary = json.loads((clone / "runs/two_jobs/summary.json").read_text())
    for job in summary["jobs"].values():
        assert job["status"] == "finished"
        assert job["last_eval"] < job["first_eval"] - 0.5
        assert (clone / job["folder"] / "adapter_config.json").is_file()


@pytest.mark.grid  # `test_preference_runs.py` trains these objectives together
def test_preferences(clone):
    assert main(["train", "examples/preferences.yaml"]) == 0
    summary = json.loads((clone / "runs/preferences/summary.json").read_text())
    assert len(summary["jobs"]) == 5
    for name, job in summary["jobs"].items():  # KTO's loss is at most 1
        assert job["last_eval"] < job["first_eval"] - (0.1 if name == "kto" else 0.5)


@pytest.mark.grid  # `test_sweep.py` has a sweep that halves
def test_sweep(clone, capsys):
    report = run_script("sweep")["result"].sweep
    stopped = [trial.progress.stopped_by for trial in report.trials]
    assert len(stopped) == 12 and stopped.count("halving") == 9
    assert report.best.progress.status == "finished"
    assert f"best: {report.best.settings.name}" in capsys.readouterr().out
    assert (clone / "runs/sweep/sweep.html").is_file()


@pytest.mark.grid  # as those below, it is trained before a release
def test_callbacks(clone):
    result = run_script("callbacks")["result"]
    statuses = {job.name: job.progress.status for job in result.jobs}
    assert statuses == {
        "steady": "finished",
        "wild": "stopped",
        "wild-slower": "finished",
    }


@pytest.mark.grid  # `tests/jaxlora/session` has such losses
def test_own_loss(clone):
    losses = run_script("own_loss")["losses"]
    assert losses[-1] < losses[0] / 3
    assert (clone / "runs/own_loss/mine/adapter_config.json").is_file()


@pytest.mark.grid
def test_toy_reward(clone):
    for rewards in run_script("toy_reward")["rewards"].values():
        assert sum(rewards[-4:]) > 2 * sum(rewards[:4])


@pytest.mark.grid
def test_resume(clone, capsys):
    run_script("resume")
    assert capsys.readouterr().out.count("the same bits") == 2


@pytest.mark.grid  # `test_kinds_on_experts.py` trains all kinds of jobs on experts
def test_experts(clone, capsys):
    result = run_script("experts")["result"]
    losses = {job.name: job.progress.last_eval for job in result.jobs}
    assert losses["whole_rank"] < losses["experts"] < losses["attention"] - 0.1
    shapes = capsys.readouterr().out
    assert "lora_A.weight (4, 48)" in shapes and "lora_A.weight (8, 48)" in shapes


def test_own_flax_model(clone):
    first, last = runpy.run_path("examples/own_flax_model.py")["main"]()
    assert (last < first / 4).all()


@pytest.mark.grid
def test_notebook(clone, monkeypatch):
    """The cells run in one namespace, in the folder where Jupyter starts them."""
    monkeypatch.chdir(clone / "examples")
    notebook = json.loads((clone / "examples/quickstart.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec("".join(cell["source"]), names)
    assert all(job.progress.status == "finished" for job in names["result"].jobs)
    assert len(names["axes"].lines) == 2
    assert names["plt"].get_fignums()  # a notebook shows the figures of pyplot
    names["plt"].close("all")
