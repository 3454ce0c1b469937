"""The tokens of a data set in flat arrays, and samples that are read from them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64

from jaxlora.data.records.notes import Note
from jaxlora.objectives.sample import TokenizedSample, TopLogprobs

_READ_SAMPLES = 64


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EncodedRecords:
    """The tokens of all records of a data set, which all jobs that use it share.

    Attributes:
        tokens: The first tokens of all records, one record after another; a target is
            stored as its complement, ~id, which is negative. The array may be mapped
            from a file.
        offsets: Index in `tokens` of each record's first token, then of the end. A
            record that cannot be used has no tokens.
        lengths: Number of tokens of each record, which may be more than are stored.
        num_targets: Number of each record's stored tokens that are targets.
        values: The number that came with each record; see `TokenizedSample`.
        run_offsets: Index in `run_ends` of each record's first run of tokens of the
            same weight, then of the end. A record without runs has no weights; empty:
            none has.
        run_ends: Index in its record of the token after each run.
        run_weights: Weight of each run.
        top_counts: Number of a teacher's most likely tokens that each record has in the
            place of each of its targets; empty: none has any.
        top_ids: These tokens, record after record, target after target.
        top_logprobs: Their log-probabilities; -inf: there is none here.
        is_bad: Whether each record is left out, because it cannot be used.
        first_bad: Describes the first record that cannot be used; "" if there is none.
        notes: Lines for the log about the data set.
    """

    tokens: Int32[np.ndarray, " T"]
    offsets: Int64[np.ndarray, " _"]
    lengths: Int64[np.ndarray, " R"]
    num_targets: Int64[np.ndarray, " R"]
    values: Float64[np.ndarray, " R"]
    run_offsets: Int64[np.ndarray, " _"]
    run_ends: Int64[np.ndarray, " W"]
    run_weights: Float32[np.ndarray, " W"]
    top_counts: Int64[np.ndarray, " _"]
    top_ids: Int32[np.ndarray, " P"]
    top_logprobs: Float32[np.ndarray, " P"]
    is_bad: Bool[np.ndarray, " R"]
    first_bad: str
    notes: tuple[Note, ...]

    def weights(self, number: int) -> Float32[np.ndarray, " T"] | None:
        """Returns the weights of the stored tokens of a record; None: all are 1."""
        if not len(self.run_offsets):
            return None
        first, end = self.run_offsets[number : number + 2]
        if first == end:
            return None
        sizes = np.diff(self.run_ends[first:end], prepend=0)
        return np.repeat(self.run_weights[first:end], sizes)

    @functools.cached_property
    def _top_offsets(self) -> Int64[np.ndarray, " _"]:
        return np.cumsum(np.append(0, self.num_targets * self.top_counts))

    def top(self, number: int) -> TopLogprobs | None:
        """Returns what a teacher says of the stored targets of a record, if it does."""
        if not len(self.top_counts) or not (k := int(self.top_counts[number])):
            return None
        first, end = self._top_offsets[number : number + 2]
        ids, logprobs = (
            x[first:end].reshape(-1, k) for x in (self.top_ids, self.top_logprobs)
        )
        return TopLogprobs(ids, logprobs)


class Samples(Sequence[TokenizedSample]):
    """Some records of a data set as samples.

    Attributes:
        records: The tokens of the data set.
        numbers: Index of each sample's record.
        values: The number that came with each sample.
    """

    def __init__(
        self,
        records: EncodedRecords,
        numbers: Int[np.ndarray, " S"],
        values: Float64[np.ndarray, " S"] | None = None,
    ):
        self.records, self.numbers = records, numbers
        self.values = records.values[numbers] if values is None else values

    @property
    def lengths(self) -> Int64[np.ndarray, " S"]:
        """Tokens of each sample."""
        offsets = self.records.offsets
        return offsets[self.numbers + 1] - offsets[self.numbers]

    @property
    def num_targets(self) -> Int64[np.ndarray, " S"]:
        """Number of target tokens of each sample."""
        return self.records.num_targets[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> TokenizedSample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenizedSample, ...]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        number, value = int(self.numbers[index]), float(self.values[index])
        ids, is_target = _decoded(self._stored(number))
        weights, top = self.records.weights(number), self.records.top(number)
        return TokenizedSample(ids, is_target, value, weights=weights, top=top)

    def __iter__(self) -> Iterator[TokenizedSample]:
        # Samples are converted in groups, because the overhead per call is high.
        for first in range(0, len(self), _READ_SAMPLES):
            some = slice(first, first + _READ_SAMPLES)
            parts = [self._stored(number) for number in self.numbers[some].tolist()]
            token_ids, targets = _decoded(np.concatenate(parts))
            weights = map(self.records.weights, self.numbers[some].tolist())
            tops = map(self.records.top, self.numbers[some].tolist())
            ends = itertools.accumulate(map(len, parts), initial=0)
            spans = itertools.starmap(slice, itertools.pairwise(ends))
            values = self.values[some].tolist()
            for part, value, given, top in zip(
                spans, values, weights, tops, strict=True
            ):
                ids, is_target = token_ids[part], targets[part]
                yield TokenizedSample(ids, is_target, value, weights=given, top=top)

    def _stored(self, number: int) -> np.ndarray:
        """Returns the stored tokens of a record."""
        offsets = self.records.offsets
        return self.records.tokens[offsets[number] : offsets[number + 1]]


def _decoded(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids, and whether each is a target."""
    is_target = stored < 0
    return complemented(stored, is_target), is_target


def complemented(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Returns values, or their complements where these are wanted."""
    return np.where(where, ~values, values)
