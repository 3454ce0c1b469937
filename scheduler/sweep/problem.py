"""The problem: configurations of a sweep, GPUs, and what a group of GPUs costs.

A profile gives the parameters of the formulas for time and memory.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One LoRA adapter to train.

    Attributes:
        name: Unique name.
        rank: LoRA rank.
        batch_size: Samples of a step.
        num_steps: Optimizer steps.
        sample_tokens: Tokens of a sample; their mean, if samples differ.
    """

    name: str
    rank: int
    batch_size: int
    num_steps: int
    sample_tokens: int

    def __post_init__(self):
        for field in ("rank", "batch_size", "num_steps", "sample_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"configuration {self.name!r}: {field}={getattr(self, field)} "
                    "must be at least 1."
                )

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.sample_tokens


class Costs(Protocol):
    """Time and memory of a group of GPUs that trains configurations together.

    In a round, each running configuration of the group makes one step. With the
    configurations K running, a round on a group of `degree` GPUs takes

        max over i of (fixed_seconds(degree)[i] + sum over k in K of seconds_of(k)[i])

    which is any increasing, convex, piecewise linear function of additive loads: for
    example, flat until the GPUs are full and linear from there on. The lower bound of
    the planner holds for every function of this form.

    All slots of a group have the rank of its largest configuration (`slot_rank`). What
    a configuration costs may depend on it, and must not decrease with it.
    """

    @property
    def pads_ranks(self) -> bool:
        """Whether costs depend on `slot_rank`, not only on a configuration's own."""
        ...

    def free_bytes(self, degree: int) -> float:
        """Bytes of all GPUs of a group that remain for configurations.

        Zero or less means that the base model does not fit.
        """
        ...

    def bytes_of(
        self, configuration: Configuration, degree: int, slot_rank: int
    ) -> float:
        """Bytes of a running configuration, summed over the GPUs of its group."""
        ...

    def fixed_seconds(self, degree: int) -> tuple[float, ...]:
        """Seconds of a round without any configuration, by line of the maximum."""
        ...

    def seconds_of(
        self, configuration: Configuration, degree: int, slot_rank: int
    ) -> tuple[float, ...]:
        """Seconds that a configuration adds to a round, by line of the maximum."""
        ...


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Configurations that are trained on the GPUs of one machine or cluster.

    Attributes:
        configurations: The configurations, with unique names.
        num_gpus: Number of GPUs.
        max_degree: Largest number of GPUs in a group: those of a host, if groups do not
            span hosts.
    """

    configurations: tuple[Configuration, ...]
    num_gpus: int
    max_degree: int = 8

    def __post_init__(self):
        if not self.configurations:
            raise ValueError("a sweep needs at least one configuration, got none.")
        names = [c.name for c in self.configurations]
        if len(set(names)) < len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"names of configurations must differ; twice: {twice}.")
        for field in ("num_gpus", "max_degree"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1.")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of GPUs that a group may have: powers of two, in ascending order."""
        largest = min(self.num_gpus, self.max_degree)
        return tuple(2**i for i in range(largest.bit_length()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One configuration in time.

    Attributes:
        configuration: The configuration.
        slot: Slot of its group.
        start, end: Seconds since the start of the sweep.
    """

    configuration: Configuration
    slot: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """GPUs that hold one copy of the base model and train configurations together.

    Attributes:
        gpus: Numbers of its GPUs.
        start, end: Seconds since the start of the sweep, between which it has them.
        slot_rank: Rank of its slots.
        runs: Its configurations.
    """

    gpus: tuple[int, ...]
    start: float
    end: float
    slot_rank: int
    runs: tuple[Run, ...]

    @property
    def degree(self) -> int:
        """Number of its GPUs."""
        return len(self.gpus)

    @property
    def num_slots(self) -> int:
        """Most configurations that run at the same time."""
        return 1 + max(run.slot for run in self.runs)

    @property
    def round_tokens(self) -> int:
        """Most tokens of a round, for which one microbatch may be made."""
        tokens = lambda at: sum(
            r.configuration.step_tokens for r in self.runs if r.start <= at < r.end
        )
        return max(tokens(run.start) for run in self.runs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Lower bounds of the makespan, in seconds, each with a proof.

    Attributes:
        fixed_groups: Holds for every plan whose groups keep their GPUs to the end.
        any_plan: Holds for every plan, also if configurations move between groups and
            groups change.
    """

    fixed_groups: float
    any_plan: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """Where and when each configuration of a sweep runs.

    Attributes:
        sweep: The sweep.
        groups: The groups. Those that share a GPU follow one another.
    """

    sweep: Sweep
    groups: tuple[Group, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last configuration has ended."""
        return max(group.end for group in self.groups)

    @property
    def gpu_hours(self) -> float:
        """Hours in which GPUs belong to a group, summed over the GPUs."""
        held = sum(group.degree * (group.end - group.start) for group in self.groups)
        return held / 3600

    def price(self, per_gpu_hour: float) -> float:
        """Returns the price if all GPUs of the sweep are paid for until its end."""
        return self.sweep.num_gpus * self.makespan / 3600 * per_gpu_hour
