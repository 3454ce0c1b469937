"""A base model from a checkpoint, streamed tensor by tensor to where it belongs."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.errors import ModelError
from jaxlora.hf.config import model_config
from jaxlora.hf.files import model_folder, read_json, safetensor_files
from jaxlora.hf.names import TensorSpec, tensor_specs
from jaxlora.hf.tensor_file import TensorFile
from jaxlora.models.config import ModelConfig

Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

# In older checkpoints, and recomputed from the config here.
_HARMLESS_EXTRA = ("rotary_emb.inv_freq",)
# Rows transposed at a time: few enough for the cache, three times as fast as all.
_BLOCK_ROWS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A frozen base model on its devices.

    Attributes:
        config: Its mathematics.
        params: Its weights, by our dotted path; linears are K N.
        dtype: Of the weights.
        folder: Where its files are.
        source: What the user called it: a folder or a hub id.
        fingerprint: Tells bases apart: of names, shapes, the edges of every tensor's
            bytes, and the mathematics.
    """

    config: ModelConfig
    params: dict[str, jax.Array]
    dtype: jnp.dtype
    folder: pathlib.Path
    source: str
    fingerprint: str


def load_base(
    source: str | pathlib.Path,
    *,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    revision: str | None = None,
    place: Place | None = None,
) -> BaseModel:
    """Loads a Hugging Face checkpoint of the Llama family.

    Each tensor goes from the mapped file through one host buffer to its device, so that
    the host never holds more than one tensor beyond what lives there.

    Args:
        source: A folder, or a hub id.
        dtype: Of the weights; `auto` is bfloat16 on a GPU and float32 on a CPU.
        revision: Branch, tag or commit on the hub.
        place: Where each array goes, from its path and shape; None: one device.

    Raises:
        ModelError: The checkpoint is missing, damaged, of an unsupported kind, or its
            weights and its config.json disagree.
    """
    folder = model_folder(source, revision)
    config = model_config(read_json(folder / "config.json"))
    files = safetensor_files(folder)
    specs = tensor_specs(config)
    opened = {path: TensorFile(path) for path in sorted(set(files.values()))}
    _check(specs, files, opened)
    chosen = base_dtype(dtype)
    params = {}
    for spec in specs:
        source_array = opened[files[spec.hf_name]].array(spec.hf_name)
        where = place(spec.path, spec.shape) if place is not None else None
        params[spec.path] = _put(source_array, spec, chosen, where)
    return BaseModel(
        config=config,
        params=params,
        dtype=jnp.dtype(chosen),
        folder=folder,
        source=str(source),
        fingerprint=_fingerprint(config, specs, files, opened),
    )


def base_dtype(dtype: str) -> np.dtype:
    """What `auto` means for the base on this machine."""
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    return jnp.dtype(dtype)


def _put(source: np.ndarray, spec: TensorSpec, dtype: np.dtype, where) -> jax.Array:
    """Casts and transposes in one pass, then waits: the buffer is gone on return."""
    buffer = np.empty(spec.shape, dtype)
    if spec.transpose:
        for i in range(0, len(source), _BLOCK_ROWS):
            rows = slice(i, i + _BLOCK_ROWS)
            buffer[:, rows] = source[rows].T
    else:
        buffer[...] = source
    return jax.block_until_ready(jax.device_put(buffer, where))


def _check(
    specs: tuple[TensorSpec, ...],
    files: dict[str, pathlib.Path],
    opened: dict[pathlib.Path, TensorFile],
) -> None:
    for spec in specs:
        path = files.get(spec.hf_name)
        if path is None:
            raise ModelError(
                f"the checkpoint lacks {spec.hf_name} {list(spec.hf_shape)}, which its "
                "config.json calls for."
            )
        found = opened[path].shape(spec.hf_name)
        if found != spec.hf_shape:
            raise ModelError(
                f"{path}: {spec.hf_name} has shape {list(found)}; its config.json "
                f"calls for {list(spec.hf_shape)}."
            )
    known = {spec.hf_name for spec in specs}
    for name in files:
        # A tied head may be stored as well; it is the embedding.
        harmless = name == "lm_head.weight" or name.endswith(_HARMLESS_EXTRA)
        if name not in known and not harmless:
            raise ModelError(
                f"the checkpoint holds {name}, which a model of its config.json has no "
                "place for."
            )


def _fingerprint(config, specs, files, opened) -> str:
    digest = hashlib.sha256(repr(config).encode())
    for spec in sorted(specs, key=lambda spec: spec.hf_name):
        file = opened[files[spec.hf_name]]
        digest.update(f"{spec.hf_name} {file.description(spec.hf_name)}".encode())
        digest.update(file.edges(spec.hf_name))
    return digest.hexdigest()
