"""Converts the tokenizer of a GGUF file to Hugging Face's files."""

import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxlora.common.atomic import write_text
from jaxlora.common.counted import counted
from jaxlora.common.json_file import shown
from jaxlora.common.rust import wrap_errors
from jaxlora.errors import ModelError
from jaxlora.hf.gguf_file import GgufFile

# Kinds of tokenizers that split digits from each other before merging.
_DIGITS = {"smollm", "starcoder", "refact", "command-r"}
_CONTROL, _USER_DEFINED = 3, 4
_ROLES = ("bos", "eos", "padding", "unknown")


def check_tokenizer(file: GgufFile) -> None:
    """Checks that a GGUF file has a tokenizer of the kind that is converted.

    Raises:
        ModelError: The file has no tokenizer, or one that is damaged or of another
            kind.
    """
    fields = file.fields
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError(
            f"{file.path} has tokenizer {shown(fields.get('tokenizer.ggml.model'))}; "
            "only byte-level BPE ('gpt2') is converted."
        )
    for key, kind in (("tokens", str), ("token_type", int), ("merges", str)):
        values = fields.get(f"tokenizer.ggml.{key}")
        if values is None:
            raise ModelError(f"{file.path} lacks tokenizer.ggml.{key}.")
        is_list = isinstance(values, list)
        if not is_list or not all(isinstance(value, kind) for value in values):
            raise ModelError(
                f"{file.path} has tokenizer.ggml.{key}={shown(values)}; wanted a list "
                f"of {'texts' if kind is str else 'whole numbers'}."
            )
    tokens = fields["tokenizer.ggml.tokens"]
    if not tokens or len(set(tokens)) < len(tokens):
        raise ModelError(f"{file.path} has no tokens, or some of them twice.")
    if len(fields["tokenizer.ggml.token_type"]) != len(tokens):
        raise ModelError(
            f"{file.path} has {counted(len(tokens), 'token')}, and a type for "
            f"{len(fields['tokenizer.ggml.token_type'])}."
        )
    for merge in fields["tokenizer.ggml.merges"]:
        if len(merge.split(" ")) != 2:
            raise ModelError(
                f"{file.path} merges {shown(merge)}; wanted two tokens with a space "
                "between them."
            )
    for role in _ROLES:
        token_id = fields.get(f"tokenizer.ggml.{role}_token_id")
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if token_id is not None and not (is_id and 0 <= token_id < len(tokens)):
            raise ModelError(
                f"{file.path} has tokenizer.ggml.{role}_token_id={shown(token_id)}; "
                f"wanted the id of a token, from 0 to {len(tokens) - 1}."
            )
    if not isinstance(fields.get("tokenizer.chat_template"), str | None):
        raise ModelError(f"{file.path} has a chat template that is not text.")


def write_tokenizer(file: GgufFile, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes tokenizer.json and tokenizer_config.json.

    Args:
        file: A file that has passed `check_tokenizer`.
        folder: Folder to write to.

    Raises:
        ModelError: The tokenizer splits text in an unknown way, or is damaged.
    """
    fields, tokens = file.fields, file.fields["tokenizer.ggml.tokens"]
    special = {
        role: tokens[fields[f"tokenizer.ggml.{role}_token_id"]]
        for role in _ROLES
        if f"tokenizer.ggml.{role}_token_id" in fields
    }
    with wrap_errors(f"{file.path}: its tokenizer", "Fetch it again.", ModelError):
        tokenizer = _tokenizer(file)
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


def _tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    tokens, kinds, merges = (
        file.fields[f"tokenizer.ggml.{key}"]
        for key in ("tokens", "token_type", "merges")
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    split: list[Any] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ]
    kind = file.fields.get("tokenizer.ggml.pre")
    if isinstance(kind, str) and kind in _DIGITS:
        split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif kind != "gpt-2":
        raise ModelError(
            f"{file.path} splits text the {shown(kind)} way, which is not known; "
            f"known: {', '.join(sorted(_DIGITS))}, gpt-2."
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
    return tokenizer


def _put_around(
    tokenizer: tokenizers.Tokenizer, fields: dict, special: dict[str, str]
) -> None:
    """Adds the special tokens that the GGUF file puts at the start and end of texts."""
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
