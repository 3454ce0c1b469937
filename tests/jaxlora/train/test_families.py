"""Training on tiny models of other families than Llama, whose layers differ."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.models.registry import model_config
from jaxlora.models.structure import tensor_specs
from tests import tiny
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.test_contracts import assert_same_training

MODELS = pathlib.Path(__file__).parents[2] / "golden" / "models"
FAMILIES = (
    "gemma2",
    "smollm3",
    "granite",
    "olmo3",
    "phi4_mini",
    "qwen3_moe",
    "ministral3",
    "glm4",
    "granite4",
)
MESHED = ("smollm3", "qwen3_moe", "ministral3")


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> pathlib.Path:
    golden = json.loads((MODELS / request.param / "config.json").read_text())
    config = golden | {"vocab_size": tiny.CONFIG["vocab_size"]}
    folder = tmp_path_factory.mktemp("base") / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    weights = {}
    for spec in tensor_specs(model_config(config)):
        size = 0.2 if len(spec.hf_shape) == 1 else spec.hf_shape[1] ** -0.5
        noise = size * rng.normal(size=spec.hf_shape)
        weights[spec.hf_name] = noise.astype(np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder) -> FrozenModel:
    """Replaces the tiny Llama of the other tests."""
    return load_model(folder, dtype="float32")


@pytest.mark.grid
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_alone_equals_together(train, jobs):
    pair = [job.replace(target_modules="all-linear") for job in jobs[:2]]
    together = train(pair)
    alone = train(pair[1:], max_concurrent_jobs=2, slot_dropout=True)  # same programs
    assert_same_training(together, alone, [pair[1].name])
    assert together.result.num_compilations <= 7
    assert np.isfinite(together.losses[pair[1].name]).all()


@pytest.mark.grid
@pytest.mark.needs_devices(4)
@pytest.mark.parametrize("folder", MESHED, indirect=True)
def test_meshes_and_sections_train_what_one_device_trains(meshes, small_jobs, folder):
    pair = [job.replace(target_modules="all-linear") for job in small_jobs[:2]]
    given = {"model": str(folder), "slot_targets": "all-linear"}
    one = meshes.train("fsdp=1", pair, **given)
    sections = meshes.train("fsdp=1", pair, layers_per_program=1, **given)
    assert_same_on_meshes(one, sections)
    meshes_of = ["stage=2,fsdp=2"]
    if one.trainer.model.config.family.undivided is None:
        meshes_of.append("tensor=2")
    for mesh in meshes_of:
        assert_same_on_meshes(one, meshes.train(mesh, pair, **given))
