"""Schedules of the learning rate, with the names and the values of transformers'.

Each gives the factor of `learning_rate` in an optimizer step, as the function of the
same name in transformers' `optimization.py` does. Warm-up is a setting of its own.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

ScheduleName = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
_CURVES = ("linear", "cosine", "1-sqrt")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An optimizer step of a job, for its schedule.

    Attributes:
        number: Steps done before it.
        warmup: Steps of warm-up.
        total: Steps of the job.
        peak: The job's `learning_rate`.
    """

    number: int
    warmup: int
    total: int
    peak: float

    @property
    def done(self) -> float:
        """Share of the steps after warm-up that are done."""
        return (self.number - self.warmup) / max(1, self.total - self.warmup)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule of the learning rate.

    Attributes:
        factor: Returns the factor of a step after warm-up. Its keyword arguments are
            the keys of `lr_schedule_args`.
        check: Returns what is wrong with the given settings, from the job's
            `learning_rate` and those settings; None: nothing.
        warm: Returns the factor of a step of warm-up, as `factor` does.
    """

    factor: Callable[..., float]
    check: Callable[[float, Mapping[str, Any]], str | None] = lambda peak, given: None
    warm: Callable[..., float] = lambda step, **settings: step.number / step.warmup

    @property
    def settings(self) -> dict[str, Any]:
        """Default of each key of `lr_schedule_args`; None: it may be left out."""
        arguments = inspect.signature(self.factor).parameters.values()
        return {one.name: one.default for one in arguments if one.name != "step"}


def _cosine(step: Step, *, num_cycles: float = 0.5) -> float:
    return max(0.0, _wave(num_cycles * step.done))


def _wave(cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(2 * math.pi * cycles))


def _restarts(step: Step, *, num_cycles: float = 1.0) -> float:
    if step.done >= 1:
        return 0.0
    return max(0.0, _wave(((num_cycles * step.done) % 1.0) / 2))


def _min_lr(
    step: Step,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    lowest = min_lr_rate if min_lr is None else min_lr / step.peak
    assert lowest is not None
    return max(0.0, _wave(num_cycles * step.done) * (1 - lowest) + lowest)


def _one_step_ahead(
    step: Step,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    step = dataclasses.replace(step, number=step.number + 1)
    return _min_lr(step, num_cycles=num_cycles, min_lr=min_lr, min_lr_rate=min_lr_rate)


def _warm_from_rate(
    step: Step, *, warmup_lr_rate: float | None = None, **others: Any
) -> float:
    if warmup_lr_rate is None:
        return (step.number + 1) / step.warmup
    share = step.number / max(1, step.warmup - 1)
    return warmup_lr_rate + (1 - warmup_lr_rate) * share


def _polynomial(step: Step, *, lr_end: float = 1e-7, power: float = 1.0) -> float:
    left = max(0.0, 1 - step.done) ** power
    return ((step.peak - lr_end) * left + lr_end) / step.peak


def _inverse_sqrt(step: Step, *, timescale: float | None = None) -> float:
    scale = timescale or step.warmup or 10_000
    return (scale / (step.number + scale - step.warmup)) ** 0.5


def _warm_stable(
    step: Step, *, warmup_type: str = "linear", min_lr_ratio: float = 0.0, **others: Any
) -> float:
    done = step.number / step.warmup
    risen = {
        "linear": done,
        "cosine": 0.5 * (1 - math.cos(math.pi * done)),
        "1-sqrt": 1 - math.sqrt(1 - done),
    }
    return max(0.0, risen[warmup_type] * (1 - min_lr_ratio) + min_lr_ratio)


def _stable(
    step: Step,
    *,
    num_decay_steps: float | None = None,
    num_stable_steps: float | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    assert num_decay_steps is not None
    if num_stable_steps is None:
        num_stable_steps = step.total - step.warmup - num_decay_steps
    start = step.warmup + num_stable_steps
    if step.number < start:
        return 1.0
    if step.number >= start + num_decay_steps:
        return min_lr_ratio
    done = (step.number - start) / max(1, num_decay_steps)
    fallen = {
        "linear": 1 - done,
        "cosine": _wave(num_cycles * done),
        "1-sqrt": 1 - math.sqrt(done),
    }
    return max(0.0, fallen[decay_type] * (1 - min_lr_ratio) + min_lr_ratio)


def _has_one_lowest(peak: float, given: Mapping[str, Any]) -> str | None:
    if ("min_lr" in given) == ("min_lr_rate" in given):
        return "give min_lr, the lowest rate, or min_lr_rate, its share of the highest"
    return None


def _ends_below(peak: float, given: Mapping[str, Any]) -> str | None:
    end = given.get("lr_end", SCHEDULES["polynomial"].settings["lr_end"])
    if not end < peak:
        return (
            f"lr_end={end:g} must be below learning_rate={peak:g}: lower "
            "it, or take another schedule"
        )
    return None


def _decays(peak: float, given: Mapping[str, Any]) -> str | None:
    if "num_decay_steps" not in given:
        return "give num_decay_steps, the optimizer steps of the decay"
    for key in ("warmup_type", "decay_type"):
        if given.get(key, "linear") not in _CURVES:
            return f"{key}={given[key]!r} must be one of {', '.join(_CURVES)}"
    return None


SCHEDULES: dict[str, Schedule] = {
    "constant": Schedule(factor=lambda step: 1.0),
    "linear": Schedule(factor=lambda step: max(0.0, 1.0 - step.done)),
    "cosine": Schedule(factor=_cosine),
    "cosine_with_restarts": Schedule(factor=_restarts),
    "cosine_with_min_lr": Schedule(factor=_min_lr, check=_has_one_lowest),
    "cosine_warmup_with_min_lr": Schedule(
        factor=_one_step_ahead, warm=_warm_from_rate, check=_has_one_lowest
    ),
    "polynomial": Schedule(factor=_polynomial, check=_ends_below),
    "inverse_sqrt": Schedule(factor=_inverse_sqrt),
    "warmup_stable_decay": Schedule(factor=_stable, warm=_warm_stable, check=_decays),
}
_TEXTS = ("warmup_type", "decay_type")


def schedule_problem(name: str, given: Mapping[str, Any], peak: float) -> str | None:
    """Returns what is wrong with the settings of a schedule, with the cure.

    Args:
        name: A key of `SCHEDULES`.
        given: The job's `lr_schedule_args`.
        peak: The job's `learning_rate`.
    """
    schedule = SCHEDULES[name]
    for key, value in given.items():
        if key not in schedule.settings:
            known = ", ".join(schedule.settings) or "none"
            return (
                f"{key!r} is not a setting of the schedule {name}, whose "
                f"settings are: {known}. Correct it, or leave it out."
            )
        if isinstance(value, str) != (key in _TEXTS):
            kind = "text" if key in _TEXTS else "a number"
            return f"{key}={value!r} must be {kind}."
        if isinstance(value, float) and value < 0:
            return f"{key}={value:g} must be at least 0."
    problem = schedule.check(peak, given)
    return problem and f"the schedule {name}: {problem}."


def learning_rate(job: Any, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (from 0) out of `num_steps`.

    Args:
        job: A `LoraJob`.
        step: Steps done before it.
        num_steps: Steps of the job.
    """
    warmup = job.warmup_steps
    if warmup is None:
        warmup = math.ceil(job.warmup_ratio * num_steps)
    if not job.learning_rate:
        return 0.0
    schedule = SCHEDULES[job.lr_schedule]
    found = Step(number=step, warmup=warmup, total=num_steps, peak=job.learning_rate)
    factor = schedule.warm if step < warmup else schedule.factor
    return job.learning_rate * factor(found, **job.lr_schedule_args)
