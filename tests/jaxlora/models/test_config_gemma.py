"""Reading the config.json of Gemma 2, 3 and 4."""

import pytest

from jaxlora.errors import ModelError
from jaxlora.models.config import LinearRopeScaling, ProportionalScaling, Rope
from jaxlora.models.registry import model_config
from jaxlora.models.structure import linears
from jaxlora.models.tensor_parallel import check_divides, part_config
from tests.jaxlora.models.test_config import SHAPE, read

GEMMA2 = {"model_type": "gemma2", **SHAPE}
GEMMA3 = {"model_type": "gemma3_text", **SHAPE, "num_hidden_layers": 7}
GEMMA4 = {
    "model_type": "gemma4_text",
    **SHAPE,
    "num_hidden_layers": 7,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}


def test_gemma_2_has_the_defaults_of_transformers():
    config = model_config(GEMMA2)
    assert (config.max_positions, config.head_dim, config.num_kv_heads) == (
        8192,
        256,
        4,
    )
    assert config.layer_windows == (4096, None, 4096, None)
    assert config.score_scale == 256**-0.5
    assert (config.score_softcap, config.logit_softcap) == (50.0, 30.0)
    assert (config.rope, config.local_rope) == (Rope(theta=10000.0), None)
    assert config.tie_embeddings and not config.qkv_bias


def test_gemma_3_has_the_defaults_of_transformers():
    config = model_config(GEMMA3)
    assert (config.max_positions, config.head_dim, config.num_kv_heads) == (
        131072,
        256,
        4,
    )
    assert config.layer_windows == (*[4096] * 5, None, 4096)
    assert config.score_scale == 256**-0.5
    assert (config.score_softcap, config.logit_softcap) == (None, None)
    assert (config.rope, config.local_rope) == (Rope(theta=1e6), Rope(theta=1e4))
    assert config.tie_embeddings and not config.qkv_bias


def test_gemma_3_with_images_has_the_defaults_of_its_text_model():
    text = {"model_type": "gemma3_text", "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    whole |= {"vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256}
    config = model_config(whole)
    assert (config.vocab_size, config.hidden_size, config.num_heads) == (
        262208,
        2304,
        8,
    )
    assert (config.intermediate_size, config.num_layers) == (9216, 26)
    assert config.tie_embeddings and config.layer_windows[:6] == (*[1024] * 5, None)
    assert config.rope.scaling == LinearRopeScaling(factor=8.0)


def test_a_cap_of_null_is_no_cap():
    config = model_config(
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    )
    assert (config.score_softcap, config.logit_softcap) == (None, None)


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window": 9}, (9, 9, 9, 9, 9, None, 9)),
        ({"sliding_window_pattern": 3}, (*[4096] * 2, None) * 2 + (4096,)),
        ({"sliding_window_pattern": 1}, (None,) * 7),
        ({"layer_types": ["full_attention"] * 7, "sliding_window": None}, (None,) * 7),
        # transformers writes the pattern under this name, and reads layer_types.
        (
            {
                "_sliding_window_pattern": 2,
                "layer_types": ["sliding_attention"] * 6 + ["full_attention"],
            },
            (*[4096] * 6, None),
        ),
    ],
)
def test_gemma_3_windows(more, windows):
    assert model_config(GEMMA3 | more).layer_windows == windows


def test_gemma_3_rope_in_both_spellings():
    scaling = {"rope_type": "linear", "factor": 8.0}
    v4 = {"rope_theta": 5e5, "rope_scaling": scaling, "rope_local_base_freq": 2e4}
    v5 = {
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    config = model_config(GEMMA3 | v4)
    assert config.rope == Rope(theta=5e5, scaling=LinearRopeScaling(factor=8.0))
    assert config.local_rope == Rope(theta=2e4)
    assert model_config(GEMMA3 | v5) == config
    halves = {"full_attention": v5["rope_parameters"]["full_attention"]}
    mixed = {"rope_parameters": halves, "rope_local_base_freq": 2e4}
    assert model_config(GEMMA3 | mixed) == config
    assert model_config(GEMMA3 | {"rope_parameters": None, **v4}) == config


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"model_type": "gemma"}, r"model_type='gemma'\. Supported: llama, .*gemma2"),
        ({"hidden_activation": "gelu"}, "='gelu'; only 'gelu_pytorch_tanh' is suppor"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True, wh"),
        # transformers ignores it in Gemma 3's attention.
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0, which is not"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0; wanted a num"),
        (
            {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar=0; wanted a number above",
        ),
        (
            {"sliding_window": None},
            "sliding_window=null, and some layers of a gemma3_text model have a window",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            r"sets \['rope_theta', 'rope_type'\] in rope_parameters; wanted an object "
            "for full_attention and one for sliding_attention",
        ),
        (
            {"rope_parameters": {"sliding_attention": 1e4}},
            "sliding_attention=10000.0; wanted an object or null",
        ),
        ({"vision_config": {"a": 1}}, "vision_config={'a': 1}, which is not read here"),
    ],
)
def test_refused_for_gemma(more, match):
    with pytest.raises(ModelError, match=match):
        model_config(GEMMA3 | more)


@pytest.mark.parametrize(
    "key",
    ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"],
)
def test_gemma_fields_are_refused_for_other_families(key):
    with pytest.raises(ModelError, match=f"sets {key}=30.0, which is not read here"):
        read("llama", **{key: 30.0})


def test_gemma_4_has_the_defaults_of_transformers():
    config = model_config(GEMMA4)
    assert config.layer_windows == (*[512] * 5, None, None)
    assert (config.head_dim, config.num_kv_heads, config.score_scale) == (256, 4, 1.0)
    full = config.at_layer(5)
    assert (full.head_dim, full.num_kv_heads) == (512, 2)
    assert config.at_layer(4) == config
    quarter = ProportionalScaling(share=0.25)
    assert config.rope == Rope(theta=1e6, scaling=quarter)
    assert config.local_rope == Rope(theta=1e4)
    assert config.tie_embeddings and config.logit_softcap is None


def test_full_layers_of_gemma_4_make_values_of_keys():
    config, heads = model_config(GEMMA4), GEMMA4["num_attention_heads"]
    sliding, full = (linears(config, i) for i in (0, 5))
    assert set(sliding) - set(full) == {"self_attn.v_proj"}
    assert full["self_attn.q_proj"].out_features == heads * 512
    assert full["self_attn.k_proj"].out_features == 2 * 512
    own = {k: v for k, v in GEMMA4.items() if k != "attention_k_eq_v"}
    separate = model_config(own)
    assert linears(separate, 5)["self_attn.v_proj"].out_features == 4 * 512


def test_sizes_of_each_layer_of_gemma_4():
    """As version 5.24 of transformers writes them."""
    sizes = {"head_dim": 128, "num_key_value_heads": 1}
    given = {"5": sizes, "6": dict(sizes)}
    config = model_config({**GEMMA4, "per_layer_config": given})
    assert (config.full_head_dim, config.full_kv_heads) == (128, 1)


def test_experts_of_gemma_4_are_beside_its_mlps():
    config = model_config(GEMMA4 | EXPERTS)
    sliding, full = (linears(config, i) for i in (0, 5))
    for layer in (sliding, full):
        assert layer["mlp.down_proj"].experts is None
        down = layer["experts.down_proj"]
        assert (down.in_features, down.out_features) == (24, config.hidden_size)
        assert down.names[7] == "experts.7.down_proj"
    with pytest.raises(ValueError, match="its experts are whole on each device"):
        check_divides(config, 2)
    unused = {k: v for k, v in EXPERTS.items() if k != "enable_moe_block"}
    assert model_config(GEMMA4 | unused) == model_config(GEMMA4)


def test_devices_divide_the_heads_of_all_layers_of_gemma_4():
    config = model_config(GEMMA4)
    part = part_config(config, 2)
    assert (part.num_kv_heads, part.at_layer(5).num_kv_heads) == (2, 1)
    check_divides(config, 2)
    with pytest.raises(ValueError, match=r"have \[2, 4\] key-value heads: it must"):
        check_divides(config, 4)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"hidden_size_per_layer_input": 256}, "gemma-4-E2B and .* Others are, su"),
        ({"num_kv_shared_layers": 2}, "that share keys and values"),
        (
            {"enable_moe_block": True, "num_experts": 8},
            "lacks .top_k_experts.,",
        ),
        ({**EXPERTS, "top_k_experts": 9}, "top_k_experts=9, more than its 8 experts"),
        ({"use_bidirectional_attention": "all"}, "only 'vision' is supp"),
        ({"layer_types": ["sliding_attention"] * 7}, "last layer of a Gemma 4 must be"),
        ({"num_global_key_value_heads": 3}, "has 3 key-value heads of 512 features in"),
        ({"global_head_dim": 9}, "key-value heads of 9 features"),
        ({"per_layer_config": {"5": {"head_dim": 9}}}, "wanted the same head_dim and"),
        ({"per_layer_config": {"5": {"x": 9}, "6": {"x": 9}}}, "wanted the same head"),
        (
            {"per_layer_config": {"5": {"head_dim": 0}, "6": {"head_dim": 0}}},
            "head_dim=0; wanted a positive whole number",
        ),
    ],
)
def test_values_of_gemma_4_that_are_refused(more, match):
    with pytest.raises(ModelError, match=match):
        model_config({**GEMMA4, **more})
