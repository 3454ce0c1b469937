"""Collects the tokens of records in flat arrays, in memory or in temporary files."""

import array
import tempfile
import weakref
from collections.abc import Sequence
from typing import IO

import numpy as np
from jaxtyping import Float32

from jaxlora.data.records.notes import Note
from jaxlora.data.tokens.samples import (
    EncodedRecords,
    complemented,
)
from jaxlora.errors import DataError
from jaxlora.objectives.sample import TokenizedSample, TopLogprobs

# Data sets with more tokens than this keep them in a file instead of memory.
TOKENS_IN_MEMORY = 2**22
# Records, or tokens, that are collected before they are put into an array.
_PENDING_RECORDS = 1000
_PENDING_TOKENS = 2**18


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
        self._is_bad = bytearray()
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

    def add(self, sample: TokenizedSample) -> None:
        """Takes the tokens of the next record.

        Args:
            sample: All tokens of the record.

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
        self._append(sample, length, is_bad=False)

    def add_bad(self) -> None:
        """Counts the next record, which cannot be used."""
        nothing = TokenizedSample(np.zeros(0, np.int32), np.zeros(0, bool))
        self._append(nothing, 0, is_bad=True)

    def _append(self, sample: TokenizedSample, length: int, *, is_bad: bool) -> None:
        self._pending.append(sample)
        self._offsets.append(self.num_tokens + len(sample.token_ids))
        self._lengths.append(length)
        self._num_targets.append(int(np.count_nonzero(sample.is_target)))
        self._values.append(sample.value)
        self._append_runs(sample.weights)
        self._top_counts.append(0 if sample.top is None else sample.top.ids.shape[1])
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
        self._tokens.add(complemented(token_ids, is_target))
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
        top_counts = self._top_counts if any(self._top_counts) else ()
        return EncodedRecords(
            tokens=self._tokens.joined(),
            offsets=np.array(self._offsets, np.int64),
            lengths=np.array(self._lengths, np.int64),
            num_targets=np.array(self._num_targets, np.int64),
            values=np.array(self._values, np.float64),
            run_offsets=np.array(self._run_offsets if self._run_ends else (), np.int64),
            run_ends=np.array(self._run_ends, np.int64),
            run_weights=np.array(self._run_weights, np.float32),
            top_counts=np.array(top_counts, np.int64),
            top_ids=self._top_ids.joined(),
            top_logprobs=self._top_logprobs.joined(),
            is_bad=np.frombuffer(bytes(self._is_bad), bool),
            first_bad=first_bad,
            notes=tuple(notes),
        )
