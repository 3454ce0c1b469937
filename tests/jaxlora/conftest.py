"""The tiny model, a way to change it, and adapters for it."""

import json

import numpy as np
import pytest
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.models.registry import model_config
from jaxlora.models.structure import linear_names, linear_path, tensor_specs
from jaxlora.modules.trained_tensors import tensors_with
from jaxlora.train.execute.run_programs import RunPrograms
from tests import tiny
from tests.jaxlora.memory_formula import estimated_by_formula


@pytest.fixture
def compiled_when_called(monkeypatch):
    """Programs are not compiled ahead: for trainers that are looked at, not trained."""
    empty = RunPrograms(passes=(), others=())
    monkeypatch.setattr(RunPrograms, "start", lambda *_, **__: empty)
    monkeypatch.setattr("jaxlora.plan.stages.measured_footprint", lambda *_: None)


@pytest.fixture
def memory_by_formula():
    """Memory is not estimated from traces; see memory_formula.py."""
    with estimated_by_formula():
        yield


@pytest.fixture
def folder(tmp_path):
    """A whole checkpoint of the tiny model."""
    return tiny.write_model(tmp_path / "model")


@pytest.fixture
def rewrite(folder):
    """Replaces the folder's weights, or keys of its config.json."""

    def change(weights=None, **config):
        if weights is not None:
            safetensors.numpy.save_file(weights, folder / "model.safetensors")
        old = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**old, **config}))
        return folder

    return change


@pytest.fixture
def shard(folder):
    """Splits the folder's weights over two files with an index; returns the index."""

    def split(**weight_map):
        weights = tiny.random_weights()
        names = list(weights)
        parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
        index = {}
        for file, part in parts.items():
            safetensors.numpy.save_file({n: weights[n] for n in part}, folder / file)
            index.update(dict.fromkeys(part, file))
        (folder / "model.safetensors").unlink()
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {**index, **weight_map}}))
        return path

    return split


@pytest.fixture(scope="session")
def linear_shapes():
    """(K, N) of the tiny model's linears, by module name."""
    config = model_config(tiny.CONFIG)
    shapes = {spec.path: spec.shape for spec in tensor_specs(config)}
    return {n: shapes[f"{linear_path(n)}.kernel"] for n in linear_names(config)}


@pytest.fixture(scope="session")
def make_adapter(linear_shapes):
    """An adapter of random A and B on modules with the given suffixes."""

    def make(
        suffixes=("q_proj", "down_proj"), rank=4, lora_alpha=8.0, seed=0, **options
    ):
        rng = np.random.default_rng(seed)
        modules = {}
        for name, (k, n) in linear_shapes.items():
            if not name.endswith(tuple(suffixes)):
                continue
            r = rank(name) if callable(rank) else rank
            alpha = lora_alpha(name) if callable(lora_alpha) else lora_alpha
            tensors = {
                tensor.name: rng.normal(size=tensor.shape(k, n, r)).astype(np.float32)
                for tensor in tensors_with(lambda setting: False)
            }
            modules[name] = LoraWeights(tensors=tensors, rank=r, lora_alpha=alpha)
        return Adapter(modules=modules, **options)

    return make


@pytest.fixture
def export(tmp_path, linear_shapes):
    """Writes an adapter as a PEFT folder."""

    def write(adapter, name="adapter"):
        return export_peft(
            adapter,
            tmp_path / name,
            base_model="nobody/tiny",
            linear_names=list(linear_shapes),
        )

    return write
