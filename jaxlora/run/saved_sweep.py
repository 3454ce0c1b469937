"""The decisions of a sweep, as a checkpoint holds them."""

import dataclasses

from jaxlora.run.saved_fields import STRICT, Count, JobName


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedSweep:
    """The evaluations and decisions of a sweep, which a resumed run takes over.

    Attributes:
        points: (steps done, held-out loss) of each evaluation, by job.
        cutoffs: Highest loss that went on at each rung of halving that is decided.
        metrics: (steps done, value of the metric of answers), by job.
        stops: The rule and the reason of each job that ends, or has ended, early.
        halving: `eta` and `first` of the rule of halving; None: there is none.
    """

    __pydantic_config__ = STRICT

    points: dict[JobName, list[tuple[Count, float]]]
    cutoffs: list[float]
    stops: dict[JobName, tuple[str, str]]
    metrics: dict[JobName, list[tuple[Count, float]]]
    halving: dict[str, float] | None
