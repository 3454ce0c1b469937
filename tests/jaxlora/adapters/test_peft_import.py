"""PEFT folders of all kinds as adapters, and what is refused."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.errors import AdapterError

PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def peft_folder(make_adapter, export):
    """A folder on q_proj, with its tensors changed or its settings replaced."""

    def make(change=None, **config):
        folder = export(make_adapter(("q_proj",)))
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        if change is not None:
            weights = folder / "adapter_model.safetensors"
            tensors = change(safetensors.numpy.load_file(weights))
            safetensors.numpy.save_file(tensors, weights)
        return folder

    return make


def assert_same(found, wanted):
    assert list(found.modules) == list(wanted.modules)
    for name, weights in wanted.modules.items():
        np.testing.assert_array_equal(found.modules[name].a, weights.a)
        np.testing.assert_array_equal(found.modules[name].b, weights.b)
        assert found.modules[name].rank == weights.rank


def renamed(rename):
    return lambda tensors: {rename(name): array for name, array in tensors.items()}


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: name.removeprefix(PREFIX),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.removeprefix(PREFIX).replace(".weight", ".default.weight"),
    ],
)
def test_spellings_of_the_keys(peft_folder, make_adapter, linear_shapes, rename):
    found = import_peft(peft_folder(renamed(rename)), linear_shapes)
    assert_same(found, make_adapter(("q_proj",)))


@pytest.mark.parametrize("dtype", [np.float16, np.dtype(ml_dtypes.bfloat16)])
def test_short_floats(peft_folder, make_adapter, linear_shapes, dtype):
    folder = peft_folder(
        lambda tensors: {k: v.astype(dtype) for k, v in tensors.items()}
    )
    found = import_peft(folder, linear_shapes).modules[Q]
    wanted = make_adapter(("q_proj",)).modules[Q]
    assert (found.a.dtype, found.b.dtype) == (np.float32, np.float32)
    assert found.a.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(found.a, wanted.a.astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(found.b, wanted.b.astype(dtype).astype(np.float32))


def test_modules_come_in_the_models_order(export, make_adapter, linear_shapes):
    adapter = make_adapter(("q_proj", "k_proj", "up_proj"))
    found = import_peft(export(adapter), dict(reversed(linear_shapes.items())))
    assert list(found.modules) == list(reversed(adapter.modules))


def test_patterns_of_ones_own(peft_folder, linear_shapes):
    folder = peft_folder(
        r=16,
        rank_pattern={"q_proj": 4},
        lora_alpha=32,
        alpha_pattern={"layers.1.self_attn.q_proj": 2, ".*q_proj": 6},
    )
    adapter = import_peft(folder, linear_shapes)
    found = {name: (w.rank, w.lora_alpha) for name, w in adapter.modules.items()}
    assert found == {Q: (4, 6.0), Q.replace("0", "1"): (4, 2.0)}
    assert adapter.scaling(adapter.modules[Q]) == 1.5


def test_scaling_of_rslora(peft_folder, linear_shapes):
    adapter = import_peft(peft_folder(use_rslora=True, lora_dropout=0.2), linear_shapes)
    assert adapter.scaling(adapter.modules[Q]) == 8 / 2
    assert (adapter.use_rslora, adapter.dropout) == (True, 0.2)
    adapter = import_peft(peft_folder(), linear_shapes)
    assert adapter.scaling(adapter.modules[Q]) == 8 / 4


@pytest.mark.parametrize(
    "config",
    [
        {"bias": None, "modules_to_save": [], "layer_replication": None},
        {"eva_config": None, "loftq_config": {}, "peft_version": "0.18.0"},
        {"rank_pattern": None, "alpha_pattern": None, "lora_dropout": None},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}},
        {"init_lora_weights": False},
    ],
)
def test_settings_without_effect(peft_folder, make_adapter, linear_shapes, config):
    found = import_peft(peft_folder(**config), linear_shapes)
    assert_same(found, make_adapter(("q_proj",)))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"use_rslora": "false"}, "use_rslora='false'; wanted true or false"),
        ({"peft_type": "IA3"}, "peft_type='IA3'; only 'LORA' and 'VERA' are read"),
        ({"use_dora": True}, r"lacks .*q_proj\.lora_magnitude_vector"),
        ({"use_dora": "yes"}, "use_dora='yes'; wanted true or false"),
        ({"bias": "all"}, "bias='all'; only 'none' and 'lora_only' are supported"),
        ({"lora_bias": True}, "lora_bias=True, which is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"_config.json has a whole copy of lm_head"),
        ({"modules_to_save": ["norm"]}, r"modules_to_save=\['norm'\]; only whole copi"),
        ({"trainable_token_indices": [1]}, "the 1 trainable_token_indices of embed"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which also chan"),
        ({"r": 10**400}, r"r=1000.*\.\.\..*; wanted a whole number above 0"),
        ({"r": 10**9}, r"lora_A\.weight has shape \[4, 32\]; .* rank 1000000000 call"),
        ({"lora_alpha": 10**400}, r"lora_alpha=1000.*; wanted a number above 0"),
        (
            {"rank_pattern": {"(.|.)*!?\\d": 4}},
            r"adapter_config\.json: .* takes longer than 1 s to match the nam",
        ),
        ({"r": 0}, "r=0; wanted a whole number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan; wanted a number above 0"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0; wanted a number from 0 to below 1"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj=0; wanted a whole number above 0"),
        (
            {"rank_pattern": {"(": 4}},
            r"rank_pattern key '\(' is not a valid regular expr",
        ),
        ({"alpha_pattern": [1]}, r"alpha_pattern=\[1\]; wanted an object"),
        ({"r": 8}, r"lora_A\.weight has shape \[4, 32\]; .* rank 8 call for \[8, 32\]"),
    ],
)
def test_settings_that_are_refused(peft_folder, linear_shapes, config, match):
    with pytest.raises(AdapterError, match=match):
        import_peft(peft_folder(**config), linear_shapes)


def without(name):
    return lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(name)}


def with_extra(name, shape=(4, 32), dtype=np.float32, value=0):
    return lambda tensors: {**tensors, name: np.full(shape, value, dtype)}


def holding(value, dtype=np.float16):
    return with_extra(f"{PREFIX}{Q}.lora_A.weight", dtype=dtype, value=value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            renamed(lambda name: name.replace("layers", "h")),
            r"adapts model\.h\.0\.self_attn\.q_proj, .* adapter of another model\?",
        ),
        (without("0.self_attn.q_proj.lora_B.weight"), rf"lacks {Q}\.lora_B\.weight"),
        (without("weight"), "holds no weights"),
        (
            with_extra(f"{PREFIX}{Q}.lora_A.weight", (32, 4)),
            r"lora_A\.weight has shape \[32, 4\]; .* call for \[4, 32\]",
        ),
        (
            with_extra(f"{PREFIX}{Q}.lora_B.weight", (16, 4)),
            r"lora_B\.weight has shape \[16, 4\]; .* call for \[32, 4\]",
        ),
        (
            with_extra(f"{PREFIX}{Q}.lora_magnitude_vector"),
            "lora_magnitude_vector, but its adapter_config.json does not set use_dora",
        ),
        (
            with_extra(f"{PREFIX}model.embed_tokens.lora_embedding_A"),
            r"has embed_tokens\.lora_embedding_A alone",
        ),
        (
            with_extra(f"{PREFIX}{Q}.lora_A.default.weight"),
            r"holds .*q_proj\.lora_A.*weight under two spellings of its name",
        ),
        (with_extra("weight"), "holds weight, which is no LoRA weight"),
        (holding(np.nan), r"safetensors: .*q_proj\.lora_A\.weight holds NaN, so noth"),
        (holding(1e300, np.float64), r"1e\+300, which overflows float32"),
        (
            with_extra(f"{PREFIX}{Q}.lora_A.weight", dtype=np.int8),
            "has dtype I8; wanted one of",
        ),
    ],
)
def test_weights_that_are_refused(peft_folder, linear_shapes, change, match):
    with pytest.raises(AdapterError, match=match):
        import_peft(peft_folder(change), linear_shapes)


def with_settings(text):
    return lambda folder: (folder / "adapter_config.json").write_text(text)


def cut_to(size):
    def cut(folder):
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return cut


def as_pickle(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (shutil.rmtree, r"_config\.json: there is no such file, so .* is no PEFT fold"),
        (with_settings("{"), "cannot be read as JSON"),
        (with_settings("[]"), "peft_type=None"),
        (as_pickle, r"holds only adapter_model\.bin\. Loading a pickle can run any co"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "there is no such file"),
        *((cut_to(size), "damaged or incomplete") for size in (0, 100, -1)),
    ],
)
def test_damaged_folders(peft_folder, linear_shapes, damage, match):
    folder = peft_folder()
    damage(folder)
    with pytest.raises(AdapterError, match=match):
        import_peft(folder, linear_shapes)
