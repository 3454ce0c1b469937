"""Which samples run together, and when. Pure Python: no JAX, no GPU."""

from scheduler import greedy
from scheduler.check import violations
from scheduler.types import (
    Limits,
    Microbatch,
    Sample,
    Schedule,
    padded_tokens,
    tokens_by_job,
)

__all__ = [
    "Limits",
    "Microbatch",
    "Sample",
    "Schedule",
    "greedy",
    "padded_tokens",
    "tokens_by_job",
    "violations",
]
