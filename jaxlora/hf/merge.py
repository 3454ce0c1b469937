"""A base with an adapter added in: a plain Hugging Face checkpoint."""

import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxlora.adapter import Adapter
from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf.config import model_config
from jaxlora.hf.files import TOKENIZER_FILES, read_json, safetensor_files
from jaxlora.hf.names import linear_names, linear_path, tensor_specs
from jaxlora.hf.peft_import import import_peft
from jaxlora.hf.save import save_checkpoint
from jaxlora.hf.tensor_file import TensorFile

_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def merge_adapter(
    base_folder: str | pathlib.Path,
    adapter_folder: str | pathlib.Path,
    out_folder: str | pathlib.Path,
    *,
    dtype: str | None = None,
) -> pathlib.Path:
    """Writes `W + scaling * (A B)` of every adapted linear, and the rest as it is.

    Computes in float32 and rounds once. Tensors stream through: the host never holds
    more than one shard.

    Args:
        base_folder: Hugging Face checkpoint of the base.
        adapter_folder: PEFT folder.
        out_folder: Folder to make.
        dtype: Of the merged weights; None: each tensor's own.

    Raises:
        JaxloraError: Base or adapter cannot be read, or they do not fit.
        FileExistsError: `out_folder` holds something already.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r}; wanted one of {', '.join(_DTYPES)}.")
    base_folder = pathlib.Path(base_folder)
    config_json = read_json(base_folder / "config.json")
    config = model_config(config_json)
    kernels = {s.path: s.shape for s in tensor_specs(config)}
    shapes = {n: kernels[f"{linear_path(n)}.kernel"] for n in linear_names(config)}
    adapter = import_peft(adapter_folder, shapes)
    if dtype is not None:
        config_json = {**config_json, "torch_dtype": dtype}
        config_json.pop("dtype", None)
    tensors = _merged(base_folder, adapter, None if dtype is None else _DTYPES[dtype])
    extra = [base_folder / name for name in TOKENIZER_FILES]
    return save_checkpoint(
        out_folder, tensors, config_json, [path for path in extra if path.is_file()]
    )


def _merged(
    folder: pathlib.Path, adapter: Adapter, dtype: np.dtype | None
) -> Iterator[tuple[str, np.ndarray]]:
    files = safetensor_files(folder)
    missing = [name for name in adapter.modules if f"{name}.weight" not in files]
    if missing:
        raise ModelError(f"the checkpoint lacks {missing[0]}.weight.")
    opened = {path: TensorFile(path) for path in set(files.values())}
    for name, path in files.items():
        array = opened[path].array(name)
        weights = adapter.modules.get(name.removesuffix(".weight"))
        wanted = array.dtype if dtype is None else dtype
        if weights is not None:
            update = (weights.a @ weights.b).T * np.float32(adapter.scaling(weights))
            array = array.astype(np.float32) + update
        yield name, array.astype(wanted, copy=False)
