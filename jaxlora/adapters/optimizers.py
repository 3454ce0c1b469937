"""Optimizers: how the gradients of a job's adapter change its weights.

An entry of `OPTIMIZERS` is all that the slots, the optimizer step, checkpoints, meshes
and estimates of memory know of one. The mathematics is optax's. Jobs of one run may
have different optimizers: the slots hold a table for each state tensor that any of them
has, and optimizers share the tables of equal names, as a slot has one optimizer.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxlora.config import LoraJob
from jaxlora.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSetting:
    """A number that an optimizer takes.

    Attributes:
        default: Its value where a job does not give it.
        below: Values are from 0 to less than this.
        job_setting: The setting of `LoraJob` that gives it; None: `optimizer_args`.
    """

    default: float
    below: float = math.inf
    job_setting: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Update rule of a job's adapter, and its settings.

    Attributes:
        name: Value of the setting `optimizer` of a job.
        state: Names of its state tensors, as fields of optax's state. Each has the
            shapes of the weights, is float32, and starts at zero.
        settings: Its settings, by name, beside the learning rate and weight decay.
        transformation: Makes optax's transformation from the learning rate, the
            decoupled weight decay, and its settings by name: scalars, which may be
            traced. It is applied to one adapter at a time.
    """

    name: str
    state: tuple[str, ...]
    settings: Mapping[str, OptimizerSetting]
    transformation: Callable[..., Any]

    def settings_of(self, job: LoraJob) -> dict[str, float]:
        """Returns the values of its settings in a job with this optimizer."""
        return {
            name: getattr(job, setting.job_setting)
            if setting.job_setting
            else job.optimizer_args.get(name, setting.default)
            for name, setting in self.settings.items()
        }


# Checking settings needs no optax, which takes a second to import.


def _adamw(learning_rate: Any, weight_decay: Any, *, b1: Any, b2: Any, eps: Any) -> Any:
    import optax

    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


def _lion(learning_rate: Any, weight_decay: Any, *, b1: Any, b2: Any) -> Any:
    import optax

    return optax.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay)


ADAMW = Optimizer(  # arXiv 1711.05101
    name="adamw",
    state=("mu", "nu"),
    settings={
        "b1": OptimizerSetting(default=0.9, below=1.0, job_setting="adam_b1"),
        "b2": OptimizerSetting(default=0.999, below=1.0, job_setting="adam_b2"),
        "eps": OptimizerSetting(default=1e-8, job_setting="adam_eps"),
    },
    transformation=_adamw,
)
LION = Optimizer(  # arXiv 2302.06675
    name="lion",
    state=("mu",),
    settings={
        "b1": OptimizerSetting(default=0.9, below=1.0),
        "b2": OptimizerSetting(default=0.99, below=1.0),
    },
    transformation=_lion,
)
OPTIMIZERS: dict[str, Optimizer] = {one.name: one for one in (ADAMW, LION)}


def state_names(optimizers: Iterable[str]) -> tuple[str, ...]:
    """Names of the state tensors of some optimizers, each once.

    Args:
        optimizers: Names of optimizers.
    """
    names = (name for optimizer in optimizers for name in OPTIMIZERS[optimizer].state)
    return tuple(sorted(set(names)))


def find_by_other_name(name: str) -> Optimizer | None:
    """Returns an optimizer by a name that transformers has for it, if there is one.

    Args:
        name: A value of `optim`, such as `adamw_torch_fused` or `paged_lion_8bit`.
    """
    first = name.removeprefix("paged_").partition("_")[0]
    return OPTIMIZERS.get(first)


def find_optimizer(job: LoraJob) -> Optimizer:
    """Returns the optimizer of a job, after checking its settings.

    Raises:
        ConfigError: There is none of this name, or it has no such setting or value.
    """
    if job.optimizer not in OPTIMIZERS:
        meant = find_by_other_name(job.optimizer)
        cure = "" if meant is None else f" Set `optimizer: {meant.name}`."
        raise ConfigError(
            f"optimizer={job.optimizer!r} must be one of {', '.join(OPTIMIZERS)}.{cure}"
        )
    found = OPTIMIZERS[job.optimizer]
    _check_args(job, found)
    for other in OPTIMIZERS.values():
        for name, setting in other.settings.items():
            key = setting.job_setting
            if other is found or key is None or getattr(job, key) == setting.default:
                continue
            cure = "Leave it out"
            if name in found.settings:
                cure += f", and set {name} in optimizer_args"
            raise ConfigError(
                f"{key} is a setting of {other.name}, and optimizer is {found.name}. "
                f"{cure}."
            )
    return found


def _check_args(job: LoraJob, optimizer: Optimizer) -> None:
    settings = optimizer.settings
    free = {name: one for name, one in settings.items() if one.job_setting is None}
    for name, value in job.optimizer_args.items():
        if name not in free:
            known = f"which has {', '.join(free)}" if free else "which has none here"
            if name in settings:
                known = f"where it is {settings[name].job_setting}"
            raise ConfigError(
                f"optimizer_args: {name!r} is no setting of {optimizer.name}, {known}."
            )
        if not 0 <= value < free[name].below:
            bound = f" and below {free[name].below:g}" if free[name].below < 1e9 else ""
            raise ConfigError(
                f"optimizer_args: {name}={value:g} must be at least 0{bound}."
            )
