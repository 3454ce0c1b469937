"""Converts checkpoints to dense Hugging Face folders."""

import logging
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from jaxlora.errors import ModelError
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint
from jaxlora.hf.files import model_folder, tokenizer_files
from jaxlora.hf.magnitude import check_finite
from jaxlora.hf.new_tokens import add_to_tokenizer, with_rows
from jaxlora.hf.save import save_checkpoint

logger = logging.getLogger(__name__)

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


def convert(
    source: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    dtype: str = "bfloat16",
    revision: str | None = None,
    new_tokens: Sequence[str] = (),
) -> pathlib.Path:
    """Writes a Hugging Face folder of safetensors that this library trains on.

    Quantized linears are dequantized.

    Args:
        source: A checkpoint folder, or a hub id.
        out: Folder to make.
        dtype: Dtype of the weights: bfloat16 or float32.
        revision: Branch, tag or commit of a hub id.
        new_tokens: Texts of special tokens to add to the tokenizer. Embedding and head
            get rows for them if they have too few.

    Raises:
        ConfigError: A new token is empty, is given twice, or is there already.
        ModelError: The source cannot be read, is of an unsupported kind, or holds a
            weight that is not finite.
        FileExistsError: `out` holds something already.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is unknown; there is: {', '.join(DTYPES)}.")
    if str(source).endswith(".gguf"):
        raise ModelError(
            f"{source}: GGUF files of models are not read. Use the checkpoint in "
            "Hugging Face's format that it was made of."
        )
    checkpoint = open_checkpoint(model_folder(source, revision))
    checkpoint.check()
    log_dequantized(checkpoint, dtype)
    tensors, config = _cast(checkpoint, DTYPES[dtype]), checkpoint.dense_config(dtype)
    if not new_tokens:
        return save_checkpoint(out, tensors, config, tokenizer_files(checkpoint.folder))
    with tempfile.TemporaryDirectory(prefix="jaxlora-convert-") as temporary:
        place = pathlib.Path(temporary)
        files, num_tokens = add_to_tokenizer(checkpoint.folder, new_tokens, place)
        config["vocab_size"] = max(checkpoint.config.vocab_size, num_tokens)
        tensors = with_rows(tensors, config["vocab_size"])
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
