"""Loads a base model from a checkpoint, several tensors at a time."""

import dataclasses
import functools
import hashlib
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxlora
from jaxlora.device_check import check_device
from jaxlora.errors import ModelError
from jaxlora.hf.base_format import find_base_format
from jaxlora.hf.bounded_threads import map_in_threads
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint
from jaxlora.hf.files import hub_revision, model_folder
from jaxlora.hf.quantized.place import Place, put_linear
from jaxlora.hf.quantized.stored import StoredWeight
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.config import ModelConfig
from jaxlora.models.structure import TensorSpec
from jaxlora.pallas_kernels import device
from jaxlora.sharding.global_arrays import TRANSPOSED_BYTES, put_converted

logger = logging.getLogger(__name__)

_MAX_THREADS = 16
# Limits of the bytes of all tensors that are loaded at a time. Between them, the bytes
# are a fraction of the checkpoint, because neither the host nor a device should need
# much more memory for loading a model than for holding it.
MIN_BYTES, MAX_BYTES = 2**28, 2**31
FRACTION = 1 / 8
_LARGE_BYTES = 2**28  # tensors of so many bytes are read first

# The arrays of a weight by our path, the hash of each tensor that was read by Hugging
# Face's name, and the sums of squares that `put_linear` returns.
_Loaded = tuple[dict[str, jax.Array], dict[str, str], np.ndarray]


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
    quantize: str | None = None,
    quantize_args: Mapping[str, Any] | None = None,
    keep_bf16: Sequence[str] = (),
    place: Callable[[ModelConfig, BaseFormat | None], Place | None] | None = None,
) -> FrozenModel:
    """Loads a Hugging Face checkpoint of one of the families in `FAMILIES`.

    Each tensor goes from its file through a buffer of the host to its devices. On the
    way it is hashed for the fingerprint and checked for NaN and infinity. A linear that
    is to be quantized is quantized on one device.

    A thread for each processor core, at most 16, does so with one tensor after another.
    The buffers of all threads never hold more than an eighth of the checkpoint (256 MiB
    at least, 2 GiB at most), or one tensor if that is larger. Nor do the tensors on a
    device that are not transposed, cast or quantized yet. On a CPU, each thread needs
    up to two copies of a linear in float32 as well while it quantizes.

    With several processes, each reads and hashes every tensor, and places the parts on
    its own devices.

    Args:
        source: A folder, or a hub id.
        dtype: Dtype of the weights that are not quantized; `auto` is bfloat16 on a GPU
            and float32 on a CPU.
        revision: Branch, tag or commit on the hub.
        quantize: Format of the linears of the decoder layers, such as `fp8`, `int8` or
            `nf4`. None: that of the checkpoint, which is dense or quantized.
        quantize_args: Settings of the format, by name, such as `{"weight_copies": 2}`.
        keep_bf16: Regular expressions; linears with a name whose end one of them
            matches are not quantized.
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
    opened = open_model(
        source,
        dtype=dtype,
        revision=revision,
        quantize=quantize,
        keep_bf16=keep_bf16,
        quantize_args=quantize_args,
    )
    placed = None if place is None else place(opened.config, opened.base_format)
    return opened.load(placed)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """A base model whose weights have not been read; see `FrozenModel`."""

    checkpoint: Checkpoint
    dtype: jnp.dtype
    folder: pathlib.Path
    source: str
    revision: str | None
    base_format: BaseFormat | None

    @property
    def config(self) -> ModelConfig:
        """Architecture of the model."""
        return self.checkpoint.config

    def load(self, place: Place | None = None) -> FrozenModel:
        """Reads the weights; see `load_model`."""
        params, fingerprint = _load(
            self.checkpoint, self.base_format, self.dtype, place
        )
        return FrozenModel(
            config=self.config,
            params=params,
            dtype=self.dtype,
            folder=self.folder,
            source=self.source,
            fingerprint=fingerprint,
            revision=self.revision,
            base_format=self.base_format,
        )


def open_model(
    source: str | pathlib.Path,
    *,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    revision: str | None = None,
    quantize: str | None = None,
    quantize_args: Mapping[str, Any] | None = None,
    keep_bf16: Sequence[str] = (),
) -> OpenedModel:
    """Reads the config and the headers of a checkpoint; see `load_model`."""
    check_device()
    folder = model_folder(source, revision)
    checkpoint = open_checkpoint(folder)
    checkpoint.check()
    base = find_base_format(
        checkpoint, quantize, keep_bf16, quantize_args=quantize_args
    )
    return OpenedModel(
        checkpoint=checkpoint,
        dtype=jnp.dtype(base_dtype(dtype)),
        folder=folder,
        source=str(source),
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
    began = time.perf_counter()

    def position(spec: TensorSpec) -> tuple[int, str, int]:
        name = spec.parts[0].hf_name
        file = checkpoint.files[name]
        # No thread is left alone with a large tensor at the end. For the others, disks
        # read fastest from front to back.
        large = -(_stored_bytes(checkpoint, spec) // _LARGE_BYTES)
        return large, str(file.path), file.offset(name)

    specs = checkpoint.specs()
    ordered = sorted(specs, key=position)
    total = sum(_stored_bytes(checkpoint, spec) for spec in specs)
    results = map_in_threads(
        functools.partial(_load_weight, checkpoint, base, dtype, place),
        ordered,
        num_bytes=lambda spec: _host_bytes(checkpoint, spec, dtype, base),
        max_bytes=min(MAX_BYTES, max(MIN_BYTES, int(FRACTION * total))),
        num_threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))),
    )
    seconds, gib = time.perf_counter() - began, total / 2**30
    logger.info(
        "loaded the base: %.3g GiB in %.1f s, %.3g GiB/s", gib, seconds, gib / seconds
    )
    by_path = {spec.path: x for spec, x in zip(ordered, results, strict=True)}
    params, hashes, squares = {}, {}, np.zeros(2)
    for spec in specs:
        arrays, digests, added = by_path[spec.path]
        params |= arrays
        hashes |= digests
        squares += added
    _log_differences(checkpoint, squares)
    return params, _fingerprint(checkpoint, hashes)


def _stored_bytes(checkpoint: Checkpoint, spec: TensorSpec) -> int:
    """Returns the bytes of a weight's tensors in the checkpoint."""
    total = 0
    for part in spec.parts:
        linear = checkpoint.quantized.get(part.path)
        names = [part.hf_name] if linear is None else linear.tensor_names
        total += sum(checkpoint.files[name].num_bytes(name) for name in names)
    return total


def _host_bytes(
    checkpoint: Checkpoint,
    spec: TensorSpec,
    dtype: np.dtype,
    base: BaseFormat | None = None,
) -> int:
    """Returns the bytes of the host that are in use while a weight is loaded.

    With experts that are held quantized, they include those of the device on which the
    experts are put together.
    """
    stored = _stored_bytes(checkpoint, spec)
    first, *others = spec.parts
    if base is not None and others and _is_quantized(checkpoint, base, spec):
        shapes = base.shapes(*first.shape[::-1], num_experts=1 + len(others))
        whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes.values())
        return whole + _stored_bytes(checkpoint, first)
    if spec.path in checkpoint.quantized:
        return stored
    name = spec.parts[0].hf_name
    kind = checkpoint.files[name].dtype(name)
    cast = 0 if kind == dtype else 4 * (stored // kind.itemsize)  # float32 at most
    # Each device gets a part, of which the host makes a transposed copy if it is small.
    most = TRANSPOSED_BYTES * jax.device_count()
    transposed = stored if spec.transpose and stored <= most else 0
    return stored + cast + transposed


def _load_weight(
    checkpoint: Checkpoint,
    base: BaseFormat | None,
    dtype: np.dtype,
    place: Place | None,
    spec: TensorSpec,
    check: Callable[[], None],
) -> _Loaded:
    """Reads a weight and puts it on its devices; returns when its buffers are free."""
    if base is not None and _is_quantized(checkpoint, base, spec):
        hashes: dict[str, str] = {}
        weights = _read_linears(checkpoint, spec, check, hashes)
        params, squares = put_linear(spec, weights, base, place)
        return params, hashes, squares
    weight, hashes = _read(checkpoint, spec, dtype, check)
    where = None if place is None else place(spec.path, spec.shape)
    array = put_converted(weight, where, dtype, transpose=spec.transpose)
    return {spec.path: jax.block_until_ready(array)}, hashes, np.zeros(2)


def _is_quantized(
    checkpoint: Checkpoint, base: BaseFormat | None, spec: TensorSpec
) -> bool:
    """Returns whether a weight is held quantized."""
    path = spec.parts[0].path  # experts are alike
    if base is None or path not in checkpoint.kernel_paths:
        return False
    if checkpoint.quantized:
        return path in checkpoint.quantized
    return base.quantizes(path.removesuffix(".kernel"))


def _read_linears(
    checkpoint: Checkpoint,
    spec: TensorSpec,
    check: Callable[[], None],
    hashes: dict[str, str],
) -> Iterator[np.ndarray | StoredWeight]:
    """Reads the weight of a linear that is held quantized, or that of each expert.

    Args:
        checkpoint: The checkpoint.
        spec: The weight.
        check: See `TensorFile.read`.
        hashes: Gets the hash of each tensor by Hugging Face's name.
    """
    for part in spec.parts:
        if linear := checkpoint.quantized.get(part.path):
            weight, digests = linear.read(check)
        else:
            kind = np.dtype(np.float32)
            weight, digest = _read_tensor(checkpoint, kind, check, part.hf_name)
            weight = weight if part.transpose else weight.T
            digests = {part.hf_name: digest}
        hashes |= digests
        yield weight
        del weight  # while the next one is read


def _read(
    checkpoint: Checkpoint,
    spec: TensorSpec,
    dtype: np.dtype,
    check: Callable[[], None],
) -> tuple[np.ndarray, dict[str, str]]:
    """Reads a dense weight, of which experts have a tensor each, and hashes it.

    Args:
        checkpoint: The checkpoint.
        spec: The weight.
        dtype: Dtype that it will be cast to.
        check: See `TensorFile.read`.

    Returns:
        The weight as it is stored, experts one after the other, and the hash of each
        tensor by Hugging Face's name.
    """
    read = functools.partial(_read_tensor, checkpoint, dtype, check)
    if len(spec.parts) == 1:
        weight, digest = read(spec.hf_name)
        return weight, {spec.hf_name: digest}
    names = [part.hf_name for part in spec.parts]
    kinds = {checkpoint.files[name].dtype(name) for name in names}
    is_kept = len(kinds) == 1 and kinds != {np.dtype(np.float64)}
    weight = np.empty(spec.hf_shape, kinds.pop() if is_kept else dtype)
    hashes = {}
    for name, part in zip(names, weight, strict=True):
        part[...], hashes[name] = read(name)
    return weight, hashes


def _read_tensor(
    checkpoint: Checkpoint, dtype: np.dtype, check: Callable[[], None], name: str
) -> tuple[np.ndarray, str]:
    """Reads and hashes one tensor; see `_read`."""
    array, digest = checkpoint.files[name].read(name, dtype=dtype, check=check)
    # JAX has no float64.
    return array.astype(dtype) if array.dtype == np.float64 else array, digest


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
