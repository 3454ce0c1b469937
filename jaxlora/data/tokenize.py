"""A job's records as token arrays, with the tokens to be learned marked."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.order import permutation
from jaxlora.data.read import Record, read_records
from jaxlora.data.render import Chat, Pair, Plain, Rendered, Span, make_renderer
from jaxlora.data.tokenizer import Encoded, Tokenizer
from jaxlora.errors import DataError

_Ids = Int32[np.ndarray, "..."]
_Flags = Bool[np.ndarray, "..."]

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
    """

    source: str
    samples: tuple[TokenizedSample, ...]
    max_length: int
    num_records: int
    num_truncated: int
    num_dropped: int
    num_without_target: int

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
            be. With `eval_fraction`, `job.seed` alone decides which are held out.
        tokenizer: The base model's.
        which: The training records, or the held-out ones.

    Returns:
        At least one sample.

    Raises:
        DataError: A record cannot be used (it is named), or none is left.
        ModelError: Chat messages meet a tokenizer without a chat template.
    """
    data, numbered = _read_side(job, which)
    encode = _Encoder(data, tokenizer)
    try:
        render = make_renderer(data, numbered[0][1], tokenizer)
    except DataError as error:
        raise DataError(f"{data.path}: {error}") from error
    cut = _Cutter(job, data.path)
    for chunk in itertools.batched(numbered, _CHUNK_RECORDS):
        texts = [_named(render, data.path, *item) for item in chunk]
        for (number, _), sample in zip(chunk, encode(texts), strict=True):
            cut.add(number, sample)
    return cut.finish(len(numbered))


def _named(
    render: Callable[[Record], Rendered], path: str, number: int, record: Record
) -> Rendered:
    try:
        return render(record)
    except DataError as error:
        raise DataError(f"{path}: record {number}: {error}") from error


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
    held_out = permutation(len(numbered), job.seed, _HELD_OUT_STREAM)[:num_held_out]
    is_held_out = np.zeros(len(numbered), bool)
    is_held_out[held_out] = True
    wanted = is_held_out == (which == "eval")
    return job.data, list(itertools.compress(numbered, wanted))


class _Encoder:
    """Turns texts of one kind into samples, many at once."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        self._data = data
        self._tokenizer = tokenizer

    def __call__(self, records: Sequence[Rendered]) -> list[TokenizedSample]:
        texts = [text for record in records for text in _texts(record)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        samples = []
        for record in records:
            match record:
                case Pair():
                    ids, is_target = self._pair(next(encoded).ids, next(encoded).ids)
                case Chat(target_spans=spans):
                    ids, is_target = _mark(next(encoded), spans)
                case Plain():
                    ids, is_target = self._plain(next(encoded).ids)
            is_target[:1] = False
            samples.append(TokenizedSample(ids, is_target))
        return samples

    def _pair(self, prompt: _Ids, completion: _Ids) -> tuple[_Ids, _Flags]:
        # Not what the tokenizer puts after a text: the prompt is not its end.
        head = np.array([*self._tokenizer.prefix_ids, *prompt], np.int32)
        ids = np.concatenate([head, self._ended(completion)])
        first = 0 if self._data.loss_on == "all" else len(head)
        return ids, np.arange(len(ids)) >= first

    def _plain(self, text: _Ids) -> tuple[_Ids, _Flags]:
        if not len(text):
            return text, np.zeros(0, bool)
        around = self._tokenizer.prefix_ids, self._tokenizer.suffix_ids
        ids = self._ended(np.array([*around[0], *text, *around[1]], np.int32))
        return ids, np.ones(len(ids), bool)

    def _ended(self, ids: _Ids) -> _Ids:
        """`ids` with the end-of-sequence token, unless it is there or unwanted."""
        if not self._data.append_eos:
            return ids
        eos = self._tokenizer.eos_id
        if eos is None:
            raise DataError(
                f"{self._data.path}: append_eos=true, but the tokenizer has no "
                "end-of-sequence token. Set eos_token in tokenizer_config.json, or "
                "data.append_eos to false."
            )
        if len(ids) and ids[-1] == eos:
            return ids
        return np.append(ids, np.int32(eos))


def _texts(record: Rendered) -> tuple[str, ...]:
    if isinstance(record, Pair):
        return record.prompt, record.completion
    return (record.text,)


def _mark(encoded: Encoded, target_spans: Iterable[Span]) -> tuple[_Ids, _Flags]:
    """Marks the tokens that begin within a span: one that begins before is not its."""
    is_target = np.zeros(len(encoded.ids), bool)
    first = encoded.spans[:, 0]
    for start, end in target_spans:
        is_target |= (first >= start) & (first < end)
    return encoded.ids, is_target


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

    def finish(self, num_records: int) -> TokenizedData:
        """The samples that are left, of so many records."""
        if not self._samples:
            raise DataError(
                f"{self._path}: none of {num_records} records can be used by job "
                f"{self._job.name!r}: {self._num_dropped} are longer than "
                f"max_length={self._job.max_length}, and {self._num_without_target} "
                "have no token to predict within it. Raise max_length or give other "
                "records."
            )
        return TokenizedData(
            source=self._path,
            samples=tuple(self._samples),
            max_length=self._job.max_length,
            num_records=num_records,
            num_truncated=self._num_truncated,
            num_dropped=self._num_dropped,
            num_without_target=self._num_without_target,
        )
