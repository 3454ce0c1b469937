"""Collects the states of a run's jobs for a checkpoint, and restores them from one."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxlora.adapters.parked_slot import ParkedSlot, ReadSlot
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JobStates:
    """A snapshot of the jobs that have begun and not ended; training may go on.

    Attributes:
        slots: Slot of each job that runs, by name.
        read_slot: Returns the state of a slot.
        parked: State of each job that is paused, by name.
    """

    slots: Mapping[str, int]
    read_slot: ReadSlot
    parked: Mapping[str, ParkedSlot]

    @staticmethod
    def of(jobs: Sequence[JobState], read_slot: ReadSlot) -> "JobStates":
        """Takes the snapshot; it is complete when this returns.

        Args:
            jobs: All jobs of the run.
            read_slot: The states of the slots, each after the steps of its job.
        """
        return JobStates(
            slots={job.name: job.slot for job in jobs if job.has_slot},
            read_slot=read_slot,
            parked={job.name: job.parked for job in jobs if job.parked is not None},
        )

    def read(self) -> dict[str, ParkedSlot]:
        """Returns the state of each job, by name."""
        running = {name: self.read_slot(slot) for name, slot in self.slots.items()}
        return {**self.parked, **running}


def restore_jobs(
    jobs: Sequence[JobState], found: ReadCheckpoint, slots: StagedSlots, num_slots: int
) -> None:
    """Restores progress and states of the jobs in a checkpoint.

    A running job takes its slot again. If this run has no such slot, the job is paused
    and continues in the next free slot. Jobs that are not in the checkpoint stay as
    they are.

    Args:
        jobs: All jobs of the run.
        found: The checkpoint.
        slots: The slots of the run, all empty.
        num_slots: Number of slots.
    """
    for job in jobs:
        name = job.name
        if name not in found.run.progress:
            continue
        job.progress = found.run.progress[name]
        if name not in found.tensors:
            continue
        parked, slot = found.parked(name), job.progress.slot
        if slot is not None and slot < num_slots:
            slots.restore(slot, parked, job.like)
            continue
        job.parked = parked
        if slot is not None:
            reason = f"this run has no slot {slot}"
            job.update(status="paused", reason=reason, slot=None)
