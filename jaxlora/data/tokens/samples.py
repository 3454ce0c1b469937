"""The tokens of a data set in flat arrays, and samples that are read from them."""

import array
import dataclasses
import functools
import itertools
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, overload

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64

from jaxlora.data.records.notes import Note
from jaxlora.data.rendering.distillation import TopLogprobs
from jaxlora.errors import DataError

# Data sets with more tokens than this keep them in a file instead of memory.
TOKENS_IN_MEMORY = 2**22
# Records, or tokens, that are collected before they are put into an array.
_PENDING_RECORDS = 1000
_PENDING_TOKENS = 2**18
_READ_SAMPLES = 64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenizedSample:
    """One sample.

    Attributes:
        token_ids: The sample's tokens.
        is_target: Whether each token is a target of the loss. The first token is never
            one, because there is no token before it to predict it.
        value: The number that came with the record: whether a labelled completion is
            desirable, 1 or 0; or the margin of a pair. 0: there is none.
        reference_logp: Log-probability of the targets, in nats, by the base without an
            adapter, for objectives that need it.
        weights: Weight of each token's loss as a target; None: all are 1.
        top: A teacher's most likely tokens in the place of each target; None: there is
            no teacher.
    """

    token_ids: Int32[np.ndarray, " T"]
    is_target: Bool[np.ndarray, " T"]
    value: float = 0.0
    reference_logp: float | None = None
    weights: Float32[np.ndarray, " T"] | None = None
    top: TopLogprobs | None = None

    @property
    def target_weights(self) -> Float32[np.ndarray, " _"] | None:
        """Weights of the targets; None: all are 1, or there are none."""
        if self.weights is None or not self.is_target.any():
            return None
        return self.weights[self.is_target]

    @property
    def sum_of_weights(self) -> float:
        """Sum of the weights of the targets; without weights, their number."""
        if (weights := self.target_weights) is None:
            return int(self.is_target.sum())
        return float(weights.sum(dtype=np.float64))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first target."""
        return int(self.is_target.argmax())


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
        is_whole: Whether `lengths` is exact; otherwise it is a lower bound.
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
    is_whole: Bool[np.ndarray, " R"]
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
    return _complemented(stored, is_target), is_target


def _complemented(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where, ~values, values)


class _Spool:
    """Collects arrays that become one; a large one goes to a temporary file.

    The file has no name, so it disappears however the process ends.
    """

    def __init__(self, source: str, dtype: type):
        self._source, self._dtype, self._count = source, np.dtype(dtype), 0
        self._parts: list[np.ndarray] = []
        self._file: IO[bytes] | None = None

    def add(self, part: np.ndarray) -> None:
        """Takes the next array.

        Raises:
            DataError: The disk is full, or cannot be written to.
        """
        self._parts.append(part.astype(self._dtype, copy=False).ravel())
        self._count += part.size
        if self._file is None and self._count <= TOKENS_IN_MEMORY:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
                weakref.finalize(self, self._file.close)  # also after an error
            for one in self._parts:
                self._file.write(one.tobytes())
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        self._parts.clear()

    def joined(self) -> np.ndarray:
        """Returns all of them as one array."""
        if self._file is None:
            return np.concatenate([np.zeros(0, self._dtype), *self._parts])
        try:
            array = np.memmap(self._file, self._dtype, "r", shape=(self._count,))
        except OSError as error:
            raise self._error(error) from error
        self._file.close()  # the memory mapping keeps the file alive
        return np.asarray(array)

    def _error(self, error: OSError) -> DataError:
        return DataError(
            f"{self._source}: its tokens ({self._dtype.itemsize * self._count:,} bytes "
            f"so far) cannot be kept in a temporary file in "
            f"{tempfile.tempdir or 'no folder'}: {error.strerror or error}. Make room "
            "there, or name another folder in the environment variable TMPDIR."
        )


class RecordWriter:
    """Collects the tokens of records, and a teacher's; a large number in files."""

    def __init__(self, source: str, max_length: int):
        """Starts with no records.

        Args:
            source: Where the records come from, for errors.
            max_length: Number of first tokens of each record that are kept.
        """
        self._max_length = max_length
        self._offsets = array.array("q", [0])
        self._lengths, self._num_targets = array.array("q"), array.array("q")
        self._values = array.array("d")
        self._run_offsets = array.array("q", [0])
        self._run_ends, self._run_weights = array.array("q"), array.array("f")
        self._top_counts = array.array("q")
        self._is_whole, self._is_bad = bytearray(), bytearray()
        self._pending: list[TokenizedSample] = []
        self._tokens = _Spool(source, np.int32)
        self._top_ids = _Spool(source, np.int32)
        self._top_logprobs = _Spool(source, np.float32)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were kept so far."""
        return self._offsets[-1]

    def add(self, sample: TokenizedSample, *, is_whole: bool = True) -> None:
        """Takes the tokens of the next record.

        Args:
            sample: All tokens of the record, or more than `max_length` of them.
            is_whole: Whether these are known to be all of its tokens.

        Raises:
            DataError: The disk is full, or cannot be written to.
        """
        length, limit = len(sample.token_ids), self._max_length
        if length > limit:
            # The arrays are copied so that the long ones can be freed.
            weights, top = sample.weights, sample.top
            is_target = sample.is_target[:limit].copy()
            if top is not None:
                num = np.count_nonzero(is_target)
                top = TopLogprobs(*(x[:num].copy() for x in top))
            sample = TokenizedSample(
                sample.token_ids[:limit].copy(),
                is_target,
                sample.value,
                weights=None if weights is None else weights[:limit],
                top=top,
            )
        self._append(sample, length, is_whole, is_bad=False)

    def add_bad(self) -> None:
        """Counts the next record, which cannot be used."""
        nothing = TokenizedSample(np.zeros(0, np.int32), np.zeros(0, bool))
        self._append(nothing, 0, is_whole=True, is_bad=True)

    def _append(
        self, sample: TokenizedSample, length: int, is_whole: bool, *, is_bad: bool
    ) -> None:
        self._pending.append(sample)
        self._offsets.append(self.num_tokens + len(sample.token_ids))
        self._lengths.append(length)
        self._num_targets.append(int(np.count_nonzero(sample.is_target)))
        self._values.append(sample.value)
        self._append_runs(sample.weights)
        self._top_counts.append(0 if sample.top is None else sample.top.ids.shape[1])
        self._is_whole.append(is_whole)
        self._is_bad.append(is_bad)
        num_pending = self.num_tokens - self._offsets[-1 - len(self._pending)]
        if len(self._pending) == _PENDING_RECORDS or num_pending > _PENDING_TOKENS:
            self._store()

    def _append_runs(self, weights: Float32[np.ndarray, " T"] | None) -> None:
        if weights is not None and len(weights):
            last = np.append(np.flatnonzero(np.diff(weights)), len(weights) - 1)
            self._run_ends.extend((last + 1).tolist())
            self._run_weights.extend(weights[last].tolist())
        self._run_offsets.append(len(self._run_ends))

    def _store(self) -> None:
        """Puts the pending samples into arrays, in memory or in files."""
        if not self._pending:
            return
        token_ids = np.concatenate([s.token_ids for s in self._pending])
        is_target = np.concatenate([s.is_target for s in self._pending])
        self._tokens.add(_complemented(token_ids, is_target))
        for top in (s.top for s in self._pending):
            if top is not None:
                self._top_ids.add(top.ids)
                self._top_logprobs.add(top.logprobs)
        self._pending.clear()

    def finish(
        self, *, first_bad: str = "", notes: Sequence[Note] = ()
    ) -> EncodedRecords:
        """Returns the records, of which there must be at least one."""
        self._store()
        return dataclasses.replace(
            self.so_far(),
            tokens=self._tokens.joined(),
            top_ids=self._top_ids.joined(),
            top_logprobs=self._top_logprobs.joined(),
            first_bad=first_bad,
            notes=tuple(notes),
        )

    def so_far(self) -> EncodedRecords:
        """Returns the records so far, without their tokens."""
        return EncodedRecords(
            tokens=np.zeros(0, np.int32),
            offsets=np.array(self._offsets, np.int64),
            lengths=np.array(self._lengths, np.int64),
            num_targets=np.array(self._num_targets, np.int64),
            values=np.array(self._values, np.float64),
            run_offsets=np.array(self._run_offsets if self._run_ends else (), np.int64),
            run_ends=np.array(self._run_ends, np.int64),
            run_weights=np.array(self._run_weights, np.float32),
            top_counts=np.array(
                self._top_counts if any(self._top_counts) else (), np.int64
            ),
            top_ids=np.zeros(0, np.int32),
            top_logprobs=np.zeros(0, np.float32),
            is_whole=np.frombuffer(bytes(self._is_whole), bool),
            is_bad=np.frombuffer(bytes(self._is_bad), bool),
            first_bad="",
            notes=(),
        )
