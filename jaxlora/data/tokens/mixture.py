"""The samples of several data sets in one order."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
from jaxtyping import Int

from jaxlora.common.counted import counted
from jaxlora.config import DataConfig
from jaxlora.data.order import MOST_INTERLEAVED, expected_draws, interleave
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import DataError
from jaxlora.objectives.sample import TokenizedSample


class MixedSamples(Sequence[TokenizedSample]):
    """Samples of several data sets in one order, which may leave out and repeat some.

    Attributes:
        parts: The samples of each data set.
        sources: Index in `parts` of the data set of each sample.
        indices: Index of each sample in its data set.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[TokenizedSample]],
        sources: Int[np.ndarray, " S"],
        indices: Int[np.ndarray, " S"],
    ):
        self.parts, self.sources, self.indices = tuple(parts), sources, indices

    def in_order(self, values: Sequence[Int[np.ndarray, " _"]]) -> np.ndarray:
        """Returns the value of each sample, from those of the data sets' samples."""
        starts = np.cumsum([0, *map(len, values)])[:-1]
        return np.concatenate(values)[starts[self.sources] + self.indices]

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> TokenizedSample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenizedSample, ...]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return self.parts[self.sources[index]][int(self.indices[index])]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MixedData(TokenizedData):
    """One job's samples of several data sets.

    Attributes:
        mixed: The samples.
        by_name: The samples of each data set, of which these are made.
        order: Describes their order.
    """

    mixed: MixedSamples
    by_name: Mapping[str, TokenizedData]
    order: str

    @property
    def parts(self) -> Mapping[str, TokenizedData]:
        """The samples of each data set, by name."""
        return self.by_name

    @property
    def ranges(self) -> dict[str, range]:
        """The groups of each data set by name, if each comes after the one before."""
        sizes = (len(part.group_lengths) for part in self.parts.values())
        ends = np.cumsum([0, *sizes])
        assert (np.diff(self.mixed.sources) >= 0).all(), "the data sets are interleaved"
        pairs = zip(self.parts, itertools.pairwise(ends.tolist()), strict=True)
        return {name: range(start, end) for name, (start, end) in pairs}

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, " S"]:
        """Tokens of each sample."""
        return self.mixed.in_order([part.lengths for part in self.parts.values()])

    @functools.cached_property
    def num_targets(self) -> Int[np.ndarray, " S"]:
        """Target tokens of each sample."""
        return self.mixed.in_order([part.num_targets for part in self.parts.values()])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the data sets, and of the order of their samples."""
        digest = hashlib.sha256()
        for part in self.parts.values():
            digest.update(part.fingerprint.encode())
        for numbers in (self.mixed.sources, self.mixed.indices):
            digest.update(numbers.astype("<i8").tobytes())
        return digest.hexdigest()

    def summary(self) -> str:
        """Describes the mixture in one line, without the records of each data set."""
        sources = self.mixed.sources[:: self.group_size]
        counts = np.bincount(sources, minlength=len(self.parts)).tolist()
        shares = zip(counts, self.parts, strict=True)
        return (
            f"{self.order} of {len(self.parts)} data sets: "
            f"{counted(len(self.group_lengths), self.noun)} "
            f"({', '.join(f'{num:,} of {name}' for num, name in shares)}), "
            f"{counted(self.num_tokens, 'token')}, {self.num_target_tokens:,} of them "
            "to predict."
        )

    def summaries(self) -> list[str]:
        """Returns the summary of each data set, and of the mixture."""
        return [*(part.summary() for part in self.parts.values()), self.summary()]


def mix(parts: Sequence[TokenizedData], data: DataConfig, seed: int) -> MixedData:
    """Makes one list of the samples of several data sets.

    Args:
        parts: The samples of each data set.
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
        shares = data.probabilities
        sources, indices = interleave(
            num_groups,
            probabilities=shares,
            stopping_strategy=data.stopping_strategy,
            seed=seed,
        )
        order = f"interleaving ({describe_shares(data)}; {data.stopping_strategy})"
    names = dict(zip(data.set_names, parts, strict=True))
    return arranged(names, sources, indices, order)


def describe_shares(data: DataConfig) -> str:
    """Says how often samples of each data set come."""
    if data.probabilities is None:
        return "in turn"
    return ", ".join(f"{share:g}" for share in data.probabilities)


def arranged(
    by_name: Mapping[str, TokenizedData],
    sources: Int[np.ndarray, " N"],
    indices: Int[np.ndarray, " N"],
    order: str,
) -> MixedData:
    """Makes one list of the groups of samples of several data sets.

    Args:
        by_name: The samples of each data set.
        sources: Number of the data set of each group of the list.
        indices: Its number in the data set.
        order: Describes the order.
    """
    parts = list(by_name.values())
    size = parts[0].group_size
    in_group = np.tile(np.arange(size), len(sources))
    samples = MixedSamples(
        [part.samples for part in parts],
        np.repeat(sources, size),
        np.repeat(size * indices, size) + in_group,
    )
    counts = "records", "truncated", "dropped", "without_target", "bad"
    names = [f"num_{name}" for name in counts]
    totals: Any = {name: sum(getattr(part, name) for part in parts) for name in names}
    return MixedData(
        source=", ".join(dict.fromkeys(part.source for part in parts)),
        samples=samples,
        max_length=parts[0].max_length,
        group_size=size,
        is_recombined=parts[0].is_recombined,
        mixed=samples,
        by_name=by_name,
        order=order,
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
