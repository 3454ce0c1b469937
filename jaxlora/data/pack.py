"""Packs the samples of a microbatch into arrays of one fixed shape."""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlora.data.objective import Objective, Terms
from jaxlora.data.objectives import NEXT_TOKEN, OBJECTIVES, has_reference
from jaxlora.data.tokens.samples import TokenizedSample
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
        loss_inputs: What each objective of the run reads of its rows, by name of the
            objective; 0 in other rows.
        group_ids: Index of the group of samples that each row belongs to; -1 in padding
            rows. None: every group of the run is one sample.
        token_index: Index of each token in the global batch of its job.
        block_adapter: Slot of each token block; -1 for padding blocks.
        reference_nll: Negative log likelihood of each row's label by the reference of
            its job, in nats; 0 if no sample needs it. None: no objective of the run
            has a reference.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    segment_ids: Int[Array, " T"]
    labels: Int[Array, " T"]
    loss_inputs: dict[str, dict[str, Float[Array, "T ..."]]]
    group_ids: Int[Array, " T"] | None = None
    token_index: Int[Array, " T"]
    block_adapter: Int[Array, " NB"]
    reference_nll: Float[Array, " T"] | None = None


def runs_reference(packed: PackedBatch) -> bool:
    """Whether a microbatch of the host has samples whose reference runs with it."""
    inputs = packed.loss_inputs.values()
    return any(np.any(one.get("runs_reference", 0)) for one in inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobBatch:
    """One global batch of one job.

    Attributes:
        slot: Slot of the job.
        step: Number of the job's optimizer step that uses this batch.
        samples: Samples of the batch, in the order of the job.
        weight: Weight of each term of the loss: the reciprocal of their number for
            training, 1 for a sum.
        objective: What the loss is.
        settings: Values of the objective's settings.
        is_reference: See `Terms`.
    """

    slot: int
    step: int
    samples: Sequence[TokenizedSample]
    weight: float
    objective: Objective = NEXT_TOKEN
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_reference: bool = False

    @functools.cached_property
    def terms(self) -> Terms:
        """Weights of the terms of the batch's loss."""
        whole = self.weight * self.num_terms
        return Terms(
            weight=self.weight,
            part_weights=tuple(whole / max(1, size) for size in self._part_sizes),
            settings=self.settings,
            is_reference=self.is_reference,
        )

    @functools.cached_property
    def _part_sizes(self) -> tuple[int, ...]:
        return self.objective.part_sizes(self.samples)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that the batch has values of."""
        parts, sizes = self.objective.metric_parts, self._part_sizes
        return [
            name
            for name in self.objective.metric_names
            if all(sizes[part] for part in parts.get(name, ()))
        ]

    @property
    def num_terms(self) -> float:
        """Number of terms of the loss."""
        return self.objective.num_terms(self.samples)

    def num_terms_of(self, groups: range) -> float:
        """Returns the number of terms of the loss of some consecutive groups."""
        size = self.objective.group_size
        return self.objective.num_terms(
            self.samples[size * groups.start : size * groups.stop]
        )

    def group(self, index: int) -> Sequence[TokenizedSample]:
        """Returns the samples of a group, which lie in one microbatch."""
        size = self.objective.group_size
        return self.samples[index * size : (index + 1) * size]

    @property
    def num_groups(self) -> int:
        """Number of groups of samples."""
        return len(self.samples) // self.objective.group_size

    @property
    def num_target_tokens(self) -> int:
        """Number of tokens that are trained on or evaluated."""
        return sum(int(s.is_target.sum()) for s in self.samples)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch."""
        return sum(len(s.token_ids) for s in self.samples)

    def to_schedule(self) -> list[Sample]:
        """Converts each group to a scheduler's sample, with the slot as its owner."""
        return [
            Sample(
                owner=self.slot,
                batch=self.step,
                index=i,
                num_tokens=sum(len(s.token_ids) for s in self.group(i)),
            )
            for i in range(self.num_groups)
        ]

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Index in the global batch of each group's first token."""
        lengths = [len(s.token_ids) for s in self.samples]
        return np.cumsum([0, *lengths[:-1]])[:: self.objective.group_size]


def split_by_segment_limit(
    microbatch: Microbatch,
    short_tokens: int,
    max_short: int,
    lengths: Callable[[Sample], Sequence[int]] = lambda sample: (sample.num_tokens,),
) -> list[Microbatch]:
    """Splits a microbatch, in order, into parts with a limited number of short samples.

    Args:
        microbatch: The groups of samples; those of one job are adjacent.
        short_tokens: A sample is short if it has at most this many tokens.
        max_short: Most short samples in one part, at least as many as a group has.
        lengths: Tokens of the samples of a group.
    """
    parts, num_short = [[]], 0
    for sample in microbatch:
        more = sum(length <= short_tokens for length in lengths(sample))
        if num_short + more > max_short:
            parts.append([])
            num_short = 0
        parts[-1].append(sample)
        num_short += more
    return [tuple(part) for part in parts]


def pack_tick(
    microbatches: Sequence[Microbatch],
    batches: Mapping[int, JobBatch],
    limits: Limits,
    objectives: Sequence[str] = (NEXT_TOKEN.name,),
) -> PackedBatch:
    """Packs microbatches that several devices run at the same time, one after another.

    Args:
        microbatches: The microbatch of each device; an empty one becomes padding.
        batches: Global batch of each slot. If a slot is missing, its rows become
            padding.
        limits: Capacity and block size of each microbatch.
        objectives: Objectives of the run.

    Returns:
        NumPy arrays; each device has `limits.capacity` of the rows.
    """
    parts = [pack_microbatch(one, batches, limits, objectives) for one in microbatches]
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def pack_microbatch(
    microbatch: Microbatch,
    batches: Mapping[int, JobBatch],
    limits: Limits,
    objectives: Sequence[str] = (NEXT_TOKEN.name,),
) -> PackedBatch:
    """Packs a microbatch into `limits.capacity` rows.

    Args:
        microbatch: The groups of samples; those of one job are adjacent.
        batches: Global batch of each slot in the microbatch. If a slot is missing, its
            rows become padding.
        limits: Capacity and block size.
        objectives: Objectives of the run.

    Returns:
        NumPy arrays.
    """
    packed, pads = _rows(microbatch, batches, limits)
    if not packed:
        return _padding(limits, objectives)
    # All rows are runs, of a sample or of padding, in the order of their first rows.
    runs = [(p.row, len(p.sample.token_ids), p) for p in packed]
    runs += [(first, length, None) for first, length in pads]
    runs.sort(key=lambda run: run[0])
    starts, lengths = (np.array([run[i] for run in runs], np.int32) for i in (0, 1))

    def by_row(values: Iterable[int]) -> np.ndarray:
        return np.repeat(np.array([*values], np.int32), lengths)

    token_ids = np.concatenate(
        [np.zeros(n, np.int32) if p is None else p.sample.token_ids for _, n, p in runs]
    )
    labels = np.zeros_like(token_ids)
    labels[:-1] = token_ids[1:]
    labels[starts + lengths - 1] = 0  # nothing follows the last token of a sample
    positions = np.arange(limits.capacity, dtype=np.int32) - np.repeat(starts, lengths)
    for first, length in pads:
        positions[first : first + length] = 0
    parts = [p for _, _, p in runs]
    group_ids = None
    if has_groups(objectives):
        group_ids = by_row(-1 if p is None else p.group for p in parts)
    arrays: dict[str, Any] = {
        "token_ids": token_ids,
        "positions": positions,
        "segment_ids": by_row(-1 if p is None else p.number for p in parts),
        "labels": labels,
        "loss_inputs": _loss_inputs(packed, limits.capacity, objectives),
        "group_ids": group_ids,
        "token_index": positions + by_row(0 if p is None else p.index for p in parts),
        # The rows of a job begin with a block.
        "block_adapter": by_row(-1 if p is None else p.batch.slot for p in parts)[
            :: limits.block_tokens
        ].copy(),
        "reference_nll": _no_reference(limits, objectives),
    }
    return PackedBatch(**arrays)


class _Rows(NamedTuple):
    """The rows of a sample in a microbatch.

    Attributes:
        number: Index of the sample in the microbatch.
        group: Index of its group in the microbatch.
        row: Its first row.
        index: Index of its first token in the global batch.
        batch: Its global batch.
        sample: Its tokens.
    """

    number: int
    group: int
    row: int
    index: int
    batch: JobBatch
    sample: TokenizedSample


def _rows(
    microbatch: Microbatch, batches: Mapping[int, JobBatch], limits: Limits
) -> tuple[list[_Rows], list[tuple[int, int]]]:
    """Returns the rows of each sample, and the first row and length of each padding."""
    packed: list[_Rows] = []
    pads: list[tuple[int, int]] = []
    row = num_samples = 0

    def pad(end: int) -> None:
        if end > row:
            pads.append((row, end - row))

    for number, group in enumerate(microbatch):
        if number and group.owner != microbatch[number - 1].owner:
            pad(limits.padded(row))
            row = limits.padded(row)
        if (batch := batches.get(group.owner)) is None:
            pad(row + group.num_tokens)
            row, num_samples = row + group.num_tokens, num_samples + 1
            continue
        first, in_batch = row, batch.starts[group.index]
        for sample in batch.group(group.index):
            index = in_batch + row - first
            packed.append(_Rows(num_samples, number, row, index, batch, sample))
            row += len(sample.token_ids)
            num_samples += 1
    pad(limits.capacity)
    return packed, pads


def has_groups(objectives: Sequence[str]) -> bool:
    """Whether an objective reads the groups of rows."""
    read = (OBJECTIVES[name] for name in objectives)
    return any(one.group_size > 1 or one.sums_groups for one in read)


def input_shapes(objective: str, num_rows: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each input of an objective's rows, by name."""
    found = OBJECTIVES[objective]
    return {
        name: (num_rows, found.widths[name]) if name in found.widths else (num_rows,)
        for name in found.input_names
    }


def _loss_inputs(
    packed: Sequence[_Rows], num_rows: int, objectives: Sequence[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Lays out what each objective reads of the rows of its jobs."""
    inputs = {
        name: {
            key: np.zeros(shape, np.float32)
            for key, shape in input_shapes(name, num_rows).items()
        }
        for name in objectives
    }
    for _, parts in itertools.groupby(packed, lambda part: part.group):
        first, *others = parts
        group = [first.sample, *(part.sample for part in others)]
        batch = first.batch
        values = batch.objective.row_inputs(group, batch.terms)
        end = first.row + sum(len(sample.token_ids) for sample in group)
        for key, of_rows in values.items():
            inputs[batch.objective.name][key][first.row : end] = of_rows
    return inputs


def _padding(limits: Limits, objectives: Sequence[str]) -> PackedBatch:
    """Returns a microbatch without samples."""
    num_rows, num_blocks = limits.capacity, limits.capacity // limits.block_tokens
    zeros: Any = np.zeros(num_rows, np.int32)
    none: Any = np.full(num_rows, -1, np.int32)
    inputs: Any = _loss_inputs((), num_rows, objectives)
    blocks: Any = np.full(num_blocks, -1, np.int32)
    return PackedBatch(
        token_ids=zeros,
        positions=zeros,
        segment_ids=none,
        labels=zeros,
        loss_inputs=inputs,
        group_ids=none if has_groups(objectives) else None,
        token_index=zeros,
        block_adapter=blocks,
        reference_nll=_no_reference(limits, objectives),
    )


def _no_reference(limits: Limits, objectives: Sequence[str]) -> Any:
    if not has_reference(objectives):
        return None
    return np.zeros(limits.capacity, np.float32)
