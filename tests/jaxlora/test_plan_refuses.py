"""A plan refuses what training would refuse before its first step."""

import json
import pathlib
import sys
from collections.abc import Callable

import pytest

from jaxlora import Callback, LoraJob, RunConfig, Trainer
from jaxlora.costs.gpus import parse_machine
from jaxlora.errors import JaxloraError
from jaxlora.forecast import plan_run
from tests import tiny

Change = Callable[[RunConfig, pathlib.Path], RunConfig]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    folder = tmp_path_factory.mktemp("refused")
    job = LoraJob(
        name="job",
        data={"path": tiny.write_records(folder / "records.jsonl", 6, seed=0)},
        rank=2,
        target_modules=["q_proj"],
        max_length=96,
    )
    return RunConfig(
        model=str(tiny.write_model(folder / "model")),
        output_dir=str(folder / "run"),
        jobs=[job],
        microbatch_tokens=256,
        block_tokens=16,
        dtype="float32",
    )


def job(**settings) -> Change:
    """Changes settings of the job."""
    return lambda run, _: run.replace(jobs=[run.jobs[0].replace(**settings)])


def run(**settings) -> Change:
    """Changes settings of the run."""
    return lambda run, _: run.replace(**settings)


def data(records: list[dict]) -> Change:
    def change(run: RunConfig, folder: pathlib.Path) -> RunConfig:
        path = folder / "data.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return job(data={"path": str(path)})(run, folder)

    return change


def model(damage: Callable[[pathlib.Path], object], **keys) -> Change:
    """Takes another model, with other keys in config.json, and damages its files."""

    def change(run: RunConfig, folder: pathlib.Path) -> RunConfig:
        tiny.write_model(folder / "model", config={**tiny.CONFIG, **keys})
        damage(folder / "model")
        return run.replace(model=str(folder / "model"))

    return change


def folder_of_another_run(run: RunConfig, folder: pathlib.Path) -> RunConfig:
    (folder / "metrics.jsonl").touch()
    return run.replace(output_dir=str(folder))


def folder_is_a_file(run: RunConfig, folder: pathlib.Path) -> RunConfig:
    (folder / "file").touch()
    return run.replace(output_dir=str(folder / "file"))


BAD_RUNS: dict[str, tuple[Change, str]] = {
    "target": (
        job(target_modules=["query"]),
        "'query' matches no linear of the model",
    ),
    "pattern": (job(target_modules=r".*\.query"), "matches no linear of the model"),
    "exclusion": (job(exclude_modules=["q_proj"]), "excludes everything of the 2"),
    "rank": (job(rank=64), "at most rank 32"),
    "rank_pattern": (job(rank_pattern={"up_proj": 4}), "matches none of the job's"),
    "init_from": (job(init_from="/nowhere"), "/nowhere"),
    "continue_from": (job(continue_from="/nowhere"), "holds no complete checkpoint"),
    "no data": (job(data={"path": "/nowhere.jsonl"}), "/nowhere.jsonl"),
    "empty data": (data([]), "data.jsonl"),
    "record": (data([{"question": "a", "answer": "b"}]), "data.jsonl"),
    "slot_rank": (
        run(slot_rank=1),
        "rank 2, and the slots of .* made for 1",
    ),
    "slot_targets": (run(slot_targets=["query"]), "slot_targets: target_modules"),
    "slot_dropout": (
        lambda r, f: job(dropout=0.1)(r.replace(slot_dropout=False), f),
        "dropout 0.1, and the slots of this run were made without",
    ),
    "long sample": (run(microbatch_tokens=32), "supports samples of at most 32"),
    "mesh of more devices": (run(mesh="fsdp=16"), "mesh: .*16.*8"),
    "mesh of more layers": (run(mesh="stage=3"), "the model has 2 layers"),
    "mesh of odd shards": (run(mesh="fsdp=3"), "mesh: "),
    "implementation": (run(implementation="mosaic"), "implementation: mosaic"),
    "attention": (run(attention="cudnn"), "attention: cudnn cannot run this"),
    "keep_bf16": (
        run(quantize_base="int8", keep_bf16=["query"]),
        "keep_bf16.*'query'",
    ),
    "no model": (run(model="/nowhere"), "/nowhere"),
    "kind of model": (model(lambda _: None, model_type="bert"), "bert"),
    "embeddings": (model(lambda _: None, vocab_size=200), "largest token id is 258"),
    "weights": (
        model(lambda m: (m / "model.safetensors").write_bytes(b"\1")),
        "model.safetensors",
    ),
    "output_dir of another run": (folder_of_another_run, "holds a run"),
    "output_dir": (folder_is_a_file, "file is a file. Choose another output_dir"),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.needs_devices(8)] * ("mesh" in kind))
        for kind in BAD_RUNS
    ],
)
def test_a_plan_refuses_what_training_refuses(config, tmp_path, kind):
    """In the same words."""
    change, message = BAD_RUNS[kind]
    bad = change(config, tmp_path).replace()
    if kind not in ("output_dir", "output_dir of another run"):
        bad = bad.replace(output_dir=str(tmp_path / "run"))
    with pytest.raises((JaxloraError, OSError), match=message) as of_plan:
        plan_run(bad)
    with pytest.raises(type(of_plan.value)) as of_training:
        Trainer(bad).train()
    assert str(of_training.value) == str(of_plan.value)


def test_a_plan_of_a_run_that_has_begun(config, tmp_path):
    """It is planned, and refused, as `--resume` would continue it."""
    begun = config.replace(output_dir=str(tmp_path / "run"))
    begun = job(steps=1)(begun, tmp_path)
    late = begun.jobs[0].replace(name="late")

    class AddsAJob(Callback):
        def on_step(self, event):
            if event.job == "job":
                self.trainer.add_job(late)

    Trainer(begun).train(callbacks=[AddsAJob()])
    planned = plan_run(begun)
    assert [job.name for job in planned.jobs] == ["job", "late"]
    for settings, message in (
        ({"steps": 1, "batch_size": 3}, r"batch_size is 8 .* and 3 now"),
        ({"steps": 2}, "'job' has finished its 1 step, and 2 are wanted"),
    ):
        other = job(**settings)(begun, tmp_path)
        with pytest.raises(JaxloraError, match=message) as of_plan:
            plan_run(other)
        with pytest.raises(JaxloraError) as of_training:
            Trainer(other).train(resume=True)
        assert str(of_training.value) == str(of_plan.value)


def test_a_plan_refuses_trackers_that_are_not_installed(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    bad = config.replace(output_dir=str(tmp_path / "run"), report_to=("wandb",))
    with pytest.raises(JaxloraError, match="needs the package wandb") as of_plan:
        plan_run(bad)
    with pytest.raises(JaxloraError) as of_training:
        Trainer(bad).train()
    assert str(of_training.value) == str(of_plan.value)
    plan_run(bad, machine=parse_machine("h100"))
