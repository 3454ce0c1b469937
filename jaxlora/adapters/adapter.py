"""An adapter as a plain value on the host, at its real ranks."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import NonNegativeInt, PlainSerializer, PlainValidator

from jaxlora.config.rules import row_tokens
from jaxlora.errors import AdapterError
from jaxlora.models.config import ModelConfig, shared_path
from jaxlora.models.slot_modules import HEAD_ROWS, SLOT_MODULES
from jaxlora.models.structure import linear_path
from jaxlora.modules.trained_tensors import (
    tensor_paths,
    tensors_with,
    trained_tensors,
)
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.table import variants
from jaxlora.modules.variants.variant import TrainedTensor, Variant
from jaxlora.modules.variants.vera import VeraMatrices


def _blank(shape: Any) -> np.ndarray:
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"{shape!r} is no shape of an array.")
    return np.broadcast_to(np.float32(0), shape)


# The metadata of a checkpoint has adapters without their values: an array is its shape,
# and comes back as zeros.
_Array = Annotated[np.ndarray, PlainValidator(_blank), PlainSerializer(np.shape)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """The LoRA of one linear, which adds `scaling * A B` to its weight.

    Attributes:
        tensors: The trained tensors, float32, by their names in
            `jaxlora.modules.trained_tensors`: `lora_a` is A, K r; `lora_b` is B, r N.
            Those of other variants of LoRA may be there, too; VeRA has no A and B.
        rank: Rank r.
        lora_alpha: Numerator of the scaling; see `Adapter.scaling`.

    Raises:
        ValueError: A tensor is missing or unknown, or the shapes do not match.
    """

    tensors: dict[str, _Array]
    rank: int
    lora_alpha: float

    def __post_init__(self):
        shapes = ((name, array.shape) for name, array in self.tensors.items())
        _check_shapes(tuple(shapes), self.rank)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that train something in the linear."""
        return _variants_of(frozenset(self.tensors))

    def in_order(self) -> list[TrainedTensor]:
        """Its trained tensors, in the order of their table."""
        return [t for t in trained_tensors() if t.name in self.tensors]

    @property
    def a(self) -> np.ndarray:
        """Shrink matrix A, K r."""
        return self.tensors[LORA_A.name]

    @property
    def b(self) -> np.ndarray:
        """Expand matrix B, r N."""
        return self.tensors[LORA_B.name]


@functools.lru_cache  # the linears of all adapters mostly have the same tensors
def _variants_of(names: frozenset[str]) -> tuple[Variant, ...]:
    return tuple(v for v in variants() if any(t.name in names for t in v.tensors))


@functools.lru_cache(maxsize=1024)
def _check_shapes(
    named_shapes: tuple[tuple[str, tuple[int, ...]], ...], rank: int
) -> None:
    """Checks the names and shapes of the tensors of a linear; see `LoraWeights`."""
    shapes = dict(named_shapes)
    settings = {variant.setting for variant in _variants_of(frozenset(shapes))}
    wanted = {t.name: t.dimensions for t in tensors_with(settings.__contains__)}
    if shapes.keys() != wanted.keys():
        raise ValueError(
            f"an adapter of a linear has the tensors {', '.join(wanted)}, got "
            f"{', '.join(shapes)}."
        )
    sizes: dict[str, int] = {"R": rank}
    for name, dimensions in wanted.items():
        if len(shapes[name]) != len(dimensions) or any(
            sizes.setdefault(letter, size) != size
            for letter, size in zip(dimensions, shapes[name], strict=True)
        ):
            raise ValueError(
                f"the shapes {shapes} do not match each other and rank {rank}."
            )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OutsideWeights:
    """The weights that an adapter trains in a module outside the linears.

    Attributes:
        array: The trained array, float32, in the layout of
            `jaxlora.models.slot_modules`.
        tokens: The token of each row, if it has rows of single tokens; none occurs
            twice.
    """

    array: _Array
    tokens: tuple[NonNegativeInt, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        modules: The weights of each adapted linear, by Hugging Face's module name
            (`model.layers.0.self_attn.q_proj`).
        use_rslora: Whether the scaling divides by the root of the rank.
        dropout: Dropout rate in training.
        keeps_start: Whether the second half of each module's ranks is fixed; see
            `jaxlora.adapters.initial`.
        outside: What it trains outside the linears, by name in
            `jaxlora.models.slot_modules`: rows of tokens of the embedding (and of a
            head that is tied to it) or of an untied head, whole copies of the two, each
            by itself, and the score head of a reward model.
        vera: The matrices of VeRA that all modules share; None: it is not VeRA.
        chat_template_kwargs: The setting of the data that it was trained on, which
            chats with it have, too.
    """

    modules: dict[str, LoraWeights]
    use_rslora: bool = False
    dropout: float = 0.0
    keeps_start: bool = False
    outside: dict[str, OutsideWeights] = dataclasses.field(default_factory=dict)
    vera: VeraMatrices | None = None
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def scaling(self, weights: LoraWeights) -> float:
        """Factor of A B in one of the adapter's linears."""
        return lora_scaling(weights.lora_alpha, weights.rank, self.use_rslora)

    def trained_rank(self, weights: LoraWeights) -> int:
        """Number of ranks of one of the adapter's linears that are trained."""
        return weights.rank // 2 if self.keeps_start else weights.rank

    def is_set(self, setting: str) -> bool:
        """Whether it has the variant of a setting, such as `use_dora`."""
        return any(variant.setting == setting for variant in self.variants)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that train something in some linear."""
        found = {v for weights in self.modules.values() for v in weights.variants}
        return tuple(variant for variant in variants() if variant in found)

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """The tokens of the rows of each module in `outside`, by its name."""
        return {name: weights.tokens for name, weights in self.outside.items()}

    @property
    def token_indices(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """Tokens whose rows are trained, in the form of `trainable_token_indices`."""
        rows = {SLOT_MODULES[name].frozen: ids for name, ids in self.tokens.items()}
        return row_tokens({module: ids for module, ids in rows.items() if ids})

    @property
    def modules_to_save(self) -> tuple[str, ...]:
        """Names of the modules of which whole copies are trained, sorted."""
        found = (SLOT_MODULES[name] for name in self.outside)
        return tuple(sorted(str(one.frozen) for one in found if one.is_whole))

    def limited_to(self, paths: Collection[str]) -> "Adapter":
        """Returns the part of the adapter in some modules, such as those of a stage.

        Args:
            paths: Dotted paths of the modules (`layers.0.mlp.up_proj`, `score`); the
                experts of a layer share one, see `shared_path`.
        """
        modules = {
            name: weights
            for name, weights in self.modules.items()
            if shared_path(linear_path(name)) in paths
        }
        outside = {name: own for name, own in self.outside.items() if name in paths}
        return dataclasses.replace(self, modules=modules, outside=outside)

    def as_lora(self, linear_shapes: Mapping[str, Sequence[int]]) -> "Adapter":
        """Returns the adapter of LoRA with the same product A B; itself if it is one.

        Args:
            linear_shapes: (K, N) of each linear, by module name.
        """
        modules = {}
        for name, weights in self.modules.items():
            made = [variant for variant in weights.variants if variant.makes_matrices]
            tensors = weights.tensors
            for variant in made:
                tensors = variant.as_lora(tensors, self.vera, *linear_shapes[name])
            if made:
                modules[name] = dataclasses.replace(weights, tensors=tensors)
        if not modules:
            return self
        modules = self.modules | modules
        return dataclasses.replace(self, modules=modules, vera=None)

    def by_path(self) -> dict[str, np.ndarray]:
        """All trained tensors by path, such as `layers.0.mlp.up_proj.lora_a`."""
        tensors = {
            path: weights.tensors[tensor.name]
            for name, weights in self.modules.items()
            for tensor, path in tensor_paths(linear_path(name))
            if tensor.name in weights.tensors
        }
        for name, weights in self.outside.items():
            tensors[SLOT_MODULES[name].path] = weights.array
        return tensors

    def fingerprint(self) -> str:
        """Returns a hash of what is trained, and of what it is trained beside."""
        digest = hashlib.sha256()
        for name, weights in sorted(self.modules.items()):
            digest.update(name.encode())
            for tensor in weights.in_order():
                digest.update(np.asarray(weights.tensors[tensor.name]).tobytes())
        replaced = {SLOT_MODULES[n].frozen or "": w for n, w in self.outside.items()}
        added = replaced.pop("", None)
        for module, weights in sorted(replaced.items()):
            if module != "embed_tokens":
                digest.update(module.encode())
            digest.update(str(weights.tokens or range(len(weights.array))).encode())
            digest.update(weights.array.tobytes())
        if self.vera is not None:
            digest.update(str(dataclasses.astuple(self.vera)).encode())
        if added is not None:
            digest.update(added.array.tobytes())
        return digest.hexdigest()

    def product_fingerprint(self) -> str:
        """Returns a hash of what the adapter computes: its weights and scalings."""
        digest = hashlib.sha256(self.fingerprint().encode())
        for name, weights in sorted(self.modules.items()):
            digest.update(f"{name} {self.scaling(weights)!r}".encode())
        return digest.hexdigest()

    def check_base(self, model: ModelConfig) -> None:
        """Checks that the base has the tokens and the head that are trained.

        Raises:
            AdapterError: It lacks one.
        """
        vocab_size = model.vocab_size
        if HEAD_ROWS.name in self.outside and model.tie_embeddings:
            raise AdapterError(
                "the adapter has rows of lm_head, and the head of the base model is "
                "tied to its embedding. Use the base with a head of its own that the "
                "adapter was trained on."
            )
        for name, weights in self.outside.items():
            module, size = SLOT_MODULES[name], len(weights.array)
            if module.is_whole and size != vocab_size:
                raise AdapterError(
                    f"the adapter has a whole copy of {module.frozen} with {size} "
                    f"tokens, and the base model has {vocab_size}. Use the base whose "
                    "embedding has as many, such as the resized one; or merge the "
                    "adapter into its base (jaxlora merge), which makes that model if "
                    "the adapter has both the embedding and the head."
                )
            if (largest := max(weights.tokens, default=0)) >= vocab_size:
                raise AdapterError(
                    f"the adapter has a row of token {largest} in {module.frozen}, and "
                    f"the base model has {vocab_size} tokens. Use the base whose "
                    "embedding was resized for the added tokens."
                )


def lora_scaling(lora_alpha: float, rank: int, use_rslora: bool) -> float:
    """`lora_alpha / rank`, or `lora_alpha / sqrt(rank)` for rsLoRA (2312.03732)."""
    return lora_alpha / (math.sqrt(rank) if use_rslora else rank)
