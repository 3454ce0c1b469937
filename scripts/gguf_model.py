"""Converts a GGUF file of the Llama architecture to a Hugging Face folder.

    python scripts/gguf_model.py FILE.gguf FOLDER

The demo needs it, whose model comes from a Python package as such a file. Quantized
weights are expanded, which does not restore their precision. Only byte-level BPE
tokenizers are converted.
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxlora.adapters.files.gguf_export import GGUF_LINEARS
from jaxlora.hf.convert import save_checkpoint

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {gguf: name for name, gguf in GGUF_LINEARS.items()} | {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Kinds of tokenizers that split digits from each other before merging.
_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_ROLES = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}


def convert(path: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Writes config, weights in bfloat16 and tokenizer of a file as a folder.

    Args:
        path: The file.
        out: Folder to make.

    Raises:
        ValueError: The file is of another kind than the ones above.
    """
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    for key, wanted in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
    ):
        if fields.get(key) != wanted:
            raise ValueError(f"{path}: {key} is {fields.get(key)!r}, not {wanted!r}.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    is_scaled = any(key.startswith("llama.rope.scaling") for key in fields)
    if is_scaled or "rope_freqs.weight" in tensors:
        raise ValueError(f"{path} scales its rotary frequencies, which is not read.")
    config = _config(fields, has_head="output.weight" in tensors)
    with tempfile.TemporaryDirectory() as scratch:
        extra = _write_tokenizer(fields, pathlib.Path(scratch))
        return save_checkpoint(out, _weights(tensors, config), config, extra)


def _config(fields: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    of = lambda key, default=None: fields.get(f"llama.{key}", default)
    heads = fields["llama.attention.head_count"]
    token_ids = {
        f"{ours}_token_id": fields.get(f"tokenizer.ggml.{theirs}_token_id")
        for theirs, ours in _ROLES.items()
        if ours != "unk"
    }
    # GGUF has float32: without rounding, 1e-5 would become 9.999999747378752e-06.
    epsilon = float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": of("attention.key_length", of("embedding_length") // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": epsilon,
        "rope_theta": of("rope.freq_base", 10000.0),
        "tie_word_embeddings": not has_head,
        "torch_dtype": "bfloat16",
        **token_ids,
    }


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def _weights(
    tensors: Mapping[str, gguf.ReaderTensor], config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    heads = {
        "self_attn.q_proj.": config["num_attention_heads"],
        "self_attn.k_proj.": config["num_key_value_heads"],
    }
    for name, tensor in tensors.items():
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        array = array.reshape([int(size) for size in tensor.shape[::-1]])
        hf_name = _hf_name(name)
        for part, count in heads.items():
            if part in hf_name:
                # From interleaved pairs of rotary features to half-split ones.
                pairs = array.reshape(count, -1, 2, *array.shape[1:])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        yield hf_name, array.astype(ml_dtypes.bfloat16)


def _write_tokenizer(
    fields: Mapping[str, Any], folder: pathlib.Path
) -> list[pathlib.Path]:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    special = {
        ours: tokens[fields[key]]
        for theirs, ours in _ROLES.items()
        if (key := f"tokenizer.ggml.{theirs}_token_id") in fields
    }
    tokenizer = _tokenizer(fields)
    first, last = (
        [special[role]]
        if role in special and fields.get(f"tokenizer.ggml.add_{role}_token")
        else []
        for role in ("bos", "eos")
    )
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*first, *last}],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": token for role, token in special.items()},
        "clean_up_tokenization_spaces": False,
    }
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n")
    return [folder / "tokenizer.json", path]


def _tokenizer(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens, kinds, merges, way = (
        fields[f"tokenizer.ggml.{key}"]
        for key in ("tokens", "token_type", "merges", "pre")
    )
    if way not in (*_DIGITS, "gpt-2"):
        raise ValueError(f"the tokenizer splits text the {way!r} way, not a known one.")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    split: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if way in _DIGITS:
        split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


if __name__ == "__main__":
    convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
