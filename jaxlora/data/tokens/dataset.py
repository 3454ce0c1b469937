"""The tokens of a data set in flat arrays, and the samples that are read from them."""

import array
import bisect
import dataclasses
import itertools
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any, overload

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64

from jaxlora.data.records.notes import Note
from jaxlora.errors import DataError
from jaxlora.objectives.sample import TokenizedSample, TopLogprobs

# Data sets with more tokens than this keep them in a file instead of memory.
TOKENS_IN_MEMORY = 2**22
# Records, or tokens, that are collected before they are put into an array.
_PENDING_RECORDS = 1000
_PENDING_TOKENS = 2**18
_READ_SAMPLES = 64
# The arrays of `EncodedRecords`, of which those with larger elements come first.
COLUMNS: dict[str, type] = {
    "offsets": np.int64,
    "lengths": np.int64,
    "num_targets": np.int64,
    "values": np.float64,
    "weight_offsets": np.int64,
    "top_offsets": np.int64,
    "tokens": np.int32,
    "weights": np.float32,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "is_bad": np.bool_,
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EncodedRecords:
    """The tokens of all records of a data set, which all jobs that use it share.

    Arrays may be mapped from a file. Offsets are the index of each record's first
    element, then of the end.

    Attributes:
        tokens: The first tokens of all records, one record after another; a target is
            stored as its complement, ~id, which is negative.
        offsets: Offsets in `tokens`. A record that cannot be used has no tokens.
        lengths: Number of tokens of each record, which may be more than are stored.
        num_targets: Number of each record's stored tokens that are targets.
        values: The number that came with each record; see `TokenizedSample`.
        weights: Weights of the stored tokens of the records that have weights.
        weight_offsets: Offsets in `weights`; empty: no record has any.
        top_ids: A teacher's most likely tokens in the place of each target, record
            after record, target after target, with equally many in a record.
        top_logprobs: Their log-probabilities; -inf: there is none here.
        top_offsets: Offsets in both; empty: no record has any.
        is_bad: Whether each record is left out, because it cannot be used.
        first_bad: Describes the first record that cannot be used; "" if there is none.
        notes: Lines for the log about the data set.
    """

    tokens: Int32[np.ndarray, " T"]
    offsets: Int64[np.ndarray, " _"]
    lengths: Int64[np.ndarray, " R"]
    num_targets: Int64[np.ndarray, " R"]
    values: Float64[np.ndarray, " R"]
    weights: Float32[np.ndarray, " W"]
    weight_offsets: Int64[np.ndarray, " _"]
    top_ids: Int32[np.ndarray, " P"]
    top_logprobs: Float32[np.ndarray, " P"]
    top_offsets: Int64[np.ndarray, " _"]
    is_bad: Bool[np.ndarray, " R"]
    first_bad: str
    notes: tuple[Note, ...]

    def stored(self, number: int) -> Int32[np.ndarray, " _"]:
        """Returns the stored tokens of a record, of which targets are complements."""
        return self.tokens[_span(self.offsets, number)]

    def weights_of(self, number: int) -> Float32[np.ndarray, " _"] | None:
        """Returns the weights of the stored tokens of a record; None: all are 1."""
        found = self.weights[_span(self.weight_offsets, number)]
        return found if len(found) else None

    def top_of(self, number: int) -> TopLogprobs | None:
        """Returns what a teacher says of the stored targets of a record, if it does."""
        span = _span(self.top_offsets, number)
        if span.start == span.stop:
            return None
        shape = self.num_targets[number], -1
        return TopLogprobs(
            self.top_ids[span].reshape(shape), self.top_logprobs[span].reshape(shape)
        )


def _span(offsets: Int64[np.ndarray, " _"], number: int) -> slice:
    return (
        slice(*offsets[number : number + 2].tolist()) if len(offsets) else slice(0, 0)
    )


class Samples(Sequence[TokenizedSample]):
    """Records of one data set or of several as samples, in one order.

    Attributes:
        sets: The tokens of the data sets.
        numbers: Index of each sample's record, counted through all data sets.
        values: The number that came with each sample.
    """

    def __init__(
        self,
        sets: Sequence[EncodedRecords],
        numbers: Int[np.ndarray, " S"],
        values: Float64[np.ndarray, " S"] | None = None,
    ):
        self.sets, self.numbers = tuple(sets), numbers
        ends = itertools.accumulate((len(one.lengths) for one in self.sets), initial=0)
        *self._starts, self._end = ends
        if values is None:
            values = self._column([one.values for one in self.sets])
        self.values = values

    @classmethod
    def mixed(
        cls,
        parts: Sequence["Samples"],
        sources: Int[np.ndarray, " S"],
        indices: Int[np.ndarray, " S"],
    ) -> "Samples":
        """Puts samples into one order, which may leave out and repeat some.

        Args:
            parts: The samples of each data set.
            sources: Index in `parts` of the data set of each sample.
            indices: Index of each sample in its data set.
        """
        places = np.cumsum([0, *map(len, parts)])[sources] + indices
        starts = np.cumsum([0, *(part._end for part in parts)])[:-1]
        pairs = zip(parts, starts, strict=True)
        numbers = np.concatenate([part.numbers + start for part, start in pairs])
        values = np.concatenate([part.values for part in parts])
        sets = itertools.chain.from_iterable(part.sets for part in parts)
        return cls(tuple(sets), numbers[places], values[places])

    def _column(self, of_sets: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the value of each sample, from those of the records of each set."""
        values = of_sets[0] if len(of_sets) == 1 else np.concatenate(of_sets)
        return values[self.numbers]

    @property
    def lengths(self) -> Int64[np.ndarray, " S"]:
        """Tokens of each sample."""
        return self._column([np.diff(one.offsets) for one in self.sets])

    @property
    def num_targets(self) -> Int64[np.ndarray, " S"]:
        """Number of target tokens of each sample."""
        return self._column([one.num_targets for one in self.sets])

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> TokenizedSample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenizedSample, ...]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self._read(range(*index.indices(len(self)))))
        (sample,) = self._read([range(len(self))[index]])
        return sample

    def __iter__(self) -> Iterator[TokenizedSample]:
        for some in itertools.batched(range(len(self)), _READ_SAMPLES):
            yield from self._read(some)

    def _read(self, indices: Sequence[int]) -> Iterator[TokenizedSample]:
        """Reads some samples together, because the overhead per call is high."""
        chosen = np.asarray(indices, np.int64)
        places = [self._find(number) for number in self.numbers[chosen].tolist()]
        parts = [records.stored(number) for records, number in places]
        stored = np.concatenate([np.zeros(0, np.int32), *parts])
        is_target = stored < 0
        token_ids = complemented(stored, is_target)
        ends = itertools.accumulate(map(len, parts), initial=0)
        spans = itertools.starmap(slice, itertools.pairwise(ends))
        values = self.values[chosen].tolist()
        for part, (records, number), value in zip(spans, places, values, strict=True):
            yield TokenizedSample(
                token_ids[part],
                is_target[part],
                value,
                weights=records.weights_of(number),
                top=records.top_of(number),
            )

    def _find(self, number: int) -> tuple[EncodedRecords, int]:
        """Returns the data set of a record, and its number there."""
        at = bisect.bisect_right(self._starts, number) - 1
        return self.sets[at], number - self._starts[at]


def complemented(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Returns values, or their complements where these are wanted."""
    return np.where(where, ~values, values)


class _Spool:
    """Collects arrays that become one; a large one goes to a temporary file.

    The file has no name, so it disappears however the process ends.
    """

    def __init__(self, source: str, dtype: type):
        self._source, self._dtype, self._count = source, np.dtype(dtype), 0
        self._parts: list[np.ndarray] = []
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return self._count

    def add(self, part: np.ndarray) -> None:
        """Takes the next array.

        Raises:
            DataError: The disk is full, or cannot be written to.
        """
        self._parts.append(part.astype(self._dtype, copy=False))
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
        self._pending: list[TokenizedSample] = []
        # By name in `EncodedRecords`: numbers, of which each record adds one, and
        # arrays that grow by those of several records.
        self._numbers: dict[str, Any] = {
            **{name: array.array("q") for name in ("lengths", "num_targets")},
            "values": array.array("d"),
            "is_bad": bytearray(),
        }
        self._offsets = {
            name: array.array("q", [0])
            for name in ("offsets", "weight_offsets", "top_offsets")
        }
        self._spools = {
            name: _Spool(source, COLUMNS[name])
            for name in ("tokens", "weights", "top_ids", "top_logprobs")
        }

    def __len__(self) -> int:
        return len(self._numbers["lengths"])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were kept so far."""
        return self._offsets["offsets"][-1]

    def add(self, sample: TokenizedSample) -> None:
        """Takes the tokens of the next record.

        Args:
            sample: All tokens of the record.

        Raises:
            DataError: The disk is full, or cannot be written to.
        """
        length = len(sample.token_ids)
        if length > self._max_length:
            sample = _first_tokens(sample, self._max_length)
        self._append(sample, length, is_bad=False)

    def add_bad(self) -> None:
        """Counts the next record, which cannot be used."""
        nothing = TokenizedSample(np.zeros(0, np.int32), np.zeros(0, bool))
        self._append(nothing, 0, is_bad=True)

    def _append(self, sample: TokenizedSample, length: int, *, is_bad: bool) -> None:
        numbers = {
            "lengths": length,
            "num_targets": int(np.count_nonzero(sample.is_target)),
            "values": sample.value,
            "is_bad": is_bad,
        }
        sizes = {
            "offsets": len(sample.token_ids),
            "weight_offsets": 0 if sample.weights is None else len(sample.weights),
            "top_offsets": 0 if sample.top is None else sample.top.ids.size,
        }
        for name, number in numbers.items():
            self._numbers[name].append(number)
        for name, size in sizes.items():
            self._offsets[name].append(self._offsets[name][-1] + size)
        self._pending.append(sample)
        num_pending = self.num_tokens - len(self._spools["tokens"])
        if len(self._pending) == _PENDING_RECORDS or num_pending > _PENDING_TOKENS:
            self._store()

    def _store(self) -> None:
        """Puts the pending samples into arrays, in memory or in files."""
        if not self._pending:
            return
        samples = self._pending
        token_ids = np.concatenate([s.token_ids for s in samples])
        is_target = np.concatenate([s.is_target for s in samples])
        tops = [s.top for s in samples if s.top is not None]
        found = {
            "tokens": [complemented(token_ids, is_target)],
            "weights": [s.weights for s in samples if s.weights is not None],
            "top_ids": [top.ids.ravel() for top in tops],
            "top_logprobs": [top.logprobs.ravel() for top in tops],
        }
        for name, parts in found.items():
            if parts:
                self._spools[name].add(np.concatenate(parts))
        self._pending.clear()

    def finish(
        self, *, first_bad: str = "", notes: Sequence[Note] = ()
    ) -> EncodedRecords:
        """Returns the records, of which there must be at least one."""
        self._store()
        numbers = self._numbers | self._offsets
        for name in ("weight_offsets", "top_offsets"):
            if not numbers[name][-1]:
                numbers[name] = ()
        arrays: dict[str, Any] = {
            **{name: spool.joined() for name, spool in self._spools.items()},
            **{name: np.array(x, COLUMNS[name]) for name, x in numbers.items()},
        }
        return EncodedRecords(first_bad=first_bad, notes=tuple(notes), **arrays)


def _first_tokens(sample: TokenizedSample, limit: int) -> TokenizedSample:
    """Copies the first tokens of a sample, so that its long arrays can be freed."""
    is_target, top = sample.is_target[:limit].copy(), sample.top
    if top is not None:
        num = np.count_nonzero(is_target)
        top = TopLogprobs(*(x[:num].copy() for x in top))
    return dataclasses.replace(
        sample,
        token_ids=sample.token_ids[:limit].copy(),
        is_target=is_target,
        weights=None if sample.weights is None else sample.weights[:limit].copy(),
        top=top,
    )
