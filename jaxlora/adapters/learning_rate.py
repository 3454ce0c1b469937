"""Learning rates over optimizer steps, as the Hugging Face trainer has them."""

import math

from jaxlora.config import LoraJob


def learning_rate(job: LoraJob, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (from 0) out of `num_steps`.

    Warm-up rises linearly from 0; then the rate stays, falls linearly to 0, or follows
    half a cosine to 0 at `num_steps`.
    """
    warmup = job.warmup_steps
    if warmup is None:
        warmup = math.ceil(job.warmup_ratio * num_steps)
    if step < warmup:
        return job.learning_rate * step / warmup
    if job.lr_schedule == "constant":
        return job.learning_rate
    done = (step - warmup) / max(1, num_steps - warmup)
    if job.lr_schedule == "linear":
        return job.learning_rate * max(0.0, 1.0 - done)
    return job.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
