"""Packs the samples of a microbatch into arrays of one fixed shape."""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlora.data.samples import TokenizedSample
from jaxlora.scheduler import Limits, Microbatch, Sample


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Token rows of several jobs, each job's in whole token blocks.

    Attributes:
        token_ids: Tokens; 0 in padding.
        positions: Position of each token in its own sample.
        segment_ids: Which sample of the row a token belongs to; -1 in padding.
        labels: The token that each row should predict: the next of its sample.
        loss_weight: Weight of each row's loss; 0 where nothing is predicted.
        token_index: The token's index in its job's global batch.
        block_adapter: Slot of each token block; -1 for padding.
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
        slot: The job's slot.
        step: The job's optimiser step that it feeds.
        samples: Its samples, in the job's own order.
        weight: Weight of each target token's loss: 1 / target tokens of the batch to
            train, 1 to sum.
    """

    slot: int
    step: int
    samples: Sequence[TokenizedSample]
    weight: float

    @property
    def num_target_tokens(self) -> int:
        """Tokens of the batch whose loss counts."""
        return sum(int(s.is_target.sum()) for s in self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(len(s.token_ids) for s in self.samples)

    def to_schedule(self) -> list[Sample]:
        """The batch as the scheduler sees it; jobs are named by slot."""
        return [
            Sample(job=self.slot, batch=self.step, index=i, num_tokens=len(s.token_ids))
            for i, s in enumerate(self.samples)
        ]

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Index of each sample's first token in the global batch."""
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


def pack_microbatch(
    microbatch: Microbatch, batches: Mapping[int, JobBatch], limits: Limits
) -> PackedBatch:
    """Packs a microbatch into `limits.capacity` rows and starts their upload.

    Args:
        microbatch: Samples; those of one job are adjacent.
        batches: Global batch of each slot in the microbatch. The rows of a slot that is
            missing here become padding.
        limits: Capacity and block size.
    """
    c, block = limits.capacity, limits.block_tokens
    held: list[tuple[int, int, JobBatch, TokenizedSample]] = []
    at = 0
    for number, sample in enumerate(microbatch):
        if number and sample.job != microbatch[number - 1].job:
            at = limits.padded(at)
        batch = batches.get(sample.job)
        if batch is not None:
            held.append((number, at, batch, batch.samples[sample.index]))
        at += sample.num_tokens
    lengths = np.array([len(tokens.token_ids) for *_, tokens in held])

    def by_token(values, dtype=np.int32) -> np.ndarray:
        return np.repeat(np.array(list(values), dtype), lengths)

    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1], dtype=np.int32) - by_token(ends - lengths)
    t = by_token(first for _, first, _, _ in held) + positions

    def rows(values: np.ndarray, empty: int = 0) -> np.ndarray:
        out = np.full(c, empty, values.dtype)
        out[t] = values
        return out

    def of_next(values: np.ndarray) -> np.ndarray:
        """Shifts values to the next token of the sample; 0 for the sample's last."""
        out = np.roll(values, -1)
        out[ends - 1] = 0
        return out

    token_ids = np.concatenate([tokens.token_ids for *_, tokens in held])
    is_target = np.concatenate([tokens.is_target for *_, tokens in held])
    weight = by_token((batch.weight for _, _, batch, _ in held), np.float32)
    starts = (batch.starts[microbatch[n].index] for n, _, batch, _ in held)
    block_adapter = np.full(c // block, -1, np.int32)
    block_adapter[t // block] = by_token(batch.slot for _, _, batch, _ in held)
    arrays = {
        "token_ids": rows(token_ids),
        "positions": rows(positions),
        "segment_ids": rows(by_token(number for number, *_ in held), empty=-1),
        "labels": rows(of_next(token_ids)),
        "loss_weight": rows(of_next(is_target) * weight),
        "token_index": rows(by_token(starts) + positions),
        "block_adapter": block_adapter,
    }
    return PackedBatch(**jax.device_put(arrays))
