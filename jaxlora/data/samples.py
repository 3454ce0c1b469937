"""Samples in flat arrays, with an overhead of a few bytes per sample."""

import array
import dataclasses
import itertools
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, overload

import numpy as np
from jaxtyping import Bool, Int, Int32

from jaxlora.errors import DataError

# Jobs with more tokens than this keep them in a file instead of memory.
_TOKENS_IN_MEMORY = 2**22
_TOKENS_PER_PART = 2**20
# Samples, or tokens, that are collected before they are put into an array.
_PENDING_SAMPLES = 1000
_PENDING_TOKENS = 2**18
_READ_SAMPLES = 64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenizedSample:
    """One sample.

    Attributes:
        token_ids: The sample's tokens.
        is_target: Whether each token is a target of the loss. The first token is never
            one, because there is no token before it to predict it.
    """

    token_ids: Int32[np.ndarray, " T"]
    is_target: Bool[np.ndarray, " T"]


class Samples(Sequence[TokenizedSample]):
    """A sequence of samples over two arrays.

    Attributes:
        tokens: The tokens of all samples; a target is stored as its complement, ~id,
            which is negative. The array may be mapped from a file.
        offsets: Index in `tokens` of each sample's first token, then of the end.
    """

    def __init__(self, tokens: Int32[np.ndarray, " T"], offsets: Int[np.ndarray, " _"]):
        self.tokens, self.offsets = tokens, offsets

    @property
    def lengths(self) -> Int[np.ndarray, " S"]:
        """Tokens of each sample."""
        return np.diff(self.offsets)

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens of all samples."""
        parts = range(0, len(self.tokens), _TOKENS_PER_PART)
        return sum(
            int(np.count_nonzero(self.tokens[i : i + _TOKENS_PER_PART] < 0))
            for i in parts
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> TokenizedSample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenizedSample, ...]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        return _sample(self.tokens[self.offsets[index] : self.offsets[index + 1]])

    def __iter__(self) -> Iterator[TokenizedSample]:
        # Samples are converted in groups, because the overhead per call is high.
        for number in range(0, len(self), _READ_SAMPLES):
            offsets = self.offsets[number : number + _READ_SAMPLES + 1]
            whole = _sample(self.tokens[offsets[0] : offsets[-1]])
            for first, end in itertools.pairwise((offsets - offsets[0]).tolist()):
                part = slice(first, end)
                yield TokenizedSample(whole.token_ids[part], whole.is_target[part])


def _sample(stored: np.ndarray) -> TokenizedSample:
    is_target = stored < 0
    return TokenizedSample(_complemented(stored, is_target), is_target)


def _complemented(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where, ~values, values)


class SampleWriter:
    """Collects samples; a large number of tokens goes to a temporary file.

    The file has no name, so it disappears however the process ends.
    """

    def __init__(self, source: str):
        """Starts with no samples.

        Args:
            source: Where the samples come from, for errors.
        """
        self._source = source
        self._offsets = array.array("q", [0])
        self._pending: list[TokenizedSample] = []
        self._parts: list[np.ndarray] = []
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples so far."""
        return self._offsets[-1]

    def add(self, sample: TokenizedSample) -> None:
        """Takes one more sample.

        Raises:
            DataError: The disk is full, or cannot be written to.
        """
        self._pending.append(sample)
        self._offsets.append(self.num_tokens + len(sample.token_ids))
        num_pending = self.num_tokens - self._offsets[-1 - len(self._pending)]
        if len(self._pending) == _PENDING_SAMPLES or num_pending > _PENDING_TOKENS:
            self._store()

    def _store(self) -> None:
        """Turns the pending samples into an array, in memory or in the file."""
        if self._pending:
            token_ids = np.concatenate([s.token_ids for s in self._pending])
            is_target = np.concatenate([s.is_target for s in self._pending])
            self._parts.append(_complemented(token_ids, is_target))
            self._pending.clear()
        if self._file is None and self.num_tokens <= _TOKENS_IN_MEMORY:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
                weakref.finalize(self, self._file.close)  # also after an error
            for part in self._parts:
                self._file.write(part.tobytes())
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        self._parts.clear()

    def finish(self) -> Samples:
        """Returns the samples, of which there must be at least one."""
        self._store()
        offsets = np.array(self._offsets, np.int64)
        if self._file is None:
            return Samples(np.concatenate(self._parts), offsets)
        try:
            tokens = np.memmap(self._file, np.int32, "r", shape=(self.num_tokens,))
        except OSError as error:
            raise self._error(error) from error
        self._file.close()  # the memory mapping keeps the file alive
        return Samples(np.asarray(tokens), offsets)

    def _error(self, error: OSError) -> DataError:
        return DataError(
            f"{self._source}: its tokens ({4 * self.num_tokens:,} bytes so far) cannot "
            f"be kept in a temporary file in {tempfile.tempdir or 'no folder'}: "
            f"{error.strerror or error}. Make room there, or name another folder in "
            "the environment variable TMPDIR."
        )
