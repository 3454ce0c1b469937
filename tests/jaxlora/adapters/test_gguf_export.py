"""GGUF adapters have llama.cpp's names, metadata and order of rotary features."""

import json

import gguf
import numpy as np
import pytest

from jaxlora.adapters.files.gguf_export import export_gguf, gguf_name, rows_in_gguf
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.cli.main import main
from jaxlora.errors import AdapterError
from jaxlora.models.registry import model_config
from tests import tiny

HEADS = {"attn_q": 4, "attn_k": 2}
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "down_proj": "ffn_down"}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The definition: features i and i + E / 2 of a head become 2 i and 2 i + 1."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            start = head * size
            out[start + 2 * i] = rows[start + i]
            out[start + 2 * i + 1] = rows[start + i + size // 2]
    return out


@pytest.fixture
def written(make_adapter, export, folder, tmp_path):
    """Exports an adapter as PEFT and as GGUF; returns both as they are read."""

    def write(**options):
        peft = export(make_adapter(suffixes=tuple(NAMES), **options))
        out = export_gguf(peft, tmp_path / "adapter.gguf", base=str(folder))
        return peft, *read(out)

    return write


def read(path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Returns the fields and the tensors of a file, by name."""
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return fields, {tensor.name: tensor.data for tensor in reader.tensors}


def weight_of(module: str) -> str:
    """Name of the weight of a linear in GGUF files."""
    _, _, layer, *_, suffix = module.split(".")
    return f"blk.{layer}.{NAMES[suffix]}.weight"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank": lambda name: 2 + 2 * ("q_proj" in name)},
        {"lora_alpha": lambda name: 3.0 + ("layers.1" in name)},
    ],
    ids=["plain", "rslora", "ranks", "alphas"],
)
def test_llama_cpp_adds_the_same_update(written, linear_shapes, options):
    """`alpha / rank * B A`, with the rank of each module and one alpha."""
    peft, fields, tensors = written(**options)
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == "llama"
    assert fields["adapter.type"] == "lora"
    adapter = import_peft(peft, linear_shapes)
    assert len(tensors) == 2 * len(adapter.modules) == 12
    for module, weights in adapter.modules.items():
        name = weight_of(module)
        a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        found = fields["adapter.lora.alpha"] / len(a) * (b @ a)
        update = adapter.scaling(weights) * (weights.a @ weights.b).T
        if (heads := HEADS.get(name.split(".")[2])) is not None:
            update = interleaved(update, heads)
        elif not options:
            assert fields["adapter.lora.alpha"] == 8.0
            np.testing.assert_array_equal(a, weights.a.T)
            np.testing.assert_array_equal(b, weights.b.T)
        np.testing.assert_allclose(found, update, rtol=1e-5, atol=1e-6)


def test_other_families_keep_the_order_of_features():
    rows = np.arange(32.0)[:, None]
    module = "model.layers.0.self_attn.q_proj"
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        model = model_config(tiny.CONFIG | {"model_type": model_type, "head_dim": 8})
        found = rows_in_gguf(rows, module, model)
        is_llama = model_type in ("llama", "mistral")
        assert (found == (interleaved(rows, 4) if is_llama else rows)).all()


def test_a_text_model_that_is_one_part_has_the_same_names():
    name = "layers.3.mlp.up_proj"
    assert gguf_name(f"model.language_model.{name}") == gguf_name(f"model.{name}")


def test_the_command(make_adapter, export, folder, tmp_path, capsys):
    peft, out = export(make_adapter()), tmp_path / "adapter.gguf"
    command = ["convert", str(peft), str(out), "--base", str(folder)]
    assert main(command) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert main(command) == 1
    assert "adapter.gguf" in capsys.readouterr().err


def of_layers(first: float, second: float):
    return lambda name: second if "layers.1" in name else first


@pytest.mark.parametrize(
    "lora_alpha",
    [
        *(1e-46, 1e-40, 1e-38, 1e39, 1e308, 2e-38),
        *(of_layers(8.0, 1e-46), of_layers(1e-46, 8.0), of_layers(8.0, 1e39)),
        *(of_layers(1e-37, 1e30), of_layers(1e30, 1e-37), of_layers(1e-30, 1e30)),
    ],
)
def test_scalings_beyond_float32_are_refused(written, tmp_path, lora_alpha):
    """And nothing is written."""
    with pytest.raises(AdapterError, match=r"float32 of GGUF files holds .* in full"):
        written(lora_alpha=lora_alpha)
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(
    "lora_alpha", [1e-35, 1e35, of_layers(1e-12, 1e12), of_layers(1e12, 1e-12)]
)
def test_unusual_scalings_within_float32(written, linear_shapes, lora_alpha):
    peft, fields, tensors = written(lora_alpha=lora_alpha)
    adapter, alpha = import_peft(peft, linear_shapes), fields["adapter.lora.alpha"]
    for module, weights in adapter.modules.items():
        wanted = adapter.scaling(weights) * np.sort(weights.b.T.astype(float), axis=0)
        b = tensors[f"{weight_of(module)}.lora_b"].astype(float)
        found = float(alpha) / weights.rank * np.sort(b, axis=0)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("base_model_name_or_path", None, "does not name its base .*--base MODEL"),
        ("base_model_name_or_path", "/no/folder", "no folder here.*--base MODEL"),
        ("base_model_name_or_path", ["a/b"], "base_model_name_or_path=.* text"),
        ("base_model_name_or_path", False, "base_model_name_or_path=.* text"),
        ("revision", 3, "adapter_config.json has revision=3; wanted a text"),
        ("revision", {"a": "b"}, "adapter_config.json has revision=.* wanted a text"),
    ],
)
def test_bases_that_are_refused(make_adapter, export, tmp_path, key, value, match):
    path = export(make_adapter()) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(AdapterError, match=match):
        export_gguf(path.parent, tmp_path / "a.gguf")


@pytest.mark.parametrize("given", ["models/tiny", "./models/tiny", "absolute"])
def test_a_local_base_is_found_by_the_path_in_the_folder(
    make_adapter, folder, linear_shapes, tmp_path, monkeypatch, given
):
    """As peft writes it: the path as it was given, not its last part alone."""
    (tmp_path / "models").mkdir()
    folder.rename(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    base = str(tmp_path / "models" / "tiny") if given == "absolute" else given
    peft = export_peft(
        make_adapter(), "adapter", base_model=base, linear_names=list(linear_shapes)
    )
    config = json.loads((peft / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (base, None)
    assert main(["convert", str(peft), "a.gguf"]) == 0
    assert (
        export_gguf(peft, "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    )
