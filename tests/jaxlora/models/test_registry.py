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


LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
FUSED = (
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
OF_EXPERTS = (
    *LINEARS[:4],
    *(f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")),
)
WITH_SHARED = (
    *OF_EXPERTS,
    *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
)
HYBRID = (
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z")),
    *(f"linear_attn.{name}" for name in ("in_proj_b", "in_proj_a", "out_proj")),
    *LINEARS[4:],
)
OTHER_LINEARS = {
    "phi3": FUSED,
    "qwen3_moe": OF_EXPERTS,
    "glm": (*LINEARS[:4], *FUSED[2:]),
    "qwen2_moe": WITH_SHARED,
    "olmoe": OF_EXPERTS,
    "mixtral": OF_EXPERTS,
    "gpt_oss": (
        *LINEARS[:4],
        *(f"mlp.experts.{name}_proj" for name in ("gate_up", "down")),
    ),
    "glm4": (*LINEARS[:4], *FUSED[2:]),
    "granitemoehybrid": (
        *LINEARS[:4],
        "shared_mlp.input_linear",
        "shared_mlp.output_linear",
    ),
    "qwen3_5_text": HYBRID,
    "qwen3_next": (
        *(f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        *WITH_SHARED[4:],
    ),
    "qwen3_5_moe_text": (*HYBRID[:5], *WITH_SHARED[4:]),
}
FEW = {"num_experts": 2, "num_experts_per_tok": 1}
EXPERTS = {**FEW, "moe_intermediate_size": 96}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 96}
DENSE = {
    "num_local_experts": 0,
    "layer_types": ["attention"] * 3,
    "shared_intermediate_size": 96,
}

MORE = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": SHARED,
    "qwen3_next": SHARED,
    "qwen3_5_moe_text": SHARED,
    "olmoe": FEW,
    "mixtral": FEW,
    "gpt_oss": FEW,
    "granitemoehybrid": DENSE,
    "gemma4_text": {"hidden_size_per_layer_input": 0, "global_head_dim": 24},
}


def config_of(family: str) -> ModelConfig:
    more = MORE.get(family, {})
    return model_config({"model_type": family, **SIZES, **more})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_the_projections_never_changes(family):
    """It keys the dropout masks: a resumed run would draw others."""
    projections = {
        name: linear.projection for name, linear in linears(config_of(family)).items()
    }
    wanted = OTHER_LINEARS.get(family, LINEARS)
    assert projections == {name: number for number, name in enumerate(wanted)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_and_norm_has_its_size(family):
    config = config_of(family)
    q, kv, inner = 8 * 24, 2 * 24, 96
    sizes = {
        "q_proj": (64, q),
        "k_proj": (64, kv),
        "v_proj": (64, kv),
        "qkv_proj": (64, q + 2 * kv),
        "o_proj": (q, 64),
        "gate_proj": (64, inner),
        "up_proj": (64, inner),
        "gate_up_proj": (64, 2 * inner),
        "down_proj": (inner, 64),
        "input_linear": (64, 2 * inner),
        "output_linear": (inner, 64),
        "in_proj_qkv": (64, (2 * 16 + 32) * 128),
        "in_proj_qkvz": (64, (2 * 16 + 2 * 32) * 128),
        "in_proj_ba": (64, 2 * 32),
        "in_proj_z": (64, 32 * 128),
        "in_proj_b": (64, 32),
        "in_proj_a": (64, 32),
        "out_proj": (32 * 128, 64),
    }
    for name, linear in linears(config).items():
        wanted = sizes[name.rpartition(".")[2]]
        assert (linear.in_features, linear.out_features) == wanted
    norms = {x.shape for x in tensor_specs(config) if x.path.endswith(".scale")}
    of_heads = {(q,), (kv,)} if family.startswith("olmo") else {(24,)}
    assert norms <= {(64,)} | of_heads


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_unique(family):
    """In this library, and in Hugging Face's checkpoints."""
    config = config_of(family)
    specs = tensor_specs(config)
    assert len({spec.path for spec in specs}) == len(specs)
    assert len({spec.hf_name for spec in specs}) == len(specs)
    own = [name for linear in linears(config).values() for name in linear.names]
    assert len(linear_names(config)) == 3 * len(own)


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
