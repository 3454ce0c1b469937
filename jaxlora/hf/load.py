"""Loads a base model from a checkpoint, streamed tensor by tensor to its devices."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jaxlora.errors import ModelError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.checkpoint import open_checkpoint
from jaxlora.hf.files import hub_revision, model_folder
from jaxlora.hf.magnitude import check_finite, largest
from jaxlora.hf.names import TensorSpec
from jaxlora.hf.tensor_file import TensorFile
from jaxlora.sharding.global_arrays import put

Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

# Rows of a matrix that are read at a time. They stay in the CPU's cache while they are
# hashed, checked and transposed.
_BLOCK_ROWS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A frozen base model on its devices.

    Attributes:
        config: Architecture of the model.
        params: Weights, by this library's dotted path; linears are K N.
        dtype: Dtype of the weights.
        folder: Folder of the checkpoint's files.
        source: Folder or hub id, as the user gave it.
        fingerprint: Hash of the config and of every tensor's name, shape and bytes.
        revision: Commit of a model from the hub; None for a folder.
    """

    config: ModelConfig
    params: dict[str, jax.Array]
    dtype: jnp.dtype
    folder: pathlib.Path
    source: str
    fingerprint: str
    revision: str | None = None


def load_model(
    source: str | pathlib.Path,
    *,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    revision: str | None = None,
    place: Callable[[ModelConfig], Place | None] | None = None,
) -> BaseModel:
    """Loads a Hugging Face checkpoint of one of the families in `FAMILIES`.

    Each tensor goes from its file through one host buffer to its device, so the host
    never holds more than one tensor in addition to those placed there. On the way it is
    hashed for the fingerprint and checked for NaN and infinity.

    Args:
        source: A folder, or a hub id.
        dtype: Dtype of the weights; `auto` is bfloat16 on a GPU and float32 on a CPU.
        revision: Branch, tag or commit on the hub.
        place: Given the model, returns a function from an array's path and shape to its
            sharding. None, or a None that it returns: all arrays go to one device.

    Raises:
        ModelError: The checkpoint is missing, damaged or of an unsupported kind, its
            weights and its config.json disagree, or a weight is not finite.
    """
    folder = model_folder(source, revision)
    checkpoint = open_checkpoint(folder)
    checkpoint.check()
    chosen = base_dtype(dtype)
    placed = None if place is None else place(checkpoint.config)
    params, hashes = {}, {}
    for spec in checkpoint.specs():
        file = checkpoint.files[spec.hf_name]
        where = None if placed is None else placed(spec.path, spec.shape)
        buffer, hashes[spec.hf_name] = _read(file, spec, chosen)
        # This waits until the buffer is free, before the next one is made.
        params[spec.path] = jax.block_until_ready(put(buffer, where))
        del buffer
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    for name in sorted(hashes):
        description = checkpoint.files[name].description(name)
        digest.update(f"{name} {description} {hashes[name]}".encode())
    return BaseModel(
        config=checkpoint.config,
        params=params,
        dtype=jnp.dtype(chosen),
        folder=folder,
        source=str(source),
        fingerprint=digest.hexdigest(),
        revision=hub_revision(source, folder, revision),
    )


def base_dtype(dtype: str) -> np.dtype:
    """Resolves `auto` to the dtype of the base on this machine."""
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    elif dtype not in ("bfloat16", "float32"):
        raise ModelError(f"dtype={dtype!r}; wanted auto, bfloat16 or float32.")
    return jnp.dtype(dtype)


def _read(
    file: TensorFile, spec: TensorSpec, dtype: np.dtype
) -> tuple[np.ndarray, str]:
    """Reads, hashes, checks, casts and transposes a tensor block by block."""
    buffer = np.empty(spec.shape, dtype)
    num_rows = _BLOCK_ROWS if len(spec.hf_shape) == 2 else spec.hf_shape[0]
    digest, peaks, start = xxhash.xxh3_128(), [], 0
    for block in file.blocks(spec.hf_name, num_rows):
        digest.update(block.view(np.uint8))
        peaks.append(largest(block))
        rows = slice(start, start + len(block))
        with np.errstate(over="ignore", invalid="ignore"):
            if spec.transpose:
                buffer[:, rows] = block.T
            else:
                buffer[rows] = block
        start += len(block)
    check_finite(peaks, f"{file.path}: {spec.hf_name}", ModelError, dtype)
    return buffer, digest.hexdigest()
