"""Chooses the records that become samples of a job, and counts the others."""

import dataclasses

import numpy as np
from jaxtyping import Bool

from jaxlora.common.counted import counted
from jaxlora.config import LoraJob
from jaxlora.data.tokens.samples import EncodedRecords, Samples
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import DataError
from jaxlora.objectives.table import find_objective, smallest_batch

# TRL takes so many pairs apart at a time.
_PAIRS_AT_ONCE = 1000


def choose_samples(
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
        samples=Samples(records, np.flatnonzero(np.repeat(is_sample, size))),
        group_size=size,
        max_length=job.max_length,
        num_records=int(is_included.sum()),
        num_truncated=int((is_sample & is_long).sum()),
        num_dropped=int(is_dropped.sum()),
        num_without_target=int((is_usable & ~is_dropped & ~is_sample).sum()),
        num_bad=int(is_bad.sum()),
    )


def sample_form(job: LoraJob) -> tuple[int, bool]:
    """Returns what `grouped` depends on, for jobs that share samples."""
    objective = find_objective(job.objective)
    return objective.group_size, objective.baseline is not None


def grouped(data: TokenizedData, job: LoraJob) -> TokenizedData:
    """Takes pairs apart for an objective that learns from single samples.

    As in TRL, all chosen answers of 1000 pairs come before their rejected ones. A
    chosen answer gets the label 1, and a rejected one 0.
    """
    objective = find_objective(job.objective)
    is_recombined = objective.baseline is not None
    if (data.group_size, objective.group_size) != (2, 1):
        return dataclasses.replace(data, is_recombined=is_recombined)
    samples = data.samples
    assert isinstance(samples, Samples), "the reader makes them"
    pair, is_rejected = np.divmod(samples.numbers, 2)
    order = np.lexsort((pair, is_rejected, pair // _PAIRS_AT_ONCE))
    values = 1.0 - is_rejected[order]
    counts = ("num_records", "num_truncated", "num_dropped", "num_without_target")
    return dataclasses.replace(
        data,
        samples=Samples(samples.records, samples.numbers[order], values),
        group_size=1,
        is_recombined=is_recombined,
        **{name: 2 * getattr(data, name) for name in (*counts, "num_bad")},
    )


def check_some(data: TokenizedData, job: LoraJob, first_bad: str) -> None:
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
