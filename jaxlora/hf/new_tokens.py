"""Adds tokens to a tokenizer, and rows for them to an embedding and a head."""

import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf.files import tokenizer_files

_TABLES = "model.embed_tokens.weight", "lm_head.weight"


def add_to_tokenizer(
    folder: pathlib.Path, tokens: Sequence[str], out: pathlib.Path
) -> tuple[list[pathlib.Path], int]:
    """Writes a tokenizer with further special tokens, as transformers adds them.

    Args:
        folder: Folder of the tokenizer.
        tokens: Texts of the tokens.
        out: Folder to write to.

    Returns:
        The files, and the largest token id + 1.

    Raises:
        ConfigError: A token is empty, is given twice, or is there already.
        ModelError: The folder has no tokenizer.json.
    """
    files = [shutil.copyfile(x, out / x.name) for x in tokenizer_files(folder)]
    path = out / "tokenizer.json"
    if path not in files:
        raise ModelError(f"{folder} has no tokenizer.json, to which tokens are added.")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    for number, token in enumerate(tokens):
        if not token or token in tokens[:number]:
            raise ConfigError(
                f"new tokens: {token!r} is {'given twice' if token else 'empty'}. Give "
                "different texts."
            )
        if (there := tokenizer.token_to_id(token)) is not None:
            raise ConfigError(
                f"new tokens: the tokenizer of {folder} has {token!r}, as {there}. "
                "Leave it out; a job can train its row as it is."
            )
    added = [tokenizers.AddedToken(x, special=True, normalized=False) for x in tokens]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(path))
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return files, 1 + max(ids)


def with_rows(
    tensors: Iterable[tuple[str, np.ndarray]], vocab_size: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors, with an embedding and a head of at least so many rows.

    A new row is the mean of the others, around which transformers draws it.

    Args:
        tensors: Name and contents of each tensor.
        vocab_size: Number of rows.
    """
    for name, array in tensors:
        num_new = vocab_size - len(array) if name in _TABLES else 0
        if num_new > 0:
            mean: Any = array.astype(np.float32).mean(axis=0, keepdims=True)
            rows = np.repeat(mean.astype(array.dtype), num_new, axis=0)
            array = np.concatenate([array, rows])
        yield name, array
