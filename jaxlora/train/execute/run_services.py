"""The parts of a run that its stream of microbatches works with, as one value."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.events import Event
from jaxlora.train.control import Control
from jaxlora.train.execute.answers import Measure
from jaxlora.train.execute.executor import Executor
from jaxlora.train.execute.samples import MakeSamples
from jaxlora.train.job_state import JobState
from jaxlora.train.requests import Requests


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunServices:
    """Services that the trainer provides to a stream.

    Attributes:
        plan: The plan of the run.
        jobs: Jobs of the run; more may be added at a border.
        executor: Has the slots, and runs the microbatches.
        requests: Requests to stop and to pause jobs; more may come at any time.
        early_exit: Decides which jobs of a sweep end early.
        export: Writes a job's adapter.
        keep_references: Writes the log-probabilities of a job's samples.
        send: Sends an event to the callbacks.
        make_samples: Generates texts with the adapters in slots, for evaluations.
        measure: Measures the answers of jobs that are evaluated.
    """

    plan: RunPlan
    jobs: Sequence[JobState]
    executor: Executor
    requests: Requests
    early_exit: Control
    export: Callable[[JobState], None]
    keep_references: Callable[[JobState], None]
    send: Callable[[Event], None]
    make_samples: MakeSamples | None = None
    measure: Measure | None = None
