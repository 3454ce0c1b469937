"""Writes the tiny model as a GGUF file."""

import pathlib

import gguf
from tokenizers import pre_tokenizers

from tests import tiny

_NAMES = {
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
_SIZES = {
    "context_length": 512,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 8,
}


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_NAMES[part]}.weight"
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    return f"{top[stem]}.weight"


def write(path: pathlib.Path) -> None:
    """Writes it, with a byte-level tokenizer; one kind of tensor is quantized."""
    tokens = [*tiny.SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens.append("th")
    tokens += [f"<|unused{i}|>" for i in range(288 - len(tokens))]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in _SIZES.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 285)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tiny.CHATML)
    for name, array in tiny.random_weights().items():
        if "up_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(array, kind)
            writer.add_tensor(_name(name), data, raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
