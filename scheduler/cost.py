"""Cost model: the time of a microbatch on each stage of a pipeline."""

import dataclasses

import numpy as np

from jaxlora.scheduler.types import Limits, Microbatch, Schedule, padded_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AffineCost:
    """Time of a pass: base + per_token * tokens + per_square * squares.

    `squares` is the sum of the squared sample lengths. The time has the unit of the
    coefficients.
    """

    base: float
    per_token: float
    per_square: float

    def __post_init__(self):
        if min(self.base, self.per_token, self.per_square) < 0:
            raise ValueError(
                f"{self} has a negative coefficient, but a pass cannot take less time "
                "for more tokens. scheduler.calibrate fits nonnegative coefficients."
            )

    def __call__(self, tokens, squares):
        """Returns the time; both arguments are numbers or arrays of the same shape."""
        return self.base + self.per_token * tokens + self.per_square * squares

    def __mul__(self, factor: float) -> "AffineCost":
        return AffineCost(
            base=factor * self.base,
            per_token=factor * self.per_token,
            per_square=factor * self.per_square,
        )

    def __add__(self, other: "AffineCost") -> "AffineCost":
        return AffineCost(
            base=self.base + other.base,
            per_token=self.per_token + other.per_token,
            per_square=self.per_square + other.per_square,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Time that one pipeline stage takes for a microbatch."""

    forward: AffineCost
    backward: AffineCost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Time of microbatches on every stage. A no-op takes no time.

    Attributes:
        stages: Costs of each stage.
        buckets: Compiled shapes in tokens, in ascending order. A microbatch is padded
            to the smallest bucket that holds it. Without buckets, it is padded only to
            whole blocks.
        communication: Time from the end of a pass on one stage to its start on the
            neighboring stage.
        padding: Time of a row of padding, as a share of that of a token: attention and
            the loss skip padding, products do not.
    """

    stages: tuple[StageCost, ...]
    buckets: tuple[int, ...] = ()
    communication: float = 0.0
    padding: float = 1.0

    def __post_init__(self):
        if not self.stages:
            raise ValueError("a cost model needs at least one stage, got none.")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets must ascend, got {self.buckets}. Sort them.")
        if self.communication < 0:
            raise ValueError(f"communication={self.communication} must be at least 0.")
        if not 0 <= self.padding <= 1:
            raise ValueError(f"padding={self.padding} must be a share, from 0 to 1.")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: AffineCost,
        backward: AffineCost,
        last_stage: float = 1.0,
        buckets: tuple[int, ...] = (),
        communication: float = 0.0,
        padding: float = 1.0,
    ) -> "CostModel":
        """Makes a model of equal stages, except for the last one.

        The last stage takes `last_stage` times as long, because it also computes the
        output head and the loss.
        """
        stage = StageCost(forward=forward, backward=backward)
        last = StageCost(forward=forward * last_stage, backward=backward * last_stage)
        stages = (stage,) * (num_stages - 1) + (last,)
        return cls(
            stages=stages,
            buckets=buckets,
            communication=communication,
            padding=padding,
        )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def is_flat(self) -> bool:
        """Whether all microbatches take the same time, however full they are."""
        return len(self.buckets) == 1 and self.padding == 1

    def size(self, microbatch: Microbatch, limits: Limits) -> tuple[float, int]:
        """Returns the tokens of a microbatch, and the sum of its squared lengths.

        Padding to its bucket counts as the tokens that take as long.

        Raises:
            ValueError: The microbatch fits in no bucket.
        """
        tokens = padded_tokens(microbatch, limits)
        timed = tokens + self.padding * (self.bucket_tokens(tokens) - tokens)
        return timed, sum(s.num_tokens**2 for s in microbatch)

    def schedule_times(self, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
        """Times of all forward and all backward passes of a schedule.

        Returns:
            Two arrays [stages, microbatches].
        """
        sizes = [self.size(m, schedule.limits) for m in schedule.microbatches]
        tokens, squares = np.array(sizes, float).reshape(-1, 2).T
        is_real = np.array([bool(m) for m in schedule.microbatches], float)
        return self.times(tokens, squares, is_real)

    def times(
        self, tokens: np.ndarray, squares: np.ndarray, is_real: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Times of forward and backward passes.

        Args:
            tokens: Tokens of each microbatch, with its padding; see `size`.
            squares: Sum of squared sample lengths of each microbatch.
            is_real: 0 for a no-op, else 1.

        Returns:
            Two arrays [stages, microbatches].
        """
        forward = [s.forward(tokens, squares) * is_real for s in self.stages]
        backward = [s.backward(tokens, squares) * is_real for s in self.stages]
        return np.stack(forward), np.stack(backward)

    def bucket_tokens(self, tokens: int) -> int:
        """Rounds the padded tokens of a microbatch up to its bucket.

        Raises:
            ValueError: The microbatch fits in no bucket.
        """
        if not self.buckets or not tokens:
            return tokens
        for bucket in self.buckets:
            if bucket >= tokens:
                return bucket
        raise ValueError(
            f"a microbatch of {tokens} tokens fits in none of the buckets "
            f"{self.buckets}. Add a bucket of the schedule's capacity."
        )
