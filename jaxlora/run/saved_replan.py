"""A comparison of replicas that is due, as a checkpoint holds it."""

import dataclasses

from jaxlora.run.saved_fields import STRICT, Count, JobName, OneLine


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedReplan:
    """For which jobs the replicas of a run were compared, and with what.

    Attributes:
        deployment: The replicas that ran.
        jobs: The jobs for which they were compared last, or are to be.
        held: The jobs that replicas had to hold, as they had not ended: `jobs`, and
            those that were paused or waited; None: an earlier version saved it, for
            which all jobs of the run were.
        steps: Steps that each of these jobs had done when one joined or left, which the
            comparison is made from; empty: it is made.
        slots: The slots of those that had one.
        why: Which jobs had joined or left.
        due: Steps of all jobs of the run, in all, at which it takes effect.
    """

    __pydantic_config__ = STRICT

    deployment: OneLine
    jobs: list[JobName]
    held: list[JobName] | None = None
    steps: dict[JobName, Count] = dataclasses.field(default_factory=dict)
    slots: dict[JobName, Count] = dataclasses.field(default_factory=dict)
    why: str = ""
    due: Count = 0

    def __post_init__(self):
        """Checks that the jobs are the same ones; see `read_sealed`."""
        if self.steps and self.steps.keys() != set(self.jobs):
            raise ValueError("replan.steps has other jobs than replan.jobs.")
        if self.held is not None and not set(self.jobs) <= set(self.held):
            raise ValueError("replan.jobs has jobs that replan.held has not.")
        if not self.slots.keys() <= self.steps.keys():
            raise ValueError("replan.slots has jobs that replan.steps has not.")
