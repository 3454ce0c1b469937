"""Warns of microbatches that a run cannot fill."""

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.memory.bounds import Bounds

_LOW = 0.5


def low_fill(config: RunConfig, bounds: Bounds) -> tuple[Note, ...]:
    """Warns if less than half of a microbatch can be filled, and names the cure.

    A microbatch never holds two steps of a job, so one that is larger than a step of
    all jobs that run at once stays partly empty.

    Args:
        config: The run, with a number for `microbatch_tokens`.
        bounds: Bounds of its capacity.
    """
    capacity = config.limits.capacity
    step_tokens = bounds.window_tokens / config.window_steps
    if step_tokens >= _LOW * capacity:
        return ()
    if capacity > bounds.largest:
        cure = f"Set microbatch_tokens to auto, which takes at most {bounds.largest:,}"
    else:
        cure = (
            "The longest sample needs such a microbatch. Raise batch_size, train more "
            "jobs at once, or lower max_length"
        )
    num_lanes = config.mesh_sizes.devices_per_stage
    lanes = f" for each of {num_lanes} devices" if num_lanes > 1 else ""
    text = (
        f"low fill: at most {100 * step_tokens / capacity:.0f}% of a microbatch of "
        f"{capacity:,} tokens can be filled, as a step of all jobs that run at once "
        f"has about {step_tokens:,.0f} tokens{lanes}. {cure}."
    )
    return (Note(text, is_warning=True),)
