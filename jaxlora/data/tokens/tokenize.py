"""A job's records as token arrays, with the tokens to be learned marked."""

import dataclasses
import logging
import math
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from jaxlora.common.counted import counted
from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.formats.table import format_of, has_kind
from jaxlora.data.order import permutation
from jaxlora.data.records.notes import log_notes
from jaxlora.data.records.read import Record, open_records
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.dataset import EncodedRecords, Samples
from jaxlora.data.tokens.encode_records import encode_records
from jaxlora.data.tokens.token_cache import TokenCache, cache_key
from jaxlora.data.tokens.tokenized_data import TokenizedData, mix
from jaxlora.errors import DataError
from jaxlora.objectives.table import find_objective, smallest_batch

_Flags = Bool[np.ndarray, "..."]

logger = logging.getLogger(__name__)

# The field that has the margin of a pair, if the user names no other.
_MARGIN = "margin"
# The random stream of the held-out records; no epoch number is as large.
_HELD_OUT_STREAM = 2**63
# TRL takes so many pairs apart at a time.
_PAIRS_AT_ONCE = 1000


class DataReader:
    """Reads the data of jobs; jobs that share a data set share its tokens.

    A data set is read, rendered and encoded once, if jobs name the same contents and
    the same settings for their tokens. The jobs may differ in the records that they
    hold out, in `too_long`, and in everything that is not about data.

    Attributes:
        tokenizer: The base model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, cache: TokenCache | None = None):
        """Makes a reader.

        Args:
            tokenizer: The base model's tokenizer.
            cache: Keeps tokens on disk for later runs; None: they are not kept.
        """
        self.tokenizer = tokenizer
        self._cache = cache
        self._encoded: dict[str, EncodedRecords] = {}
        self._tokenized: dict[tuple, TokenizedData] = {}

    def read(
        self, job: LoraJob, which: Literal["train", "eval"] = "train"
    ) -> TokenizedData:
        """Reads a job's records and turns them into tokens.

        Args:
            job: The job's settings. With `eval_fraction`, only `job.eval_seed` decides
                which records are held out.
            which: The training records, or the held-out ones.

        Returns:
            At least one sample. Jobs with the same samples get the same object.

        Raises:
            DataError: A record cannot be used (the error names it), or none is left.
            ModelError: The records are chats, and the tokenizer has no chat template.
        """
        data, fraction = job.data, job.eval_fraction
        if which == "eval" and job.eval_data is not None:
            data, fraction = job.eval_data, 0.0
        elif which == "eval" and not fraction:
            raise DataError(
                f"job {job.name!r} has no held-out records. Set eval_data or "
                "eval_fraction."
            )
        read = [self._read_set(one, job, which, fraction) for one in data.sets]
        if not data.datasets:
            return read[0]
        if which == "eval":  # evaluated whole, in any order
            data = DataConfig(datasets=data.datasets)
        order = data.mix, data.probabilities, data.stopping_strategy
        seed = 0 if data.probabilities is None else job.seed
        choice = (*map(id, read), data.set_names, order, seed)
        if choice not in self._tokenized:
            self._tokenized[choice] = mix(read, data, seed)
        return self._tokenized[choice]

    def _read_set(
        self,
        data: DataConfig,
        job: LoraJob,
        which: Literal["train", "eval"],
        fraction: float,
    ) -> TokenizedData:
        """Reads one data set of a job, a fraction of which is held out."""
        data = with_kind(data, job)
        key, records = self._encode(data, job.max_length)
        split = (which, fraction, job.eval_seed) if fraction else ()
        objective = find_objective(job.objective)
        form = objective.group_size, objective.baseline is not None
        choice = (key, data.path, split, job.too_long, form)
        if choice not in self._tokenized:
            size = format_of(data.kind).num_samples
            num_records = len(records.lengths) // size
            is_included = np.ones(num_records, bool)
            if split:
                is_held_out = _choose_held_out(job, data.path, num_records)
                is_included = is_held_out == (which == "eval")
            chosen = _choose(records, is_included, job, data.path, size)
            _check_some(chosen, job, records.first_bad)
            self._tokenized[choice] = _grouped(chosen, *form)
        return self._tokenized[choice]

    def _encode(self, data: DataConfig, max_length: int) -> tuple[str, EncodedRecords]:
        """Returns the tokens of a data set, and the key by which they are shared."""
        records = open_records(data)
        content = records.content_hash()
        tokenizer = self.tokenizer.with_setting(
            data.chat_template, data.chat_template_kwargs
        )
        key = cache_key(data, content, tokenizer, max_length)
        if key in self._encoded:
            return key, self._encoded[key]
        found, cache = None, self._cache
        if not format_of(data.kind).is_built_in:
            cache = None  # the key does not have the user's function
        if cache is not None:
            found = cache.load(key, data.path)
        if found is not None:
            log_notes(data.path, found.notes)
        else:
            found = encode_records(data, records, tokenizer, max_length)
            if records.content_hash() != content:
                raise DataError(
                    f"{data.path}: changed while it was read. Do not change data while "
                    "they are read."
                )
            if cache is not None:
                cache.store(key, found)
        self._encoded[key] = found
        return key, found


def with_kind(data: DataConfig, job: LoraJob) -> DataConfig:
    """Returns the settings with the kind of records that the job's objective needs.

    The first record decides what the objective leaves open: the kind if it learns from
    several, and whether there are margins.

    Raises:
        DataError: The objective does not learn from the kind that is set, or the first
            record cannot be read.
    """
    objective = find_objective(job.objective)
    kinds, has_margin = objective.kinds, objective.reads_margin
    leaves_open = kinds if data.kind == "auto" else ()
    first: Record = {}
    if len(leaves_open) > 1 or (has_margin and data.margin is None):
        first = next(open_records(data).readable())
    if data.kind == "auto" and kinds:
        fits = [kind for kind in kinds if has_kind(data.replace(kind=kind), first)]
        data = data.replace(kind=(*fits, *kinds)[0])
    form = format_of(data.kind)
    if has_margin and data.margin is None and _MARGIN in first and form.is_built_in:
        data = data.replace(margin=_MARGIN)
    if data.margin is not None and not has_margin:
        raise DataError(
            f"job {job.name!r} has data.margin {data.margin!r}, which objective "
            f"{job.objective} does not use. Leave it out."
        )
    is_wanted = data.kind in kinds or form.gives in kinds
    if is_wanted or not (kinds or form.gives != "completion"):
        return data
    raise DataError(
        f"job {job.name!r} has objective {job.objective}, which does not learn from "
        f"records of the kind {data.kind}. Leave data.kind out, or set another "
        "objective."
    )


def _choose_held_out(job: LoraJob, path: str, num_records: int) -> _Flags:
    """Chooses, for each record, whether it is held out."""
    # The number is rounded up, but 0.07 * 100, slightly above 7, must give 7.
    num_held_out = math.ceil(job.eval_fraction * num_records - 1e-9)
    if num_held_out < 1:
        raise DataError(
            f"{path}: eval_fraction={job.eval_fraction} of {num_records} records holds "
            "out none of them. Use a larger eval_fraction, or leave it out."
        )
    if num_held_out >= num_records:
        raise DataError(
            f"{path}: eval_fraction={job.eval_fraction} of {num_records} "
            "records holds out all of them, and none is left to train on. Use a "
            "smaller eval_fraction or more records."
        )
    held_out = permutation(num_records, job.eval_seed, _HELD_OUT_STREAM)
    is_held_out = np.zeros(num_records, bool)
    is_held_out[held_out[:num_held_out]] = True
    return is_held_out


def _choose(
    records: EncodedRecords,
    is_included: Bool[np.ndarray, " R"],
    job: LoraJob,
    path: str,
    size: int,
) -> TokenizedData:
    """Applies `too_long` to the records of a split, and counts the affected ones.

    Args:
        records: The tokens of all records.
        is_included: Whether each record belongs to the split.
        job: The job.
        path: Path of the records, for errors.
        size: Samples of a record, which are used together or not at all.

    Raises:
        DataError: A sample is too long, and `too_long` is `error`.
    """
    is_bad = is_included & records.is_bad.reshape(-1, size).any(axis=1)
    is_usable = is_included & ~is_bad
    is_long_sample = records.lengths > job.max_length
    is_long = is_usable & is_long_sample.reshape(-1, size).any(axis=1)
    if job.too_long == "error" and is_long.any():
        is_first = is_long_sample & np.repeat(is_long, size)
        raise _too_long(records, int(is_first.argmax()), job, path, size)
    is_dropped = is_long if job.too_long == "drop" else np.zeros_like(is_long)
    has_targets = (records.num_targets > 0).reshape(-1, size).all(axis=1)
    is_sample = is_usable & ~is_dropped & has_targets
    return TokenizedData(
        source=path,
        samples=Samples([records], np.flatnonzero(np.repeat(is_sample, size))),
        group_size=size,
        max_length=job.max_length,
        num_records=int(is_included.sum()),
        num_truncated=int((is_sample & is_long).sum()),
        num_dropped=int(is_dropped.sum()),
        num_without_target=int((is_usable & ~is_dropped & ~is_sample).sum()),
        num_bad=int(is_bad.sum()),
    )


def _grouped(
    data: TokenizedData, group_size: int, is_recombined: bool
) -> TokenizedData:
    """Takes pairs apart for an objective that learns from single samples.

    As in TRL, all chosen answers of 1000 pairs come before their rejected ones. A
    chosen answer gets the label 1, and a rejected one 0.
    """
    data = dataclasses.replace(data, is_recombined=is_recombined)
    if (data.group_size, group_size) != (2, 1):
        return data
    samples = data.samples
    assert isinstance(samples, Samples), "the reader makes them"
    pair, is_rejected = np.divmod(samples.numbers, 2)
    order = np.lexsort((pair, is_rejected, pair // _PAIRS_AT_ONCE))
    values = 1.0 - is_rejected[order]
    counts = "records", "truncated", "dropped", "without_target", "bad"
    twice: Any = {f"num_{name}": 2 * getattr(data, f"num_{name}") for name in counts}
    return dataclasses.replace(
        data,
        samples=Samples(samples.sets, samples.numbers[order], values),
        group_size=1,
        **twice,
    )


def _check_some(data: TokenizedData, job: LoraJob, first_bad: str) -> None:
    """Checks that samples are left.

    Args:
        data: The samples.
        job: The job.
        first_bad: Describes the first record that cannot be used.

    Raises:
        DataError: None is left.
    """
    if not len(data.samples):
        bad = f", and {data.num_bad} cannot be used (the first: {first_bad})"
        raise DataError(
            f"{data.source}: none of {counted(data.num_records, 'record')} can be used "
            f"by job {job.name!r}: {data.num_dropped} are longer than max_length="
            f"{job.max_length}, and {data.num_without_target} have no token to predict "
            f"within it{bad if data.num_bad else ''}. Raise max_length or give other "
            "records."
        )


def check_enough(data: TokenizedData, job: LoraJob) -> None:
    """Checks that there are as many samples as a batch of the objective has at least.

    Args:
        data: All training samples of the job, or all held-out ones.
        job: The job.

    Raises:
        DataError: There are fewer.
    """
    found = len(data.group_lengths)
    fewest = smallest_batch(job.objective, job.objective_args)
    if found < fewest:
        raise DataError(
            f"{data.source}: job {job.name!r} has {counted(found, data.noun)} there, "
            f"and {job.objective} needs {fewest} or more, for training and in held-out "
            "data, as its baseline has the prompt of each with the answer of another "
            "one. Give more records, or choose a loss_type without a baseline."
        )


def _too_long(
    records: EncodedRecords, index: int, job: LoraJob, path: str, size: int
) -> DataError:
    return DataError(
        f"{path}: record {index // size + 1} has {records.lengths[index]} tokens, more "
        f"than max_length="
        f"{job.max_length} of job {job.name!r}. Raise max_length, shorten the record, "
        "or set too_long to truncate or drop."
    )
