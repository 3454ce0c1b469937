"""Computes the samples of a job's global batch from the number of its step.

`interleave` makes one list of several data sets, before the job's own order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

# A product of floats such as 0.1 * 30 is slightly above the intended integer.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOrder:
    """The order in which one job sees its samples.

    An epoch is a permutation of all samples, cut into global batches; its last batch
    may be smaller and is kept, unless it is smaller than the objective allows: then its
    samples go into the batch before. There is no state between batches, so the step of
    the job is its whole position in the data.

    Attributes:
        num_samples: Number of samples of the job.
        batch_size: Number of samples in a global batch.
        seed: Seed of the job.
        shuffle: Whether each epoch has another permutation of the samples. Otherwise
            they keep their order.
        epochs: Number of passes over the data; used if `steps` is None.
        steps: Number of optimizer steps.
        smallest_batch: Fewest samples of a global batch that the objective allows.
    """

    num_samples: int
    batch_size: int
    seed: int
    shuffle: bool = True
    epochs: float = 1.0
    steps: int | None = None
    smallest_batch: int = 1

    def __post_init__(self):
        assert min(self.num_samples, self.batch_size) >= max(1, self.smallest_batch)
        assert self.epochs > 0 and (self.steps is None or self.steps > 0)

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch."""
        most = self.num_samples - self.smallest_batch + 1
        return max(1, math.ceil(most / self.batch_size))

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the job."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.epochs * self.batches_per_epoch - _ROUNDING))

    def batch(self, step: int) -> Int[np.ndarray, " B"]:
        """Returns the indices of the samples of global batch `step`, from 0."""
        assert 0 <= step < self.num_steps
        epoch, batch = divmod(step, self.batches_per_epoch)
        places = self._places(batch)
        if not self.shuffle:
            return np.arange(places.start, places.stop)
        return self._epoch(epoch)[places].copy()

    def _places(self, batch: int) -> slice:
        """Returns the places in an epoch's permutation of one of its batches."""
        first = batch * self.batch_size
        is_last = batch == self.batches_per_epoch - 1
        return slice(first, self.num_samples if is_last else first + self.batch_size)

    def neighbors(self) -> Int[np.ndarray, " N"]:
        """Returns for each sample the one before it in its batch of the first epoch.

        The first sample of a batch has the last one as its neighbor.
        """
        order, out = np.arange(self.num_samples), np.empty(self.num_samples, np.int64)
        if self.shuffle:
            order = self._epoch(0)
        for number in range(self.batches_per_epoch):
            batch = order[self._places(number)]
            out[batch] = np.roll(batch, 1)
        return out

    @functools.cached_property
    def _epoch(self) -> Callable[[int], Int[np.ndarray, " N"]]:
        """Makes an epoch's permutation.

        Planning runs ahead of training, in a thread of its own and possibly in the next
        epoch, so two are kept.
        """
        make = functools.partial(permutation, self.num_samples, self.seed)
        return functools.lru_cache(maxsize=2)(make)


def permutation(num: int, seed: int, stream: int) -> Int[np.ndarray, " N"]:
    """A random permutation of `range(num)` that depends only on (num, seed, stream).

    It sorts Philox's raw numbers, whose stream NumPy guarantees never to change
    (NEP 19). `Generator.permutation` may change between NumPy versions, which would
    change the data order of a resumed run.

    Args:
        num: Length of the permutation.
        seed: First half of Philox's key.
        stream: Second half of the key; different streams are independent.
    """
    philox = np.random.Philox(key=np.array([seed, stream], np.uint64))
    return np.argsort(philox.random_raw(num), kind="stable")


StoppingStrategy = Literal[
    "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"
]
_DRAWS = 2**16
# More samples than this are refused, before an array of their numbers fills the memory.
MOST_INTERLEAVED = 2**31


def interleave(
    lengths: Sequence[int],
    *,
    probabilities: Sequence[float] | None,
    stopping_strategy: StoppingStrategy,
    seed: int,
) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"]]:
    """Interleaves data sets as `datasets.interleave_datasets` does.

    Without probabilities, one sample of each data set comes in turn. With them, the
    data set of each sample is drawn. A data set whose samples were all taken begins
    again, or is skipped by `all_exhausted_without_replacement`.

    Args:
        lengths: Number of samples of each data set; positive.
        probabilities: Share of each data set, with the sum 1; None: in turn.
        stopping_strategy: When the list ends: with the last sample of the data set that
            is exhausted first, or with that of the one that is exhausted last.
        seed: Seed of the draws.

    Returns:
        The number of the data set of each sample, and its index in that data set.
    """
    ends = np.asarray(lengths)
    if probabilities is None:
        num = ends.min() if stopping_strategy == "first_exhausted" else ends.max()
        sources = np.tile(np.arange(len(ends)), num)
        indices = np.repeat(np.arange(num), len(ends))
    else:
        sources, indices = _draw(
            ends, np.asarray(probabilities), stopping_strategy, seed
        )
    if stopping_strategy == "all_exhausted_without_replacement":
        is_new = indices < ends[sources]
        return sources[is_new], indices[is_new]
    return sources, indices % ends[sources]


def _draw(
    ends: Int[np.ndarray, " D"],
    shares: Float[np.ndarray, " D"],
    stopping_strategy: StoppingStrategy,
    seed: int,
) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"]]:
    """Draws data sets until the first or the last one is exhausted.

    The draws are those of `np.random.default_rng(seed).choice(len(shares), p=shares)`.
    They are made from the raw numbers of PCG64, whose stream NumPy guarantees never to
    change, which it does not for `choice`.

    Returns:
        The data sets, and for each draw the number of earlier draws of the same one.
    """
    cdf = np.cumsum(shares)
    cdf /= cdf[-1]
    generator = np.random.PCG64(seed)
    counts, parts = np.zeros_like(ends), []
    wanted = np.any if stopping_strategy == "first_exhausted" else np.all
    while not wanted(counts >= ends):
        raw = generator.random_raw(_DRAWS)
        draws = (raw >> np.uint64(11)) * 2.0**-53
        parts.append(np.searchsorted(cdf, draws, side="right"))
        counts += np.bincount(parts[-1], minlength=len(ends))
    sources = np.concatenate(parts)
    indices, last = np.empty_like(sources), []
    for number, end in enumerate(ends.tolist()):
        (places,) = np.nonzero(sources == number)
        indices[places] = np.arange(len(places))
        last.append(places[end - 1] if len(places) >= end else len(sources))
    num = 1 + (min(last) if stopping_strategy == "first_exhausted" else max(last))
    return sources[:num], indices[:num]


def expected_draws(lengths: Sequence[int], shares: Sequence[float]) -> float:
    """Returns about how many draws exhaust the data set that takes the most."""
    pairs = zip(lengths, shares, strict=True)
    return max(length / share for length, share in pairs if share > 0)
