"""Reading the config.json of Gemma 2 and Gemma 3."""

import pytest

from jaxlora.errors import ModelError
from jaxlora.models.config import LinearRopeScaling, Rope
from jaxlora.models.registry import model_config
from tests.jaxlora.models.test_config import SHAPE, read

GEMMA2 = {"model_type": "gemma2", **SHAPE}
GEMMA3 = {"model_type": "gemma3_text", **SHAPE, "num_hidden_layers": 7}


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
