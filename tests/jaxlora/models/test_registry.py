"""The table of model families."""

import hashlib
import json
import pathlib

import pytest

from jaxlora.models.config import ModelConfig
from jaxlora.models.registry import FAMILIES, model_config
from jaxlora.models.structure import linear_names, linears, tensor_specs

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "models"
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
}


def config_of(family: str) -> ModelConfig:
    return model_config({"model_type": family, **SIZES})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_the_projections_never_changes(family):
    """It keys the dropout masks: a resumed run would draw others."""
    projections = {
        name: linear.projection for name, linear in linears(config_of(family)).items()
    }
    assert projections == {
        "self_attn.q_proj": 0,
        "self_attn.k_proj": 1,
        "self_attn.v_proj": 2,
        "self_attn.o_proj": 3,
        "mlp.gate_proj": 4,
        "mlp.up_proj": 5,
        "mlp.down_proj": 6,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_and_norm_has_its_size(family):
    config = config_of(family)
    found = {linear.name: linear for linear in linears(config).values()}
    assert found["self_attn.q_proj"].out_features == 8 * 24
    assert found["self_attn.v_proj"].out_features == 2 * 24
    assert found["self_attn.o_proj"].in_features == 8 * 24
    assert found["mlp.down_proj"].in_features == 96
    norms = [x.shape for x in tensor_specs(config) if x.path.endswith(".scale")]
    assert set(norms) <= {(64,), (24,)}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_unique(family):
    """In this library, and in Hugging Face's checkpoints."""
    config = config_of(family)
    specs = tensor_specs(config)
    assert len({spec.path for spec in specs}) == len(specs)
    assert len({spec.hf_name for spec in specs}) == len(specs)
    assert len(linear_names(config)) == 3 * len(linears(config))


@pytest.mark.parametrize(
    ("model", "digest"),
    [
        ("gemma2", "dbaeda727b1e2ea9"),
        ("gemma3_v5", "4d4f3de05ef66070"),
        ("llama3", "f8596c3cf0e76d85"),
        ("llama_bias", "2ee7eefc71ba5f32"),
        ("mistral", "1fa72fe8acb25622"),
        ("qwen2_window", "6b3f91b6cf777cb5"),
        ("qwen3", "c03cb7bd3ee2929e"),
    ],
)
def test_the_repr_never_changes(model, digest):
    """Checkpoints of runs hold its digest: others would not resume."""
    text = (GOLDEN / model / "config.json").read_text()
    config = model_config(json.loads(text))
    assert hashlib.sha256(repr(config).encode()).hexdigest()[:16] == digest
