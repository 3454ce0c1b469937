"""A microbatch as arrays of one fixed shape."""

import dataclasses
import functools
import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlora.data.tokenize import TokenizedSample
from scheduler import Limits, Microbatch, Sample


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
        block_adapter: Slot of each token block; -1 belongs to nobody.
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
    samples: tuple[TokenizedSample, ...]
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


def pack_microbatch(
    microbatch: Microbatch, batches: Mapping[int, JobBatch], limits: Limits
) -> PackedBatch:
    """Lays a microbatch out in `limits.capacity` rows.

    Args:
        microbatch: Samples, each job's side by side.
        batches: The global batch of each slot that occurs. The room of a slot that is
            not here stays empty.
        limits: Capacity and block size.
    """
    c, block = limits.capacity, limits.block_tokens
    rows = {
        "token_ids": np.zeros(c, np.int32),
        "positions": np.zeros(c, np.int32),
        "segment_ids": np.full(c, -1, np.int32),
        "labels": np.zeros(c, np.int32),
        "loss_weight": np.zeros(c, np.float32),
        "token_index": np.zeros(c, np.int32),
    }
    block_adapter = np.full(c // block, -1, np.int32)
    at = 0
    for number, sample in enumerate(microbatch):
        if number and sample.job != microbatch[number - 1].job:
            at = limits.padded(at)
        batch = batches.get(sample.job)
        end = at + sample.num_tokens
        if batch is None:
            at = end
            continue
        tokens = batch.samples[sample.index]
        _fill(rows, slice(at, end), tokens, batch.weight)
        rows["segment_ids"][at:end] = number
        rows["token_index"][at:end] += np.int32(batch.starts[sample.index])
        block_adapter[at // block : limits.padded(end) // block] = batch.slot
        at = end
    rows["block_adapter"] = block_adapter
    return PackedBatch(**{name: jnp.asarray(row) for name, row in rows.items()})


def _fill(rows, span: slice, sample: TokenizedSample, weight: float) -> None:
    length = len(sample.token_ids)
    rows["token_ids"][span] = sample.token_ids
    rows["positions"][span] = rows["token_index"][span] = np.arange(length)
    # Row t predicts token t + 1; the last row of a sample predicts nothing.
    rows["labels"][span][:-1] = sample.token_ids[1:]
    rows["loss_weight"][span][:-1] = sample.is_target[1:] * np.float32(weight)
