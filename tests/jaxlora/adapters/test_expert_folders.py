"""LoRA on experts in PEFT's folders: both layouts, as peft 0.21 and 0.18 have them."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import DataConfig, LoraJob, export_peft, import_peft, load_model
from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.errors import AdapterError, ConfigError
from jaxlora.models.registry import model_config
from jaxlora.models.structure import linear_shapes
from jaxlora.plan.job.chosen_modules import choose_modules
from tests.jaxlora.adapters.forward import adapter_logits
from tests.oracle import relative_error

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
GPT_OSS = GOLDEN / "expert_folders" / "gpt_oss"
FOLDERS = sorted(path for path in GPT_OSS.parent.iterdir() if path != GPT_OSS)
NAMES = [path.name for path in FOLDERS]
LAYOUTS = ("fused", "per_expert")


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN / "models" / "qwen3_moe", dtype="float32")


@pytest.fixture(scope="module")
def shapes(model):
    return linear_shapes(model.config)


def wanted(folder) -> dict[str, np.ndarray]:
    with np.load(folder / "wanted.npz") as file:
        return dict(file)


def change(folder, place, tensors=None, **settings) -> pathlib.Path:
    """Copies a folder with other tensors or settings."""
    shutil.copytree(folder, place)
    if tensors is not None:
        file = place / "adapter_model.safetensors"
        file.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    path = place / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return place


def swapped(folder) -> dict[str, np.ndarray]:
    """Returns the tensors of a fused folder with the sides of peft 0.18."""
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    found = dict(tensors)
    for name, a in tensors.items():
        if ".experts." in name and "lora_A" in name:
            of_b = name.replace("lora_A", "lora_B")
            b, e = tensors[of_b], 5
            each = b.reshape(len(b), -1, e).transpose(2, 1, 0)
            found[name] = np.ascontiguousarray(each.reshape(-1, len(b)))
            each = a.reshape(e, -1, a.shape[1]).transpose(2, 1, 0)
            found[of_b] = np.ascontiguousarray(each.reshape(a.shape[1], -1))
    return found


def test_they_mean_what_peft_means(model, shapes, tmp_path):
    golden = [wanted(folder) for folder in FOLDERS]
    adapters = [import_peft(folder, shapes) for folder in FOLDERS]
    older = [
        import_peft(change(f, tmp_path / f.name, swapped(f)), shapes) for f in FOLDERS
    ]
    tokens = [one["tokens"] for one in golden]
    for some in (adapters, older):
        found = adapter_logits(model, some, tokens)
        for name, logits, one in zip(NAMES, found, golden, strict=True):
            assert relative_error(logits, one["logits"]) < 1e-5, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_round_trips_keep_every_bit(shapes, folder, layout, tmp_path):
    adapter, out = import_peft(folder, shapes), tmp_path / "out"
    names = {"base_model": "b", "linear_names": list(shapes)}
    export_peft(adapter, out, expert_layout=layout, **names)
    again = import_peft(out, shapes)
    assert again.fingerprint() == adapter.fingerprint()
    for name, weights in adapter.modules.items():
        own = again.modules[name]
        assert again.scaling(own) == pytest.approx(adapter.scaling(weights), rel=1e-12)
    files = [path / "adapter_model.safetensors" for path in (folder, out)]
    if layout == "fused" and folder.name == "down":
        before, after = map(safetensors.numpy.load_file, files)
        assert before.keys() == after.keys()
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array)


def test_gate_and_up_that_are_one_linear(tmp_path):
    """The folder is read, and written, as peft has it."""
    model = load_model(GOLDEN / "models" / "gpt_oss", dtype="float32")
    shapes, golden = linear_shapes(model.config), wanted(GPT_OSS)
    adapter = import_peft(GPT_OSS, shapes)
    assert len(adapter.modules) == 3 * (2 + 2 * 5)
    (logits,) = adapter_logits(model, [adapter], [golden["tokens"]])
    assert relative_error(logits, golden["logits"]) < 1e-5
    out = export_peft(
        adapter, tmp_path / "out", base_model="b", linear_names=list(shapes)
    )
    files = [path / "adapter_model.safetensors" for path in (GPT_OSS, out)]
    before, after = map(safetensors.numpy.load_file, files)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    settings = json.loads((out / "adapter_config.json").read_text())
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert settings["target_parameters"] == names
    assert import_peft(out, shapes).fingerprint() == adapter.fingerprint()


def test_its_sides_are_the_same_in_all_versions_of_peft(tmp_path):
    """Also where a parameter has as many input as output features, as most have."""
    config = json.loads((GOLDEN / "models" / "gpt_oss" / "config.json").read_text())
    shapes = linear_shapes(model_config(config | {"intermediate_size": 32}))
    tensors, rng = {}, np.random.default_rng(0)
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.mlp.experts.lora_{{}}.weight"
        for letter, shape in (("A", (10, 32)), ("B", (32, 10))):
            tensors[name.format(letter)] = rng.normal(size=shape).astype(np.float32)
    found = []
    for version in ("0.18.1", "0.19.0", None):
        place, only = tmp_path / str(version), ["mlp.experts.down_proj"]
        change(GPT_OSS, place, tensors, peft_version=version, target_parameters=only)
        found.append(import_peft(place, shapes).fingerprint())
    assert len(set(found)) == 1


def test_what_cannot_be_told_apart_is_refused(shapes, tmp_path):
    """A parameter with as many input as output features, of an unknown peft."""
    (both,) = (folder for folder in FOLDERS if folder.name == "both")
    tensors = safetensors.numpy.load_file(both / "adapter_model.safetensors")
    rng, square = np.random.default_rng(0), {}
    for name in tensors:
        if "base_layer" in name:
            shape = (15, 48) if "lora_A" in name else (48, 15)
            own = name.replace(".base_layer", "")
            square[own] = rng.normal(size=shape).astype(np.float32)
    wide = {
        name: (48, 24) if name.endswith(("gate_proj", "up_proj")) else shape
        for name, shape in shapes.items()
    }
    only = {"target_parameters": ["mlp.experts.gate_up_proj"]}
    found = []
    for version in ("0.18.1", "0.19.0"):
        place = tmp_path / version
        change(both, place, square, peft_version=version, **only)
        name = "model.layers.0.mlp.experts.1.gate_proj"
        weights = import_peft(place, wide).modules[name]
        found.append(weights.a @ weights.b)
    assert relative_error(*found) > 0.1
    place = change(both, tmp_path / "none", square, peft_version=None, **only)
    with pytest.raises(AdapterError, match="does not state its peft_version"):
        import_peft(place, wide)


@pytest.mark.parametrize(
    ("settings", "drop", "error"),
    [
        ({"r": 2}, "", "has rank 3, and the settings state 2"),
        ({}, "experts.lora_B", "lacks A or B of model.layers.0.mlp.experts"),
        ({"target_parameters": []}, "experts.lora_", r"target_parameters=\[\] do not"),
    ],
)
def test_errors_name_the_rule(shapes, tmp_path, settings, drop, error):
    (both,) = (folder for folder in FOLDERS if folder.name == "both")
    tensors = safetensors.numpy.load_file(both / "adapter_model.safetensors")
    kept = {n: x for n, x in tensors.items() if not drop or f".{drop}" not in n}
    folder = change(both, tmp_path / "changed", kept, **settings)
    with pytest.raises(AdapterError, match=error):
        import_peft(folder, shapes)


def test_experts_are_adapted_alike(shapes, tmp_path):
    (whole,) = (folder for folder in FOLDERS if folder.name == "down")
    adapter = import_peft(whole, shapes)
    names = {"base_model": "b", "linear_names": list(shapes)}
    out = export_peft(adapter, tmp_path / "a", expert_layout="per_expert", **names)
    tensors = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    some = {n: x for n, x in tensors.items() if ".layers.1.mlp.experts.3." not in n}
    with pytest.raises(AdapterError, match="only some are adapted"):
        import_peft(change(out, tmp_path / "b", some), shapes)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("mlp.gate", "adapts .*mlp.gate, and routers and gates of experts stay frozen"),
        ("block_sparse_moe.experts.9.w1", "Is it an adapter of another model"),
        ("mlp.other", "Is it an adapter of another model"),
    ],
)
def test_linears_that_are_not_there(shapes, tmp_path, place, error):
    (both,) = (folder for folder in FOLDERS if folder.name == "both")
    tensors = safetensors.numpy.load_file(both / "adapter_model.safetensors")
    for name in ("lora_A", "lora_B"):
        key = f"base_model.model.model.layers.0.{place}.{name}.weight"
        tensors[key] = np.ones((3, 3), np.float32)
    with pytest.raises(AdapterError, match=error):
        import_peft(change(both, tmp_path / "changed", tensors), shapes)


def adapter_of(chosen, shapes) -> Adapter:
    """Returns an adapter of ones on these modules."""
    modules = {}
    for name, one in chosen.items():
        k, n = shapes[name]
        tables = {"lora_a": (k, one.rank), "lora_b": (one.rank, n)}
        modules[name] = LoraWeights(
            tensors={x: np.ones(size, np.float32) for x, size in tables.items()},
            rank=one.rank,
            lora_alpha=one.lora_alpha,
        )
    return Adapter(modules=modules)


def written(base, folder, *, targets="all-linear", **options):
    """Returns an adapter of ones, and names of tensors and settings of its folder."""
    config = json.loads((GOLDEN / "models" / base / "config.json").read_text())
    config = model_config(config)
    data, shapes = DataConfig(path="a.jsonl"), linear_shapes(config)
    job = LoraJob(name="a", data=data, rank=4, target_modules=targets)
    adapter = adapter_of(choose_modules(job, config).modules, shapes)
    names = {"base_model": "b", "linear_names": list(shapes)}
    kind = {"model_type": config.model_type}
    export_peft(adapter, folder, **names, **(kind | options))
    assert import_peft(folder, shapes).fingerprint() == adapter.fingerprint()
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    start = "base_model.model.model.layers."
    names = {n.removeprefix(start).removesuffix(".weight") for n in tensors}
    return names, json.loads((folder / "adapter_config.json").read_text())


EXPERTS = r".*\.experts\..*"


@pytest.mark.parametrize(
    ("base", "targets", "layout"),
    [
        ("qwen3_moe", "all-linear", "per_expert"),
        ("qwen3_moe", r".*(q_proj|gate_proj)", "fused"),
        ("olmoe", "all-linear", "per_expert"),
        ("mixtral", "all-linear", "per_expert"),
        ("qwen2_moe", "all-linear", "fused"),
        ("qwen2_moe", EXPERTS, "fused"),
        ("gemma4_experts", "all-linear", "fused"),
        ("gpt_oss", "all-linear", "fused"),
        ("gpt_oss", r".*\.experts\..*\.down_proj", "fused"),
        ("qwen3_next", EXPERTS, "per_expert"),
        ("qwen3_next", "all-linear", "fused"),
        ("qwen3_5_moe", "all-linear", "fused"),
        ("qwen3_moe_dense", EXPERTS, "per_expert"),
        ("qwen3_moe_dense", "all-linear", "fused"),
    ],
)
def test_the_layout_is_one_that_peft_reads(base, targets, layout, tmp_path):
    """As `tests/live` tries it with peft, which else leaves experts out in silence."""
    _, settings = written(base, tmp_path / "a", targets=targets)
    assert ("target_parameters" in settings) == (layout == "fused")
    _, settings = written(base, tmp_path / "b", targets=targets, model_type=None)
    assert "target_parameters" in settings


def test_linears_that_peft_would_take_for_experts_are_named_as_parameters(tmp_path):
    dense = [f"model.layers.1.mlp.{x}_proj.weight" for x in ("down", "gate", "up")]
    for options in ({}, {"model_type": None}):
        folder = tmp_path / str(len(options))
        names, settings = written("qwen3_moe_dense", folder, **options)
        assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
        assert settings["target_parameters"][2:] == dense
        assert "1.mlp.gate_proj.lora_A" in names
    # peft takes names for what they are in a model that it does not convert.
    _, settings = written("qwen2_moe", tmp_path / "b")
    assert {"gate_proj", "up_proj", "down_proj"} <= {*settings["target_modules"]}


def test_names_of_single_experts_are_those_that_others_know(tmp_path):
    """Those of Mixtral's checkpoints, for peft and vLLM; of Gemma 4, those of vLLM."""
    names, settings = written("mixtral", tmp_path / "a")
    assert "1.block_sparse_moe.experts.2.w3.lora_B" in names
    assert {"w1", "w2", "w3"} <= {*settings["target_modules"]}
    given = {"expert_layout": "per_expert"}
    names, _ = written("gemma4_experts", tmp_path / "b", **given)
    assert {"1.moe.experts.2.up_proj.lora_B", "1.mlp.up_proj.lora_B"} <= names
    with pytest.raises(AdapterError, match="whose gate and up are one linear"):
        written("gpt_oss", tmp_path / "d", **given)
    names, _ = written("qwen2_moe", tmp_path / "c", **given)
    experts = {"mlp.experts.2.up_proj.lora_B", "mlp.shared_expert.up_proj.lora_B"}
    assert {f"2.{name}" for name in experts} <= names


def test_patterns_of_older_folders_name_mixtrals_linears(tmp_path):
    """With the names of transformers 4, and a rank of w2 of its own."""
    written("mixtral", tmp_path / "a", targets=EXPERTS)
    tensors = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    tensors |= {
        name: np.concatenate([x, x], axis=1 if "lora_B" in name else 0)
        for name, x in tensors.items()
        if ".w2." in name
    }
    own = {"rank_pattern": {"w2": 2}, "alpha_pattern": {"w2": 7}}
    folder = change(tmp_path / "a", tmp_path / "b", tensors, **own)
    config = json.loads((GOLDEN / "models" / "mixtral" / "config.json").read_text())
    adapter = import_peft(folder, linear_shapes(model_config(config)))
    down = adapter.modules["model.layers.0.mlp.experts.0.down_proj"]
    up = adapter.modules["model.layers.0.mlp.experts.0.up_proj"]
    assert (down.rank, down.lora_alpha, up.rank) == (2, 7.0, 1)


def test_a_job_starts_from_what_its_settings_have_trained(model, shapes, tmp_path):
    """Without `expert_rank`, the ranks of experts may be scaled or whole."""
    data = DataConfig(path="a.jsonl")
    job = LoraJob(
        name="a", data=data, rank=6, lora_alpha=9, target_modules="all-linear"
    )
    for expert_rank, rank in {"scaled": 3, "full": 6}.items():
        own = job.replace(expert_rank=expert_rank)
        chosen = choose_modules(own, model.config).modules
        assert chosen["model.layers.1.mlp.experts.0.up_proj"].rank == rank
        folder = tmp_path / expert_rank
        names = {"base_model": "b", "linear_names": list(shapes)}
        export_peft(adapter_of(chosen, shapes), folder, **names)
        again = job.model_dump(exclude_unset=True) | {"init_from": str(folder)}
        assert choose_modules(LoraJob(**again), model.config).modules == chosen
        other = LoraJob(**again | {"expert_rank": 2})
        with pytest.raises(ConfigError, match="leave out rank, expert_rank"):
            choose_modules(other, model.config)


def test_a_rank_of_experts_is_used_or_refused(model):
    data = DataConfig(path="a.jsonl")
    job = LoraJob(name="a", data=data, expert_rank=3, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="expert_rank=3 and adapts no linears of exp"):
        choose_modules(job, model.config)
    chosen = choose_modules(job.replace(target_modules="all-linear"), model.config)
    assert chosen.modules["model.layers.0.mlp.experts.1.up_proj"].rank == 3
