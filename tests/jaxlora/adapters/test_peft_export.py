"""Adapters as PEFT folders: names, layout, settings, and what a failure leaves."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.targets import pattern_value
from jaxlora.errors import AdapterError

PREFIX = "base_model.model."


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "adapter_model.safetensors")


def test_names_and_layout_are_those_of_peft(make_adapter, export, linear_shapes):
    adapter = make_adapter()
    folder = export(adapter)
    tensors = tensors_of(folder)
    assert set(tensors) == {
        f"{PREFIX}{name}.lora_{part}.weight"
        for name in adapter.modules
        for part in "AB"
    }
    for name, weights in adapter.modules.items():
        k, n = linear_shapes[name]
        a, b = (tensors[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
        assert (a.shape, b.shape) == ((4, k), (n, 4))
        assert (a.dtype, b.dtype) == (np.float32, np.float32)
        np.testing.assert_array_equal(a, weights.a.T)
        np.testing.assert_array_equal(b, weights.b.T)
        # PEFT adds B A to a weight that is N K.
        np.testing.assert_allclose(b @ a, (weights.a @ weights.b).T, rtol=1e-5)
    path = folder / "adapter_model.safetensors"
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert {p.name for p in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_settings(make_adapter, tmp_path, linear_shapes):
    folder = export_peft(
        make_adapter(dropout=0.05, use_rslora=True),
        tmp_path / "adapter",
        base_model="nobody/tiny",
        linear_names=list(linear_shapes),
        revision="a" * 40,
    )
    assert config_of(folder) == {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "nobody/tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "revision": "a" * 40,
        "target_modules": ["down_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": True,
    }


@pytest.mark.parametrize("lora_alpha", [16.0, 1.5])
def test_alpha_is_an_integer_where_it_is_whole(make_adapter, export, lora_alpha):
    """As vLLM and older versions of peft require."""
    found = config_of(export(make_adapter(lora_alpha=lora_alpha)))["lora_alpha"]
    assert found == lora_alpha and type(found) is (int if found == 16 else float)


@pytest.mark.parametrize(
    ("suffixes", "targets"),
    [
        (("q_proj", "v_proj"), ["q_proj", "v_proj"]),
        (("mlp.up_proj",), ["up_proj"]),
        (("1.self_attn.q_proj",), ["model.layers.1.self_attn.q_proj"]),
        (
            ("0.self_attn.q_proj", "o_proj"),
            [
                "model.layers.0.self_attn.o_proj",
                "model.layers.0.self_attn.q_proj",
                "model.layers.1.self_attn.o_proj",
            ],
        ),
    ],
)
def test_targets_name_exactly_the_modules(
    make_adapter, export, linear_shapes, suffixes, targets
):
    adapter = make_adapter(suffixes)
    found = config_of(export(adapter))["target_modules"]
    assert found == targets
    chosen = {
        name
        for name in linear_shapes
        if any(name == t or name.endswith(f".{t}") for t in found)
    }
    assert chosen == set(adapter.modules)


def test_patterns_give_each_module_its_rank_and_alpha(make_adapter, export):
    adapter = make_adapter(
        ("q_proj", "k_proj", "down_proj"),
        rank=lambda name: 2 if name == "model.layers.0.self_attn.q_proj" else 4,
        lora_alpha=lambda name: 3.5 if "1.mlp" in name else 16.0,
    )
    folder = export(adapter)
    config = config_of(folder)
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    # A pattern is a regular expression: a dot must mean a dot.
    assert config["rank_pattern"] == {r"model\.layers\.0\.self_attn\.q_proj": 2}
    assert config["alpha_pattern"] == {r"model\.layers\.1\.mlp\.down_proj": 3.5}
    for name, weights in adapter.modules.items():
        assert pattern_value(config["rank_pattern"], name, config["r"]) == weights.rank
        alpha = pattern_value(config["alpha_pattern"], name, config["lora_alpha"])
        assert alpha == weights.lora_alpha
    tensors = tensors_of(folder)
    a = tensors[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert a.shape == (2, 32)


def test_a_pattern_does_not_reach_a_longer_name():
    pattern = {r"model\.layers\.1\.mlp\.up_proj": 2}
    assert pattern_value(pattern, "model.layers.1.mlp.up_proj", 4) == 2
    assert pattern_value(pattern, "model.layers.11.mlp.up_proj", 4) == 4
    assert pattern_value(pattern, "model.layers.1.mlp.up_proj.x", 4) == 4


def test_an_older_folder_is_replaced(make_adapter, export, linear_shapes):
    folder = export(make_adapter(seed=1))
    adapter = make_adapter(("v_proj",), seed=2)
    assert export(adapter) == folder
    assert import_peft(folder, linear_shapes).modules.keys() == adapter.modules.keys()


def test_a_folder_with_other_files_is_not_replaced(make_adapter, export):
    folder = export(make_adapter(seed=1))
    (folder / "README.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(AdapterError, match="holds files that jaxlora did not write"):
        export(make_adapter(seed=2))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_failure_keeps_the_older_folder(make_adapter, export, monkeypatch):
    folder = export(make_adapter(seed=1))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export(make_adapter(seed=2))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_vllm_does_not_read_is_told(make_adapter, export, caplog):
    """peft scales each module by its own rank and alpha; vLLM all alike."""
    rank = lambda name: 2 if name.endswith("q_proj") else 4
    for lora_alpha, told in ((rank, False), (8.0, True)):
        caplog.clear()
        export(make_adapter(rank=rank, lora_alpha=lora_alpha), str(told))
        assert ("merge it for vLLM" in caplog.text) == told
