"""A sweep that is ranked by a metric of generated answers."""

import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import Generator, LoraJob, Prompt, RunConfig, Sweep, Trainer
from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.config.sweep_config import ExitRule
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.sweeps.engine.run import run_groups
from jaxlora.train.execute.texts import AnswerMeter, SlotDecoder
from tests import tiny
from tests.jaxlora.train.runs import InterruptAt, events_of, outcome, run_of
from tests.jaxlora.train.test_contracts import ROUNDING
from tests.jaxlora.train.thread_workers import use_threads
from tests.oracle import relative_error

RATES = 3e-2, 1e-3, 1e-4


def share_of_places(answers: list[str], references: list[str]) -> float:
    """Returns the share of characters that are in their places."""
    pairs = list(zip(answers, references, strict=True))
    hits = sum(a == r for one, other in pairs for a, r in zip(one, other, strict=False))
    return hits / sum(len(other) for _, other in pairs)


@pytest.fixture(scope="module")
def make(model, tmp_path_factory):
    """Returns a function that makes a sweep over rates; jobs never share a batch."""
    folder = tmp_path_factory.mktemp("metric")
    records = [{"prompt": "q" * 6, "completion": "abab" * 2} for _ in range(31)]
    records += [{"prompt": "q" * (3 + i), "completion": "abab"} for i in range(9)]
    data = tiny.write_jsonl(folder / "data.jsonl", records)
    number = iter(range(100))

    def run(rates=RATES, **settings) -> RunConfig:
        job = LoraJob(
            name="c",
            data={"path": data},
            eval_fraction=0.2,
            rank=4,
            target_modules=["q_proj", "v_proj", "down_proj"],
            batch_size=8,
            steps=6,
            eval_every=2,
            keep_best=True,
            lr_schedule="constant",
            max_length=15,
        )
        sweep = Sweep(
            parameters={"learning_rate": list(rates)},
            metric={"name": share_of_places, "max_new_tokens": 8},
            early_exit=ExitRule(type="halving", first=0.5),
            merge_best=True,
        )
        return run_of(
            model,
            folder / f"run{next(number)}",
            [job],
            sweep=sweep,
            max_concurrent_jobs=2,
            microbatch_tokens=128,
            block_tokens=16,
            window_steps=2,
            checkpoint_every=None,
            **settings,
        )

    return run


def measured(config: RunConfig) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events_of(config.output_dir):
        if event["event"] == "eval":
            point = event["step"], event["metric"]
            found.setdefault(event["job"], []).append(point)
    return found


@pytest.fixture(scope="module")
def whole(make, model):
    config = make()
    return config, outcome(config, model)


def test_ranking_exits_and_weights_follow_the_metric(whole):
    config, found = whole
    metrics, report = measured(config), found.result.sweep
    evaluated = {name: [step for step, _ in points] for name, points in metrics.items()}
    assert config.sweep.metric.name == f"{__name__}:share_of_places"
    best = {name: max(v for _, v in points) for name, points in metrics.items()}
    ranked = [trial.progress.best_metric for trial in report.trials]
    assert ranked == sorted(best.values(), reverse=True)
    assert len(set(best.values())) > 1, "the rates make a difference"
    for name, progress in found.progress.items():
        assert progress.best_metric == best[name]
        # The lowest loss decides between equal metrics; its weights are in the folder.
        losses = dict(zip(evaluated[name], found.evals[name], strict=True))
        equal = [step for step, value in metrics[name] if value == best[name]]
        assert progress.best_step == min(reversed(equal), key=losses.__getitem__)
    stopped = [p for p in found.progress.values() if p.stopped_by]
    assert stopped and all("share_of_places" in p.reason for p in stopped)
    kept = {t.settings.name: at(metrics, t, 3) for t in report.trials}
    lost = [kept[n] for n, p in found.progress.items() if p.stopped_by]
    assert max(lost) <= max(kept.values())
    assert f"{__name__}:share_of_places" in report.csv().splitlines()[0]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs round by batch size")
def test_groups_decide_by_the_metric_and_merge_the_best(make, whole, monkeypatch):
    """Each of two groups answers for its own configurations.

    On a GPU, answers to fewer prompts at a time may differ in a token.
    """
    use_threads(monkeypatch)
    config, alone = whole
    grouped = make()
    grouped = grouped.replace(sweep=grouped.sweep.replace(groups=2))
    result = run_groups(grouped)
    found = {job.name: job for job in result.jobs}
    for name, progress in alone.progress.items():
        other, keys = found[name].progress, ("status", "best_metric", "best_step")
        assert [getattr(other, k) for k in keys] == [getattr(progress, k) for k in keys]
        path = "adapters", name, "adapter_model.safetensors"
        here, there = (
            safetensors.numpy.load_file(pathlib.Path(c.output_dir, *path))
            for c in (config, grouped)
        )
        # Another neighbour in a microbatch may round other bits.
        for tensor in here:
            assert relative_error(here[tensor], there[tensor]) < ROUNDING
    assert result.sweep.curves == alone.result.sweep.curves
    merged = sorted(pathlib.Path(grouped.output_dir, "merged").glob("*/*.safetensors"))
    best = pathlib.Path(config.output_dir, "merged", result.sweep.best.settings.name)
    assert merged and [path.read_bytes() for path in merged] == [
        path.read_bytes() for path in sorted(best.glob("*.safetensors"))
    ]


def at(metrics, trial, step: int) -> float:
    return dict(metrics[trial.settings.name]).get(step, 0.0)


def test_the_metric_is_that_of_the_exported_weights(whole, model):
    """The generator that users call on a folder gives each configuration's metric."""
    _, found = whole
    tokenizer = load_tokenizer(model.folder)
    adapters = {t.settings.name: t.folder for t in found.result.sweep.trials}
    generator = Generator(model, adapters)
    for job in found.trainer.jobs:
        prompts, references = [], []
        for sample in job.prepared.eval_data.samples:
            start = int(np.argmax(sample.is_target))
            ids = sample.token_ids.tolist()
            text = tokenizer.decode(ids[:start], skip_special_tokens=True)
            prompts.append(Prompt(text, adapter=job.name))
            references.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
        made = generator.generate(prompts, GenerationSettings(max_new_tokens=8))
        value = share_of_places([out.text for out in made], references)
        assert value == pytest.approx(job.progress.best_metric)


def test_jobs_are_asked_together_as_each_alone(
    make, model, make_adapter, compiled_when_called
):
    trainer = Trainer(make(), model)
    jobs = trainer.jobs[:2]
    for slot, job in enumerate(jobs):
        suffixes = job.settings.target_modules
        trainer.slots.load(slot, make_adapter(suffixes, seed=slot), "adamw")
        job.update(status="running", slot=slot)
    tokenizer, tables = load_tokenizer(model.folder), trainer.slots.tables
    decoder = SlotDecoder(trainer.layout, model.params)
    meter = AnswerMeter(trainer.config.sweep.metric, model, tokenizer, decoder)
    together = meter.answers(jobs, tables)
    for job in jobs:
        assert meter.answers([job], tables) == {job.name: together[job.name]}
    one, other = together.values()
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_the_best_is_merged(whole, model):
    config, found = whole
    best = found.result.sweep.best.settings.name
    folder = pathlib.Path(config.output_dir) / "merged" / best
    merged = safetensors.numpy.load_file(next(folder.glob("*.safetensors")))
    assert (
        merged.keys()
        == safetensors.numpy.load_file(model.folder / "model.safetensors").keys()
    )


def test_a_configuration_has_the_metric_that_it_has_alone(whole, make, model):
    config, _ = whole
    alone = make(rates=RATES[:1])
    trainer = Trainer(alone, model)
    trainer.train()
    (points,) = measured(alone).values()
    assert points == measured(config)[config.jobs[0].name]
    assert [step for step, _ in points] == [0, 2, 3, 4, 6]


def test_an_interrupted_sweep_decides_the_same(make, model, whole):
    config = make()
    Trainer(config, model).train(callbacks=[InterruptAt(2)])
    resumed = outcome(config, model, resume=True)
    assert resumed.progress == whole[1].progress
    assert resumed.bytes == whole[1].bytes
    assert measured(config) == measured(whole[0])
