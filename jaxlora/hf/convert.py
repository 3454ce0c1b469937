"""Writes checkpoints as Hugging Face folders, shard by shard."""

import json
import logging
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from jaxlora.common.atomic import new_folder, sync_files
from jaxlora.errors import ModelError
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint, with_values
from jaxlora.hf.files import model_folder, tokenizer_files
from jaxlora.hf.new_tokens import add_to_tokenizer, with_rows
from jaxlora.hf.tensor_file import check_finite

logger = logging.getLogger(__name__)

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


def convert(
    source: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    new_tokens: Sequence[str] = (),
) -> pathlib.Path:
    """Writes a Hugging Face folder of safetensors that this library trains on.

    Quantized linears are dequantized.

    Args:
        source: A checkpoint folder, or a hub id.
        out: Folder to make.
        dtype: Dtype of the weights: bfloat16 or float32. None: bfloat16; with
            `new_tokens`, float32 if the source's embedding has it.
        revision: Branch, tag or commit of a hub id.
        new_tokens: Texts of special tokens to add to the tokenizer. Embedding and head
            get rows for them if they have too few.

    Raises:
        ConfigError: A new token is empty, is given twice, or is there already.
        ModelError: The source cannot be read, is of an unsupported kind, or holds a
            weight that is not finite.
        FileExistsError: `out` holds something already.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is unknown; there is: {', '.join(DTYPES)}.")
    if str(source).endswith(".gguf"):
        raise ModelError(
            f"{source}: GGUF files of models are not read. Use the checkpoint in "
            "Hugging Face's format that it was made of."
        )
    checkpoint = open_checkpoint(model_folder(source, revision))
    checkpoint.check()
    if dtype is None:
        name = "model.embed_tokens.weight"
        stays = new_tokens and checkpoint.files[name].dtype(name) == np.float32
        dtype = "float32" if stays else "bfloat16"
    log_dequantized(checkpoint, dtype)
    kind, config = DTYPES[dtype], checkpoint.dense_config(dtype)
    tensors = _cast(checkpoint, kind)
    if not new_tokens:
        tensors, files = checkpoint.as_stored(tensors, kind), checkpoint.folder
        return save_checkpoint(out, tensors, config, tokenizer_files(files))
    with tempfile.TemporaryDirectory(prefix="jaxlora-convert-") as temporary:
        place = pathlib.Path(temporary)
        files, num_tokens = add_to_tokenizer(checkpoint.folder, new_tokens, place)
        vocab_size = max(checkpoint.config.vocab_size, num_tokens)
        config = with_values(config, vocab_size=vocab_size)
        tensors = checkpoint.as_stored(with_rows(tensors, vocab_size), kind)
        return save_checkpoint(out, tensors, config, files)


def log_dequantized(checkpoint: Checkpoint, dtype: str) -> None:
    """Logs that a copy of a checkpoint is dense, if the checkpoint is quantized."""
    if checkpoint.quantized:
        logger.info(
            "%s is quantized (%s): its %d quantized linears are dequantized. The copy "
            "is dense, in %s, and has no quantization_config.",
            checkpoint.folder,
            checkpoint.kind,
            len(checkpoint.quantized),
            dtype,
        )


def _cast(checkpoint: Checkpoint, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in checkpoint.dense_tensors():
        where = f"{checkpoint.files[name].path}: {name}"
        check_finite(array, where, ModelError, dtype)
        yield name, array.astype(dtype)


def save_checkpoint(
    folder: str | pathlib.Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    config: Mapping[str, Any],
    extra_files: Sequence[pathlib.Path] = (),
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> pathlib.Path:
    """Writes a checkpoint folder that transformers loads.

    The folder appears under its name when it is complete. At most one shard is in
    memory.

    Args:
        folder: Folder to make; must not hold anything.
        tensors: (name, array), drawn one at a time.
        config: Contents of config.json.
        extra_files: Files to copy beside it, such as the tokenizer's.
        max_shard_bytes: A larger checkpoint is split into several files.

    Raises:
        FileExistsError: The folder holds something already.
    """
    folder = pathlib.Path(folder)
    with new_folder(folder) as temporary:
        shards: list[list[str]] = []
        shard: dict[str, np.ndarray] = {}
        total = shard_bytes = 0
        for name, array in tensors:
            if shard and shard_bytes + array.nbytes > max_shard_bytes:
                shards.append(_write_shard(temporary, len(shards), shard))
                shard, shard_bytes = {}, 0
            shard[name] = array
            shard_bytes += array.nbytes
            total += array.nbytes
        shards.append(_write_shard(temporary, len(shards), shard))
        _name_shards(temporary, shards, total)
        text = json.dumps(config, indent=2) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        for path in extra_files:
            shutil.copy(path, temporary / path.name)
        sync_files(temporary)
    return folder


def _write_shard(folder: pathlib.Path, number: int, shard: dict) -> list[str]:
    contiguous = {name: np.ascontiguousarray(array) for name, array in shard.items()}
    path = folder / f"{number}.safetensors"
    safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt"})
    return list(shard)


def _name_shards(folder: pathlib.Path, shards: list[list[str]], total: int) -> None:
    """Gives the shards the names that transformers looks for, and an index."""
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
