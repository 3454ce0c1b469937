"""Loads a base model from a checkpoint, streamed tensor by tensor to its devices."""

import dataclasses
import hashlib
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

import jaxlora
from jaxlora.device_check import check_device
from jaxlora.errors import ModelError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.base_format import find_base_format
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint
from jaxlora.hf.files import hub_revision, model_folder
from jaxlora.hf.magnitude import check_finite, largest
from jaxlora.hf.names import TensorSpec
from jaxlora.hf.quantized.place import Place, put_linear
from jaxlora.hf.tensor_file import TensorFile
from jaxlora.models.base_format import BaseFormat
from jaxlora.pallas_kernels import device
from jaxlora.sharding.global_arrays import put

logger = logging.getLogger(__name__)

# Rows of a matrix that are read at a time. They stay in the CPU's cache while they are
# hashed, checked and transposed.
_BLOCK_ROWS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A frozen base model on its devices.

    Attributes:
        config: Architecture of the model.
        params: Weights, by this library's dotted path. Linears are K N, except for
            quantized ones: these have one array per field of their format, such as
            `layers.0.mlp.up_proj.kernel.values`.
        dtype: Dtype of the weights that are not quantized.
        folder: Folder of the checkpoint's files.
        source: Folder or hub id, as the user gave it.
        fingerprint: Hash of the config and of the name, shape and bytes of every tensor
            of the checkpoint. It does not depend on `base_format`.
        revision: Commit of a model from the hub; None for a folder.
        base_format: Format of the quantized linears; None: there are none.
    """

    config: ModelConfig
    params: dict[str, jax.Array]
    dtype: jnp.dtype
    folder: pathlib.Path
    source: str
    fingerprint: str
    revision: str | None = None
    base_format: BaseFormat | None = None

    def generate(self, prompts: Any, **options: Any) -> list[Any]:
        """Generates text with the model, or with adapters on it.

        Args:
            prompts: One prompt or several: texts, chats or `Prompt`s.
            **options: Further arguments of `jaxlora.generate`, such as `adapters`,
                `chat` and `max_new_tokens`.

        Returns:
            The `Generation`s, as `jaxlora.generate` returns them.

        Raises:
            JaxloraError: As for `jaxlora.generate`.
        """
        return jaxlora.generate(self, prompts, **options)


def load_model(
    source: str | pathlib.Path,
    *,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    revision: str | None = None,
    quantize: Literal["fp8", "int8", "nf4"] | None = None,
    keep_bf16: Sequence[str] = (),
    fp8_weight_copies: Literal[1, 2] = 1,
    place: Callable[[ModelConfig, BaseFormat | None], Place | None] | None = None,
) -> FrozenModel:
    """Loads a Hugging Face checkpoint of one of the families in `FAMILIES`.

    Each tensor goes from its file through one host buffer to its device, so the host
    never holds more than one tensor in addition to those placed there. On the way it is
    hashed for the fingerprint and checked for NaN and infinity. A linear that is to be
    quantized is quantized on its devices, which never hold more than one dense linear
    in addition to the quantized ones.

    Args:
        source: A folder, or a hub id.
        dtype: Dtype of the weights that are not quantized; `auto` is bfloat16 on a GPU
            and float32 on a CPU.
        revision: Branch, tag or commit on the hub.
        quantize: Format of the linears of the decoder layers. None: that of the
            checkpoint, which is dense or quantized.
        keep_bf16: Regular expressions; linears with a name whose end one of them
            matches are not quantized.
        fp8_weight_copies: 2 adds the transpose of each fp8 weight, which the backward
            pass multiplies with.
        place: Given the model and the format of its linears, returns a function from an
            array's path and shape to its sharding. None, or a None that it returns: all
            arrays go to one device.

    Raises:
        ModelError: The checkpoint is missing, damaged or of an unsupported kind, its
            weights and its config.json disagree, a weight is not finite, or the
            checkpoint is quantized in another format.
        ConfigError: A setting is unknown, or an expression is invalid or matches
            nothing.
        DeviceError: A GPU is visible, and JAX does not use it.
    """
    check_device()
    folder = model_folder(source, revision)
    checkpoint = open_checkpoint(folder)
    checkpoint.check()
    base = find_base_format(
        checkpoint, quantize, keep_bf16, fp8_weight_copies=fp8_weight_copies
    )
    chosen = base_dtype(dtype)
    placed = None if place is None else place(checkpoint.config, base)
    params, fingerprint = _load(checkpoint, base, chosen, placed)
    return FrozenModel(
        config=checkpoint.config,
        params=params,
        dtype=jnp.dtype(chosen),
        folder=folder,
        source=str(source),
        fingerprint=fingerprint,
        revision=hub_revision(source, folder, revision),
        base_format=base,
    )


def _load(
    checkpoint: Checkpoint,
    base: BaseFormat | None,
    dtype: np.dtype,
    place: Place | None,
) -> tuple[dict[str, jax.Array], str]:
    """Reads all weights; returns them, and the fingerprint."""
    params, hashes, squares = {}, {}, np.zeros(2)
    for spec in checkpoint.specs():
        file = checkpoint.files[spec.hf_name]
        if base is not None and (linear := checkpoint.quantized.get(spec.path)):
            weight, found = linear.read()
            arrays, added = put_linear(spec.path, weight, base, place)
            hashes |= found
            squares += added
        elif base is not None and _is_quantized(checkpoint, base, spec):
            weight, hashes[spec.hf_name] = _read(file, spec, None)
            arrays, _ = put_linear(spec.path, weight, base, place)
        else:
            where = None if place is None else place(spec.path, spec.shape)
            weight, hashes[spec.hf_name] = _read(file, spec, dtype)
            # This waits until the buffer is free, before the next one is made.
            arrays = {spec.path: jax.block_until_ready(put(weight, where))}
        del weight
        params |= arrays
    _log_differences(checkpoint, squares)
    return params, _fingerprint(checkpoint, hashes)


def _is_quantized(checkpoint: Checkpoint, base: BaseFormat, spec: TensorSpec) -> bool:
    """Tells whether a dense weight of the checkpoint is to be quantized."""
    path = spec.path.removesuffix(".kernel")
    is_linear = path in checkpoint.linear_paths
    return not checkpoint.quantized and is_linear and base.quantizes(path)


def _fingerprint(checkpoint: Checkpoint, hashes: Mapping[str, str]) -> str:
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    for name in sorted(hashes):
        description = checkpoint.files[name].description(name)
        digest.update(f"{name} {description} {hashes[name]}".encode())
    return digest.hexdigest()


def _log_differences(checkpoint: Checkpoint, squares: np.ndarray) -> None:
    """Logs how the model differs from the one that a quantized checkpoint describes."""
    if scales := checkpoint.activation_scales:
        logger.info(
            "%s: %d scales of activations (%s, ...) are not used: each row of "
            "activations has its own scale here.",
            checkpoint.folder,
            len(scales),
            min(scales),
        )
    if squares[1] > 0:
        logger.info(
            "%s: the weights (%s) were quantized again, with one scale per output "
            "feature. That adds an error of %.2f%% of the weights (RMS over all).",
            checkpoint.folder,
            checkpoint.kind,
            100 * (squares[0] / squares[1]) ** 0.5,
        )


def base_dtype(dtype: str) -> np.dtype:
    """Resolves `auto` to the dtype of the base on this machine."""
    if dtype == "auto":
        dtype = "bfloat16" if device.platform() == "gpu" else "float32"
    elif dtype not in ("bfloat16", "float32"):
        raise ModelError(f"dtype={dtype!r}; wanted auto, bfloat16 or float32.")
    return jnp.dtype(dtype)


def _read(
    file: TensorFile, spec: TensorSpec, dtype: np.dtype | None
) -> tuple[np.ndarray, str]:
    """Reads, hashes and checks a tensor, casts it to `dtype` and transposes it.

    If `dtype` is None, the tensor keeps its layout, and its dtype or float32.
    """
    num_rows = _BLOCK_ROWS if len(spec.hf_shape) == 2 else spec.hf_shape[0]
    is_transposed = spec.transpose and dtype is not None
    if dtype is None:
        stored = file.dtype(spec.hf_name)
        dtype = np.dtype(np.float32) if stored == np.float64 else stored
    buffer = np.empty(spec.shape if is_transposed else spec.hf_shape, dtype)
    digest, peaks, start = xxhash.xxh3_128(), [], 0
    for block in file.blocks(spec.hf_name, num_rows):
        digest.update(block.view(np.uint8))
        peaks.append(largest(block))
        rows = slice(start, start + len(block))
        with np.errstate(over="ignore", invalid="ignore"):
            if is_transposed:
                buffer[:, rows] = block.T
            else:
                buffer[rows] = block
        start += len(block)
    check_finite(peaks, f"{file.path}: {spec.hf_name}", ModelError, dtype)
    return buffer, digest.hexdigest()
