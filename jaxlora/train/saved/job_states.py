"""Collects the states of a run's jobs for a checkpoint, and restores them from one."""

from collections.abc import Sequence

from jaxlora.adapters.slots import ParkedSlot
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint


def job_states(jobs: Sequence[JobState], slots: StagedSlots) -> dict[str, ParkedSlot]:
    """Returns the states of the jobs that have begun and not ended, by name.

    Args:
        jobs: All jobs of the run, between two windows.
        slots: The slots of the run.
    """
    states = {}
    for job in jobs:
        if job.has_slot:
            states[job.name] = slots.copy(job.slot)
        elif job.parked is not None:
            states[job.name] = job.parked
    return states


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
        slot, parked = job.progress.slot, found.parked(name)
        if slot is not None and slot < num_slots:
            slots.restore(slot, parked, job.start)
            continue
        job.parked = parked
        if slot is not None:
            reason = f"this run has no slot {slot}"
            job.update(status="paused", reason=reason, slot=None)
