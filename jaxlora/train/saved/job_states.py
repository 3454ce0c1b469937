"""Collects the states of a run's jobs for a checkpoint, and restores them from one."""

from collections.abc import Sequence

from jaxlora.adapters.slots import ParkedSlot
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint


def job_states(runs: Sequence[JobState], slots: StagedSlots) -> dict[str, ParkedSlot]:
    """Returns the states of the jobs that have begun and not ended, by name.

    Args:
        runs: All jobs of the run, between two windows.
        slots: The slots of the run.
    """
    states = {}
    for run in runs:
        if run.has_slot:
            states[run.name] = slots.copy(run.slot)
        elif run.parked is not None:
            states[run.name] = run.parked
    return states


def restore_jobs(
    runs: Sequence[JobState], found: ReadCheckpoint, slots: StagedSlots, num_slots: int
) -> None:
    """Restores progress and states of the jobs in a checkpoint.

    A running job takes its slot again. If this run has no such slot, the job is paused
    and continues in the next free slot. Jobs that are not in the checkpoint stay as
    they are.

    Args:
        runs: All jobs of the run.
        found: The checkpoint.
        slots: The slots of the run, all empty.
        num_slots: Number of slots.
    """
    for run in runs:
        name = run.name
        if name not in found.run.progress:
            continue
        run.progress = found.run.progress[name]
        if name not in found.tensors:
            continue
        slot, parked = run.progress.slot, found.parked(name)
        if slot is not None and slot < num_slots:
            slots.restore(slot, parked, run.start)
            continue
        run.parked = parked
        if slot is not None:
            reason = f"this run has no slot {slot}"
            run.update(status="paused", reason=reason, slot=None)
