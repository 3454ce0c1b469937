"""Time and memory of groups as formulas, whose parameters a profile gives."""

import dataclasses
from collections.abc import Mapping

from jaxlora.scheduler.sweep.problem import Configuration


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepLine:
    """Seconds of a round, linear in what its configurations bring.

    Attributes:
        fixed: Seconds of any round.
        per_token: Seconds for each token of each configuration's step.
        per_rank_token: Seconds for each token and rank, of the LoRA products.
        per_rank: Seconds for each rank, of the optimizer.
    """

    fixed: float
    per_token: float
    per_rank_token: float = 0.0
    per_rank: float = 0.0

    def __post_init__(self):
        if min(dataclasses.astuple(self)) < 0:
            raise ValueError(f"{self} has a negative time. Give none below 0.")

    def seconds_of(self, tokens: int, rank: int) -> float:
        """Returns the seconds that one configuration adds."""
        per_rank = self.per_rank + self.per_rank_token * tokens
        return self.per_token * tokens + per_rank * rank

    def slowed(self, factor: float) -> "StepLine":
        """Returns the line with all seconds multiplied by a factor."""
        return StepLine(**{k: factor * v for k, v in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupCosts:
    """Costs of groups of one degree.

    Attributes:
        step: A round takes the largest of these times.
        free_bytes: Bytes of all GPUs of a group that remain for configurations, after
            the base model, and what is kept free.
        bytes_per_rank: Bytes of an adapter for each rank, with gradients and optimizer
            state.
        bytes_per_token: Bytes of activations for each token of a configuration's step.
            Zero, if microbatches have a fixed capacity, whose activations are then not
            part of `free_bytes`.
        most_tokens: Tokens of a step whose activations are in memory at once; a longer
            step accumulates gradients. None: all.
    """

    step: tuple[StepLine, ...]
    free_bytes: float
    bytes_per_rank: float
    bytes_per_token: float = 0.0
    most_tokens: int | None = None

    def __post_init__(self):
        if not self.step:
            raise ValueError("a group needs at least one line of time, got none.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticCosts:
    """Costs by formula; see `Costs`.

    Attributes:
        by_degree: Costs of groups, by their number of GPUs. The base model does not fit
            into groups of other numbers.
        pads_ranks: Whether each slot of a group has the memory and computes the
            products of the group's largest rank, as in this project's trainer, or only
            those of its configuration, as in PLoRA's cost model.
    """

    by_degree: Mapping[int, GroupCosts]
    pads_ranks: bool

    def __post_init__(self):
        if self.pads_ranks and any(c.bytes_per_token for c in self.by_degree.values()):
            raise ValueError(
                "with pads_ranks, slots keep their memory while they are empty, so all "
                "slots of a group must be equal: bytes_per_token must be 0. Subtract "
                "the activations of a microbatch from free_bytes instead."
            )

    def free_bytes(self, degree: int) -> float:
        group = self.by_degree.get(degree)
        return 0.0 if group is None else group.free_bytes

    def bytes_of(
        self, configuration: Configuration, degree: int, slot_rank: int
    ) -> float:
        group = self.by_degree[degree]
        tokens = configuration.step_tokens
        if group.most_tokens is not None:
            tokens = min(tokens, max(group.most_tokens, configuration.sample_tokens))
        rank = self._rank(configuration, slot_rank)
        return group.bytes_per_rank * rank + group.bytes_per_token * tokens

    def fixed_seconds(self, degree: int) -> tuple[float, ...]:
        return tuple(line.fixed for line in self.by_degree[degree].step)

    def seconds_of(
        self, configuration: Configuration, degree: int, slot_rank: int
    ) -> tuple[float, ...]:
        rank, tokens = self._rank(configuration, slot_rank), configuration.step_tokens
        step = self.by_degree[degree].step
        return tuple(line.seconds_of(tokens, rank) for line in step)

    def _rank(self, configuration: Configuration, slot_rank: int) -> int:
        if not self.pads_ranks:
            return configuration.rank
        return max(slot_rank, configuration.rank)
