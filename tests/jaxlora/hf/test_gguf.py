"""Converts GGUF files as llama.cpp writes them to Hugging Face folders."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import ModelError
from jaxlora.hf.convert import convert
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


def test_weights_and_config(write, tmp_path):
    out = convert(write(), tmp_path / "out", dtype="float32")
    base = load_model(out)
    assert_params_equal(base, tiny.random_weights())
    plain = load_model(tiny.write_model(tmp_path / "plain"))
    assert base.config == plain.config
    written = json.loads((out / "config.json").read_text())
    for key in ("rms_norm_eps", "tie_word_embeddings", "torch_dtype", "eos_token_id"):
        assert written[key] == tiny.CONFIG[key]


def test_bfloat16_is_the_default(write, tmp_path):
    out = convert(str(write()), tmp_path / "out")
    weights = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in tiny.random_weights().items()
    }
    assert_params_equal(load_model(out, dtype="bfloat16"), weights)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_untied_head(write, tmp_path):
    head = np.random.default_rng(1).normal(size=(288, 32)).astype(np.float32)
    weights = {**tiny.random_weights(), "lm_head.weight": head}
    base = load_model(convert(write(weights), tmp_path / "out", dtype="float32"))
    assert not base.config.tie_embeddings
    np.testing.assert_array_equal(np.asarray(base.params["lm_head.kernel"]), head.T)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16", "F16"])
def test_quantised_weights_are_expanded(write, tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    base = load_model(convert(write(quantize=kind), tmp_path / "out", dtype="float32"))
    expected = {}
    for name, array in tiny.random_weights().items():
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            # Blocks lie along a row, so that the order of rows does not matter.
            array = gguf.dequantize(gguf.quants.quantize(array, kind), kind)
        expected[name] = array.astype(np.float32)
    assert_params_equal(base, expected)
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
        ({"architecture": "gemma"}, "architecture 'gemma'; only 'llama'"),
        ({"tokenizer_model": "llama"}, "tokenizer 'llama'; only byte-level BPE"),
        ({"tokenizer_model": None}, "tokenizer None; only byte-level BPE"),
        ({"tokenizer_pre": "llama-bpe"}, "splits text the 'llama-bpe' way"),
        ({"tokenizer_pre": None}, "splits text the None way"),
        ({"token_merges": None}, r"lacks tokenizer\.ggml\.merges"),
        ({"llama": {"block_count": None}}, r"lacks llama\.block_count"),
        ({"llama": {"rope.dimension_count": 4}}, "rotates 4 of a head's 8 features"),
        ({"rope_scaling_factor": 8.0}, "scales its rotary frequencies"),
        (
            {"rename": {"model.norm.weight": "blk.0.ffn_gate_exps.weight"}},
            r"holds blk\.0\.ffn_gate_exps\.weight, which is not known",
        ),
        ({"rename": {"model.norm.weight": "rope_freqs.weight"}}, "scales its rotary"),
        ({"rename": {"model.norm.weight": "norm.weight"}}, r"holds norm\.weight, whic"),
    ],
)
def test_refused(write, tmp_path, fields, match):
    path = write(**fields)
    with pytest.raises(ModelError, match=match):
        convert(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all", None])
def test_not_a_gguf_file(tmp_path, content):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"not a readable GGUF file|there is no such"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"llama": {"block_count": 10**9}},
            "as a config.json: .*num_hidden_layers=100",
        ),
        ({"llama": {"block_count": 3}}, "layers.2.*; its metadata calls for"),
        ({"llama": {"block_count": 1}}, "layers.1.*; its metadata calls for None"),
        ({"llama": {"embedding_length": 2**31}}, "rotates 8 of a head's 536870912"),
        ({"llama": {"feed_forward_length": 2**31}}, "as a config.json: .*size=214748"),
        (
            {"llama": {"attention.head_count": 0}},
            "head_count=0; wanted a positive whole",
        ),
        ({"llama": {"attention.head_count": 3}}, r"rotates 8 of a head's 10 features"),
        ({"token_list": [*TOKENS[:-1], TOKENS[0]]}, "no tokens, or some of them twice"),
        ({"token_list": list(range(288))}, r"tokens=\[0, .*; wanted a list of texts"),
        ({"token_types": KINDS[:-1]}, "has 288 tokens, and a type for 287"),
        ({"token_types": TOKENS}, "token_type=.*; wanted a list of whole numbers"),
        ({"token_merges": ["t h e"]}, "merges 't h e'; wanted two tokens with a space"),
        ({"token_merges": ["no such"]}, "its tokenizer: cannot be read"),
        (
            {"bos_token_id": 288},
            "bos_token_id=288; wanted .* from 0 to 287",
        ),
        ({"eos_token_id": 2**31}, "eos_token_id=2147483648; wanted the id of a"),
    ],
)
def test_metadata_that_lies(write, tmp_path, fields, match):
    path = write(**fields)
    with pytest.raises(ModelError, match=match):
        convert(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(write, tmp_path, value):
    weights = tiny.random_weights()
    weights["model.norm.weight"][3] = value
    path = write(weights)
    with pytest.raises(ModelError, match=r"output_norm\.weight holds (NaN|infinity)"):
        convert(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


# Where a file says how many tensors and fields there are, and how long the first name.
@pytest.mark.parametrize("position", [8, 16, 24])
@pytest.mark.parametrize("count", [2**31, 2**63 - 1, 2**64 - 1])
def test_counts_that_lie(write, tmp_path, position, count):
    path = write()
    content = bytearray(path.read_bytes())
    content[position : position + 8] = count.to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(
        ModelError, match=r"not a readable GGUF file: it has .* bytes, and"
    ):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (
            b"general.architecture",
            b"general.architectur\xff",
            "not a readable GGUF file",
        ),
        (
            b"<|im_start|>",
            b"<|im_start|\xff",
            "not a readable GGUF file: 'utf-8' codec",
        ),
        (
            b"blk.0.attn_norm",
            b"blk.0.attn_nor\xff",
            "not a readable GGUF file: 'utf-8'",
        ),
        (
            b"blk.0.attn_norm",
            b"blk.x.attn_norm",
            r"holds blk\.x\.attn_norm\.weight, wh",
        ),
        (b"blk.0.attn_norm", b"blk.7.attn_norm", "its metadata calls for"),
    ],
)
def test_damaged_texts(write, tmp_path, old, new, match):
    path = write()
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(ModelError, match=match):
        convert(path, tmp_path / "out")


def test_truncated_file(write, tmp_path):
    path = write()
    whole = path.read_bytes()
    for size in (20, 500, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            convert(path, tmp_path / "out")
