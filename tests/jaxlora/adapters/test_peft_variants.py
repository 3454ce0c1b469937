"""Variants of LoRA as peft saves them: the same logits, merged or not, and bytes.

The golden files are those of tests/golden/make_variant_folders.py.
"""

import json
import pathlib
import shutil

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import (
    DecoderOptions,
    DecoderSpec,
    LoraJob,
    SlotShape,
    export_peft,
    import_peft,
    load_model,
)
from jaxlora.adapters.files.export_record import check_replaceable
from jaxlora.adapters.files.gguf_export import export_gguf, gguf_name, rows_in_gguf
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.targets import resolve_targets
from jaxlora.errors import AdapterError
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.train.execute.step import CompiledSteps
from tests.golden_base import biased, tied
from tests.jaxlora.adapters.forward import adapter_logits, base_logits
from tests.oracle import relative_error

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
BASE = GOLDEN / "peft_run" / "base"
BIASED = "bias00", "bias01"  # with trained biases, which are merged only
FOLDERS = sorted(
    path
    for path in (GOLDEN / "variant_folders").iterdir()
    if path.is_dir() and path.name not in BIASED
)
WANTED = np.load(GOLDEN / "variant_folders" / "wanted.npz")
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def model():
    return load_model(BASE, dtype="float32")


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The base models of the golden adapters, by the word that `base_of` returns."""
    return {
        "plain": BASE,
        "tied": tied(BASE, tmp_path_factory.mktemp("tied")),
        "biased": biased(BASE, tmp_path_factory.mktemp("biased")),
    }


def base_of(name: str) -> str:
    """The base model of a golden adapter."""
    if name in ("rows01", "rows03", "whole01", "whole03", "whole05"):
        return "tied"
    return "biased" if name in BIASED else "plain"


@pytest.fixture(scope="module")
def adapters(model):
    shapes = linear_shapes(model.config)
    return {folder.name: import_peft(folder, shapes) for folder in FOLDERS}


def test_all_mean_what_peft_means(bases, adapters):
    """In one microbatch, with different ranks, layers and linears."""
    assert len(adapters) >= 40
    found = {}
    for word in ("plain", "tied"):
        folder = bases[word]
        own = {name: a for name, a in adapters.items() if base_of(name) == word}
        tokens = [WANTED[f"{name}.tokens"] for name in own]
        base = load_model(folder, dtype="float32")
        logits = adapter_logits(base, list(own.values()), tokens)
        found |= dict(zip(own, logits, strict=True))
    assert found.keys() == adapters.keys()
    for name, logits in found.items():
        assert relative_error(logits, WANTED[f"{name}.logits"]) < 2e-5, name


def test_a_slot_forgets_the_matrices_of_vera(model, adapters):
    """The next job of the slot may have LoRA, and no matrices of its own."""
    adapter = next(a for a in adapters.values() if a.vera is not None)
    slots = SlotShape(num_slots=2, rank=8, settings=("use_vera",))
    paths = tuple(sorted(map(linear_path, adapter.modules)))
    options = DecoderOptions(dtype=model.dtype, max_segment_tokens=NUM_TOKENS)
    spec = DecoderSpec(config=model.config, options=options, slots=slots, adapted=paths)
    table = SlotTable(spec, CompiledSteps(spec).write_slot)
    table.load(1, adapter, "adamw")
    found = jax.device_get(table.settings.vera)
    np.testing.assert_array_equal(found.is_used, [[False, True]])
    rank = adapter.vera.rank
    np.testing.assert_array_equal(found.a[0, 1, :, :rank], adapter.vera.a)
    np.testing.assert_array_equal(found.b[0, 1, :rank], adapter.vera.b)
    table.clear(1)
    assert not any(
        x.any() for x in jax.tree.leaves(jax.device_get(table.settings.vera))
    )


def test_the_same_settings_select_the_same_linears(model, adapters):
    """Ranks, alphas and layers by PEFT's names, of PEFT's own files."""
    same = "lora_alpha", "use_rslora", "target_modules", "rank_pattern"
    same = *same, "alpha_pattern", "layers_to_transform", "r", "use_dora"
    same = *same, "projection_prng_key", "d_initial", "trainable_token_indices"
    same = *same, "modules_to_save"
    num_with_layers = 0
    for name, adapter in adapters.items():
        path = GOLDEN / "variant_folders" / name / "adapter_config.json"
        config = json.loads(path.read_text())
        given = {key: config[key] for key in same if config.get(key) is not None}
        given["use_vera"] = config["peft_type"] == "VERA"
        num_with_layers += "layers_to_transform" in given
        job = LoraJob(name="a", data={"path": "x"}, **given)
        chosen = resolve_targets(job, list(linear_shapes(model.config)))
        assert {n: (m.rank, m.scaling) for n, m in chosen.items()} == {
            n: (w.rank, adapter.scaling(w)) for n, w in adapter.modules.items()
        }
    assert num_with_layers > 5


def test_merged_models_equal_those_of_peft(model, bases, adapters, tmp_path):
    merged, names = {}, [n for n in adapters if n.endswith(("00", "01"))]
    names += BIASED
    for name in names:
        folder = GOLDEN / "variant_folders" / name
        folder = merge_adapter(bases[base_of(name)], folder, tmp_path / name)
        merged[name] = load_model(folder, dtype="float32")
    for name in names:
        found = base_logits(merged[name], WANTED[f"{name}.tokens"])
        assert relative_error(found, WANTED[f"{name}.merged"]) < 2e-5, name
        assert relative_error(found, WANTED[f"{name}.logits"]) < 2e-5, name


def test_trained_biases_are_merged_only(model, bases, tmp_path):
    folder, shapes = GOLDEN / "variant_folders" / BIASED[0], linear_shapes(model.config)
    with pytest.raises(AdapterError, match=r"trained biases .* Merge it into its base"):
        import_peft(folder, shapes)
    with pytest.raises(AdapterError, match=r"_proj.bias, and this linear .* no bias"):
        merge_adapter(bases["plain"], folder, tmp_path / "merged")
    shutil.copytree(folder, tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": "none"}))
    with pytest.raises(AdapterError, match=r"base_layer.bias, but its .* lora_only"):
        import_peft(tmp_path / "a", shapes)


def test_round_trips_keep_every_byte(model, adapters, tmp_path):
    shapes = linear_shapes(model.config)
    for name, adapter in adapters.items():
        export_peft(adapter, tmp_path / name, base_model="b", linear_names=list(shapes))
        before, after = (
            safetensors.numpy.load_file(folder / name / "adapter_model.safetensors")
            for folder in (GOLDEN / "variant_folders", tmp_path)
        )
        assert before.keys() == after.keys()
        for key, array in before.items():
            assert array.tobytes() == after[key].tobytes()
        check_replaceable(tmp_path / name)
        again = import_peft(tmp_path / name, shapes)
        assert (again.vera is None) == (adapter.vera is None)
        if adapter.vera is not None:
            assert again.vera.key == adapter.vera.key
            np.testing.assert_array_equal(again.vera.b, adapter.vera.b)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"projection_prng_key": -1}, "projection_prng_key=-1; wanted a whole number"),
        ({"projection_prng_key": None}, "projection_prng_key=None; wanted a whole"),
        (
            {"projection_prng_key": 5},
            "vera_A has other values than projection_prng",
        ),
        ({"save_projection": "no"}, "save_projection='no'; wanted true or false"),
        ({"r": 3}, r"vera_lambda_d has shape .* rank 3 call for \[3\]"),
        ({"peft_type": "LORA", "lora_alpha": 1}, "d_initial=1.0, which is not supp"),
        ({"vera_dropout": 1}, "lora_dropout=1; wanted a number"),
        ({"bias": "vera_only"}, "bias='vera_only'"),
    ],
)
def test_damaged_folders_of_vera(model, adapters, tmp_path, change, match):
    saved = [n for n, a in adapters.items() if a.vera is not None and a.vera.is_saved]
    shutil.copytree(GOLDEN / "variant_folders" / saved[0], tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(AdapterError, match=match):
        import_peft(tmp_path / "a", linear_shapes(model.config))


def test_gguf_holds_vera_as_lora_and_refuses_dora(model, adapters, tmp_path):
    folder = GOLDEN / "variant_folders"
    with pytest.raises(AdapterError, match=r"has use_dora, .* Merge it into its base"):
        export_gguf(folder / "dora00", tmp_path / "a.gguf", base=str(BASE))
    out = export_gguf(folder / "vera00", tmp_path / "b.gguf", base=str(BASE))
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(out).tensors}
    lora = adapters["vera00"].as_lora(linear_shapes(model.config))
    assert len(tensors) == 2 * len(lora.modules) > 2
    for name, weights in lora.modules.items():
        found = gguf_name(name)
        np.testing.assert_array_equal(tensors[f"{found}.lora_a"], weights.a.T)
        b = rows_in_gguf(weights.b.T, name, model.config)
        np.testing.assert_array_equal(tensors[f"{found}.lora_b"], b)
