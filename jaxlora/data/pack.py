"""Packs the samples of a microbatch into arrays of one fixed shape."""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlora.data.samples import TokenizedSample
from jaxlora.scheduler import Limits, Microbatch, Sample


@typing.no_type_check  # JAX also instantiates it with objects that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Token rows of several jobs. The rows of a job fill a whole number of blocks.

    Attributes:
        token_ids: Token ids; 0 in padding rows.
        positions: Position of each token in its sample.
        segment_ids: Index of the sample that each row belongs to; -1 in padding rows.
        labels: The token that each row should predict, which is the next one of its
            sample.
        loss_weight: Weight of each row's loss; 0 for rows without a target.
        token_index: Index of each token in the global batch of its job.
        block_adapter: Slot of each token block; -1 for padding blocks.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    segment_ids: Int[Array, " T"]
    labels: Int[Array, " T"]
    loss_weight: Float[Array, " T"]
    token_index: Int[Array, " T"]
    block_adapter: Int[Array, " NB"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobBatch:
    """One global batch of one job.

    Attributes:
        slot: Slot of the job.
        step: Number of the job's optimizer step that uses this batch.
        samples: Samples of the batch, in the order of the job.
        weight: Weight of each target token's loss: the reciprocal of the number of
            target tokens for training, 1 for a sum.
    """

    slot: int
    step: int
    samples: Sequence[TokenizedSample]
    weight: float

    @property
    def num_target_tokens(self) -> int:
        """Number of tokens that are trained on or evaluated."""
        return sum(int(s.is_target.sum()) for s in self.samples)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch."""
        return sum(len(s.token_ids) for s in self.samples)

    def to_schedule(self) -> list[Sample]:
        """Converts the batch to scheduler samples, with the slot as the job number."""
        return [
            Sample(
                owner=self.slot, batch=self.step, index=i, num_tokens=len(s.token_ids)
            )
            for i, s in enumerate(self.samples)
        ]

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Index in the global batch of each sample's first token."""
        lengths = [len(s.token_ids) for s in self.samples]
        return np.cumsum([0, *lengths[:-1]])


def split_by_segment_limit(
    microbatch: Microbatch, short_tokens: int, max_short: int
) -> list[Microbatch]:
    """Splits a microbatch, in order, into parts with a limited number of short samples.

    Args:
        microbatch: The samples; those of one job are adjacent.
        short_tokens: A sample is short if it has at most this many tokens.
        max_short: Most short samples in one part, at least 1.
    """
    parts, num_short = [[]], 0
    for sample in microbatch:
        is_short = sample.num_tokens <= short_tokens
        if is_short and num_short == max_short:
            parts.append([])
            num_short = 0
        parts[-1].append(sample)
        num_short += is_short
    return [tuple(part) for part in parts]


def pack_tick(
    microbatches: Sequence[Microbatch],
    batches: Mapping[int, JobBatch],
    limits: Limits,
) -> PackedBatch:
    """Packs microbatches that several devices run at the same time, one after another.

    Args:
        microbatches: The microbatch of each device; an empty one becomes padding.
        batches: Global batch of each slot. If a slot is missing, its rows become
            padding.
        limits: Capacity and block size of each microbatch.

    Returns:
        NumPy arrays; each device has `limits.capacity` of the rows.
    """
    parts = [pack_microbatch(one, batches, limits) for one in microbatches]
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def pack_microbatch(
    microbatch: Microbatch, batches: Mapping[int, JobBatch], limits: Limits
) -> PackedBatch:
    """Packs a microbatch into `limits.capacity` rows.

    Args:
        microbatch: The samples; those of one job are adjacent.
        batches: Global batch of each slot in the microbatch. If a slot is missing, its
            rows become padding.
        limits: Capacity and block size.

    Returns:
        NumPy arrays.
    """
    num_rows, block = limits.capacity, limits.block_tokens
    # Each sample with its number, its first row and its global batch.
    packed: list[tuple[int, int, JobBatch, TokenizedSample]] = []
    row = 0
    for number, sample in enumerate(microbatch):
        if number and sample.owner != microbatch[number - 1].owner:
            row = limits.padded(row)
        batch = batches.get(sample.owner)
        if batch is not None:
            packed.append((number, row, batch, batch.samples[sample.index]))
        row += sample.num_tokens
    if not packed:
        return _padding(limits)
    lengths = np.array([len(tokens.token_ids) for *_, tokens in packed])

    def by_token(values, dtype=np.int32) -> np.ndarray:
        return np.repeat(np.array(list(values), dtype), lengths)

    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1], dtype=np.int32) - by_token(ends - lengths)
    rows = by_token(first for _, first, _, _ in packed) + positions

    def to_rows(values: np.ndarray, padding: int = 0) -> np.ndarray:
        out = np.full(num_rows, padding, values.dtype)
        out[rows] = values
        return out

    def next_in_sample(values: np.ndarray) -> np.ndarray:
        """Returns the value of each token's successor; 0 for the last of a sample."""
        out = np.roll(values, -1)
        out[ends - 1] = 0
        return out

    token_ids = np.concatenate([tokens.token_ids for *_, tokens in packed])
    is_target = np.concatenate([tokens.is_target for *_, tokens in packed])
    weight = by_token((batch.weight for _, _, batch, _ in packed), np.float32)
    starts = (batch.starts[microbatch[n].index] for n, _, batch, _ in packed)
    block_adapter = np.full(num_rows // block, -1, np.int32)
    block_adapter[rows // block] = by_token(batch.slot for _, _, batch, _ in packed)
    arrays: dict[str, Any] = {
        "token_ids": to_rows(token_ids),
        "positions": to_rows(positions),
        "segment_ids": to_rows(by_token(number for number, *_ in packed), padding=-1),
        "labels": to_rows(next_in_sample(token_ids)),
        "loss_weight": to_rows(next_in_sample(is_target) * weight),
        "token_index": to_rows(by_token(starts) + positions),
        "block_adapter": block_adapter,
    }
    return PackedBatch(**arrays)


def _padding(limits: Limits) -> PackedBatch:
    """Returns a microbatch without samples."""
    num_rows, num_blocks = limits.capacity, limits.capacity // limits.block_tokens
    zeros: Any = np.zeros(num_rows, np.int32)
    none: Any = np.full(num_rows, -1, np.int32)
    weight: Any = np.zeros(num_rows, np.float32)
    blocks: Any = np.full(num_blocks, -1, np.int32)
    return PackedBatch(
        token_ids=zeros,
        positions=zeros,
        segment_ids=none,
        labels=zeros,
        loss_weight=weight,
        token_index=zeros,
        block_adapter=blocks,
    )
