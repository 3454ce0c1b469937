"""A job's samples, and what is counted of them."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from jaxtyping import Int, UInt64

from jaxlora.common.counted import counted
from jaxlora.data.tokens.samples import Samples
from jaxlora.objectives.sample import TokenizedSample


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedData:
    """One job's samples for training or for evaluation.

    Attributes:
        source: Path of the records.
        samples: The samples, in the order of the records. `DataReader` returns
            `Samples`, which hold millions of samples in little memory.
        max_length: Longest allowed sample, in tokens.
        num_records: Number of records, each of which became a sample or was dropped;
            or the samples of a group.
        num_truncated: Records of which a sample was truncated to `max_length`.
        num_dropped: Records that were dropped because they exceed `max_length`.
        num_without_target: Records that were dropped because they have no target token
            within `max_length`.
        num_bad: Records that were dropped because they are invalid
            (`data.bad_records`).
        group_size: Consecutive samples that the job's objective takes together.
        is_recombined: Whether prompts are also used with the completions of others.
    """

    source: str
    samples: Sequence[TokenizedSample]
    max_length: int
    num_records: int
    num_truncated: int
    num_dropped: int
    num_without_target: int
    num_bad: int = 0
    group_size: int = 1
    is_recombined: bool = False

    @property
    def parts(self) -> Mapping[str, "TokenizedData"]:
        """The samples of each data set by name, if there are several data sets."""
        return {}

    @property
    def ranges(self) -> Mapping[str, range]:
        """The groups of each data set by name, if there are several data sets."""
        return {}

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, " S"]:
        """Tokens of each sample."""
        if isinstance(self.samples, Samples):
            return self.samples.lengths
        return np.array([len(s.token_ids) for s in self.samples])

    @functools.cached_property
    def num_targets(self) -> Int[np.ndarray, " S"]:
        """Target tokens of each sample."""
        if isinstance(self.samples, Samples):
            return self.samples.num_targets
        return np.array([int(s.is_target.sum()) for s in self.samples])

    @functools.cached_property
    def group_lengths(self) -> Int[np.ndarray, " _"]:
        """Tokens of each group of samples."""
        return self.lengths.reshape(-1, self.group_size).sum(axis=1)

    @property
    def longest_sample(self) -> int:
        """Upper bound on the tokens of a sample, also of recombined ones."""
        return max(int(self.lengths.max()), self._longest_recombined)

    @property
    def longest_group(self) -> int:
        """Upper bound on the tokens of a group, likewise."""
        return max(int(self.group_lengths.max()), self._longest_recombined)

    @functools.cached_property
    def _longest_recombined(self) -> int:
        if not self.is_recombined:
            return 0
        parts = [(s.prompt_length, len(s.token_ids)) for s in self.samples]
        prompt = max(length for length, _ in parts)
        completion = max(whole - length for length, whole in parts)
        return min(prompt + completion, self.max_length)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())

    def mean_batch_tokens(self, batch_size: int) -> float:
        """Mean number of tokens of a global batch.

        Args:
            batch_size: Groups of a batch; a batch never has more than there are.
        """
        num_groups = len(self.group_lengths)
        return min(batch_size, num_groups) * self.num_tokens / num_groups

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens of all samples."""
        return int(self.num_targets.sum())

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of every token, and of whether it is a target."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(len(sample.token_ids).to_bytes(8, "little"))
            digest.update(sample.token_ids.tobytes())
            digest.update(sample.is_target.tobytes())
            if sample.weights is not None:
                digest.update(sample.weights.tobytes())
            for part in sample.top or ():
                digest.update(part.tobytes())
            if sample.value:
                digest.update(np.float64(sample.value).tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def group_hashes(self) -> UInt64[np.ndarray, " _"]:
        """A hash of the tokens of each group of samples."""
        groups = itertools.batched(self.samples, self.group_size)
        hashes = (
            xxhash.xxh3_64_intdigest(b"".join(s.token_ids.tobytes() for s in group))
            for group in groups
        )
        return np.fromiter(hashes, np.uint64)

    def describe_shared(self, other: "TokenizedData") -> str:
        """Says how many groups of samples another data set has, too; "" if none."""
        num = int(np.isin(self.group_hashes, other.group_hashes).sum())
        total, are = len(self.group_hashes), "is" if num == 1 else "are"
        of = f"{num:,} of {counted(total, 'held-out record')}"
        return f"{of} {are} also in the training data." if num else ""

    @property
    def noun(self) -> str:
        """Name of a group of samples in messages."""
        return "pair" if self.group_size == 2 else "sample"

    def summary(self) -> str:
        """Describes the size of the data and the dropped records in one line."""
        line = (
            f"{self.source}: {counted(len(self.group_lengths), self.noun)}, "
            f"{counted(self.num_tokens, 'token')}, {self.num_target_tokens:,} of them "
            "to predict"
        )
        longer = f"longer than max_length={self.max_length}"
        for number, what in (
            (self.num_truncated, f"{longer}: truncated"),
            (self.num_dropped, f"{longer}: dropped"),
            (self.num_without_target, "without a token to predict: dropped"),
            (self.num_bad, "unusable: dropped"),
        ):
            if number:
                were = "was" if number == 1 else "were"
                records = counted(self.num_records, self.noun)
                line += f"; {number:,} of {records} {were} {what}"
        return line + "."

    def summaries(self) -> list[str]:
        """Returns the summary of each data set, and of what is made of several."""
        return [self.summary()]
