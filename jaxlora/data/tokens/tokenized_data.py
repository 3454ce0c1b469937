"""A job's samples, of one data set or of several, and what is counted of them."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Int, UInt64

from jaxlora.common.counted import counted
from jaxlora.config import DataConfig
from jaxlora.data.order import MOST_INTERLEAVED, expected_draws, interleave
from jaxlora.data.tokens.dataset import Samples
from jaxlora.errors import DataError
from jaxlora.objectives.sample import TokenizedSample


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Mixture:
    """The parts from which samples of several data sets are made.

    Attributes:
        parts: The samples of each data set, by name.
        sources: Number of the data set of each group of samples.
        indices: Number of each group in its data set.
        order: Describes their order.
    """

    parts: Mapping[str, "TokenizedData"]
    sources: Int[np.ndarray, " N"]
    indices: Int[np.ndarray, " N"]
    order: str

    def of_samples(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `sources` and `indices` of samples, so many of which are a group."""
        in_group = np.tile(np.arange(size), len(self.sources))
        indices = np.repeat(size * self.indices, size) + in_group
        return np.repeat(self.sources, size), indices


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedData:
    """One job's samples for training or for evaluation.

    Attributes:
        source: Path of the records.
        samples: The samples, in the order of the records or of the mixture.
            `DataReader` returns `Samples`, which hold millions of samples in little
            memory.
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
        mixture: What they are made of, if there are several data sets.
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
    mixture: Mixture | None = None

    @property
    def ranges(self) -> Mapping[str, range]:
        """The groups of each data set by name, if there are several data sets.

        Each comes after the one before.
        """
        if self.mixture is None:
            return {}
        parts = self.mixture.parts
        ends = np.cumsum([0, *(len(part.group_lengths) for part in parts.values())])
        assert (np.diff(self.mixture.sources) >= 0).all(), "they are interleaved"
        pairs = zip(parts, itertools.pairwise(ends.tolist()), strict=True)
        return {name: range(start, end) for name, (start, end) in pairs}

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
        """A hash of every token, and of whether it is a target.

        That of a mixture is of its data sets, and of the order of their samples.
        """
        digest = hashlib.sha256()
        if self.mixture is not None:
            for part in self.mixture.parts.values():
                digest.update(part.fingerprint.encode())
            for numbers in self.mixture.of_samples(self.group_size):
                digest.update(numbers.astype("<i8").tobytes())
            return digest.hexdigest()
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
        """Describes the size of the data and the dropped records in one line.

        The line of a mixture is without the records of each data set.
        """
        groups = counted(len(self.group_lengths), self.noun)
        tokens = (
            f"{counted(self.num_tokens, 'token')}, {self.num_target_tokens:,} of them "
            "to predict"
        )
        if (mixture := self.mixture) is not None:
            counts = np.bincount(mixture.sources, minlength=len(mixture.parts)).tolist()
            pairs = zip(counts, mixture.parts, strict=True)
            shares = ", ".join(f"{num:,} of {name}" for num, name in pairs)
            sets = f"{mixture.order} of {len(counts)} data sets"
            return f"{sets}: {groups} ({shares}), {tokens}."
        line = f"{self.source}: {groups}, {tokens}"
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
        parts = {} if self.mixture is None else self.mixture.parts
        return [*(part.summary() for part in parts.values()), self.summary()]


def mix(parts: Sequence[TokenizedData], data: DataConfig, seed: int) -> TokenizedData:
    """Makes one list of the samples of several data sets.

    Args:
        parts: The samples of each data set, as `DataReader` makes them.
        data: Says how they are mixed.
        seed: Seed of the draws.

    Raises:
        DataError: It would have too many samples.
    """
    num_groups = [len(part.group_lengths) for part in parts]
    order = "concatenation"
    if data.mix == "concat":
        sources = np.repeat(np.arange(len(parts)), num_groups)
        indices = np.concatenate([np.arange(num) for num in num_groups])
    else:
        _check_ends(num_groups, data)
        shares, rule = data.probabilities, data.stopping_strategy
        sources, indices = interleave(
            num_groups, probabilities=shares, stopping_strategy=rule, seed=seed
        )
        shown = "in turn"
        if shares is not None:
            shown = ", ".join(f"{share:g}" for share in shares)
        order = f"interleaving ({shown}; {rule})"
    names = dict(zip(data.set_names, parts, strict=True))
    mixture = Mixture(parts=names, sources=sources, indices=indices, order=order)
    places = mixture.of_samples(parts[0].group_size)
    samples: list[Any] = [part.samples for part in parts]
    counts = "records", "truncated", "dropped", "without_target", "bad"
    totals: Any = {
        f"num_{name}": sum(getattr(part, f"num_{name}") for part in parts)
        for name in counts
    }
    return dataclasses.replace(
        parts[0],
        source=", ".join(dict.fromkeys(part.source for part in parts)),
        samples=Samples.mixed(samples, *places),
        mixture=mixture,
        **totals,
    )


def _check_ends(num_groups: Sequence[int], data: DataConfig) -> None:
    """Refuses probabilities by which some data set is exhausted only very late.

    Raises:
        DataError: They are such.
    """
    shares = data.probabilities
    if shares is None or data.stopping_strategy == "first_exhausted":
        return
    expected = expected_draws(num_groups, shares)
    if expected > MOST_INTERLEAVED:
        lengths = ", ".join(f"{num:,}" for num in num_groups)
        raise DataError(
            f"probabilities {list(shares)} of data sets of {lengths} samples: about "
            f"{expected:.1e} draws exhaust all of them, and {MOST_INTERLEAVED:,} is "
            "the most. Raise the smallest probability, or set stopping_strategy to "
            "first_exhausted."
        )
