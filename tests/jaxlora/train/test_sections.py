"""Runs whose layers are divided among programs that alike layers share."""

import shutil

import pytest

from jaxlora import Trainer
from jaxlora.costs.gpus import parse_machine
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.run.folder import CHECKPOINTS
from jaxlora.train.saved.read_checkpoint import read_newest
from scripts.bench.mesh.cases import Case
from tests import tiny
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.runs import InterruptAt, outcome
from tests.jaxlora.train.test_preferences import write_pairs
from tests.jaxlora.train.test_reference import job

# The references are passes of their own, above all linears.
COMPARED = {
    "microbatch_tokens": 512,
    "max_concurrent_jobs": 2,
    "slot_targets": ["q_proj"],
}
MESHES = ("data=2", "fsdp=2", "tensor=2", "fsdp=2,tensor=2")
# The first layer has one slot more than the others, which are alike.
TARGETS = r".*down_proj|.*\.0\..*q_proj"
SLOTS = {"max_concurrent_jobs": 3, "slot_targets": TARGETS}


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> dict:
    """Settings of runs of a model with three layers, of which two are alike."""
    folder = tiny.write_layers(tmp_path_factory.mktemp("base") / "three", 3)
    return SLOTS | {"model": str(folder), "window_steps": 1}


@pytest.fixture(scope="module")
def mesh_jobs(mesh_jobs):
    """The last one adapts only the last layer."""
    last = {"target_modules": r".*\.2\..*down_proj"}
    return (*mesh_jobs[:3], mesh_jobs[3].replace(**last))


def test_sections_train_what_one_program_trains(meshes, mesh_jobs, deep):
    """Four jobs through three slots, with dropout, lengths of all kinds and clipping.

    There are eight programs of passes, of sections of two kinds.
    `tests/jaxlora/models/test_sections.py` has sections of two layers and of one.
    """
    one = meshes.once("fsdp=1", mesh_jobs, **deep)
    chain = meshes.once("fsdp=1", mesh_jobs, layers_per_program=1, **deep)
    assert_same_on_meshes(one, chain)
    more = chain.result.num_compilations - one.result.num_compilations
    # Both passes of two kinds of layers, and their evaluations, and the embedding.
    assert more == 2 * 2 + 2 + 2


@pytest.mark.grid
def test_a_deeper_model_compiles_as_many_programs(meshes, mesh_jobs, deep, tmp_path):
    counts = []
    for layers in (2, 6):
        folder = tiny.write_layers(tmp_path / f"of_{layers}", layers)
        settings = deep | {"model": str(folder), "layers_per_program": 1}
        settings["slot_targets"] = r".*down_proj"
        config = meshes.config("fsdp=1", mesh_jobs[1:2], **settings)
        trainer = Trainer(config)
        counts.append(trainer.layout.num_compilations())
    assert counts[0] == counts[1] > 7


def test_an_interrupted_run_continues_in_other_programs(
    meshes, mesh_jobs, deep, tmp_path
):
    config = meshes.config("fsdp=1", mesh_jobs, layers_per_program=1, **deep)
    trainer = Trainer(config)
    result = trainer.train(callbacks=[InterruptAt(1)])
    assert result.interrupted
    found = read_newest(result.output_dir / CHECKPOINTS)
    assert found.run.stream is not None and found.run.stream.repeated
    for size in (1, 3):
        folder = shutil.copytree(result.output_dir, tmp_path / f"by_{size}")
        own = config.replace(output_dir=str(folder), layers_per_program=size)
        resumed = outcome(own, resume=True)
        whole = meshes.once("fsdp=1", mesh_jobs, layers_per_program=1, **deep)
        assert_same_on_meshes(whole, resumed)
        if size == 1:
            assert resumed.bytes == whole.bytes


def test_references_and_baselines(meshes, tmp_path):
    """Of KTO with DoRA and a whole copy of the head, beside KTO with DoRA alone."""
    path = write_pairs(tmp_path / "pairs.jsonl", 9, seed=0)
    jobs = [
        job(name, "kto", path, {"reference_logps": "in_step"}, **own)
        for name, own in (("plain", {}), ("head", {"modules_to_save": ["lm_head"]}))
    ]
    jobs = [one.replace(trainable_token_indices=()) for one in jobs]
    one = meshes.train("fsdp=1", jobs, **COMPARED)
    chain = meshes.train("fsdp=1", jobs, layers_per_program=1, **COMPARED)
    assert_same_on_meshes(one, chain)


@pytest.mark.needs_devices(4)
@pytest.mark.parametrize(
    "mesh",
    ["data=2,tensor=2", *(pytest.param(m, marks=pytest.mark.grid) for m in MESHES)],
)
def test_sections_on_a_mesh(meshes, mesh_jobs, deep, mesh):
    one = meshes.once("fsdp=1", mesh_jobs, **deep)
    chain = meshes.once(mesh, mesh_jobs, layers_per_program=1, **deep)
    assert_same_on_meshes(one, chain)


@pytest.mark.parametrize(
    ("model", "mesh", "tokens", "layers"),
    [
        ("llama-3.1-8b", "data=1", 8192, 4),
        ("llama-3.1-8b", "data=1", 512, None),
        ("smollm2-135m", "data=1", 22528, 5),
        ("smollm2-135m", "data=1", 8192, None),
        ("llama-3.1-8b", "data=2", 8192, 4),
        ("llama-3.1-8b", "data=2", 1024, None),  # the host calls both devices
        ("llama-3.1-8b", "tensor=2", 8192, 4),
        ("llama-3.1-8b", "fsdp=2", 8192, None),  # gathers would wait
        ("llama-3.1-8b", "stage=2", 8192, None),
    ],
)
def test_auto_takes_one_program_if_the_device_would_wait(model, mesh, tokens, layers):
    case = Case(
        model=model,
        mesh=mesh,
        adapters=(1,),
        num_microbatches=1,
        microbatch_tokens=tokens,
        longest_tokens=512,
    )
    with planned_for(parse_machine("h200x2").planned(1.0)):
        assert case.plan().spec.options.layers_per_program == layers
