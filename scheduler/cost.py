"""What a microbatch costs on each stage of a pipeline."""

import dataclasses

import numpy as np

from jaxlora.scheduler.types import Limits, Microbatch, Schedule, padded_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AffineCost:
    """Time of a pass: base + per_token * tokens + per_square * sum of squared lengths.

    In whatever unit its coefficients were measured.
    """

    base: float
    per_token: float
    per_square: float

    def __post_init__(self):
        if min(self.base, self.per_token, self.per_square) < 0:
            raise ValueError(
                f"{self} has a negative coefficient: a pass cannot take less time for "
                "more tokens. scheduler.calibrate fits coefficients that are not."
            )

    def __call__(self, tokens, squares):
        """Time for `tokens` and `squares`: numbers, or arrays of one shape."""
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
    """What a pipeline stage takes for a microbatch."""

    forward: AffineCost
    backward: AffineCost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Costs of microbatches on every stage; a no-op costs nothing.

    Attributes:
        stages: One entry a stage.
        buckets: Compiled shapes in tokens, ascending: a microbatch costs the smallest
            that holds it. Empty: it costs its own padded tokens.
        communication: Time from the end of one stage's pass to the start of its
            neighbour's.
    """

    stages: tuple[StageCost, ...]
    buckets: tuple[int, ...] = ()
    communication: float = 0.0

    def __post_init__(self):
        if not self.stages:
            raise ValueError("a cost model needs at least one stage, got none.")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets must ascend, got {self.buckets}: sort them.")
        if self.communication < 0:
            raise ValueError(f"communication is {self.communication}, must be >= 0.")

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
    ) -> "CostModel":
        """Equal stages, but for the last, which takes `last_stage` times as long.

        The last one also has the head and the loss.
        """
        stage = StageCost(forward=forward, backward=backward)
        last = StageCost(forward=forward * last_stage, backward=backward * last_stage)
        stages = (stage,) * (num_stages - 1) + (last,)
        return cls(stages=stages, buckets=buckets, communication=communication)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def size(self, microbatch: Microbatch, limits: Limits) -> tuple[int, int]:
        """(tokens, sum of squared sample lengths) that a microbatch is charged for.

        Raises:
            ValueError: It fits no bucket.
        """
        tokens = self.charged(padded_tokens(microbatch, limits))
        return tokens, sum(s.num_tokens**2 for s in microbatch)

    def forward(self, microbatch: Microbatch, limits: Limits) -> tuple[float, ...]:
        """Time of its forward pass on each stage."""
        size = self.size(microbatch, limits)
        return tuple(s.forward(*size) if microbatch else 0.0 for s in self.stages)

    def backward(self, microbatch: Microbatch, limits: Limits) -> tuple[float, ...]:
        """Time of its backward pass on each stage."""
        size = self.size(microbatch, limits)
        return tuple(s.backward(*size) if microbatch else 0.0 for s in self.stages)

    def tables(self, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
        """Times of all forward and of all backward passes, stage by microbatch."""
        sizes = [self.size(m, schedule.limits) for m in schedule.microbatches]
        tokens, squares = np.array(sizes, float).reshape(-1, 2).T
        real = np.array([bool(m) for m in schedule.microbatches], float)
        return self.times(tokens, squares, real)

    def times(
        self, tokens: np.ndarray, squares: np.ndarray, real: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Times of forward and of backward passes, stage by microbatch.

        Args:
            tokens: What each microbatch is charged for.
            squares: Its sum of squared sample lengths.
            real: 0 for a no-op, else 1.
        """
        forward = [s.forward(tokens, squares) * real for s in self.stages]
        backward = [s.backward(tokens, squares) * real for s in self.stages]
        return np.stack(forward), np.stack(backward)

    def charged(self, tokens: int) -> int:
        """Tokens that a microbatch of `tokens` padded tokens is charged for.

        Raises:
            ValueError: It fits no bucket.
        """
        if not self.buckets or not tokens:
            return tokens
        for bucket in self.buckets:
            if bucket >= tokens:
                return bucket
        raise ValueError(
            f"a microbatch of {tokens} tokens fits none of the buckets "
            f"{self.buckets}. Add a bucket of the schedule's capacity."
        )
