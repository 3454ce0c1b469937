"""Settings of optimizer steps, one row per slot."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxlora.adapters.optimizer import OptimizerInputs
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.config import LoraJob
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.train.job_state import JobState


def by_slot(values: Mapping[int, float], num_slots: int, dtype: Any) -> Any:
    """Puts values into a NumPy array by slot; a jitted call uploads it fastest."""
    out = np.zeros(num_slots, dtype)
    for slot, value in values.items():
        out[slot] = value
    return out


def optimizer_inputs(
    jobs: Mapping[int, JobState], steps: Mapping[int, int], slots: SlotShape
) -> OptimizerInputs:
    """Returns the settings of optimizer steps.

    Args:
        jobs: The jobs, by slot.
        steps: Numbers of the steps, by slot; rows of the other slots are not used.
        slots: The slots.
    """
    # Inputs that stay the same are made once, as this is the host's time of a tick.
    settings = tuple((slot, _Identical(job.settings)) for slot, job in jobs.items())
    fixed = _fixed_inputs(settings, slots)
    rates = {slot: jobs[slot].learning_rate(step) for slot, step in steps.items()}
    return dataclasses.replace(
        fixed,
        step_mask=by_slot(dict.fromkeys(steps, True), slots.num_slots, np.bool_),
        count=by_slot(steps, slots.num_slots, np.int32),
        learning_rate=by_slot(rates, slots.num_slots, np.float32),
    )


class _Identical:
    """Settings of a job, compared by identity: they are frozen, and slow to hash."""

    def __init__(self, job: LoraJob):
        self.job = job

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self.job is other.job

    def __hash__(self) -> int:
        return id(self.job)


@functools.lru_cache(maxsize=16)
def _fixed_inputs(
    jobs: tuple[tuple[int, _Identical], ...], slots: SlotShape
) -> OptimizerInputs:
    """Returns settings that are the same at every step, for all jobs by slot."""

    def row(value: Callable[[LoraJob], float], dtype=np.float32) -> Any:
        values = {slot: value(one.job) for slot, one in jobs}
        return by_slot(values, slots.num_slots, dtype)

    def settings(name: str) -> dict[str, Any]:
        """Settings of an optimizer; 0 in slots with another one."""
        optimizer = OPTIMIZERS[name]
        own = {
            slot: optimizer.settings_of(one.job)
            for slot, one in jobs
            if one.job.optimizer == name
        }
        return {
            key: by_slot({s: own[s][key] for s in own}, slots.num_slots, np.float32)
            for key in optimizer.settings
        }

    number = {name: i for i, name in enumerate(slots.optimizers)}

    return OptimizerInputs(
        step_mask=row(lambda job: False, np.bool_),
        count=row(lambda job: 0, np.int32),
        learning_rate=row(lambda job: 0.0),
        rate_ratio=rate_ratios(row),
        weight_decay=row(lambda job: job.weight_decay),
        settings={name: settings(name) for name in slots.optimizers},
        optimizer=row(lambda job: number[job.optimizer], np.int32),
        max_norm=row(lambda job: job.max_grad_norm or np.inf),
    )
