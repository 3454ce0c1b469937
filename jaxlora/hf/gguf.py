"""Converts GGUF files of the Llama architecture to Hugging Face folders."""

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.families.table import FAMILIES
from jaxlora.hf.config import model_config
from jaxlora.hf.gguf_file import GgufFile, open_gguf
from jaxlora.hf.gguf_tokenizer import check_tokenizer, write_tokenizer
from jaxlora.hf.magnitude import check_finite
from jaxlora.hf.names import tensor_specs
from jaxlora.hf.save import save_checkpoint

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_FAMILY = FAMILIES["llama"]
_LAYER = {linear.gguf: linear.name for linear in _FAMILY.linears} | {
    norm.gguf: norm.hf_name for norm in _FAMILY.norms
}


def convert_gguf(
    path: str | pathlib.Path, out: str | pathlib.Path, *, dtype: np.dtype
) -> pathlib.Path:
    """Writes config, weights and tokenizer of a GGUF file as a Hugging Face folder.

    Quantised weights are expanded to `dtype`, which does not restore their precision.

    Args:
        path: GGUF file of the Llama architecture with a byte-level BPE tokenizer.
        out: Folder to make.
        dtype: Dtype of the weights.

    Raises:
        ModelError: The `gguf` package is missing, the file is damaged or of another
            kind, or it holds a weight that is not finite.
    """
    file = open_gguf(path)
    architecture = file.fields.get("general.architecture")
    if architecture != _FAMILY.gguf:
        raise ModelError(
            f"{path} has architecture {shown(architecture)}; only {_FAMILY.gguf!r} is "
            "converted. Use a checkpoint in Hugging Face's format."
        )
    check_tokenizer(file)
    names = {_hf_name(path, name): name for name in file.tensors}
    config = _config(file)
    _check_tensors(file, config, names)
    config["torch_dtype"] = dtype.name
    with tempfile.TemporaryDirectory() as scratch:
        extra = write_tokenizer(file, pathlib.Path(scratch))
        tensors = _tensors(file, config, names, dtype)
        return save_checkpoint(out, tensors, config, extra)


def _config(file: GgufFile) -> dict[str, Any]:
    fields = file.fields

    def whole(key: str, default: int | None = None) -> int:
        if default is None and f"llama.{key}" not in fields:
            raise ModelError(f"{file.path} lacks llama.{key}.")
        value = fields.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(
                f"{file.path} has llama.{key}={shown(value)}; wanted a positive whole "
                "number."
            )
        return value

    unread = [k for k in fields if k.startswith("llama.rope.scaling")]
    if unread or "rope_freqs.weight" in file.tensors:
        raise ModelError(
            f"{file.path} scales its rotary frequencies, which is not read."
        )
    heads, width = whole("attention.head_count"), whole("embedding_length")
    head_dim = whole("attention.key_length", width // heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{file.path} rotates {shown(fields['llama.rope.dimension_count'])} of a "
            f"head's {head_dim} features; only all of them are supported."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": _epsilon(file),
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _epsilon(file: GgufFile) -> float:
    key = "llama.attention.layer_norm_rms_epsilon"
    value = file.fields.get(key)
    if not isinstance(value, float):
        raise ModelError(f"{file.path} has {key}={shown(value)}; wanted a number.")
    # GGUF stores float32, so without rounding 1e-5 would become 9.999999747378752e-06.
    return float(f"{value:.6g}")


def _hf_name(path: str | pathlib.Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    try:
        if parts[0] == "blk":
            layer = int(parts[1])
            return f"model.layers.{layer}.{_LAYER['.'.join(parts[2:])]}.{kind}"
        return f"{_TOP[stem]}.{kind}"
    except (KeyError, IndexError, ValueError):
        if name == "rope_freqs.weight":
            return name
        raise ModelError(f"{path} holds {name[:99]}, which is not known.") from None


def _check_tensors(
    file: GgufFile, config: dict[str, Any], names: dict[str, str]
) -> None:
    """Checks that a file holds the tensors that its metadata calls for."""
    try:
        specs = tensor_specs(model_config(config))
    except ModelError as error:
        raise ModelError(f"{file.path}, as a config.json: {error}") from error
    wanted = {spec.hf_name: spec.hf_shape for spec in specs}
    for hf_name in wanted.keys() | names.keys():
        shape = file.shape(names[hf_name]) if hf_name in names else None
        if shape != wanted.get(hf_name):
            raise ModelError(
                f"{file.path} has {hf_name} of shape {shown(shape)}; its metadata "
                f"calls for {shown(wanted.get(hf_name))}."
            )


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders each head from interleaved rotary pairs (GGUF) to half-split ones."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tensors(
    file: GgufFile, config: dict[str, Any], names: dict[str, str], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    heads = {
        "self_attn.q_proj.": config["num_attention_heads"],
        "self_attn.k_proj.": config["num_key_value_heads"],
    }
    for hf_name, name in names.items():
        array = file.array(name)
        check_finite(array, f"{file.path}: {name}", ModelError, dtype)
        for part, count in heads.items():
            if part in hf_name:
                array = _unpermute(array, count)
        yield hf_name, array.astype(dtype)
