"""Converts GGUF files, and checkpoints in another dtype, to Hugging Face folders."""

import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxlora.errors import ModelError
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint
from jaxlora.hf.files import model_folder, tokenizer_files, warn_of_revision
from jaxlora.hf.magnitude import check_finite
from jaxlora.hf.save import save_checkpoint

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
) -> pathlib.Path:
    """Writes a Hugging Face folder of safetensors that this library trains on.

    Args:
        source: A GGUF file of a Llama-architecture model, a checkpoint folder, or a hub
            id.
        out: Folder to make.
        dtype: Dtype of the weights: bfloat16 or float32.
        revision: Branch, tag or commit of a hub id.

    Raises:
        ModelError: The source cannot be read, is of an unsupported kind, or holds a
            weight that is not finite.
        FileExistsError: `out` holds something already.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is unknown; there is: {', '.join(DTYPES)}.")
    if str(source).endswith(".gguf"):
        from jaxlora.hf.gguf import convert_gguf

        warn_of_revision(source, revision)
        return convert_gguf(source, out, dtype=DTYPES[dtype])
    checkpoint = open_checkpoint(model_folder(source, revision))
    checkpoint.check()
    config_json = {**checkpoint.config_json, "torch_dtype": dtype}
    config_json.pop("dtype", None)
    return save_checkpoint(
        out,
        _cast(checkpoint, DTYPES[dtype]),
        config_json,
        tokenizer_files(checkpoint.folder),
    )


def _cast(checkpoint: Checkpoint, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    for name, file in checkpoint.files.items():
        array = file.array(name)
        check_finite(array, f"{file.path}: {name}", ModelError, dtype)
        yield name, array.astype(dtype)
