"""Tests the trainer beyond the contracts: evaluation, endings, bad input."""

import dataclasses
import json
import logging
import pathlib

import pytest

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError
from jaxlora.models.config import LongRopeScaling
from jaxlora.plan.job import chosen_modules
from jaxlora.plan.job.prepared_job import prepare_job
from tests import tiny
from tests.jaxlora.train.runs import TWO_SLOTS, events_of, outcome


@pytest.fixture
def config(model, jobs, tmp_path):
    """A run of two short jobs; settings may be changed."""

    def make(*more_jobs, **settings) -> RunConfig:
        return RunConfig(
            **{
                "model": str(model.folder),
                "output_dir": str(tmp_path / "run"),
                "jobs": more_jobs or jobs[:2],
                **TWO_SLOTS,
                **settings,
            },
        )

    return make


@pytest.mark.usefixtures("pictures")
def test_what_a_run_leaves(config, model):
    found = outcome(config(checkpoint_every=None), model)
    folder = found.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["jobs"]) == {"job0", "job1"}
    assert summary["jobs"]["job0"]["status"] == "finished"
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").iterdir())
    events = events_of(folder)
    steps = [e for e in events if e["event"] == "step" and e["job"] == "job1"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    assert steps[0]["learning_rate"] == 0 < steps[1]["learning_rate"]  # warm-up
    assert all(e["num_target_tokens"] <= e["num_tokens"] for e in steps)
    windows = [e for e in events if e["event"] == "window"]
    assert all(0 < e["fill"] <= 1 and e["tokens_per_second"] > 0 for e in windows)
    evals = [e["step"] for e in events if e["event"] == "eval" and e["job"] == "job1"]
    assert evals == [0, 2, 4]
    assert found.progress["job1"].last_eval < found.progress["job1"].first_eval
    card = (folder / "adapters" / "job1" / "README.md").read_text()
    loss = found.progress["job1"].last_eval
    assert f"| held-out loss | {loss:.4g} |" in card
    assert "| optimizer steps | 4 |" in card
    targets, tokens = (
        sum(e[key] for e in steps) for key in ("num_target_tokens", "num_tokens")
    )
    assert targets < tokens
    assert f"| tokens trained on | {targets} |" in card
    assert f"| tokens, prompts included | {tokens} |" in card


def test_early_stopping_keeps_the_best(train, jobs):
    """A rate that is far too high makes each evaluation worse than the first."""
    job = jobs[0].replace(
        learning_rate=3.0,
        steps=20,
        eval_every=1,
        early_stopping=2,
        keep_best=True,
        warmup_steps=1,
        lr_schedule="constant",
    )
    outcome = train([job])
    progress = outcome.progress["job0"]
    assert progress.status == "stopped early"
    assert progress.reason == "no better evaluation for 2 evaluations"
    best = min(outcome.evals["job0"])
    assert progress.best_eval == best
    assert progress.best_step == outcome.evals["job0"].index(best)
    assert progress.step == progress.best_step + 2
    # The weights that were kept are those of the best step: a run that ends there.
    short = job.replace(steps=progress.best_step or 1)
    if progress.best_step:
        short = short.replace(keep_best=False, early_stopping=None)
        assert train([short]).bytes == outcome.bytes


def test_says_what_it_compiles(train, jobs, caplog):
    caplog.set_level(logging.INFO, "jaxlora")
    train(jobs[1:2], slot_dropout=False)  # no other test has slots of this shape
    said = [r.getMessage() for r in caplog.records if "compil" in r.getMessage()]
    names = (
        *("training step", "evaluation", "optimizer step", "empty slots"),
        *("starting a job", "emptying a slot", "restoring a job", "reading a slot"),
    )
    assert said[0] == f"compiling 8 programs: {', '.join(names)}"
    assert len(said) == 2 and said[1].startswith("compiled 8 programs, waited ")
    assert all(f"{name} " in said[1] for name in names)


def test_starts_from_an_adapter(train, jobs, model, monkeypatch):
    """Training in two halves: the second starts from the first one's folder."""
    first = train([jobs[0].replace(target_modules=("q_proj", "down_proj"))])
    folder = first.folder / "adapters" / "job0"
    again = LoraJob(
        name="again", data=jobs[0].data, init_from=str(folder), steps=1, max_length=96
    )
    read, import_peft = [], chosen_modules.import_peft
    with monkeypatch.context() as patch:
        patch.setattr(
            chosen_modules,
            "import_peft",
            lambda folder, *args, **settings: (
                read.append(folder) or import_peft(folder, *args, **settings)
            ),
        )
        outcome = train([again.replace(learning_rate=0.0)])
    assert read == [str(folder)]  # once, by the checks before any data are read
    assert outcome.bytes["again"] == first.bytes["job0"]
    for stated, message in (
        ({"rank": 2}, "which has rank 4 on model"),
        ({"lora_alpha": 1.0}, "which has scaling 1 on model"),
        (
            {"target_modules": ["q_proj"]},
            "which adapts model.layers.0.mlp.down_proj",
        ),
        (
            {"target_modules": ["q_proj", "down_proj", "up_proj"]},
            "which does not adapt model.layers.0.mlp.up_proj",
        ),
    ):
        wrong = LoraJob(name="x", data=jobs[0].data, init_from=str(folder), **stated)
        with pytest.raises(ConfigError, match=message):
            train([wrong])
    same = {"rank": 4, "lora_alpha": 4.0, "target_modules": ["down_proj", "q_proj"]}
    train([LoraJob(name="x", data=jobs[0].data, init_from=str(folder), **same)])


def test_samples_beyond_the_models_positions_are_counted(model, jobs):
    """One warning a job, however many of its samples and whichever side they are on."""
    reader = DataReader(load_tokenizer(model.folder))
    job = prepare_job(jobs[0], model.config, reader)
    assert job.eval_data is not None
    samples = (*job.train_data.samples, *job.eval_data.samples)
    lengths = sorted(len(sample.token_ids) for sample in samples)
    positions = lengths[-4] - 1
    short = dataclasses.replace(model.config, max_positions=positions)
    notes = prepare_job(jobs[0], short, reader).notes
    for note, use in zip(notes, ("training", "held-out"), strict=False):
        assert note.job == "job0" and note.text.startswith(f"{use} data ")
    warnings = [note.text for note in notes if note.is_warning]
    count = sum(length > positions for length in lengths)
    assert warnings == [
        f"{count} of {len(lengths)} samples are longer than the {positions} "
        "positions that the model supports (max_position_embeddings); the longest has "
        f"{lengths[-1]} tokens. Set max_length to {positions}, or expect worse results "
        "on them."
    ]
    scaling = LongRopeScaling(factors=(1.0,), magnitude=1.0)
    rope = dataclasses.replace(short.rope, scaling=scaling)
    with pytest.raises(
        ConfigError, match=rf"{count} of .* Set max_length to {positions}"
    ):
        prepare_job(jobs[0], dataclasses.replace(short, rope=rope), reader)


def test_problems_of_several_jobs_data_come_together(config, model, tmp_path, jobs):
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": \n')

    def reading(number: int, name: str):
        data = jobs[number].data.replace(path=f"{tmp_path}/{name}")
        return jobs[number].replace(data=data)

    run = config(reading(0, "none.jsonl"), jobs[1], reading(2, "broken.jsonl"))
    with pytest.raises(ConfigError) as found:
        Trainer(run, model)
    first, second = str(found.value).splitlines()
    assert "jobs.0: " in first
    assert "none.jsonl" in first
    assert "jobs.2: " in second
    assert "broken.jsonl" in second
    assert not pathlib.Path(run.output_dir).exists()


def test_another_tokenizer_than_the_models(config, tmp_path, monkeypatch):
    """Token ids beyond the embedding would read past it."""
    monkeypatch.setitem(tiny.CONFIG, "vocab_size", 200)
    folder = tiny.write_model(tmp_path / "small")
    with pytest.raises(ValueError, match="largest token id is 258"):
        Trainer(config(model=str(folder)))
