"""A job's records as token arrays, with the tokens to be learned marked."""

import logging
import math
from typing import Literal

import numpy as np
from jaxtyping import Bool

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.order import permutation
from jaxlora.data.records.notes import log_notes
from jaxlora.data.records.read import Record, open_records
from jaxlora.data.rendering.kinds import SAMPLES_PER_RECORD, SPECIAL_KINDS, has_kind
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.choose import (
    check_some,
    choose_samples,
    grouped,
    sample_form,
)
from jaxlora.data.tokens.encode_records import encode_records
from jaxlora.data.tokens.mixture import mix
from jaxlora.data.tokens.samples import EncodedRecords
from jaxlora.data.tokens.token_cache import TokenCache, cache_key
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import DataError
from jaxlora.objectives.table import find_objective

_Flags = Bool[np.ndarray, "..."]

logger = logging.getLogger(__name__)

# The field that has the margin of a pair, if the user names no other.
_MARGIN = "margin"
# The random stream of the held-out records; no epoch number is as large.
_HELD_OUT_STREAM = 2**63


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
        choice = (key, data.path, split, job.too_long, sample_form(job))
        if choice not in self._tokenized:
            size = SAMPLES_PER_RECORD.get(data.kind, 1)
            num_records = len(records.lengths) // size
            is_included = np.ones(num_records, bool)
            if split:
                is_held_out = _choose_held_out(job, data.path, num_records)
                is_included = is_held_out == (which == "eval")
            chosen = choose_samples(records, is_included, job, data.path, size)
            check_some(chosen, job, records.first_bad)
            self._tokenized[choice] = grouped(chosen, job)
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
        found = None
        if self._cache is not None:
            found = self._cache.load(key, data.path)
        if found is not None:
            log_notes(data.path, found.notes)
        else:
            found = encode_records(data, records, tokenizer, max_length)
            if records.content_hash() != content:
                raise DataError(
                    f"{data.path}: changed while it was read. Do not change data while "
                    "they are read."
                )
            if self._cache is not None:
                self._cache.store(key, found)
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
    if has_margin and data.margin is None and _MARGIN in first:
        data = data.replace(margin=_MARGIN)
    if data.margin is not None and not has_margin:
        raise DataError(
            f"job {job.name!r} has data.margin {data.margin!r}, which objective "
            f"{job.objective} does not use. Leave it out."
        )
    is_special = data.kind in SPECIAL_KINDS
    if data.kind in kinds or not (kinds or is_special):
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
