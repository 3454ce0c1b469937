"""Checkpoints in another dtype, and GGUF files, as Hugging Face folders."""

import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxlora.errors import ModelError
from jaxlora.hf.config import model_config
from jaxlora.hf.files import (
    TOKENIZER_FILES,
    model_folder,
    read_json,
    safetensor_files,
)
from jaxlora.hf.names import tensor_specs
from jaxlora.hf.save import save_checkpoint
from jaxlora.hf.tensor_file import TensorFile

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


def convert(
    source: str | pathlib.Path, out: str | pathlib.Path, *, dtype: str = "bfloat16"
) -> pathlib.Path:
    """Writes a Hugging Face folder of safetensors that this library trains on.

    Args:
        source: A GGUF file of a Llama-architecture model, a checkpoint folder, or a hub
            id.
        out: Folder to make.
        dtype: Of the weights: bfloat16 or float32.

    Raises:
        ModelError: The source cannot be read or is of an unsupported kind.
        FileExistsError: `out` holds something already.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is unknown; there is: {', '.join(DTYPES)}.")
    if str(source).endswith(".gguf"):
        from jaxlora.hf.gguf import convert_gguf

        return convert_gguf(source, out, dtype=DTYPES[dtype])
    folder = model_folder(source)
    config = read_json(folder / "config.json")
    specs = tensor_specs(model_config(config))
    files = safetensor_files(folder)
    missing = [spec.hf_name for spec in specs if spec.hf_name not in files]
    if missing:
        raise ModelError(f"the checkpoint lacks {missing[0]}.")
    config.pop("dtype", None)
    extra = [folder / name for name in TOKENIZER_FILES]
    return save_checkpoint(
        out,
        _cast(files, DTYPES[dtype]),
        {**config, "torch_dtype": dtype},
        [path for path in extra if path.is_file()],
    )


def _cast(
    files: dict[str, pathlib.Path], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    opened = {path: TensorFile(path) for path in set(files.values())}
    for name, path in files.items():
        yield name, opened[path].array(name).astype(dtype)
