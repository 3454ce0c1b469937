"""The table of the tensors that an adapter trains in each linear that it adapts.

Slots, optimizer, checkpoints, fingerprints, PEFT export and import, and the Flax module
loop over this table, so a new trained tensor is one more entry. Only mathematics names
single tensors: `MultiLoraLinear` in training, and `merge_adapter`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxlora.config import LoraJob
from jaxlora.modules.quantized_kernel import as_dense
from jaxlora.pallas_kernels import column_norms
from jaxlora.sharding.global_arrays import everywhere

# Letters of docs/conventions.md: input features, output features and rank.
Dimension = Literal["K", "N", "R"]

# Makes the initial value from a random generator, the frozen weight (K N) and the rank.
Start = Callable[[np.random.Generator, Any, int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTensor:
    """One of the tensors that an adapter trains in each linear, in float32.

    Attributes:
        name: Its name in paths, and the name of its variable in `MultiLoraLinear`.
        peft_name: Its name in a PEFT folder, after the name of the linear. PEFT stores
            the transpose of our array.
        dimensions: Its dimensions; a slot pads those of rank with zeros.
        start: Makes its initial value at the adapter's own rank; None: `from_weight`
            does, or `jaxlora.adapters.fresh` by a setting of the job.
        from_weight: Makes its initial value from the frozen weight alone, K N or a
            quantized weight, in the dtype of the products. It runs programs on the
            weight's devices.
        rate_ratio: Its learning rate in a job, divided by the job's; None: always 1.
        setting: The setting of `LoraJob` and of PEFT's adapter_config.json, true or
            false, that gives it to an adapter; None: every adapter has it.
        unless: A setting that takes it away from an adapter again.
    """

    name: str
    peft_name: str
    dimensions: tuple[Dimension, ...]
    start: Start | None
    from_weight: Callable[[Any, DTypeLike], np.ndarray] | None = None
    rate_ratio: Callable[[LoraJob], float] | None = None
    setting: str | None = None
    unless: str | None = None

    def is_given(self, is_set: Callable[[str], object]) -> bool:
        """Whether an adapter has it.

        Args:
            is_set: Returns whether a setting, such as `use_dora`, is on.
        """
        is_here = self.setting is None or bool(is_set(self.setting))
        return is_here and not (self.unless is not None and is_set(self.unless))

    @property
    def is_matrix(self) -> bool:
        """Whether rows are multiplied by it, in their dtype."""
        return len(self.dimensions) == 2

    def shape(self, in_features: int, out_features: int, rank: int) -> tuple[int, ...]:
        """Shape of the tensor in a linear with a weight K N, at a rank R."""
        sizes = {"K": in_features, "N": out_features, "R": rank}
        return tuple(sizes[letter] for letter in self.dimensions)


def _kaiming_uniform(rng: np.random.Generator, kernel: Any, rank: int) -> np.ndarray:
    """Draws from +-1/sqrt(K), which is PEFT's kaiming_uniform(a = sqrt 5)."""
    in_features = kernel.shape[0]
    bound = in_features**-0.5
    return rng.uniform(-bound, bound, (in_features, rank))


def _zeros(rng: np.random.Generator, kernel: Any, rank: int) -> np.ndarray:
    return np.zeros((rank, kernel.shape[1]))


def _lora_plus(job: LoraJob) -> float:
    """The ratio of LoRA+ (2402.12354); PEFT gives it to B and to all vectors."""
    return job.lora_plus_ratio


LORA_A = TrainedTensor(
    name="lora_a",
    peft_name="lora_A.weight",
    dimensions=("K", "R"),
    start=_kaiming_uniform,
    unless="use_vera",
)
LORA_B = TrainedTensor(
    name="lora_b",
    peft_name="lora_B.weight",
    dimensions=("R", "N"),
    start=_zeros,
    rate_ratio=_lora_plus,
    unless="use_vera",
)


def _norms(kernel: Any, dtype: DTypeLike) -> np.ndarray:
    """Norms of the columns of W, as the magnitudes of DoRA start."""
    return np.asarray(everywhere(_column_norms(kernel, jnp.dtype(dtype))))


@functools.partial(jax.jit, static_argnums=1)
def _column_norms(kernel: Any, dtype: jnp.dtype) -> jax.Array:
    k, n = kernel.shape
    a, b = jnp.zeros((1, k, 1), dtype), jnp.zeros((1, 1, n), dtype)
    return column_norms(as_dense(kernel, dtype), a, b, jnp.zeros(1))[0]


MAGNITUDE = TrainedTensor(
    name="lora_magnitude_vector",
    peft_name="lora_magnitude_vector",
    dimensions=("N",),
    start=None,
    from_weight=_norms,
    rate_ratio=_lora_plus,
    setting="use_dora",  # DoRA, arXiv 2402.09353
)

# The factors of VeRA's frozen matrices; see `jaxlora.modules.vera`.
VERA_D = TrainedTensor(
    name="vera_lambda_d",
    peft_name="vera_lambda_d",
    dimensions=("R",),
    start=None,
    setting="use_vera",  # VeRA, arXiv 2310.11454
)
VERA_B = TrainedTensor(
    name="vera_lambda_b",
    peft_name="vera_lambda_b",
    dimensions=("N",),
    start=lambda rng, kernel, rank: np.zeros(kernel.shape[1]),
    setting="use_vera",
)

# The initial values are drawn in this order, so new entries go to the end.
TENSORS: tuple[TrainedTensor, ...] = (LORA_A, LORA_B, MAGNITUDE, VERA_D, VERA_B)


def trained_tensors() -> tuple[TrainedTensor, ...]:
    """All tensors that an adapter can train in a linear, in the order of the table."""
    return TENSORS


def tensors_with(is_set: Callable[[str], object]) -> tuple[TrainedTensor, ...]:
    """The tensors of an adapter, in the order of the table.

    Args:
        is_set: Returns whether a setting, such as `use_dora`, is on.
    """
    return tuple(t for t in trained_tensors() if t.is_given(is_set))


def tensor_settings() -> tuple[str, ...]:
    """The settings that give tensors to an adapter, in the order of the table."""
    settings = (tensor.setting for tensor in trained_tensors())
    return tuple(dict.fromkeys(s for s in settings if s is not None))


def rate_ratios[T](
    by_slot: Callable[[Callable[[LoraJob], float]], T],
) -> dict[str, T]:
    """Collects the ratios of the tensors that have a learning rate of their own.

    Args:
        by_slot: Makes an array by slot of a function of the slot's job.
    """
    return {t.name: by_slot(t.rate_ratio) for t in trained_tensors() if t.rate_ratio}


def tensor_path(linear: str, tensor: TrainedTensor) -> str:
    """Path of a linear's tensor, such as `layers.0.mlp.up_proj.lora_a`.

    Args:
        linear: Path of the linear.
        tensor: One of its trained tensors.
    """
    return f"{linear}.{tensor.name}"


def tensor_paths(linear: str) -> Iterator[tuple[TrainedTensor, str]]:
    """Each trained tensor of a linear, with its path."""
    return ((tensor, tensor_path(linear, tensor)) for tensor in trained_tensors())


# The score head of a reward model, which is no part of a linear; see
# `jaxlora.models.score`.
SCORE_WEIGHT = TrainedTensor(
    name="weight", peft_name="weight", dimensions=("K",), start=None
)

# Rows of the embedding or the head that a slot trains; see `jaxlora.models.token_rows`.
TOKEN_ROW_WEIGHTS = TrainedTensor(
    name="rows",
    peft_name="token_adapter.trainable_tokens_delta",
    dimensions=("R", "K"),
    start=None,
)

# A whole copy of the embedding or the head, V D; see `jaxlora.models.whole_tables`.
WHOLE_TABLE = TrainedTensor(
    name="table", peft_name="weight", dimensions=("N", "K"), start=None
)


def tensor_of(path: str) -> TrainedTensor:
    """The trained tensor that a path, or the name of a stack of tables, ends in.

    Raises:
        ValueError: The path ends in none of the table's names.
    """
    name = path.rpartition(".")[2]
    outside = SCORE_WEIGHT, TOKEN_ROW_WEIGHTS, WHOLE_TABLE
    for tensor in (*trained_tensors(), *outside):
        if tensor.name == name:
            return tensor
    raise ValueError(f"{path!r} is no name of a trained tensor.")


def rank_axis(name: str) -> int | None:
    """Axis of the rank in a trained tensor of this name; None: it has none."""
    dimensions = tensor_of(name).dimensions
    return dimensions.index("R") if "R" in dimensions else None


def feature_axis(name: str) -> int:
    """Axis of the input or output features in a trained matrix of this name."""
    axis = rank_axis(name)
    assert axis is not None, f"{name} has no rank"
    return 1 - axis


def common_rank(tensors: Sequence[TrainedTensor], arrays: Sequence[Any]) -> int | None:
    """Rank of the tensors of one linear; None if their ranks differ.

    Args:
        tensors: Entries of the table.
        arrays: The tensor of each.
    """
    ranks = {
        size
        for tensor, array in zip(tensors, arrays, strict=True)
        for letter, size in zip(tensor.dimensions, array.shape, strict=True)
        if letter == "R"
    }
    return ranks.pop() if len(ranks) == 1 else None


def unpadded(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Index of a tensor of a given shape in the zero-padded table of a slot."""
    return tuple(slice(size) for size in shape)
