"""The table of model families."""

import pytest

from jaxlora.families.table import FAMILIES
from jaxlora.hf.config import model_config
from jaxlora.models.structure import linear_names, linears, tensor_specs

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
}


ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def config_of(family: str):
    row = FAMILIES[family]
    activation = {row.activation_key: ACTIVATIONS[row.activation]}
    return model_config({"model_type": family, **SIZES, **activation})


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
    """In this library, in Hugging Face's checkpoints and in GGUF files."""
    config, row = config_of(family), FAMILIES[family]
    specs = tensor_specs(config)
    assert len({spec.path for spec in specs}) == len(specs)
    assert len({spec.hf_name for spec in specs}) == len(specs)
    assert len(linear_names(config)) == 3 * len(row.linears)
    gguf = [entry.gguf for entry in (*row.linears, *row.norms)]
    assert len(set(gguf)) == len(gguf)
