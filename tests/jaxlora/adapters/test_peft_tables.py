"""PEFT folders that hold the embedding or the head give the logits of peft.

The golden files are those of tests/golden/make_table_folders.py.
"""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import load_model
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.files.peft_tables import BaseTables
from jaxlora.errors import AdapterError
from jaxlora.generate.batch import Batch, Request
from jaxlora.generate.loaded import load_decoder
from jaxlora.models.structure import linear_shapes
from tests.golden_base import tied
from tests.jaxlora.adapters.forward import base_logits
from tests.oracle import relative_error

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
BASE, FOLDERS = GOLDEN / "peft_run" / "base", GOLDEN / "table_folders"
NAMES = sorted(path.name for path in FOLDERS.iterdir() if path.is_dir())
WANTED = np.load(FOLDERS / "wanted.npz")
MORE = 5  # tokens of the resized base
TOGETHER = "tied_together", "tied_copies_together"  # as the modules are trained


def resized(base: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes a base with more tokens; the folders hold their rows."""
    config = json.loads((base / "config.json").read_text())
    config["vocab_size"] += MORE
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        more = np.ones((MORE, weights[name].shape[1]), np.float32)
        weights[name] = np.concatenate([weights[name], more])
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[tuple[bool, bool], pathlib.Path]:
    """The bases, by whether they are tied and resized."""
    make = tmp_path_factory.mktemp
    small = {False: BASE, True: tied(BASE, make("tied"))}
    large = {is_tied: resized(base, make("more")) for is_tied, base in small.items()}
    return {(t, False): small[t] for t in small} | {(t, True): large[t] for t in large}


def kind(name: str) -> tuple[bool, bool]:
    return name.startswith("tied"), name.endswith("resized")


@pytest.mark.parametrize("name", NAMES)
def test_merged_models_give_the_logits_of_peft(bases, name, tmp_path):
    """Merged into the base as it was, and into the resized one, if peft resized it."""
    is_tied, is_resized = kind(name)
    for size in {is_resized, False}:
        base = bases[is_tied, size]
        out = merge_adapter(base, FOLDERS / name, tmp_path / str(size))
        model = load_model(out, dtype="float32")
        # A tied head that was resized, or not trained, stays tied.
        stays = name in ("tied_resized", "tied_rows_resized", *TOGETHER)
        assert model.config.tie_embeddings == (is_tied and stays)
        found = base_logits(model, WANTED[f"{name}.tokens"])
        assert relative_error(found, WANTED[f"{name}.logits"]) < 2e-5, size


@pytest.mark.parametrize("which", [(False, False), (True, True)], ids=str)
def test_generation_has_the_logits_of_peft(bases, which):
    """All adapters of a base in one batch."""
    model = load_model(bases[which], dtype="float32")
    tables = BaseTables(model.folder, model.config.tie_embeddings)
    shapes = linear_shapes(model.config)
    names = [name for name in NAMES if kind(name) == which]
    adapters = [import_peft(FOLDERS / name, shapes, base=tables) for name in names]
    requests = [
        Request(token_ids=WANTED[f"{name}.tokens"], slot=slot, seed=0, max_new_tokens=1)
        for slot, name in enumerate(names, 1)
    ]
    decoder = load_decoder(model, adapters)
    batch = Batch.of(decoder, requests)
    for name, found in zip(names, batch.logits, strict=True):
        assert relative_error(found, WANTED[f"{name}.logits"][-1]) < 2e-5, name


def test_weights_that_the_base_has_are_left_out(bases):
    """`save_embedding_layers=True` saves them although nothing was resized."""
    shapes = linear_shapes(load_model(BASE, dtype="float32").config)
    tables = BaseTables(BASE, is_tied=False)
    assert not import_peft(FOLDERS / "forced", shapes, base=tables).outside
    both = {"whole_embedding", "whole_head"}
    assert import_peft(FOLDERS / "forced", shapes).outside.keys() == both


def test_what_the_cures_name(bases, tmp_path):
    """The base of another size, and LoRA on a table where a job would train it."""
    model = load_model(BASE, dtype="float32")
    shapes = linear_shapes(model.config)
    adapter = import_peft(FOLDERS / "resized", shapes)
    with pytest.raises(AdapterError, match=r"has 97\. Use the base .*jaxlora merge"):
        load_decoder(model, [adapter])
    with pytest.raises(AdapterError, match=r"has LoRA on lm_head.*jaxlora merge"):
        import_peft(FOLDERS / "head", shapes)
    with pytest.raises(AdapterError, match="Use the base whose vocabulary has the si"):
        merge_adapter(bases[False, True], FOLDERS / "bare", tmp_path / "out")
