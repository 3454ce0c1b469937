"""Runs that cannot be are refused before anything is written."""

import json
import pathlib

import pytest

from jaxlora import Trainer, load_run
from jaxlora.errors import ConfigError
from tests.jaxlora.train.runs import contents, two_slots

pytestmark = pytest.mark.needs_devices(8)

ROWS = "trainable_token_indices"
WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("mesh", "job", "settings", "message"),
    [
        ("fsdp=16", {}, {}, "mesh: .* needs 16 devices and this machine has 8"),
        ("data=2,stage=3,fsdp=2", {}, {}, "= 12 devices and this machine has 8"),
        ("stage=4", {}, {}, "needs a layer for each stage, and the model has 2"),
        ("fsdp=5", {}, {}, "mesh: .* cannot be divided among fsdp=5 devices"),
        ("tensor=3", {}, {}, "tensor=3 does not divide num_attention_heads=4"),
        (
            "tensor=2",
            {},
            {"block_tokens": 25, "microbatch_tokens": 125},
            "tensor=2 does not divide block_tokens=25",
        ),
        ("tensor=2", WHOLE, {}, "has modules_to_save, which meshes with the"),
        ("stage=2", {ROWS: [100]}, {}, "Set a mesh of one stage, not stage=2"),
        ("stage=2", {}, {"layers_per_program": 1}, "stages of mesh stage=2 are progra"),
        (
            "fsdp=1",
            {ROWS: [67, 73]},
            {"layers_per_program": 1},
            "layers_per_program: 1 is not supported, as slots train rows of an embed",
        ),
        ("fsdp=1", {ROWS: {"lm_head": [36]}}, {}, "tied to its embedding, whose rows"),
        ("fsdp=1", {ROWS: [288]}, {}, "has 288, and the base model has 288 tokens"),
        (
            "fsdp=1",
            {ROWS: [1], "optimizer": "muon"},
            {},
            "cannot be combined with muon",
        ),
        ("fsdp=1", WHOLE | {"optimizer": "muon"}, {}, "cannot be combined with muon"),
        (
            "fsdp=1",
            {ROWS: [5], "modules_to_save": ["lm_head"]},
            {},
            "modules_to_save copies lm_head alone. Keep one of the two",
        ),
        ("fsdp=1", WHOLE | {"objective": "reward"}, {}, "lm_head, which objective rew"),
        ("fsdp=1", {"rank": 8}, {"slot_rank": 4}, "has rank 8, and the slots .* Lower"),
        ("fsdp=1", {}, {"microbatch_tokens": 32}, "samples of at most 32. Raise mic"),
    ],
)
def test_a_run_that_is_refused(meshes, jobs, mesh, job, settings, message):
    """A mesh also if the weights were loaded before."""
    config = meshes.config(mesh, [jobs[2].replace(**job)], **settings)
    for model in (None,) if job else (None, meshes.model):
        with pytest.raises(ConfigError, match=message):
            Trainer(config, model)
    assert not pathlib.Path(config.output_dir).exists()


def test_too_few_microbatches_in_flight(meshes, mesh_jobs, tmp_path):
    config = meshes.config("stage=2", mesh_jobs, pipeline_microbatches=2)
    settings = config.model_dump(mode="json") | {"pipeline_microbatches": 1}
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps(settings))
    message = "pipeline_microbatches=1 is less than the 2 stages of mesh stage=2"
    with pytest.raises(ConfigError, match=message):
        load_run(run_file)
    assert not pathlib.Path(config.output_dir).exists()


def test_a_refused_resume_leaves_the_run_as_it_is(meshes, mesh_jobs):
    done = meshes.once("stage=2", mesh_jobs)
    folder = done.result.output_dir
    before = contents(folder)
    config = meshes.config("stage=4", mesh_jobs, output_dir=str(folder))
    with pytest.raises(ConfigError, match="stage=4 needs a layer for each stage"):
        Trainer(config).train(resume=True)
    assert contents(folder) == before


@pytest.mark.usefixtures("compiled_when_called")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "job1"}, "a job named 'job1' is in this run already"),
        ({"rank": 9}, "rank 9, and the slots .* made for 8"),
        ({"target_modules": ["up_proj"]}, "up_proj, which has no slots in this run"),
        ({"dropout": 0.1}, r"dropout 0\.1, and the slots .* made without that"),
        ({"optimizer": "lion"}, "optimizer lion.* made for adamw"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save lm_head, and the slots"),
    ],
)
def test_a_job_that_cannot_join(model, jobs, tmp_path, changes, message):
    slots = {"slot_dropout": False, "implementation": "xla"}
    trainer = Trainer(two_slots(model, tmp_path / "run", jobs[1:2], **slots), model)
    late = jobs[1].replace(name="late")
    with pytest.raises(ConfigError, match=message):
        trainer.add_job(late.replace(**changes))
    with pytest.raises(ConfigError, match="there is no job 'x'; there are: job1"):
        trainer.stop_job("x")
    assert len(trainer.jobs) == 1
