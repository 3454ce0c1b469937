"""The keys of config.json that only some families have."""

import math

import pytest

from jaxlora.errors import ModelError
from jaxlora.models.config import (
    Family,
    LongRopeScaling,
    PartialRope,
    Rope,
    UnroundedYarnScaling,
    YarnScaling,
)
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.hf_config import HfConfig
from jaxlora.models.registry import model_config
from jaxlora.models.structure import linear_names, linear_path

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LONG = {"type": "longrope", "short_factor": [1.0, 2], "long_factor": [3.0, 4.0]}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
HALF = {"rope_scaling": LONG, "partial_rotary_factor": 0.5}


def read(family: str, **more):
    return model_config({**SHAPE, "model_type": family, **more})


@pytest.mark.parametrize(
    ("more", "rotates"),
    [
        ({}, (True, True, True, False)),
        ({"no_rope_layer_interval": 2}, (True, False, True, False)),
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, (False, True, True, False)),
    ],
)
def test_layers_without_positions(more, rotates):
    assert read("smollm3", **more).rotates == rotates


def test_layers_without_positions_have_the_windows():
    config = read("smollm3", use_sliding_window=True, sliding_window=8)
    assert config.layer_windows == (None, None, None, 8)


def test_each_fourth_layer_of_olmo3_has_no_window():
    assert read("olmo3").layer_windows == (4096, 4096, 4096, None)
    assert read("olmo3").rope.theta == read("olmo3").local_rope.theta == 5e5


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "olmo3"])
def test_yarn(family):
    config = read(family, rope_theta=5e5, rope_scaling=YARN)
    scaling = YarnScaling(
        factor=8.0,
        fast=32.0,
        slow=1.0,
        original_max_positions=8192,
        magnitude=1.2079441541679836,
    )
    assert config.rope == Rope(theta=5e5, scaling=scaling)
    assert config.local_rope == (Rope(theta=5e5) if family == "olmo3" else None)
    assert config.max_positions >= 65536


def test_settings_of_yarn():
    given = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 40.0}
    given |= {"original_max_position_embeddings": 4096, "truncate": False}

    def scaling(**more):
        return read("qwen3", rope_parameters={**given, **more}).rope.scaling

    assert isinstance(scaling(), UnroundedYarnScaling)
    assert scaling(mscale=2.0).magnitude == scaling().magnitude
    assert scaling(mscale=2.0, mscale_all_dim=2.0).magnitude == 1.0
    both = scaling(mscale=1.0, mscale_all_dim=0.5).magnitude
    assert both == (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert scaling(attention_factor=1.5, mscale=2.0).magnitude == 1.5
    assert scaling(factor=0.5).magnitude == 1.0


def test_rotary_positions_of_phi():
    config = read("phi3", **HALF, max_position_embeddings=131072)
    # Longer sequences have other frequencies.
    assert config.max_positions == 4096
    magnitude = math.sqrt(1 + math.log(32) / math.log(4096))
    scaling = LongRopeScaling(factors=(1.0, 2.0), magnitude=magnitude)
    assert config.rope == PartialRope(theta=10000.0, share=0.5, scaling=scaling)
    given = {"rope_scaling": {**LONG, "attention_factor": 1.5}}
    assert read("phi3", **{**HALF, **given}).rope.scaling.magnitude == 1.5
    assert read("phi3", max_position_embeddings=131072).max_positions == 131072


def test_rotary_positions_of_ministral():
    config = read("ministral3")
    assert (config.rope.growth, config.rope.period) == (0.1, 16384)
    assert config.rope.scaling.magnitude == 1.0
    assert config.max_positions == 262144
    given = {**YARN, "llama_4_scaling_beta": 0, "max_position_embeddings": 65536}
    assert read("ministral3", rope_parameters=given).rope.growth == 0


@pytest.mark.parametrize("family", ["glm", "glm4"])
@pytest.mark.parametrize("more", [{}, {"rope_scaling": YARN}])
def test_rotary_positions_of_glm(family, more):
    rope = read(family, **more).rope
    assert rope.num_rotated(128) == 64
    assert isinstance(rope.scaling, YarnScaling) == bool(more)


DENSE = {"num_local_experts": 0, "layer_types": ["attention"] * 4}


def test_dense_granite4():
    config = read("granitemoehybrid", **DENSE, shared_intermediate_size=128)
    assert (config.intermediate_size, config.rotates) == (128, False)
    assert read("granitemoehybrid", **DENSE, position_embedding_type="rope").rotates


def part(model_type="mistral", **more):
    text = {**SHAPE, "model_type": model_type, "tie_word_embeddings": True}
    return model_config({"model_type": "mistral3", "text_config": text, **more})


def test_text_model_of_a_model_with_several_parts():
    config = part(image_token_index=10, vision_config={"hidden_size": 8})
    assert config.model_type == "mistral"
    assert config.tie_embeddings
    assert not part(tie_word_embeddings=False).tie_embeddings
    assert part("ministral3").rope.growth == 0.1
    (name, *_) = linear_names(config)
    assert name == "model.language_model.layers.0.self_attn.q_proj"
    assert linear_path(name) == "layers.0.self_attn.q_proj"


def test_refused_models_with_several_parts():
    with pytest.raises(ModelError, match="model_type='llama'; for mistral3, wanted"):
        part("llama")
    with pytest.raises(ModelError, match="text_config=None; wanted the settings of"):
        part(text_config=None)
    with pytest.raises(ModelError, match=r"sets audio_config=.*, which is not read"):
        part(audio_config={"hidden_size": 8})


def test_layers_with_experts():
    config = read("qwen3_moe", mlp_only_layers=[3], decoder_sparse_step=2)
    assert config.has_experts == (False, True, False, False)
    assert read("qwen3_moe").has_experts == (True,) * 4
    assert read("qwen3_moe", num_local_experts=16).experts.number == 16


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "relu2"), ("attention_bias", True), ("mlp_bias", True)],
)
def test_a_family_reads_what_changes_its_layers_or_refuses_it(key, value):
    """A family that forgets to declare such a key does not read another model."""

    class Forgetful(HfConfig):
        FAMILY = Family(model_type="forgetful", models="none", layer=LlamaLayer)

    with pytest.raises(ModelError, match=f"sets {key}={value!r}, which is not read"):
        Forgetful.read({**SHAPE, "max_position_embeddings": 64, key: value})


@pytest.mark.parametrize(
    ("family", "more", "match"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]; wanted for"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers=.* a 1 if it"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0; wanted a number above 0"),
        ("olmo3", {"sliding_window": None}, "lacks 'sliding_window'"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1; only 0 is supported"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5; wanted"),
        ("phi3", {"partial_rotary_factor": 0.4}, "by which 3 features rotate; wanted"),
        ("phi3", {"rope_scaling": LONG}, "2 values in short_factor; wanted 4"),
        (
            "phi3",
            {"rope_scaling": {**LONG, "short_factor": [1.0, "2"]}},
            "wanted a list of numbers above 0",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "without 'short_factor'"),
        ("phi3", {"rope_scaling": {"type": "linear"}}, "supported: default, longrope"),
        ("llama", {"rope_scaling": LONG}, "supported: default, linear, llama3, yarn"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "without 'origin"),
        (
            "qwen2",
            {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}},
            "beta_fast=1, which must be at least beta_slow=32",
        ),
        ("qwen2", {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1, with which"),
        ("llama", {"rope_scaling": {**YARN, "mscale": -1}}, "mscale=-1; wanted a num"),
        ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate=false for"),
        ("granitemoehybrid", {}, "num_local_experts=8: Granite models with experts"),
        ("granitemoehybrid", {"num_local_experts": 0}, "layer_types=None; .* Mamba"),
        (
            "granitemoehybrid",
            {**DENSE, "layer_types": ["mamba", "attention"] * 2},
            r"layer_types=\['mamba', .*; wanted attention for each of the 4 layers",
        ),
        (
            "granitemoehybrid",
            {**DENSE, "position_embedding_type": "alibi"},
            "position_embedding_type='alibi'; wanted rope, nope",
        ),
        ("glm4", {"partial_rotary_factor": 0.01}, "1 features rotate; wanted an even"),
        ("glm4", {"rope_scaling": {"type": "linear"}}, "supported: default, yarn"),
        ("ministral3", {"rope_parameters": YARN}, "without 'llama_4_scaling_beta'"),
        ("ministral3", {"rope_theta": 1e4, "rope_scaling": LONG}, "supported: yarn"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok=8, more than its 4 e"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [4]},
            r"mlp_only_layers=\[4\]; wanted a list",
        ),
        ("qwen3_moe", {"output_router_logits": True}, "only False is supported"),
        ("qwen3_moe", {"n_routed_experts": 4}, "n_routed_experts=4: mixture-of-exp"),
    ],
)
def test_refused(family, more, match):
    with pytest.raises(ModelError, match=match):
        read(family, **more)


def test_each_fourth_layer_of_qwen3_5_has_attention():
    config = read("qwen3_5_text")
    assert config.is_linear == (True, True, True, False)
    assert config.rope.num_rotated(config.head_dim) == 64
    kinds = ["full_attention", "linear_attention"] * 2
    assert read("qwen3_5_text", layer_types=kinds).is_linear == (False, True) * 2
    every = read("qwen3_5_text", full_attention_interval=2)
    assert every.is_linear == (True, False) * 2
    assert every.delta_shape(1) is None
    assert every.delta_shape(0).mixed_features == (2 * 16 + 32) * 128


def test_a_qwen3_5_with_vision_has_the_mathematics_of_its_text_model():
    text = {**SHAPE, "model_type": "qwen3_5_text", "linear_num_value_heads": 48}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    assert repr(model_config(whole)) == repr(model_config(text))
    tied = {**whole, "tie_word_embeddings": True}
    assert model_config(tied).tie_embeddings
    other = {**text, "model_type": "qwen3_5_moe_text"}
    with pytest.raises(ModelError, match="for qwen3_5, wanted one of qwen3_5_text"):
        model_config({**whole, "text_config": other})


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "for each of the 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "wanted full_attention or linear"),
        ({"linear_num_value_heads": 24}, "not a multiple of linear_num_key_heads=16"),
        ({"attn_output_gate": False}, "attn_output_gate=False; only True"),
        ({"partial_rotary_factor": 0.01}, "by which 1 features rotate"),
        ({"num_experts": 8}, "mixture-of-experts models are not supported"),
    ],
)
def test_values_of_qwen3_5_that_are_refused(more, match):
    with pytest.raises(ModelError, match=match):
        read("qwen3_5_text", head_dim=128, **more)


NEXT = {"num_experts": 8, "head_dim": 16, "num_experts_per_tok": 3}


def test_experts_and_gated_delta_nets_of_qwen3_next():
    config = read("qwen3_next", **NEXT, mlp_only_layers=[1], decoder_sparse_step=2)
    assert config.has_experts == (False, False, False, True)
    assert config.is_linear == (True, True, True, False)
    shape = config.expert_shape(3)
    assert (shape.features, shape.shared_features) == (512, 512)
    assert shape.normalizes
    assert not read("qwen3_next", **NEXT, norm_topk_prob=False).experts.normalizes
    kinds = {config.layer_kind(i) for i in range(4)}
    assert len(kinds) == 2
    assert config.of_layers([1, 3]).has_experts == (False, True)


def test_all_layers_of_a_qwen3_5_moe_have_experts():
    """Its config.json has no width of an MLP."""
    text = {key: x for key, x in SHAPE.items() if key != "intermediate_size"}
    text = {**text, "model_type": "qwen3_5_moe_text", **NEXT, "mlp_only_layers": []}
    config = model_config(text)
    assert config.has_experts == (True,) * 4
    assert config.rope.num_rotated(config.head_dim) == 4
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    assert repr(model_config(whole)) == repr(config)


@pytest.mark.parametrize(
    ("family", "more", "match"),
    [
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, r"only \[\] is supported"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "only True is supported"),
        ("qwen3_next", {"mlp_only_layers": [4]}, "numbers of the 4 layers"),
        ("qwen3_next", {"num_experts_per_tok": 9}, "more than its 8 experts"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "positive whole number"),
    ],
)
def test_values_of_experts_beside_delta_nets_that_are_refused(family, more, match):
    with pytest.raises(ModelError, match=match):
        read(family, **NEXT | more)
