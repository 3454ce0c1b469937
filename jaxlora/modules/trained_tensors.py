"""The tensors that an adapter trains in each linear that it adapts, and outside.

Slots, optimizer, checkpoints, fingerprints, PEFT export and import, and the Flax module
loop over them, so a new one is one more entry of its variant.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxlora.modules.variants.table import variants, variants_with
from jaxlora.modules.variants.variant import RateSettings, TrainedTensor


def trained_tensors() -> tuple[TrainedTensor, ...]:
    """All tensors that an adapter can train in a linear, variant by variant."""
    return tuple(tensor for variant in variants() for tensor in variant.tensors)


def tensors_with(is_set: Callable[[str], object]) -> tuple[TrainedTensor, ...]:
    """The tensors of an adapter, in the same order.

    Args:
        is_set: Returns whether a setting, such as `use_dora`, is on.
    """
    found = variants_with(is_set)
    return tuple(tensor for variant in found for tensor in variant.tensors)


def tensor_settings() -> tuple[str, ...]:
    """The settings that give tensors to an adapter, in the same order."""
    return tuple(v.setting for v in variants() if v.setting is not None)


def rate_ratios[T](
    by_slot: Callable[[Callable[[RateSettings], float]], T],
) -> dict[str, T]:
    """Collects the ratios of the tensors that have a learning rate of their own.

    Args:
        by_slot: Makes an array by slot of a function of the slot's settings.
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
