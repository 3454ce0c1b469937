"""Converts GGUF files as llama.cpp writes them to Hugging Face folders."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from jaxlora.data.tokenizer import load_tokenizer
from scripts.gguf_model import convert
from tests import tiny
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.hf.test_load import assert_params_equal

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Control tokens, a token of the user's, every byte, two merges, unused ones to 288.
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e"]
TOKENS = [*tiny.SPECIAL, "<|mine|>", *ALPHABET, "th", "the"]
KINDS = [3, 3, 3, 4] + [1] * (len(ALPHABET) + 2)
KINDS += [5] * (288 - len(TOKENS))
TOKENS += [f"<|unused{i}|>" for i in range(288 - len(TOKENS))]


def to_pairs(weight, heads):
    """Turns Hugging Face's half-split rows into llama.cpp's interleaved pairs."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name):
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{({**top, 'lm_head': 'output'})[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


@pytest.fixture
def write(tmp_path):
    """Writes the tiny model as a GGUF file; None leaves a field out."""

    def make(weights=None, quantize=None, rename=None, **fields):
        path = tmp_path / "tiny.gguf"
        arch = fields.pop("architecture", "llama")
        writer = gguf.GGUFWriter(path, arch)
        defaults = {
            "context_length": 512,
            "embedding_length": 32,
            "feed_forward_length": 48,
            "block_count": 2,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "rope.dimension_count": 8,
        }
        for key, value in {**defaults, **fields.pop("llama", {})}.items():
            if value is not None:
                writer.add_uint32(f"{arch}.{key}", value)
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
        values = {
            "tokenizer_model": "gpt2",
            "tokenizer_pre": "gpt-2",
            "token_list": TOKENS,
            "token_types": KINDS,
            "token_merges": MERGES,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "chat_template": tiny.CHATML,
            **fields,
        }
        for key, value in values.items():
            if value is not None:
                getattr(writer, f"add_{key}")(value)
        weights = tiny.random_weights() if weights is None else weights
        for name, array in weights.items():
            for part, heads in (("q_proj", 4), ("k_proj", 2)):
                if part in name:
                    array = to_pairs(array, heads)
            name = (rename or {}).get(name, None) or gguf_name(name)
            if quantize is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
                data = gguf.quants.quantize(array, quantize)
                writer.add_tensor(name, data, raw_dtype=quantize)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def rounded(weights):
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}


def test_weights_and_config(write, tmp_path):
    out = convert(write(), tmp_path / "out")
    base = load_model(out, dtype="bfloat16")
    assert_params_equal(base, rounded(tiny.random_weights()))
    plain = load_model(tiny.write_model(tmp_path / "plain"))
    assert base.config == plain.config
    written = json.loads((out / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"
    for key in ("rms_norm_eps", "tie_word_embeddings", "eos_token_id"):
        assert written[key] == tiny.CONFIG[key]


def test_an_untied_head(write, tmp_path):
    head = np.random.default_rng(1).normal(size=(288, 32)).astype(np.float32)
    weights = {**tiny.random_weights(), "lm_head.weight": head}
    base = load_model(convert(write(weights), tmp_path / "out"), dtype="bfloat16")
    assert not base.config.tie_embeddings
    found = np.asarray(base.params["lm_head.kernel"])
    np.testing.assert_array_equal(found, head.T.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16", "F16"])
def test_quantised_weights_are_expanded(write, tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    out = convert(write(quantize=kind), tmp_path / "out")
    base = load_model(out, dtype="bfloat16")
    expected = {}
    for name, array in tiny.random_weights().items():
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            # Blocks lie along a row, so that the order of rows does not matter.
            array = gguf.dequantize(gguf.quants.quantize(array, kind), kind)
        expected[name] = array.astype(np.float32)
    assert_params_equal(base, rounded(expected))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(expected[name], tiny.random_weights()[name])


def test_tokenizer(write, tmp_path):
    out = convert(write(), tmp_path / "out")
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "the <|im_start|>thé 12<|mine|>\n"
    encoded = tokenizer.encode(text)
    ids = {token: i for i, token in enumerate(TOKENS)}
    wanted = ["the", "Ġ", "<|im_start|>", "th", "Ã", "©", "Ġ", "1", "2", "<|mine|>"]
    assert encoded.tokens == [*wanted, "Ċ"]
    assert encoded.ids == [ids[token] for token in encoded.tokens]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    # Only the control token is special.
    assert tokenizer.decode(encoded.ids) == text.replace("<|im_start|>", "")
    loaded = load_tokenizer(out)
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (1, 2, 0)
    assert loaded.prefix_ids == loaded.suffix_ids == ()
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == tiny.CHATML


@pytest.mark.parametrize(
    ("fields", "prefix", "suffix"),
    [
        ({"add_bos_token": True}, (1,), ()),
        ({"add_bos_token": True, "add_eos_token": True}, (1,), (2,)),
        ({"add_bos_token": False, "add_eos_token": True}, (), (2,)),
    ],
)
def test_tokens_put_around_a_text(write, tmp_path, fields, prefix, suffix):
    tokenizer = load_tokenizer(convert(write(**fields), tmp_path / "out"))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == (prefix, suffix)


def test_digits_stand_alone_in_smollm(write, tmp_path):
    number = {"token_list": [*TOKENS[:-1], "12"], "token_merges": [*MERGES, "1 2"]}
    for pre, wanted in (("smollm", ["1", "2"]), ("gpt-2", ["12"])):
        out = convert(write(tokenizer_pre=pre, **number), tmp_path / pre)
        tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
        assert tokenizer.encode("12").tokens == wanted


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"architecture": "gemma"}, "architecture is 'gemma', not 'llama'"),
        ({"tokenizer_model": "llama"}, "model is 'llama', not 'gpt2'"),
        ({"tokenizer_pre": "llama-bpe"}, "splits text the 'llama-bpe' way"),
        ({"rope_scaling_factor": 8.0}, "scales its rotary frequencies"),
    ],
)
def test_refused(write, tmp_path, fields, match):
    path = write(**fields)
    with pytest.raises(ValueError, match=match):
        convert(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]
