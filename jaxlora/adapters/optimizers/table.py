"""Optimizers: how the gradients of a job's adapter change its weights.

An entry of `OPTIMIZERS` is all that the slots, the optimizer step, checkpoints, meshes
and estimates of memory know of one. Its mathematics is a transformation of optax, which
is applied to one trained tensor of one linear at a time. So no job, layer or pipeline
stage changes what another one gets. Tables for its state follow from the state that the
transformation makes; see `jaxlora.adapters.optimizers.state`. Jobs of one run may have
different optimizers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxlora.config import LoraJob
from jaxlora.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSetting:
    """A number that an optimizer takes.

    Attributes:
        default: Its value where a job does not give it; true and false are 1 and 0.
        below: Values are from 0 to less than this.
        is_positive: Whether 0 is refused, too.
        job_setting: The setting of `LoraJob` that gives it; None: `optimizer_args`.
    """

    default: float
    below: float = math.inf
    is_positive: bool = False
    job_setting: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Optimizer:
    """Update rule of a job's adapter, and its settings.

    Attributes:
        name: Value of the setting `optimizer` of a job.
        settings: Its settings, by name, beside the learning rate and weight decay.
        transformation: Makes optax's transformation from the learning rate, the
            decoupled weight decay, and its settings by name: scalars, which may be
            traced. It is given one tensor at a time, in a dict by its name in
            `jaxlora.modules.trained_tensors`. A tensor has the slots' rank: beyond the
            rank of its own adapter, which is the extra argument `rank` of `update`, its
            values and gradients are zero. Where the state has an axis for the rank, it
            has the slots' rank, too.
        evaluation: Returns the weights that are evaluated and exported, from the
            weights in training and the state tensors by name, all of one tensor; None:
            they are the weights in training.
        mixes_elements: Whether it combines elements of a matrix. Slots are computed one
            after another then: their number changes no order of a sum, and no bit, and
            what is computed on the way is that of one slot.
        has_constant_rate: Whether it replaces the decay of the learning rate.
        fingerprint: Tells optimizers of equal names apart whose code is not in this
            package, for programs that are kept on the disk.
    """

    name: str
    settings: Mapping[str, OptimizerSetting]
    transformation: Callable[..., Any]
    evaluation: Callable[[Any, Mapping[str, Any]], Any] | None = None
    mixes_elements: bool = False
    has_constant_rate: bool = False
    fingerprint: str = ""

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


def _schedule_free(
    learning_rate: Any, weight_decay: Any, *, b1: Any, b2: Any, eps: Any
) -> Any:
    import jax.numpy as jnp
    import optax

    # The state begins with a b1, which makes no difference before the first step.
    start = optax.contrib.schedule_free_adamw()
    inner: Any = optax.contrib.schedule_free_adamw(
        learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
    )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(updates, state, params)
        return updates, state._replace(b1=jnp.float32(b1))

    return optax.GradientTransformation(start.init, update)


def _average(weights: Any, state: Mapping[str, Any]) -> Any:
    """The average x of arXiv 2405.15682, from y, where gradients are taken, and z."""
    b1 = state["b1"]
    b1 = b1 + (b1 == 0)  # in an empty slot, everything is 0
    return (weights - (1 - b1) * state["z"]) / b1


def _lion(learning_rate: Any, weight_decay: Any, *, b1: Any, b2: Any) -> Any:
    import optax

    return optax.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay)


def _sgd(learning_rate: Any, weight_decay: Any, *, momentum: Any, nesterov: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    plain, ahead = (optax.trace(momentum, nesterov=one) for one in (False, True))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        looking_ahead, _ = ahead.update(updates, state, params)
        updates, state = plain.update(updates, state, params)
        chosen = lambda one, other: jnp.where(nesterov > 0, other, one)
        return jax.tree.map(chosen, updates, looking_ahead), state

    return optax.chain(
        optax.GradientTransformation(plain.init, update),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def _muon(learning_rate: Any, weight_decay: Any, **settings: Any) -> Any:
    from jaxlora.adapters.optimizers.muon import muon

    return muon(learning_rate, weight_decay, **settings)


def _adafactor(learning_rate: Any, weight_decay: Any, **settings: Any) -> Any:
    from jaxlora.adapters.optimizers.adafactor import adafactor

    return adafactor(learning_rate, weight_decay, **settings)


_ADAM = {
    "b1": OptimizerSetting(default=0.9, below=1.0, job_setting="adam_b1"),
    "b2": OptimizerSetting(default=0.999, below=1.0, job_setting="adam_b2"),
    "eps": OptimizerSetting(default=1e-8, job_setting="adam_eps"),
}
ADAMW = Optimizer(  # arXiv 1711.05101
    name="adamw", settings=_ADAM, transformation=_adamw
)
LION = Optimizer(  # arXiv 2302.06675
    name="lion",
    settings={
        "b1": OptimizerSetting(default=0.9, below=1.0),
        "b2": OptimizerSetting(default=0.99, below=1.0),
    },
    transformation=_lion,
)
OPTIMIZERS: dict[str, Optimizer] = {
    one.name: one
    for one in (
        ADAMW,
        Optimizer(  # arXiv 2405.15682
            name="schedule_free_adamw",
            settings=_ADAM | {"b1": dataclasses.replace(_ADAM["b1"], is_positive=True)},
            transformation=_schedule_free,
            evaluation=_average,
            has_constant_rate=True,
        ),
        LION,
        Optimizer(
            name="sgd",
            settings={
                "momentum": OptimizerSetting(default=0.0, below=1.0),
                "nesterov": OptimizerSetting(default=False, below=2),
            },
            transformation=_sgd,
        ),
        Optimizer(
            name="muon",
            settings={
                "momentum": OptimizerSetting(default=0.95, below=1.0),
                "rms": OptimizerSetting(default=0.2),
                **_ADAM,
            },
            transformation=_muon,
            mixes_elements=True,
        ),
        Optimizer(
            name="adafactor",
            settings={
                "clip_threshold": OptimizerSetting(default=1.0, is_positive=True),
                "decay_rate": OptimizerSetting(default=0.8),
            },
            transformation=_adafactor,
            mixes_elements=True,
        ),
    )
}


def evaluates_other_weights(optimizer: str) -> bool:
    """Whether other weights are evaluated and exported than those in training.

    Args:
        optimizer: Name of an optimizer, which need not be registered here.
    """
    found = OPTIMIZERS.get(optimizer)
    return found is not None and found.evaluation is not None


def find_by_other_name(name: str) -> Optimizer | None:
    """Returns an optimizer by a name that other tools have for it, if there is one.

    Args:
        name: A value of `optim` in transformers or of `optimizer` in Axolotl, such as
            `adamw_torch_fused` or `paged_lion_8bit`.
    """
    first, _, _ = name.removeprefix("paged_").partition("_")
    return OPTIMIZERS.get(name) or OPTIMIZERS.get(first)


def find_optimizer(job: LoraJob) -> Optimizer:
    """Returns the optimizer of a job, after checking its settings.

    Raises:
        ConfigError: There is none of this name, or it has no such setting or value.
    """
    if job.optimizer not in OPTIMIZERS:
        meant = find_by_other_name(job.optimizer)
        cure = (
            " One of your own is registered with jaxlora.register_optimizer, in each "
            "process that trains."
            if meant is None
            else f" Set `optimizer: {meant.name}`."
        )
        raise ConfigError(
            f"optimizer={job.optimizer!r} must be one of {', '.join(OPTIMIZERS)}.{cure}"
        )
    found = OPTIMIZERS[job.optimizer]
    _check_args(job, found)
    _check_values(job, found)
    own = {setting.job_setting for setting in found.settings.values()}
    for name, setting in ADAMW.settings.items():
        key = setting.job_setting
        if key is None or key in own or getattr(job, key) == setting.default:
            continue
        cure = "Leave it out"
        if name in found.settings:
            cure += f", and set {name} in optimizer_args"
        raise ConfigError(
            f"{key} is a setting of {ADAMW.name}, and optimizer is {found.name}. "
            f"{cure}."
        )
    _check_combines(job, found)
    return found


def _check_combines(job: LoraJob, found: Optimizer) -> None:
    """Refuses settings of a job that its optimizer cannot follow."""
    if found.has_constant_rate and job.lr_schedule != "constant":
        raise ConfigError(
            f"lr_schedule={job.lr_schedule!r}, and optimizer {found.name} averages "
            "weights instead of lowering the rate. Set `lr_schedule: constant`; "
            "warm-up is as for other optimizers."
        )
    if job.keeps_start and (found.mixes_elements or found.evaluation is not None):
        raise ConfigError(
            f"init_lora_weights={job.init_lora_weights} keeps the first weights beside "
            f"those in training, and {found.name} would take both for one matrix. Set "
            "`optimizer: adamw`, lion or sgd, or choose another start."
        )
    settings = "trainable_token_indices", "new_special_tokens", "modules_to_save"
    for setting in settings:
        if getattr(job, setting) and found.mixes_elements:
            raise ConfigError(
                f"{setting} cannot be combined with {found.name}, which combines "
                "elements of a matrix: the rows of tokens are none. Set "
                "`optimizer: adamw`, lion, sgd or schedule_free_adamw."
            )


def _check_args(job: LoraJob, optimizer: Optimizer) -> None:
    settings = optimizer.settings
    free = {name: one for name, one in settings.items() if one.job_setting is None}
    for name in job.optimizer_args:
        if name not in free:
            known = f"which has {', '.join(free)}" if free else "which has none here"
            if name in settings:
                known = f"where it is {settings[name].job_setting}"
            raise ConfigError(
                f"optimizer_args: {name!r} is no setting of {optimizer.name}, {known}."
            )


def _check_values(job: LoraJob, optimizer: Optimizer) -> None:
    for name, value in optimizer.settings_of(job).items():
        setting = optimizer.settings[name]
        if 0 <= value < setting.below and (value or not setting.is_positive):
            continue
        rule = "above 0" if setting.is_positive else "at least 0"
        bound = f" and below {setting.below:g}" if setting.below < math.inf else ""
        where = setting.job_setting or f"optimizer_args: {name}"
        raise ConfigError(f"{where}={value:g} must be {rule}{bound}.")
