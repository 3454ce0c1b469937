"""Texts that jobs generate at their evaluations."""

import json

import numpy as np
import pytest

from jaxlora import Generator, RunConfig, Trainer
from jaxlora.cli.main import main
from jaxlora.config.generation_settings import SamplesConfig
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.train.report.run_callbacks import SampleFile
from jaxlora.train.saved.run_adapters import load_run_adapters
from tests import tiny
from tests.jaxlora.run.made_events import step
from tests.jaxlora.train.runs import events_of, outcome, two_slots

SAMPLES = SamplesConfig(
    prompts=("abc", "a longer one"), max_new_tokens=6, temperature=1.5, seed=4
)


@pytest.fixture(scope="module")
def runs(model, jobs, tmp_path_factory):
    """The results of the same run without samples and with them."""

    def run(samples):
        config = two_slots(
            model, tmp_path_factory.mktemp("runs") / "run", jobs[:2], samples=samples
        )
        return outcome(config, model)

    return run(None), run(SAMPLES)


def test_samples_do_not_disturb_training(runs):
    plain, sampled = runs
    assert (sampled.bytes, sampled.losses) == (plain.bytes, plain.losses)
    assert sampled.evals == plain.evals
    assert sampled.result.num_compilations == 0  # the first run compiled them


def test_samples_are_of_the_jobs_own_weights(runs, model):
    _, sampled = runs
    folder = sampled.result.output_dir
    events = events_of(folder)
    found = {
        kind: [(e["job"], e["step"]) for e in events if e["event"] == kind]
        for kind in ("eval", "sample")
    }
    assert found["sample"] == [at for at in found["eval"] for _ in SAMPLES.prompts]

    adapters = {job.name: job.folder for job in sampled.result.jobs}
    wanted = Generator(model, adapters).generate(SAMPLES.prompts, SAMPLES)
    text = (folder / "samples.txt").read_text()
    for job in sampled.result.jobs:
        made = [e for e in events if e["event"] == "sample" and e["job"] == job.name]
        assert made[-1]["step"] == job.progress.step
        mine = [out.text for out in wanted if out.prompt.adapter == job.name]
        assert [e["text"] for e in made[-2:]] == mine
        block = f"== {job.name}, step {job.progress.step}, prompt 0 (length)\nabc\n--\n"
        assert block + mine[0] in text


def test_a_run_generates_from_its_folder(runs, capsys):
    """The adapters are those that `jaxlora export` writes, on the run's own base."""
    outcome, _ = runs
    run = load_run_adapters(outcome.result.output_dir, ["job1"])
    loaded, adapters, notes = run.model, run.adapters, run.notes
    assert list(adapters) == ["job1"]
    for name, weights in adapters["job1"].modules.items():
        np.testing.assert_array_equal(weights.a, outcome.adapters["job1"][name].a)
    assert notes == {"job1": f"weights of step {outcome.progress['job1'].step}"}
    assert loaded.dtype == "float32"
    words = ["--prompt", "ab", "--max-new-tokens", "3"]
    run = str(outcome.result.output_dir)
    assert main(["generate", "--run", run, "--job", "job1", *words]) == 0
    shown = capsys.readouterr()
    assert "job1: weights of step" in shown.err
    assert len(shown.out.strip("\n")) == 3
    same = f"{outcome.result.output_dir}/adapters/job1"
    assert main(["generate", "--run", run, "--adapter", same, *words]) == 1
    assert f"a job 'job1', and {same} has the same name" in capsys.readouterr().err


def test_another_base_than_that_of_the_run_is_refused(runs, tmp_path):
    outcome, _ = runs
    other = tiny.write_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="is not the base model of"):
        load_run_adapters(outcome.result.output_dir, model=other)


def test_the_file_has_what_the_log_has_kept(tmp_path):
    sample = {"job": "a", "number": 0, "finish_reason": "length", "prompt": "p"}
    events = [{"event": "sample", "round": i, "step": i, **sample} for i in (1, 2)]
    lines = [json.dumps({**event, "text": f"t{event['round']}"}) for event in events]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "samples.txt").write_text("of rounds that will be run again")
    SampleFile(tmp_path).on_event(step("a", 3))
    assert (tmp_path / "samples.txt").read_text() == (
        "== a, step 1, prompt 0 (length)\np\n--\nt1\n\n"
        "== a, step 2, prompt 0 (length)\np\n--\nt2\n\n"
    )


def test_samples_that_cannot_be_made_are_refused(jobs, model, tmp_path):
    run = {"model": str(model.folder), "output_dir": str(tmp_path / "run")}
    blind = jobs[0].replace(eval_fraction=0.0, eval_every=None)
    with pytest.raises(ValueError, match="no job has held-out records"):
        RunConfig(jobs=[blind], samples=SAMPLES, **run)
    with pytest.raises(ValueError, match="the list is empty"):
        SamplesConfig(prompts=())
    with pytest.raises(ValueError, match="set `chat: true`"):
        SamplesConfig(prompts=("a",), system="b")
    long = SAMPLES.replace(prompts=("a" * 600,))
    with pytest.raises(ConfigError, match=r"the prompt 'a*' has 600 tokens"):
        Trainer(RunConfig(jobs=jobs[:1], samples=long, **run), model)
