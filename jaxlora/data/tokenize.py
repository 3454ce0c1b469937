"""A job's records as token arrays, with the tokens to be learned marked."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.bad_records import BadRecords
from jaxlora.data.encode import Encoder
from jaxlora.data.files import Record
from jaxlora.data.order import permutation
from jaxlora.data.read import Records, open_records
from jaxlora.data.render import has_kind, make_renderer
from jaxlora.data.samples import Samples, SampleWriter, TokenizedSample
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError

_Flags = Bool[np.ndarray, "..."]

logger = logging.getLogger(__name__)

# Limits of the records, and of their text, that are rendered at a time.
_CHUNK_RECORDS = 500
_CHUNK_CHARS = 2**20
# Progress is logged when this many records or seconds have passed.
_LOG_RECORDS = 100_000
_LOG_SECONDS = 10.0
# The random stream of the held-out records; no epoch number is as large.
_HELD_OUT_STREAM = 2**63


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedData:
    """One job's samples for training or for evaluation.

    Attributes:
        source: Path of the records.
        samples: The samples, in the order of the records. `tokenize_job` returns
            `Samples`, which hold millions of samples in little memory.
        max_length: Longest allowed sample, in tokens.
        num_records: Number of records, each of which became a sample or was dropped.
        num_truncated: Samples that were truncated to `max_length`.
        num_dropped: Records that were dropped because they exceed `max_length`.
        num_without_target: Records that were dropped because they have no target token
            within `max_length`.
        num_bad: Records that were dropped because they are invalid
            (`data.bad_records`).
    """

    source: str
    samples: Sequence[TokenizedSample]
    max_length: int
    num_records: int
    num_truncated: int
    num_dropped: int
    num_without_target: int
    num_bad: int = 0

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, " S"]:
        """Tokens of each sample."""
        if isinstance(self.samples, Samples):
            return self.samples.lengths
        return np.array([len(s.token_ids) for s in self.samples])

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())

    def mean_batch_tokens(self, batch_size: int) -> float:
        """Mean number of tokens of a global batch.

        Args:
            batch_size: Samples of a batch; a batch never has more than there are.
        """
        num_samples = len(self.samples)
        return min(batch_size, num_samples) * self.num_tokens / num_samples

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens of all samples."""
        if isinstance(self.samples, Samples):
            return self.samples.num_target_tokens
        return sum(int(s.is_target.sum()) for s in self.samples)

    def summary(self) -> str:
        """Describes the size of the data and the dropped records in one line."""
        line = (
            f"{self.source}: {len(self.samples)} samples, {self.num_tokens} tokens, "
            f"{self.num_target_tokens} of them to predict"
        )
        longer = f"longer than max_length={self.max_length}"
        for number, what in (
            (self.num_truncated, f"{longer}: truncated"),
            (self.num_dropped, f"{longer}: dropped"),
            (self.num_without_target, "without a token to predict: dropped"),
            (self.num_bad, "unusable: dropped"),
        ):
            if number:
                were = "sample was" if number == 1 else "samples were"
                line += f"; {number} of {self.num_records} {were} {what}"
        return line + "."


def tokenize_job(
    job: LoraJob, tokenizer: Tokenizer, which: Literal["train", "eval"] = "train"
) -> TokenizedData:
    """Reads a job's records and turns them into tokens.

    Args:
        job: The job's settings. With `eval_fraction`, only `job.eval_seed` decides
            which records are held out.
        tokenizer: The base model's tokenizer.
        which: The training records, or the held-out ones.

    Returns:
        At least one sample.

    Raises:
        DataError: A record cannot be used (the error names it), or none is left.
        ModelError: The records are chats, and the tokenizer has no chat template.
    """
    data, split = _read_split(job, which)
    encode = Encoder(data, tokenizer, job.max_length)
    try:
        # Held-out records of the same file have the same fields as those to train on.
        is_same_file = which == "eval" and data is job.data
        render = make_renderer(
            data, _representative(data, split), tokenizer, warn_unused=not is_same_file
        )
    except DataError as error:
        raise DataError(f"{data.path}: {error}") from error
    cut, bad = _LengthLimiter(job, data.path), BadRecords(data)
    for chunk in _chunks(split):
        numbers, records = zip(*chunk, strict=True)
        rendered = render(records)
        wholes = map(encode.is_whole, rendered)
        samples = encode(rendered)
        for number, sample, whole in zip(numbers, samples, wholes, strict=True):
            if isinstance(sample, DataError):
                bad.add(number, sample)
            else:
                cut.add(number, TokenizedSample(*sample), is_whole=whole)
        cut.log_progress()
    return cut.finish(bad)


def _representative(data: DataConfig, split: "_Split") -> Record:
    """Returns the record that determines the kind: the first valid one."""
    _, first = next(iter(split))
    if data.bad_records == "error":
        return first
    return next((record for _, record in split if has_kind(data, record)), first)


def _chunks(
    numbered: Iterable[tuple[int, Record]],
) -> Iterator[list[tuple[int, Record]]]:
    """Groups records into chunks that are rendered together and hold little text."""
    chunk: list[tuple[int, Record]] = []
    num_chars = 0
    for item in numbered:
        chunk.append(item)
        num_chars += _num_chars(item[1])
        if len(chunk) == _CHUNK_RECORDS or num_chars > _CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def _num_chars(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 1


@dataclasses.dataclass(frozen=True, eq=False)
class _Split:
    """The training records or the held-out ones; they can be read more than once.

    Attributes:
        records: All records of the data.
        is_included: Whether each record is in this split; None: all of them are.
    """

    records: Records
    is_included: _Flags | None = None

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        """Yields the records of this split with their numbers, which start at 1."""
        if self.is_included is None:
            yield from enumerate(self.records, start=1)
            return
        number, num_records = 0, len(self.is_included)
        for number, record in enumerate(self.records, start=1):
            if number <= num_records and self.is_included[number - 1]:
                yield number, record
        if number != num_records:
            raise DataError(
                f"{self.records.path}: held {num_records} records, and {number} when "
                "it was read again. Do not change the data while they are read."
            )


def _read_split(job: LoraJob, which: str) -> tuple[DataConfig, _Split]:
    """Returns the records of one split, and the settings for reading them."""
    if which == "eval" and job.eval_data is not None:
        return job.eval_data, _Split(open_records(job.eval_data))
    if which == "eval" and job.eval_fraction == 0:
        raise DataError(
            f"job {job.name!r} has no held-out records. Set eval_data or eval_fraction."
        )
    records = open_records(job.data)
    if job.eval_fraction == 0:
        return job.data, _Split(records)
    is_held_out = _choose_held_out(job, sum(1 for _ in records))
    return job.data, _Split(records, is_held_out == (which == "eval"))


def _choose_held_out(job: LoraJob, num_records: int) -> _Flags:
    """Chooses, for each record, whether it is held out."""
    # The number is rounded up, but 0.07 * 100, slightly above 7, must give 7.
    num_held_out = math.ceil(job.eval_fraction * num_records - 1e-9)
    if num_held_out >= num_records:
        raise DataError(
            f"{job.data.path}: eval_fraction={job.eval_fraction} of {num_records} "
            "records holds out all of them, and none is left to train on. Use a "
            "smaller eval_fraction or more records."
        )
    held_out = permutation(num_records, job.eval_seed, _HELD_OUT_STREAM)
    is_held_out = np.zeros(num_records, bool)
    is_held_out[held_out[:num_held_out]] = True
    return is_held_out


class _LengthLimiter:
    """Applies `too_long` to samples, and counts the affected ones."""

    def __init__(self, job: LoraJob, path: str):
        self._job = job
        self._path = path
        self._samples = SampleWriter(path)
        self._num_records = 0
        self._num_truncated = self._num_dropped = self._num_without_target = 0
        self._logged_at, self._num_logged = time.monotonic(), 0

    def add(self, number: int, sample: TokenizedSample, *, is_whole: bool) -> None:
        """Adds the sample of a record, truncates it, or drops it.

        Args:
            number: Number of the record, from 1.
            sample: All tokens of the record, or at least `max_length` + 1 of them.
            is_whole: Whether the sample is known to have all tokens.

        Raises:
            DataError: The sample is too long, and `too_long` is `error`.
        """
        self._num_records += 1
        limit = self._job.max_length
        length = len(sample.token_ids)
        if length > limit and self._job.too_long == "error":
            count = f"{length} tokens, more" if is_whole else "more tokens"
            raise DataError(
                f"{self._path}: record {number} has {count} than max_length={limit} of "
                f"job {self._job.name!r}. Raise max_length, shorten the record, or set "
                "too_long to truncate or drop."
            )
        if length > limit and self._job.too_long == "drop":
            self._num_dropped += 1
            return
        if length > limit:
            # The arrays are copied so that the long ones can be freed.
            sample = TokenizedSample(
                sample.token_ids[:limit].copy(), sample.is_target[:limit].copy()
            )
        if not sample.is_target.any():
            self._num_without_target += 1
            return
        self._num_truncated += length > limit
        self._samples.add(sample)

    def log_progress(self) -> None:
        """Logs the progress at intervals."""
        since = self._num_records - self._num_logged
        now = time.monotonic()
        if since < _LOG_RECORDS and now - self._logged_at < _LOG_SECONDS:
            return
        self._logged_at, self._num_logged = now, self._num_records
        logger.info(
            "%s: %s records read so far, %s tokens",
            self._path,
            f"{self._num_records:,}",
            f"{self._samples.num_tokens:,}",
        )

    def finish(self, bad: BadRecords) -> TokenizedData:
        """Returns the samples that were not dropped.

        Raises:
            DataError: All records were dropped.
        """
        num_records = self._num_records + bad.num
        if not len(self._samples):
            raise DataError(
                f"{self._path}: none of {num_records} records can be used by job "
                f"{self._job.name!r}: {self._num_dropped} are longer than "
                f"max_length={self._job.max_length}, and {self._num_without_target} "
                f"have no token to predict within it{bad.describe()}. Raise max_length "
                "or give other records."
            )
        return TokenizedData(
            source=self._path,
            samples=self._samples.finish(),
            max_length=self._job.max_length,
            num_records=num_records,
            num_truncated=self._num_truncated,
            num_dropped=self._num_dropped,
            num_without_target=self._num_without_target,
            num_bad=bad.num,
        )
