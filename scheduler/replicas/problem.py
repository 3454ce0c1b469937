"""The problem: kinds of replicas, what they cost, and how many of each are deployed."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlora.scheduler.cost import AffineCost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaKind:
    """A shape that a replica of the base model may have, and what it costs.

    A replica that gets samples in a step takes `cost(tokens, squares)` seconds, with
    the sum of their lengths and of their squares: samples are packed, so that padding
    is part of the time of a token. It takes no time without samples.

    Attributes:
        tensor: Degree of tensor parallelism.
        stage: Number of pipeline stages.
        longest: Tokens of the longest sample that fits into its memory.
        cost: Seconds of its part of a step. The base has what is paid once: the ramp
            of the pipeline, and the exchange of gradients.
    """

    tensor: int = 1
    stage: int = 1
    longest: int
    cost: AffineCost

    def __post_init__(self):
        for field in ("tensor", "stage", "longest"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field}={getattr(self, field)} of a replica must be at least 1."
                )
        if self.cost.per_token <= 0:
            raise ValueError(f"{self.cost} must have a positive time of a token.")

    def __str__(self) -> str:
        words = ((axis, getattr(self, axis)) for axis in ("tensor", "stage"))
        return ",".join(f"{axis}={n}" for axis, n in words if n > 1) or "tensor=1"

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of a replica."""
        return self.tensor * self.stage

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the seconds that each sample adds; infinite if it does not fit."""
        lengths = np.asarray(lengths, float)
        added = self.cost(lengths, lengths**2) - self.cost.base
        return np.where(lengths <= self.longest, added, np.inf)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """How many replicas of each kind hold the base model.

    The replicas are numbered kind by kind.

    Attributes:
        kinds: The kinds of replicas.
        counts: Number of replicas of each kind; zeros are left out.
    """

    kinds: tuple[ReplicaKind, ...]
    counts: tuple[int, ...]

    def __post_init__(self):
        if len(self.kinds) != len(self.counts) or min(self.counts, default=0) < 0:
            raise ValueError(
                f"counts={self.counts} must have a number for each of the "
                f"{len(self.kinds)} kinds of replicas, none of them negative."
            )
        used = [(k, n) for k, n in zip(self.kinds, self.counts, strict=True) if n]
        if not used:
            raise ValueError("a deployment needs at least one replica, got none.")
        object.__setattr__(self, "kinds", tuple(k for k, _ in used))
        object.__setattr__(self, "counts", tuple(n for _, n in used))

    def __str__(self) -> str:
        both = zip(self.kinds, self.counts, strict=True)
        return " + ".join(f"{n} x {kind}" for kind, n in both)

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return sum(self.counts)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all replicas."""
        return sum(k.num_gpus * n for k, n in zip(self.kinds, self.counts, strict=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that fits into some replica."""
        return max(kind.longest for kind in self.kinds)

    @property
    def kind_of(self) -> np.ndarray:
        """The number of the kind of each replica [replicas]."""
        return np.repeat(np.arange(len(self.kinds)), self.counts)

    @property
    def replicas(self) -> tuple[ReplicaKind, ...]:
        """The kind of each replica."""
        return tuple(self.kinds[i] for i in self.kind_of)

    @property
    def gpus(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the GPUs of each replica; larger replicas come first.

        So a replica that divides a host does not span two of them.
        """
        sizes = [kind.num_gpus for kind in self.replicas]
        order = sorted(range(len(sizes)), key=lambda r: -sizes[r])
        ends = itertools.accumulate(sizes[r] for r in order)
        of = {
            r: tuple(range(end - sizes[r], end))
            for r, end in zip(order, ends, strict=True)
        }
        return tuple(of[r] for r in range(len(sizes)))


def check_fit(
    kinds: Iterable[ReplicaKind], batches: Sequence[np.ndarray], longest: int = 0
) -> int:
    """Returns the longest length of some steps, or of others, that replicas must hold.

    Raises:
        ValueError: There are no samples, or the longest one fits into no replica.
    """
    if not any(len(batch) for batch in batches):
        raise ValueError("there are no samples to deploy replicas for.")
    needed = max(longest, *(int(np.max(batch)) for batch in batches if len(batch)))
    fits = max((kind.longest for kind in kinds), default=0)
    if needed > fits:
        raise ValueError(
            f"a sample of {needed} tokens fits into no replica: the largest one holds "
            f"{fits} tokens. Allow replicas of more GPUs, or lower max_length."
        )
    return needed
