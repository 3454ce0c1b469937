"""Kinds of inputs: files in folders of models and adapters, and GGUF files."""

import json
import pathlib
import random
import shutil

import ml_dtypes
import numpy as np
import safetensors.numpy

from jaxlora import import_peft, load_model
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.inspect import inspect_path
from jaxlora.models.structure import linear_shapes
from tests import tiny
from tests.fuzz.data_kinds import CHATS, make_records, read_records
from tests.fuzz.kind import Kind, quiet
from tests.fuzz.mutate import (
    Damage,
    damage_json,
    damage_safetensors,
    damage_template,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def make_tokenizer_folder(folder: pathlib.Path) -> None:
    make_records("a.jsonl", CHATS)(folder)
    model = folder / "model"
    (model / "config.json").write_text(json.dumps(tiny.CONFIG))
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 1], "temperature": 0.5})
    )
    (model / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>", "lstrip": False}})
    )
    (model / "chat_template.jinja").write_text(tiny.CHATML)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]  # that of generation_config.json
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def read_tokenizer(folder: pathlib.Path) -> None:
    tokenizer = load_tokenizer(folder / "model")
    tokenizer.check_fits(10**6)
    tokenizer.decode(tokenizer.encode("some words"))
    read_records("a.jsonl", limit=2)(folder)


def make_models(folder: pathlib.Path) -> None:
    for name in ("llama3", "qwen2_window", "qwen3"):
        source = GOLDEN / "models" / name
        (folder / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(source / file, folder / name / file)


def make_model(folder: pathlib.Path) -> None:
    tiny.write_model(folder / "model")


def make_shards(folder: pathlib.Path) -> None:
    """Writes a checkpoint of two files and an index."""
    model = tiny.write_model(folder / "model")
    weights = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in tiny.random_weights().items()
    }
    names, weight_map = list(weights), {}
    for file, part in {"a.safetensors": names[:7], "b.safetensors": names[7:]}.items():
        safetensors.numpy.save_file({n: weights[n] for n in part}, model / file)
        weight_map.update(dict.fromkeys(part, file))
    (model / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def read_models(folder: pathlib.Path) -> None:
    """Reads all of them, as only one is damaged and each takes little time."""
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        inspect_path(str(model), quiet())
        load_model(model, dtype="float32")


def make_adapter(folder: pathlib.Path) -> None:
    make_model(folder)
    rng = np.random.default_rng(0)
    (folder / "adapter").mkdir()
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, shape in {"lora_A": (4, 32), "lora_B": (32, 4)}.items():
            weights[f"{name}.{part}.weight"] = rng.normal(size=shape).astype(np.float32)
    safetensors.numpy.save_file(weights, folder / "adapter/adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 4},
        "alpha_pattern": {},
        "use_rslora": False,
        "bias": "none",
        "init_lora_weights": True,
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


_SHAPES: dict[str, tuple[int, ...]] = {}


def read_adapter(folder: pathlib.Path) -> None:
    if not _SHAPES:
        model = load_model(folder / "model", dtype="float32")
        _SHAPES.update(linear_shapes(model.config))
    inspect_path(str(folder / "adapter"), quiet())
    import_peft(folder / "adapter", _SHAPES)


def damage_json_or_weights(content: bytes, rng: random.Random) -> Damage:
    """Chooses the damage by the contents of the file."""
    function = damage_json if content[:1] == b"{" else damage_safetensors
    return function(content, rng)


def read_merged(folder: pathlib.Path) -> None:
    out = folder / "out" / "merged"
    shutil.rmtree(out.parent, ignore_errors=True)
    merge_adapter(folder / "model", folder / "adapter", out)


KINDS = {
    "chat_template": Kind(
        make=make_tokenizer_folder,
        targets=("model/chat_template.jinja",),
        damage=damage_template,
        read=read_tokenizer,
        num_cases=60,
    ),
    "tokenizer": Kind(
        make=make_tokenizer_folder,
        targets=("model/tokenizer.json",),
        damage=damage_json,
        read=read_tokenizer,
        num_cases=150,
    ),
    "tokenizer_settings": Kind(
        make=make_tokenizer_folder,
        targets=(
            "model/tokenizer_config.json",
            "model/special_tokens_map.json",
            "model/generation_config.json",
        ),
        damage=damage_json,
        read=read_tokenizer,
        num_cases=150,
    ),
    "config": Kind(
        make=make_models,
        targets=("*/config.json",),
        damage=damage_json,
        read=read_models,
        num_cases=120,
    ),
    "weights": Kind(
        make=make_model,
        targets=("model/model.safetensors",),
        damage=damage_safetensors,
        read=read_models,
        num_cases=150,
    ),
    "index": Kind(
        make=make_shards,
        targets=("model/*.index.json", "model/a.safetensors"),
        damage=damage_json_or_weights,
        read=read_models,
        num_cases=100,
    ),
    "adapter_config": Kind(
        make=make_adapter,
        targets=("adapter/adapter_config.json",),
        damage=damage_json,
        read=read_adapter,
        num_cases=150,
    ),
    "adapter_weights": Kind(
        make=make_adapter,
        targets=("adapter/adapter_model.safetensors",),
        damage=damage_safetensors,
        read=read_adapter,
        num_cases=150,
    ),
    "merge": Kind(
        make=make_adapter,
        targets=("adapter/*", "model/config.json", "model/model.safetensors"),
        damage=damage_json_or_weights,
        read=read_merged,
        num_cases=60,
    ),
}
