"""Changes of the base model of the golden adapters."""

import json
import pathlib

import safetensors.numpy


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
