"""A job's records as token arrays, with the tokens to be learned marked."""

import dataclasses
import itertools
import math
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.bad_records import BadRecords
from jaxlora.data.encode import Encoder
from jaxlora.data.order import permutation
from jaxlora.data.read import Record, read_records
from jaxlora.data.render import has_kind, make_renderer
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError

_CHUNK_RECORDS = 1000
# A stream of its own for the held-out records: epochs never count so far.
_HELD_OUT_STREAM = 2**63


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenizedSample:
    """One sample.

    Attributes:
        token_ids: The sample's tokens.
        is_target: Whether a token is to be predicted, which is what the loss counts.
            Nothing predicts the first token, so it never is.
    """

    token_ids: Int32[np.ndarray, " T"]
    is_target: Bool[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedData:
    """One job's samples for training or for evaluation.

    Attributes:
        source: The path of the records.
        samples: In the order of the records.
        max_length: Longest allowed sample, in tokens.
        num_records: Records read; each is a sample, dropped, or without target.
        num_truncated: Samples that were cut to `max_length`.
        num_dropped: Records left out because they were longer.
        num_without_target: Records left out because no token of theirs, within
            `max_length`, is to be predicted.
        num_bad: Records left out because they cannot be used (`data.bad_records`).
    """

    source: str
    samples: tuple[TokenizedSample, ...]
    max_length: int
    num_records: int
    num_truncated: int
    num_dropped: int
    num_without_target: int
    num_bad: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(s.token_ids) for s in self.samples)

    @property
    def num_target_tokens(self) -> int:
        """Tokens of all samples that are to be predicted."""
        return sum(int(s.is_target.sum()) for s in self.samples)

    def summary(self) -> str:
        """One line for the log: how much there is, and what was cut or left out."""
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
        job: Says where the records are, how they are read, and how long a sample may
            be. With `eval_fraction`, `job.eval_seed` alone decides which are held out.
        tokenizer: The base model's.
        which: The training records, or the held-out ones.

    Returns:
        At least one sample.

    Raises:
        DataError: A record cannot be used (it is named), or none is left.
        ModelError: Chat messages meet a tokenizer without a chat template.
    """
    data, numbered = _read_side(job, which)
    encode = Encoder(data, tokenizer)
    try:
        # Held-out records of the same file have the same fields as those to train on.
        is_same_file = which == "eval" and data is job.data
        render = make_renderer(
            data, _typical(data, numbered), tokenizer, names_unused=not is_same_file
        )
    except DataError as error:
        raise DataError(f"{data.path}: {error}") from error
    cut, bad = _Cutter(job, data.path), BadRecords(data)
    for chunk in itertools.batched(numbered, _CHUNK_RECORDS):
        numbers, records = zip(*chunk, strict=True)
        for number, tokens in zip(numbers, encode(render(records)), strict=True):
            if isinstance(tokens, DataError):
                bad.add(number, tokens)
            else:
                cut.add(number, TokenizedSample(*tokens))
    return cut.finish(len(numbered), bad)


def _typical(data: DataConfig, numbered: list[tuple[int, Record]]) -> Record:
    """The record that decides on the kind: the first, or the first that is not bad."""
    first = numbered[0][1]
    if data.bad_records == "error":
        return first
    return next((record for _, record in numbered if has_kind(data, record)), first)


def _read_side(job: LoraJob, which: str) -> tuple[DataConfig, list[tuple[int, Record]]]:
    """The records of one side, each with its number, from 1."""
    if which == "eval" and job.eval_data is not None:
        return job.eval_data, list(enumerate(read_records(job.eval_data), start=1))
    if which == "eval" and job.eval_fraction == 0:
        raise DataError(
            f"job {job.name!r} has no held-out records. Set eval_data or eval_fraction."
        )
    numbered = list(enumerate(read_records(job.data), start=1))
    if job.eval_fraction == 0:
        return job.data, numbered
    # Rounded up, but not because 0.07 * 100 lies just above 7.
    num_held_out = math.ceil(job.eval_fraction * len(numbered) - 1e-9)
    if num_held_out >= len(numbered):
        raise DataError(
            f"{job.data.path}: eval_fraction={job.eval_fraction} of {len(numbered)} "
            "records holds out all of them, and none is left to train on. Use a "
            "smaller eval_fraction or more records."
        )
    held_out = permutation(len(numbered), job.eval_seed, _HELD_OUT_STREAM)[
        :num_held_out
    ]
    is_held_out = np.zeros(len(numbered), bool)
    is_held_out[held_out] = True
    wanted = is_held_out == (which == "eval")
    return job.data, list(itertools.compress(numbered, wanted))


class _Cutter:
    """Applies the rule for long samples, and counts what it did."""

    def __init__(self, job: LoraJob, path: str):
        self._job = job
        self._path = path
        self._samples: list[TokenizedSample] = []
        self._num_truncated = self._num_dropped = self._num_without_target = 0

    def add(self, number: int, sample: TokenizedSample) -> None:
        """Takes the sample of record `number`, cuts it, or leaves it out."""
        limit = self._job.max_length
        length = len(sample.token_ids)
        if length > limit and self._job.too_long == "error":
            raise DataError(
                f"{self._path}: record {number} has {length} tokens, more than "
                f"max_length={limit} of job {self._job.name!r}. Raise max_length, "
                "shorten the record, or set too_long to truncate or drop."
            )
        if length > limit and self._job.too_long == "drop":
            self._num_dropped += 1
            return
        if length > limit:
            # Copies, so that the long arrays are freed.
            sample = TokenizedSample(
                sample.token_ids[:limit].copy(), sample.is_target[:limit].copy()
            )
        if not sample.is_target.any():
            self._num_without_target += 1
            return
        self._num_truncated += length > limit
        self._samples.append(sample)

    def finish(self, num_records: int, bad: BadRecords) -> TokenizedData:
        """The samples that are left, of so many records."""
        if not self._samples:
            raise DataError(
                f"{self._path}: none of {num_records} records can be used by job "
                f"{self._job.name!r}: {self._num_dropped} are longer than "
                f"max_length={self._job.max_length}, and {self._num_without_target} "
                f"have no token to predict within it{bad.in_words()}. Raise max_length "
                "or give other records."
            )
        return TokenizedData(
            source=self._path,
            samples=tuple(self._samples),
            max_length=self._job.max_length,
            num_records=num_records,
            num_truncated=self._num_truncated,
            num_dropped=self._num_dropped,
            num_without_target=self._num_without_target,
            num_bad=bad.num,
        )
