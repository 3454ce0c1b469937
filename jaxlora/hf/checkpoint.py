"""Opens a checkpoint folder and checks that its config and its tensors agree."""

import dataclasses
import functools
import itertools
import logging
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.common.counted import counted
from jaxlora.errors import ModelError
from jaxlora.hf.files import read_json, safetensor_files
from jaxlora.hf.quantized.config import KEY, read_quantization
from jaxlora.hf.quantized.linears import (
    ACTIVATION_SCALES,
    StoredLinear,
    find_stored_linears,
)
from jaxlora.hf.quantized.stored import StorageLayout, StoredWeight
from jaxlora.hf.tensor_file import TensorFile
from jaxlora.models.config import ModelConfig, is_of_expert
from jaxlora.models.registry import model_config
from jaxlora.models.structure import TensorSpec, linear_names, linear_path, tensor_specs

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Older checkpoints hold these tensors, which are recomputed from the config here.
_HARMLESS_EXTRA = ("rotary_emb.inv_freq",)
_FUSED = re.compile(
    r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_scale_inv)?"
)
# Names of an expert's part of such a tensor, by what ends the name of the whole.
_PARTS = {"_scales": "scales", "_scale_inv": "weight_scale_inv"}
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A Hugging Face checkpoint on this disk.

    Attributes:
        folder: Folder of the files.
        config_json: Contents of config.json. `tie_word_embeddings` is false where the
            weights have a head of their own.
        config: The model that config.json and the weights together define.
        files: The file of each tensor, by Hugging Face's name; none if only config.json
            is known (`planned_checkpoint`). Of a text model that is part of another, it
            is the name that it has in a checkpoint of the text model alone.
        stored_names: The name in the checkpoint of each tensor, by that in `files`;
            empty where these are the same.
        other_files: The file of each tensor of other parts of the model, by its name.
        wholes: Of each tensor that is a part of one of all experts of a layer, the name
            of that one in a dense checkpoint, and the number of experts.
    """

    folder: pathlib.Path
    config_json: dict[str, Any]
    config: ModelConfig
    files: dict[str, TensorFile]
    stored_names: dict[str, str] = dataclasses.field(default_factory=dict)
    other_files: dict[str, TensorFile] = dataclasses.field(default_factory=dict)
    wholes: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Returns the weights that the config calls for, as if none was quantized."""
        return tensor_specs(self.config)

    @functools.cached_property
    def linear_paths(self) -> tuple[str, ...]:
        """Our paths of the linears of the decoder layers."""
        return tuple(linear_path(name) for name in linear_names(self.config))

    @functools.cached_property
    def kernel_paths(self) -> frozenset[str]:
        """Our paths of the weights of these linears."""
        return frozenset(f"{path}.kernel" for path in self.linear_paths)

    @property
    def layout(self) -> StorageLayout | None:
        """Storage format of the linears by config.json; None: dense weights."""
        return read_quantization(self.config_json)

    @property
    def kind(self) -> str:
        """Name of the way in which the linears are stored."""
        layout = self.layout
        return "dense" if layout is None or not self.quantized else layout.kind

    @functools.cached_property
    def quantized(self) -> dict[str, StoredLinear]:
        """The quantized linears, by our path of the kernel."""
        parts = (part for spec in self.specs() for part in spec.parts)
        specs = (part for part in parts if part.path in self.kernel_paths)
        return find_stored_linears(self.layout, specs, self.files)

    @functools.cached_property
    def activation_scales(self) -> frozenset[str]:
        """Names of the tensors with scales of activations, which are not read."""
        if self.layout is None:
            return frozenset()
        ends = tuple(f".{name}" for name in ACTIVATION_SCALES)
        return frozenset(name for name in self.files if name.endswith(ends))

    def check(self) -> None:
        """Checks that config and weights agree.

        Raises:
            ModelError: A tensor is missing, has another shape or an unsupported dtype,
                or does not belong to such a model.
        """
        specs = [part for spec in self.specs() for part in spec.parts]
        for spec in specs:
            if (linear := self.quantized.get(spec.path)) is not None:
                linear.check()
            else:
                self._check_dense(spec)
        known = {spec.hf_name for spec in specs} | self.activation_scales
        known |= {n for linear in self.quantized.values() for n in linear.tensor_names}
        for name in self.files.keys() - known:
            # A tied head may be stored as well, and is equal to the embedding.
            if name != _HEAD and not name.endswith(_HARMLESS_EXTRA):
                raise ModelError(
                    f"{self.folder}: the checkpoint holds {name}, which is not part of "
                    "the model that its config.json describes."
                )

    def _check_dense(self, spec: TensorSpec) -> None:
        file = self.files.get(spec.hf_name)
        if file is None:
            raise ModelError(
                f"{self.folder}: the checkpoint lacks {spec.hf_name} "
                f"{list(spec.hf_shape)}, which its config.json calls for."
            )
        found = file.shape(spec.hf_name)
        if found != spec.hf_shape:
            raise ModelError(
                f"{file.path}: {spec.hf_name} has shape {list(found)}; its "
                f"config.json calls for {list(spec.hf_shape)}."
            )
        file.dtype(spec.hf_name)

    def dense_config(self, dtype: str) -> dict[str, Any]:
        """Returns the contents of config.json for a dense copy in another dtype."""
        config = {**self.config_json, "torch_dtype": dtype}
        for key in ("dtype", KEY):
            config.pop(key, None)
        return config

    def dense_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and the contents of every tensor, for a dense copy.

        Quantized linears are dequantized to float32. Scales of activations are left
        out. Dense tensors are not checked for NaN and infinity. All linears are N K.

        Raises:
            ModelError: A tensor cannot be read, or a quantized linear is not finite.
        """
        linears = {f"{x.name}.weight": x for x in self.quantized.values()}
        parts = {n for x in linears.values() for n in x.tensor_names} - linears.keys()
        for name, file in self.files.items():
            if name in linears:
                weight, _ = linears[name].read()
                yield name, np.asarray(_dequantized(weight))
            elif name not in parts | self.activation_scales:
                array = file.array(name)
                yield name, array.T if self._is_transposed(name) else array

    def as_stored(
        self, tensors: Iterable[tuple[str, np.ndarray]], dtype: np.dtype | None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields tensors by their names in the checkpoint, and those of other parts.

        Args:
            tensors: Tensors of the text model, those of a layer's experts one after the
                other, as in `files`.
            dtype: Dtype of those of other parts; None: they keep their own.
        """

        def place(tensor: tuple[str, np.ndarray]) -> tuple[str, int]:
            name, _ = tensor
            return self.wholes.get(name, (name, 0))

        for (name, num_experts), parts in itertools.groupby(tensors, place):
            arrays = [x.T if self._is_transposed(own) else x for own, x in parts]
            whole = arrays[0]
            if num_experts:
                rows = np.concatenate(arrays)
                whole = rows.reshape(num_experts, -1, whole.shape[1])
            yield self.stored_names.get(name, name), whole
        for name, file in self.other_files.items():
            array = file.array(name)
            yield name, array if dtype is None else array.astype(dtype)

    def _is_transposed(self, name: str) -> bool:
        """Returns whether the checkpoint holds K N of a linear of an expert."""
        return self.config.family.has_fused_experts and is_of_expert(name)


def with_values(config_json: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Returns the contents of config.json with other values of the text model."""
    if (text := config_json.get("text_config")) is None:
        return {**config_json, **values}
    # transformers reads whether the head is tied of the whole model.
    of_all = {key: x for key, x in values.items() if key == "tie_word_embeddings"}
    return {**config_json, **of_all, "text_config": {**text, **values}}


@jax.jit
def _dequantized(weight: StoredWeight) -> jax.Array:
    return weight.dequantize(jnp.float32)


def open_checkpoint(folder: pathlib.Path) -> Checkpoint:
    """Opens a checkpoint folder; reads no weights, except to compare the head.

    Raises:
        ModelError: A file is missing or damaged, the model is of an unsupported kind,
            or config.json has more layers than the weights.
    """
    return _with_files(_without_files(folder))


def planned_checkpoint(
    folder: pathlib.Path, *, checks_weights: bool = False
) -> Checkpoint:
    """Opens a checkpoint folder whose weights may be missing.

    Args:
        folder: The folder.
        checks_weights: Whether to refuse weights that are damaged or do not fit;
            otherwise they count as missing.

    Returns:
        What `open_checkpoint` returns, or a checkpoint without files.

    Raises:
        ModelError: config.json is damaged or of an unsupported kind, or the weights
            are refused.
    """
    planned = _without_files(folder)
    try:
        found = _with_files(planned)
    except ModelError as error:
        if checks_weights:
            raise
        logger.info("the weights were not looked at: %s", error)
        return planned
    if checks_weights:
        found.check()
    return found


def _without_files(folder: pathlib.Path) -> Checkpoint:
    config_json = read_json(folder / "config.json")
    config = model_config(config_json)
    read_quantization(config_json)
    return Checkpoint(folder=folder, config_json=config_json, config=config, files={})


def _with_files(planned: Checkpoint) -> Checkpoint:
    planned = _with_text_files(planned, safetensor_files(planned.folder))
    is_fused = planned.config.family.has_fused_experts
    files, wholes = _with_single_experts(planned.files, is_fused=is_fused)
    planned = dataclasses.replace(planned, files=files, wholes=wholes)
    _check_num_layers(planned, files)
    if not _has_own_head(planned.config, files):
        return planned
    logger.warning(
        "%s: config.json says tie_word_embeddings, and the weights hold a %s that "
        "differs from the embedding: it is used, as transformers does. Set "
        "tie_word_embeddings to false to silence this.",
        planned.folder,
        _HEAD,
    )
    return dataclasses.replace(
        planned,
        config=dataclasses.replace(planned.config, tie_embeddings=False),
        config_json=with_values(planned.config_json, tie_word_embeddings=False),
    )


def _with_text_files(planned: Checkpoint, files: dict[str, TensorFile]) -> Checkpoint:
    """Returns the checkpoint with the files of all tensors of the text model."""
    family = planned.config.family
    names = {name: family.text_name(name) for name in files}
    text_names = {stored: name for stored, name in names.items() if name is not None}
    others = {name: files[name] for name in names.keys() - text_names.keys()}
    for file in {id(file): file for file in files.values()}.values():
        file.rename(text_names)
    if others:
        logger.info(
            "%s: the text model is used alone; not read: %s of other parts (%s, ...).",
            planned.folder,
            counted(len(others), "tensor"),
            min(others),
        )
    return dataclasses.replace(
        planned,
        files={name: files[stored] for stored, name in text_names.items()},
        stored_names={name: stored for stored, name in text_names.items()},
        other_files=dict(sorted(others.items())),
    )


def _with_single_experts(
    files: dict[str, TensorFile], *, is_fused: bool
) -> tuple[dict[str, TensorFile], dict[str, tuple[str, int]]]:
    """Returns the files of all tensors, with one for each linear of an expert.

    Transformers 5 can write the experts of a layer as two tensors, of which one has
    gate and up of an expert, one after the other; Gemma 4 always has these. In fp8 with
    blocks, each has a tensor of scales.

    Args:
        files: The file of each tensor.
        is_fused: See `Family.has_fused_experts`.

    Returns:
        The files by name, and the `wholes` of `Checkpoint`.
    """
    found, wholes = {}, {}
    for name, file in files.items():
        match = _FUSED.fullmatch(name)
        of_fused = match is not None and match[3] in ("_blocks", "_scales")
        if match is None or len(file.shape(name)) < 3 or (of_fused and not is_fused):
            found[name] = file
            continue
        experts, kind, part = match.groups()
        linears = (kind,)
        if kind == "gate_up_proj" and not is_fused:
            linears = "gate_proj", "up_proj"
        number, rows, *_ = file.shape(name)
        if number == 0 or rows % len(linears):
            raise ModelError(
                f"{file.path}: {name} has shape {list(file.shape(name))}; wanted "
                f"experts, each with the rows of {' and '.join(linears)}. Fetch or "
                "copy it again."
            )
        parts = [
            f"{experts}.{i}.{linear}.{_PARTS.get(part, 'weight')}"
            for i in range(number)
            for linear in linears
        ]
        file.split(name, parts)
        found |= dict.fromkeys(parts, file)
        wholes |= dict.fromkeys(parts, (f"{experts}.{kind}", number))
    return found, wholes


def _check_num_layers(planned: Checkpoint, files: dict[str, TensorFile]) -> None:
    """Checks the number of layers before anything is allocated for each of them."""
    layers = {int(m[1]) for m in map(_LAYER.match, files) if m is not None}
    if planned.config.num_layers > len(layers):
        raise ModelError(
            f"{planned.folder / 'config.json'} has num_hidden_layers="
            f"{planned.config.num_layers}, and the weights hold "
            f"{counted(len(layers), 'layer')} (model.layers.N). Correct it, or fetch "
            "the missing files."
        )


def _has_own_head(config: ModelConfig, files: dict[str, TensorFile]) -> bool:
    """Returns whether the weights hold a head that differs from the embedding."""
    if not config.tie_embeddings or not {_HEAD, _EMBEDDING} <= files.keys():
        return False
    head, embedding = (files[name].array(name) for name in (_HEAD, _EMBEDDING))
    return not np.array_equal(head, embedding)
