"""Merges an adapter into its base, as a plain Hugging Face checkpoint."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.peft_import import PeftFolder, read_folder
from jaxlora.adapters.files.peft_tables import BaseTables
from jaxlora.adapters.files.tokenizer_copy import merged_tokenizer
from jaxlora.errors import AdapterError, ConfigError, ModelError
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint, with_values
from jaxlora.hf.convert import log_dequantized, save_checkpoint
from jaxlora.hf.files import model_folder
from jaxlora.hf.tensor_file import check_finite
from jaxlora.models.config import ModelConfig
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.pallas_kernels import FORMATS

_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def merge_adapter(
    base_folder: str | pathlib.Path,
    adapter_folder: str | pathlib.Path,
    out_folder: str | pathlib.Path,
    *,
    dtype: str | None = None,
    revision: str | None = None,
) -> pathlib.Path:
    """Writes `W + scaling * (A B)` for every adapted linear; other weights are copied.

    With DoRA, each column of the sum is scaled to the length of its magnitude. Trained
    rows of tokens replace those of the embedding, and of a head that is tied to it;
    trained biases replace those of their linears. Whole copies replace embedding and
    head each by itself, so a tied base becomes one with a head of its own. An adapter
    that started from the error of a quantized base (LoftQ) is merged into the weights
    that it adapts as they are after quantizing. The folder has the tokenizer and the
    chat template that lie beside the adapter, or else those of the base.

    It computes in float32 and rounds once. Tensors are streamed: the host never holds
    more than one shard. Quantized linears are dequantized, also those without an
    adapter, and the merged checkpoint is dense: quantizing the sum again would add an
    error to W that may be larger than the update.

    An adapter with the embedding and the head of a resized base is merged into the base
    of either size.

    Args:
        base_folder: Hugging Face checkpoint of the base: a folder, or a hub id.
        adapter_folder: PEFT folder.
        out_folder: Folder to make.
        dtype: Dtype of the merged weights; None: each tensor keeps its own, or all are
            bfloat16 if the base is quantized.
        revision: Branch, tag or commit of the base on the hub.

    Raises:
        JaxloraError: Base or adapter cannot be read, they do not fit, or a weight is
            not finite, before the merge or after it.
        FileExistsError: `out_folder` holds something already.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r}; wanted one of {', '.join(_DTYPES)}.")
    checkpoint = open_checkpoint(model_folder(base_folder, revision))
    config = checkpoint.config
    shapes = linear_shapes(config)
    tables = BaseTables(checkpoint.folder, config.tie_embeddings)
    folder = read_folder(adapter_folder, shapes, base=tables)
    adapter = folder.adapter.as_lora(shapes)
    vocab_size = _vocab_size(adapter, config)
    adapter.check_base(dataclasses.replace(config, vocab_size=vocab_size))
    _check_biases(folder.biases, checkpoint)
    checkpoint.check()
    if checkpoint.quantized:
        dtype = dtype or "bfloat16"
        log_dequantized(checkpoint, dtype)
    config_json = checkpoint.config_json
    if dtype is not None:
        config_json = checkpoint.dense_config(dtype)
    if _unties(adapter, config):
        config_json = with_values(config_json, tie_word_embeddings=False)
    if vocab_size != config.vocab_size:
        config_json = with_values(config_json, vocab_size=vocab_size)
    folder = dataclasses.replace(folder, adapter=adapter)
    kind = None if dtype is None else _DTYPES[dtype]
    tensors = checkpoint.as_stored(_merged(checkpoint, folder, kind), kind)
    extra = [*merged_tokenizer(checkpoint.folder, pathlib.Path(adapter_folder))]
    return save_checkpoint(out_folder, tensors, config_json, extra)


def _check_biases(biases: Mapping[str, np.ndarray], checkpoint: Checkpoint) -> None:
    if missing := sorted(biases.keys() - checkpoint.files.keys()):
        raise AdapterError(
            f"the adapter has {missing[0]}, and this linear of the base model has no "
            "bias. Is it an adapter of another model?"
        )


def _merged(
    checkpoint: Checkpoint, folder: PeftFolder, dtype: np.dtype | None
) -> Iterator[tuple[str, np.ndarray]]:
    adapter, base_format = folder.adapter, folder.base_format
    unties = _unties(adapter, checkpoint.config)
    outside = {str(SLOT_MODULES[name].frozen): name for name in adapter.outside}
    by_path = {linear_path(name): found for name, found in adapter.modules.items()}
    by_name = {_EMBEDDING: outside.get("embed_tokens"), _HEAD: outside.get("lm_head")}
    if checkpoint.config.tie_embeddings and not unties:
        by_name[_HEAD] = by_name[_EMBEDDING]
    for name, array in _with_head(checkpoint) if unties else checkpoint.dense_tensors():
        wanted = array.dtype if dtype is None else dtype
        file = checkpoint.files.get(name) or checkpoint.files[_EMBEDDING]
        where = f"{file.path}: {name}"
        check_finite(array, where, ModelError, wanted)
        weights = by_path.get(name.removeprefix("model.").removesuffix(".weight"))
        if weights is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                if base_format is not None and not checkpoint.quantized:
                    array = _quantized(array, base_format)
                scaling = np.float32(adapter.scaling(weights))
                array = array.astype(np.float32) + (weights.a @ weights.b).T * scaling
                for variant in weights.variants:
                    array = variant.merged(array, weights.tensors)
            check_finite(array, f"{where}, merged,", ModelError, wanted)
        array = folder.biases.get(name, array)
        if (own := by_name.get(name)) is not None:
            rows = adapter.outside[own]
            array = SLOT_MODULES[own].merged(array, rows.array, rows.tokens)
        yield name, array.astype(wanted, copy=False)


def _unties(adapter: Adapter, config: ModelConfig) -> bool:
    """Whether a tied base becomes one with a head of its own."""
    copies = _whole_copies(adapter)
    are_same = len(copies) == 2 and np.array_equal(copies[0], copies[1])
    return config.tie_embeddings and bool(copies) and not are_same


def _vocab_size(adapter: Adapter, config: ModelConfig) -> int:
    """Returns the number of tokens of the merged model.

    It is that of the adapter, if it has both the embedding and the head of a base that
    was resized.
    """
    sizes = [len(copy) for copy in _whole_copies(adapter)]
    has_both = len(sizes) == 2 and sizes[0] == sizes[1]
    return sizes[0] if has_both else config.vocab_size


def _whole_copies(adapter: Adapter) -> list[np.ndarray]:
    outside = adapter.outside.items()
    return [own.array for name, own in outside if SLOT_MODULES[name].is_whole]


def _with_head(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors with a head of its own, as which the embedding begins."""
    for name, array in checkpoint.dense_tensors():
        yield name, array
        if name == _EMBEDDING and _HEAD not in checkpoint.files:
            yield _HEAD, array


def _quantized(
    w: Float[np.ndarray, "N K"], base_format: str
) -> Float[np.ndarray, "N K"]:
    """Returns the weight as it is after it was quantized in a format."""
    dequantize = jax.jit(
        lambda x: FORMATS[base_format].quantize(x).dequantize(np.float32)
    )
    return np.asarray(dequantize(w.astype(np.float32)))
