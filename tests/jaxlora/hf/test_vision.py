"""A checkpoint of a model with vision is read as its text model."""

import json
import logging
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxlora.hf.load import load_model

TEXT = pathlib.Path(__file__).parents[2] / "golden" / "models" / "qwen3_5"
OTHERS = {
    "model.visual.patch_embed.proj.weight": np.ones((2, 3, 4), np.float32),
    "mtp.layers.0.input_layernorm.weight": np.ones(4, np.float32),
}


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    folder = tmp_path / "whole"
    folder.mkdir()
    text = json.loads((TEXT / "config.json").read_text())
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 2},
        "image_token_id": 9,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in safetensors.numpy.load_file(
            TEXT / "model.safetensors"
        ).items()
    }
    safetensors.numpy.save_file(
        weights | OTHERS, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def test_weights_are_those_of_the_text_model(folder, caplog):
    with caplog.at_level(logging.INFO, "jaxlora"):
        whole = load_model(folder, dtype="float32")
    assert "not read: 2 tensors of other parts" in caplog.text
    text = load_model(TEXT, dtype="float32")
    for path, array in text.params.items():
        np.testing.assert_array_equal(whole.params[path], array)
