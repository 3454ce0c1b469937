"""Changes of the base model of the golden adapters."""

import json
import pathlib

import numpy as np
import safetensors.numpy

from jaxlora.hf.new_tokens import with_rows


def tied(base: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the base with its embedding as its head."""
    config = json.loads((base / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    del weights["lm_head.weight"]
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    return folder


def resized(base: pathlib.Path, folder: pathlib.Path, num_new: int) -> pathlib.Path:
    """Writes the base with rows for more tokens."""
    config = json.loads((base / "config.json").read_text())
    config["vocab_size"] += num_new
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    weights = dict(with_rows(weights.items(), config["vocab_size"]))
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    return folder


def biased(base: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the base with biases in attention, as make_variant_folders.py does."""
    config = json.loads((base / "config.json").read_text())
    config["attention_bias"] = True
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    for name in [n for n in weights if "self_attn" in n]:
        number = int(name.split(".")[2])
        bias = 0.3 * np.sin(np.arange(len(weights[name])) + number)
        weights[name.replace("weight", "bias")] = bias.astype(np.float32)
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    return folder
