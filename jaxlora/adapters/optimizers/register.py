"""Optimizers of users: a transformation of optax becomes an entry of the table."""

import dataclasses
import hashlib
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlora.adapters.optimizers.state import transformation
from jaxlora.adapters.optimizers.table import OPTIMIZERS, Optimizer, OptimizerSetting
from jaxlora.errors import ConfigError
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.variant import TrainedTensor

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RATES = ["learning_rate", "weight_decay"]
# Ranks and features of the matrices with which a transformation is tried.
_RANKS, _FEATURES = (2, 3), 5


def register_optimizer(name: str, make_transformation: Any) -> None:
    """Makes a transformation of optax an optimizer of jobs, under the same isolation.

    It is applied to each matrix by itself, A and B of each linear, and mapped over the
    slots. So it depends on no other job, layer or device; a norm over all matrices is
    what `max_grad_norm` is for. Its state is parked, saved, sharded, resumed and
    counted in memory as that of any other optimizer. Call this in each process that
    trains, before the run is made.

        def adagrad(learning_rate, weight_decay, *, eps=1e-7):
            return optax.chain(
                optax.scale_by_rss(eps=eps),
                optax.add_decayed_weights(weight_decay),
                optax.scale_by_learning_rate(learning_rate),
            )

        jaxlora.register_optimizer("adagrad", adagrad)
        job = jaxlora.LoraJob(..., optimizer="adagrad", optimizer_args={"eps": 1e-8})

    Args:
        name: Value of the setting `optimizer`: lower-case letters, digits and `_`.
        make_transformation: Makes an `optax.GradientTransformation` from the learning
            rate of the step and the weight decay of the job, float32 scalars that are
            traced. Further parameters have numbers as defaults, and are settings of
            `optimizer_args`; they are traced, too. The transformation gets and returns
            a dict with one matrix by its name, such as `{"lora_a": ...}`, K r, or
            `lora_b`, r N, float32. Matrices of smaller ranks than the slots' are filled
            with zeros, and stay so. If a mean or a scale depends on the rank, `update`
            takes it as the extra argument `rank`
            (`optax.GradientTransformationExtraArgs`).
            A counter of steps in the state is named `count`, as in optax, and is the
            job's. The state at the start may depend on the weights, and on no setting.

    Raises:
        ConfigError: The name is taken or no name, or the transformation breaks one of
            these rules. Nothing is registered then.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"optimizer name {name!r} must be lower-case letters, digits and '_', and "
            "begin with a letter. Choose such a name."
        )
    if name in OPTIMIZERS:
        raise ConfigError(
            f"optimizer name {name!r} is taken: there are {', '.join(OPTIMIZERS)}. "
            "Choose another name; an optimizer is registered once in a process."
        )
    try:
        found = Optimizer(
            name=name,
            settings=_settings(make_transformation),
            transformation=make_transformation,
            mixes_elements=True,  # it may
        )
        code = hashlib.sha256()
        for tensor in (LORA_A, LORA_B):
            shapes, text = zip(*(_try(found, tensor, r) for r in _RANKS), strict=True)
            _check_axes(*shapes)
            code.update("".join(text).encode())
    except ConfigError as error:
        raise ConfigError(f"optimizer {name!r}: {error}") from error.__cause__
    OPTIMIZERS[name] = dataclasses.replace(found, fingerprint=code.hexdigest())


def _settings(make: Any) -> dict[str, OptimizerSetting]:
    """Returns the settings of a transformation: its parameters with defaults."""
    if not callable(make):
        raise ConfigError(
            f"make_transformation is {make!r:.80}, and must be a function of "
            "learning_rate and weight_decay. Pass the function that makes the "
            "transformation."
        )
    parameters = dict(inspect.signature(make).parameters)
    if list(parameters)[:2] != _RATES:
        raise ConfigError(
            f"make_transformation has the parameters ({', '.join(parameters)}), and "
            "must begin with learning_rate and weight_decay. Add them, and use them in "
            "the transformation."
        )
    defaults = {key: p.default for key, p in parameters.items() if key not in _RATES}
    for key, default in defaults.items():
        if not isinstance(default, int | float) or not 0 <= default < np.inf:
            is_missing = default is inspect.Parameter.empty
            given = "no default" if is_missing else f"the default {default!r:.80}"
            raise ConfigError(
                f"the parameter {key} of make_transformation has {given}, and must "
                "have a number that is at least 0, which jobs set in optimizer_args. "
                "Give it one, or take the parameter away."
            )
    return {key: OptimizerSetting(default=value) for key, value in defaults.items()}


def _try(optimizer: Optimizer, tensor: TrainedTensor, rank: int) -> tuple[Any, str]:
    """Returns the shapes of a state by path, and the code of its start and of a step.

    Raises:
        ConfigError: The state or the step breaks a rule.
    """
    defaults = {name: one.default for name, one in optimizer.settings.items()}
    made = optimizer.transformation(1e-3, 0.0, **defaults)
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"make_transformation returned a {type(made).__name__}, and must return an "
            "optax.GradientTransformation. Return one, such as optax.chain(...)."
        )
    shape = tensor.shape(_FEATURES, _FEATURES, rank)
    values = np.random.default_rng(0).normal(size=shape)
    weight = {tensor.name: jnp.array(values, jnp.float32)}
    state = transformation(optimizer).init(weight)
    others = {name: default / 2 + 0.25 for name, default in defaults.items()}
    _check_start(state, transformation(optimizer, 0.5, 0.5, others).init(weight))

    def step(weight: Any, state: Any, rank: Any, rates: Any, settings: Any) -> Any:
        learning_rate, weight_decay = rates
        start = transformation(optimizer).init(weight)
        made = transformation(optimizer, learning_rate, weight_decay, settings)
        return start, *made.update(weight, state, weight, rank=rank)

    settings = {name: jnp.float32(default) for name, default in defaults.items()}
    rates = jnp.float32(1e-3), jnp.float32(0.0)
    try:
        traced = jax.jit(step).trace(weight, state, jnp.int32(1), rates, settings)
    except (jax.errors.JAXTypeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"a step of {tensor.name} fails when it is traced: {error}\nUse jnp "
            "functions, no Python conditions or float() on the learning rate, weight "
            "decay, settings and arrays."
        ) from error
    start, updates, after = traced.out_info
    given = jax.eval_shape(lambda: weight)
    for what, found, wanted in (("updates", updates, given), ("state", after, start)):
        if _signature(found) != _signature(wanted):
            raise ConfigError(
                f"a step makes {what} {found!r:.200}, which must be as before: "
                f"{wanted!r:.200}. Keep structure, shapes and dtypes."
            )
    return jax.tree_util.tree_leaves_with_path(start), traced.lower().as_text()


def _signature(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _check_start(state: Any, other: Any) -> None:
    """Checks that the state at the start is of arrays, and depends on no setting.

    Args:
        state: The state at the start.
        other: The state at the start with other settings.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), another in zip(leaves, jax.tree.leaves(other), strict=True):
        place = jax.tree_util.keystr(path)
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ConfigError(
                f"its state has {' '.join(repr(leaf).split()):.80} at {place}, and "
                "must have arrays of numbers only, which are kept by slot. Make it a "
                "jnp array (of a random key, jax.random.PRNGKey), or keep it out of "
                "the state."
            )
        if not np.array_equal(leaf, another, equal_nan=True):
            raise ConfigError(
                f"its state at the start has a setting, at {place}, and must depend on "
                "the weights only, as learning rates change from step to step. Use the "
                "setting in update, and no optax.inject_hyperparams."
            )


def _check_axes(*states: Any) -> None:
    """Checks that each axis of a state is the rank, or does not depend on it.

    Args:
        *states: Shapes of the states of a tensor, one of each of `_RANKS`.
    """
    for (path, one), (_, other) in zip(*states, strict=True):
        is_kept = len(one.shape) == len(other.shape) and all(
            sizes == _RANKS or sizes[0] == sizes[1]
            for sizes in zip(one.shape, other.shape, strict=True)
        )
        if not is_kept:
            raise ConfigError(
                f"for ranks {_RANKS[0]} and {_RANKS[1]}, its state at "
                f"{jax.tree_util.keystr(path)} has the shapes {one.shape} and "
                f"{other.shape}. An axis must be the rank itself or not depend on it, "
                "as a slot fills smaller ranks with zeros. Keep the axes of the matrix."
            )
