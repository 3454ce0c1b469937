"""Simulates steps on replicas: a barrier for each step, or one for each job.

With a barrier for each step, as in LobRA, all replicas wait for the last one before
all jobs take their optimizer steps. With one for each job, a job's step waits for its
own samples alone, and a replica goes on with a job whose step is done. All replicas
run the jobs of a step in one order, which is that in which the jobs were ready: so the
first job's next step is ready when the last job's samples still run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxlora.scheduler.replicas.dispatcher import Dispatch, dispatch
from jaxlora.scheduler.replicas.problem import Deployment

type Barrier = Literal["job", "step"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The samples of a job's step on one replica.

    Attributes:
        replica: Number of the replica.
        job: Number of the job.
        step: Number of the step.
        start, end: Seconds since the start.
    """

    replica: int
    job: int
    step: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SimulatedSteps:
    """Steps in time.

    Attributes:
        deployment: The replicas.
        seconds: End of the last step.
        busy: Seconds in which each replica computes [replicas].
        parts: What each replica does, in the order of time.
    """

    deployment: Deployment
    seconds: float
    busy: np.ndarray
    parts: tuple[Part, ...]

    @property
    def idle(self) -> np.ndarray:
        """Share of the time in which each replica waits [replicas]."""
        return 1 - self.busy / self.seconds if self.seconds else 0 * self.busy

    @property
    def gpus_idle(self) -> float:
        """Share of the time in which a GPU waits, on average."""
        sizes = np.array([kind.num_gpus for kind in self.deployment.replicas])
        return float((sizes * self.idle).sum() / sizes.sum())


def simulate_steps(
    deployment: Deployment,
    steps: Sequence[Sequence[np.ndarray]],
    *,
    barrier: Barrier = "job",
) -> SimulatedSteps:
    """Simulates steps that are dispatched one after the other.

    Args:
        deployment: The replicas.
        steps: Lengths of the samples of each job, in each step.
        barrier: What waits for all samples: each job's step, or all jobs' together.

    Raises:
        ValueError: A sample fits into no replica.
    """
    num_jobs = max((len(step) for step in steps), default=0)
    free = np.zeros(deployment.num_replicas)
    busy = np.zeros(deployment.num_replicas)
    ready = np.zeros(num_jobs)
    parts: list[Part] = []
    for number, step in enumerate(steps):
        if barrier == "step":
            free[:] = ready[:] = max(free.max(), ready.max(initial=0.0))
        lengths = np.concatenate([np.empty(0, int), *step])
        owners = np.repeat(np.arange(len(step)), [len(own) for own in step])
        begin = free - free.min() if barrier == "job" else None
        sent = dispatch(deployment, lengths, start=begin)
        seconds = _part_seconds(deployment, lengths, owners, sent, num_jobs)
        done = np.zeros(num_jobs)
        for job in np.argsort(ready, kind="stable"):
            for replica in np.flatnonzero(seconds[:, job]):
                took = seconds[replica, job]
                start = max(free[replica], ready[job])
                free[replica] = end = start + took
                busy[replica] += took
                done[job] = max(done[job], end)
                parts.append(
                    Part(
                        replica=int(replica),
                        job=int(job),
                        step=number,
                        start=float(start),
                        end=float(end),
                    )
                )
        ready = np.maximum(ready, done)
    return SimulatedSteps(
        deployment=deployment,
        seconds=float(free.max()),
        busy=busy,
        parts=tuple(parts),
    )


def _part_seconds(
    deployment: Deployment,
    lengths: np.ndarray,
    owners: np.ndarray,
    sent: Dispatch,
    num_jobs: int,
) -> np.ndarray:
    """Returns the seconds of each job on each replica [replicas, jobs].

    The base of a replica is divided among its jobs by their time.
    """
    kind_of = deployment.kind_of
    seconds = np.stack([kind.seconds(lengths) for kind in deployment.kinds])
    own = seconds[kind_of[sent.replica_of], np.arange(len(lengths))]
    cell = sent.replica_of * num_jobs + owners
    out = np.bincount(cell, own, len(kind_of) * num_jobs).reshape(-1, num_jobs)
    bases = np.array([kind.cost.base for kind in deployment.replicas])
    total = out.sum(axis=1)
    return (
        out
        * np.divide(total + bases, total, out=np.ones_like(total), where=total > 0)[
            :, None
        ]
    )
