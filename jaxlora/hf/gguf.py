"""GGUF files of the Llama architecture as Hugging Face folders."""

import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxlora.atomic import write_text
from jaxlora.errors import ModelError
from jaxlora.hf.save import save_checkpoint

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How a tokenizer of each kind splits text before its merges apply.
_DIGITS = {"smollm", "starcoder", "refact", "command-r"}
_CONTROL, _USER_DEFINED = 3, 4


def convert_gguf(
    path: str | pathlib.Path, out: str | pathlib.Path, *, dtype: np.dtype
) -> pathlib.Path:
    """Writes config, weights and tokenizer of a GGUF file as a Hugging Face folder.

    Quantised weights are expanded to `dtype`; what quantisation lost stays lost.

    Args:
        path: GGUF file: Llama architecture, byte-level BPE tokenizer.
        out: Folder to make.
        dtype: Of the weights.

    Raises:
        ModelError: The `gguf` package is missing, or the file is of another kind.
    """
    reader, fields = _open(path)
    if fields.get("general.architecture") != "llama":
        raise ModelError(
            f"{path} has architecture {fields.get('general.architecture')!r}; only "
            "'llama' is converted."
        )
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError(
            f"{path} has tokenizer {fields.get('tokenizer.ggml.model')!r}; only "
            "byte-level BPE ('gpt2') is converted."
        )
    for key in ("tokens", "token_type", "merges"):
        if f"tokenizer.ggml.{key}" not in fields:
            raise ModelError(f"{path} lacks tokenizer.ggml.{key}.")
    config = _config(fields, {tensor.name for tensor in reader.tensors})
    config["torch_dtype"] = dtype.name
    with tempfile.TemporaryDirectory() as scratch:
        extra = _tokenizer_files(fields, pathlib.Path(scratch))
        return save_checkpoint(out, _tensors(reader, config, dtype), config, extra)


def _open(path: str | pathlib.Path):
    try:
        import gguf
    except ImportError:
        raise ModelError(
            "reading GGUF files needs the gguf package: pip install 'jaxlora[gguf]'."
        ) from None
    if not pathlib.Path(path).is_file():
        raise ModelError(f"{path}: there is no such file.")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{path} is no readable GGUF file: {error}") from error
    return reader, {key: field.contents() for key, field in reader.fields.items()}


def _config(fields: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    def llama(key: str) -> Any:
        try:
            return fields[f"llama.{key}"]
        except KeyError:
            raise ModelError(f"the GGUF file lacks llama.{key}.") from None

    unread = [k for k in fields if k.startswith("llama.rope.scaling")]
    if unread or "rope_freqs.weight" in tensor_names:
        raise ModelError(
            "the GGUF file scales its rotary frequencies, which is not read."
        )
    heads = llama("attention.head_count")
    width = llama("embedding_length")
    head_dim = fields.get("llama.attention.key_length", width // heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"the GGUF file rotates {fields['llama.rope.dimension_count']} of a head's "
            f"{head_dim} features; only all of them are supported."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": llama("context_length"),
        # Kept as float32 there: 1e-5 would come out as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _hf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    parts = stem.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{_LAYER['.'.join(parts[2:])]}.{kind}"
        return f"{_TOP[stem]}.{kind}"
    except KeyError:
        raise ModelError(f"the GGUF file holds {name}, which is not known.") from None


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """From GGUF's interleaved rotary pairs to the half-split order, head by head."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tensors(reader, config, dtype) -> Iterator[tuple[str, np.ndarray]]:
    import gguf

    heads = {
        "self_attn.q_proj.": config["num_attention_heads"],
        "self_attn.k_proj.": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        array = values.astype(np.float32).reshape(tuple(tensor.shape[::-1]))
        for part, count in heads.items():
            if part in name:
                array = _unpermute(array, count)
        yield name, array.astype(dtype)


def _tokenizer_files(fields: dict, folder: pathlib.Path) -> list[pathlib.Path]:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    split: list[Any] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ]
    kind = fields.get("tokenizer.ggml.pre")
    if kind in _DIGITS:
        split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif kind != "gpt-2":
        raise ModelError(
            f"the GGUF file splits text the {kind!r} way, which is not known; known: "
            f"{', '.join(sorted(_DIGITS))}, gpt-2."
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    special = {
        role: tokens[fields[f"tokenizer.ggml.{role}_token_id"]]
        for role in ("bos", "eos", "padding", "unknown")
        if f"tokenizer.ggml.{role}_token_id" in fields
    }
    _put_around(tokenizer, fields, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special.get("bos"),
        "eos_token": special.get("eos"),
        "pad_token": special.get("padding"),
        "unk_token": special.get("unknown"),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    text = json.dumps({k: v for k, v in settings.items() if v is not None}, indent=2)
    write_text(folder / "tokenizer_config.json", text + "\n")
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def _put_around(
    tokenizer: tokenizers.Tokenizer, fields: dict, special: dict[str, str]
) -> None:
    """Has every text begin and end with the tokens that the GGUF file asks for."""
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
