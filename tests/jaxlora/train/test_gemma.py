"""Training on a tiny Gemma 2: soft caps, windows and norms of outputs included."""

import json

import numpy as np
import pytest
import safetensors.numpy

from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.models.registry import model_config
from jaxlora.models.structure import tensor_specs
from tests import tiny
from tests.jaxlora.train.test_contracts import assert_same_training

CONFIG = tiny.CONFIG | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 8.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> FrozenModel:
    """Replaces the tiny Llama of the other tests."""
    folder = tmp_path_factory.mktemp("base") / "gemma"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    weights = {}
    for spec in tensor_specs(model_config(CONFIG)):
        size = 0.2 if len(spec.hf_shape) == 1 else spec.hf_shape[1] ** -0.5
        noise = size * rng.normal(size=spec.hf_shape)
        weights[spec.hf_name] = noise.astype(np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tiny.write_tokenizer(folder)
    return load_model(folder, dtype="float32")


@pytest.mark.grid
def test_alone_equals_together(train, jobs):
    together = train(jobs[:2])
    alone = train(jobs[1:2], max_concurrent_jobs=2, slot_dropout=True)  # same programs
    assert_same_training(together, alone, [jobs[1].name])
    assert together.result.num_compilations <= 7
    losses = together.losses[jobs[1].name]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
