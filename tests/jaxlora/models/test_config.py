"""Reads config.json of each family as a `ModelConfig`, and refuses the rest."""

import pytest

from jaxlora.errors import ModelError
from jaxlora.models.config import LinearRopeScaling, Llama3RopeScaling, Rope
from jaxlora.models.registry import model_config
from jaxlora.models.structure import tensor_specs
from tests import tiny

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_READ = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
# Fields that transformers writes into every file, and others without effect here.
NOISE = {
    "architectures": ["ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "transformers_version": "4.57.0",
    "use_cache": True,
    "dtype": "bfloat16",
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "torchscript": None,
}


def read(family="llama", **more):
    heads = {} if family == "llama" else {"num_key_value_heads": 2}
    return model_config({"model_type": family, **SHAPE, **heads, **more})


def test_tiny_llama():
    config = model_config(tiny.CONFIG)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (
        288,
        32,
        48,
    )
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_positions, config.rms_eps) == (8, 512, 1e-5)
    assert config.rope == Rope(theta=10000.0)
    assert config.local_rope is None
    assert config.tie_embeddings
    assert config.layer_windows == (None, None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_noise_changes_nothing(family):
    assert read(family, **NOISE) == read(family)
    assert read(family).model_type == family


@pytest.mark.parametrize(
    ("family", "max_positions", "head_dim", "num_kv_heads", "windows"),
    [
        ("llama", 2048, 4, 64, (None,) * 4),
        ("mistral", 131072, 4, 8, (4096,) * 4),
        ("qwen2", 32768, 4, 32, (None,) * 4),
        ("qwen3", 32768, 128, 32, (None,) * 4),
    ],
)
def test_defaults_are_those_of_transformers(
    family, max_positions, head_dim, num_kv_heads, windows
):
    config = model_config(
        {
            **SHAPE,
            "model_type": family,
            "num_attention_heads": 64,
            "hidden_size": 256,
        }
    )
    assert config.max_positions == max_positions
    assert config.head_dim == head_dim
    assert config.num_kv_heads == num_kv_heads
    assert config.layer_windows == windows
    assert (config.rope, config.rms_eps) == (Rope(theta=10000.0), 1e-6)
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    ("family", "more", "qkv", "o", "mlp", "qk_norm"),
    [
        ("llama", {}, False, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False, False),
        ("llama", {"mlp_bias": True}, False, False, True, False),
        ("mistral", {}, False, False, False, False),
        ("qwen2", {}, True, False, False, False),
        ("qwen3", {}, False, False, False, True),
        ("qwen3", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms(family, more, qkv, o, mlp, qk_norm):
    config = read(family, **more)
    found = (config.qkv_bias, config.o_bias, config.mlp_bias)
    paths = {spec.path for spec in tensor_specs(config)}
    found += ("layers.0.self_attn.q_norm.scale" in paths,)
    assert found == (qkv, o, mlp, qk_norm)


def test_fields_of_other_families_are_ignored_as_in_transformers():
    assert not read("mistral", attention_bias=True, mlp_bias=True).qkv_bias
    assert not read("mistral", attention_bias=True, mlp_bias=True).mlp_bias
    assert not read("qwen2", num_key_value_heads=2, attention_bias=True).o_bias
    assert read(partial_rotary_factor=1.0) == read()


def test_null_key_value_heads_are_as_many_as_heads():
    for family in ("llama", "mistral", "qwen2"):
        assert read(family, num_key_value_heads=None).num_kv_heads == 8


def test_head_dim_need_not_divide_the_width():
    assert read(head_dim=24).head_dim == 24
    assert read(head_dim=None).head_dim == 8


def test_tied_embeddings():
    assert read(tie_word_embeddings=True).tie_embeddings
    assert not read(tie_word_embeddings=False).tie_embeddings


@pytest.mark.parametrize(
    ("more", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 512}, 512)],
)
def test_mistral_window_absent_is_not_null(more, window):
    assert read("mistral", **more).layer_windows == (window,) * 4


QWEN_WINDOW = {"use_sliding_window": True, "num_key_value_heads": 2}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 64}, (None,) * 4),
        ({"max_window_layers": 2, "sliding_window": 64}, (None, None, 64, 64)),
        ({"max_window_layers": 0}, (4096,) * 4),
        ({"sliding_window": 64}, (None,) * 4),
        ({"sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        (
            {
                "sliding_window": 64,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 64, None, 64),
        ),
    ],
)
def test_qwen_windows(family, more, windows):
    assert read(family, **{**QWEN_WINDOW, **more}).layer_windows == windows


@pytest.mark.parametrize(
    ("v4", "v5", "theta", "scaling"),
    [
        (
            {"rope_theta": 5e5},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            5e5,
            None,
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            LLAMA3_READ,
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2}},
            10000.0,
            LinearRopeScaling(factor=2.0),
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            10000.0,
            LinearRopeScaling(factor=2.0),
        ),
        ({"rope_scaling": None}, {"rope_parameters": None}, 10000.0, None),
    ],
)
def test_rope_in_both_spellings(v4, v5, theta, scaling):
    assert read(**v4) == read(**v5)
    assert read(**v4).rope == Rope(theta=theta, scaling=scaling)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2'\. Supported: llama, mistral"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]\. Supported"),
        ({"num_local_experts": 8}, "num_local_experts=8: mixture-of-experts"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1; only 0 is supported"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic'; supported: default, linear, llama3, yarn",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5; only 1.0 is supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; only 1.0 is su"),
        ({"auto_map": {"AutoModel": "code.X"}}, "auto_map={'AutoModel': 'code.X'}, w"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' without 'factor'"),
        (
            {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "beta_fast": 32}},
            r"sets \['beta_fast'\] for rope_type='llama3'",
        ),
        ({"rope_scaling": {"factor": 4.0}}, r"sets \['factor'\] for rope_type='def"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            r"sets \['full_attention'\]",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor='two'; wanted"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'; wanted an object"),
        ({"rope_theta": "big"}, "rope_theta='big'; wanted a number"),
        ({"tie_word_embeddings": "false"}, "'false'; wanted true or false"),
        ({"num_attention_heads": 7}, "hidden_size=64, not a multiple of"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7; rotary positions need an even one"),
        ({"intermediate_size": None}, "lacks 'intermediate_size'"),
        ({"sliding_window": 64}, "sliding_window=64 for a llama model"),
    ],
)
def test_refused(more, match):
    with pytest.raises(ModelError, match=match):
        model_config({"model_type": "llama", **SHAPE, **more})


BOUNDED = (*SHAPE, "num_key_value_heads", "head_dim", "max_position_embeddings")


@pytest.mark.parametrize("key", BOUNDED)
@pytest.mark.parametrize(
    "value", [0, -1, 16.0, True, "16", [16], {}, 10**9 * 8, 10**12, 10**400, 1e308]
)
def test_sizes_are_bounded_before_anything_is_made(key, value):
    with pytest.raises(
        ModelError, match=f"config.json has {key}=.*; wanted a"
    ) as found:
        read("qwen3", **{key: value})
    assert len(str(found.value)) < 400


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"rope_theta": 10**400}, "rope_theta=1000.*; wanted a number above 0, and at"),
        ({"rope_theta": 1e-300}, "rope_theta=1e-300; wanted at least 1"),
        ({"rope_theta": 1e300}, r"rope_theta=1e\+300; wanted a number above 0, and at"),
        ({"rope_scaling": {"type": []}}, r"rope_type=.*; supported: default, linear"),
        (
            {"rope_scaling": {**LLAMA3, "type": "llama3", "high_freq_factor": 1.0}},
            "high_freq_factor=1, which must be above low_freq_factor=1",
        ),
        ({"hidden_size": 65, "head_dim": 8}, "hidden_size=65, not a multiple of"),
        ({"eos_token_id": [2, None, "a"]}, "eos_token_id=.*; wanted a whole number"),
        ({"pad_token_id": True}, "pad_token_id=True; wanted a whole number"),
        ({"auto_map": "a" * 9999}, r"auto_map='aaa.*\.\.\..*, which is not read"),
    ],
)
def test_values_that_cannot_be_computed_with(more, match):
    with pytest.raises(ModelError, match=match) as found:
        read(**more)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("key", SHAPE)
def test_required(key):
    config = {k: v for k, v in SHAPE.items() if k != key}
    with pytest.raises(ModelError, match=f"lacks '{key}'"):
        model_config({"model_type": "llama", **config})
