"""Adapters as peft saves them: the same ranks, scaling, logits and bytes."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import export_peft, import_peft, load_model
from jaxlora.models.structure import linear_shapes
from tests.jaxlora.adapters.forward import adapter_logits
from tests.oracle import relative_error

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
FOLDERS = sorted(path for path in (GOLDEN / "peft_folders").iterdir())
NAMES = [path.name for path in FOLDERS]


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN / "peft_run" / "base", dtype="float32")


def test_they_mean_what_peft_means(model):
    """And without B, the base."""
    adapters = [import_peft(f, linear_shapes(model.config)) for f in FOLDERS]
    golden = [np.load(folder / "wanted.npz") for folder in FOLDERS]
    for folder, adapter in zip(FOLDERS, adapters, strict=True):
        wanted = json.loads((folder / "wanted.json").read_text())
        assert adapter.modules.keys() == wanted.keys()
        for name, weights in adapter.modules.items():
            actual = [weights.rank, adapter.scaling(weights)]
            assert actual == pytest.approx(wanted[name])
    for is_whole in (True, False):
        tokens = [one["tokens"] for one in golden]
        found = adapter_logits(model, adapters, tokens)
        for name, logits, one in zip(NAMES, found, golden, strict=True):
            error = relative_error(logits, one["logits"])
            assert error < 1e-5 if is_whole else error > 1e-2, name
        for weights in (w for a in adapters for w in a.modules.values()):
            weights.b[...] = 0


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_round_trip_keeps_every_byte(model, folder, tmp_path):
    shapes = linear_shapes(model.config)
    adapter = import_peft(folder, shapes)
    export_peft(adapter, tmp_path / "out", base_model="b", linear_names=list(shapes))
    before, after = (
        safetensors.numpy.load_file(path / "adapter_model.safetensors")
        for path in (folder, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert array.astype(np.float32).tobytes() == after[key].tobytes()
    again = import_peft(tmp_path / "out", shapes)
    assert (again.dropout, again.use_rslora) == (adapter.dropout, adapter.use_rslora)
    for name, weights in adapter.modules.items():
        assert again.scaling(again.modules[name]) == adapter.scaling(weights)
        assert again.modules[name].rank == weights.rank
    export_peft(again, tmp_path / "again", base_model="b", linear_names=list(shapes))
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
