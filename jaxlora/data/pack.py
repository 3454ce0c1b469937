"""Packs the samples of a microbatch into arrays of one fixed shape."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlora.models.packed_batch import PackedBatch
from jaxlora.objectives.base import Objective, Terms
from jaxlora.objectives.next_token import NEXT_TOKEN
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.objectives.table import OBJECTIVES, has_groups, has_reference
from jaxlora.scheduler import Limits, Microbatch, Sample


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
    settings: Any = None
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


def split_by_jobs(microbatch: Microbatch, max_jobs: int) -> list[Microbatch]:
    """Splits a microbatch, in order, into parts with samples of at most so many jobs.

    Args:
        microbatch: The groups of samples; those of one job are adjacent.
        max_jobs: Most jobs in one part.
    """
    jobs = list(dict.fromkeys(sample.owner for sample in microbatch))
    return [
        tuple(s for s in microbatch if s.owner in jobs[i : i + max_jobs])
        for i in range(0, max(1, len(jobs)), max_jobs)
    ]


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
    runs = _runs(microbatch, batches, limits)
    lengths = np.array([run.length for run in runs])
    ends = np.cumsum(lengths)
    starts = (ends - lengths).tolist()

    def by_row(values: Iterable[int]) -> Any:
        return np.repeat(np.array([*values], np.int32), lengths)

    token_ids: Any = np.concatenate(
        [
            np.zeros(run.length, np.int32) if run.of is None else run.of[1].token_ids
            for run in runs
        ]
    )
    labels: Any = np.zeros_like(token_ids)
    labels[:-1] = token_ids[1:]
    labels[ends - 1] = 0  # nothing follows the last token of a sample
    for start, run in zip(starts, runs, strict=True):
        if run.of is not None and (own := run.of[1].labels) is not None:
            labels[start : start + run.length] = own
    positions = np.arange(limits.capacity, dtype=np.int32) - by_row(starts)
    positions[by_row(run.of is None for run in runs) > 0] = 0
    slots = by_row(-1 if run.of is None else run.of[0].slot for run in runs)
    reference: Any = np.zeros(limits.capacity, np.float32)
    return PackedBatch(
        token_ids=token_ids,
        positions=positions,
        segment_ids=by_row(run.sample for run in runs),
        labels=labels,
        loss_inputs=_loss_inputs(runs, starts, limits.capacity, objectives),
        group_ids=(
            by_row(run.group for run in runs) if has_groups(objectives) else None
        ),
        token_index=positions + by_row(run.first_token for run in runs),
        block_adapter=slots[:: limits.block_tokens].copy(),  # a job begins with a block
        reference_nll=reference if has_reference(objectives) else None,
    )


class _Run(NamedTuple):
    """Consecutive rows of a microbatch: those of a sample, or padding.

    Attributes:
        length: Number of rows.
        sample: Index of the sample in the microbatch; -1: padding.
        group: Index of its group in the microbatch; -1: padding.
        first_token: Index of its first token in the global batch.
        of: The global batch and the sample; None: padding.
    """

    length: int
    sample: int = -1
    group: int = -1
    first_token: int = 0
    of: tuple[JobBatch, TokenizedSample] | None = None


def _runs(
    microbatch: Microbatch, batches: Mapping[int, JobBatch], limits: Limits
) -> list[_Run]:
    """Returns the rows of a microbatch, in order."""
    runs: list[_Run] = []
    row = num_samples = 0
    for number, group in enumerate(microbatch):
        if number and group.owner != microbatch[number - 1].owner:
            runs.append(_Run(limits.padded(row) - row))
            row = limits.padded(row)
        row += group.num_tokens
        if (batch := batches.get(group.owner)) is None:
            runs.append(_Run(group.num_tokens))
            num_samples += 1
            continue
        first_token = int(batch.starts[group.index])
        for sample in batch.group(group.index):
            length, of = len(sample.token_ids), (batch, sample)
            runs.append(_Run(length, num_samples, number, first_token, of))
            first_token += length
            num_samples += 1
    runs.append(_Run(limits.capacity - row))
    return [run for run in runs if run.length]


def _loss_inputs(
    runs: Sequence[_Run],
    starts: Sequence[int],
    num_rows: int,
    objectives: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Lays out what each objective reads of the rows of its jobs."""
    inputs: dict[str, dict[str, Any]] = {
        name: {
            key: np.zeros(shape, np.float32)
            for key, shape in OBJECTIVES[name].input_shapes(num_rows).items()
        }
        for name in objectives
    }
    pairs = zip(starts, runs, strict=True)
    for _, members in itertools.groupby(pairs, lambda pair: pair[1].group):
        of_group = [(start, *run.of) for start, run in members if run.of is not None]
        if not of_group:
            continue
        first, batch, _ = of_group[0]
        group = [sample for *_, sample in of_group]
        end = first + sum(len(sample.token_ids) for sample in group)
        values = batch.objective.row_inputs(group, batch.terms)
        for key, of_rows in values.items():
            inputs[batch.objective.name][key][first:end] = of_rows
    return inputs
