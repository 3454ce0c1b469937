"""Optimizers of users: a transformation of optax becomes an entry of the table."""

import hashlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlora.adapters.optimizers.state import transformation
from jaxlora.adapters.optimizers.table import OPTIMIZERS, Optimizer, OptimizerSetting
from jaxlora.errors import ConfigError
from jaxlora.modules.variants.lora import LORA_A, LORA_B

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RATES = ("learning_rate", "weight_decay")
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
    settings = _settings(name, make_transformation)
    found = Optimizer(name=name, settings=settings, transformation=make_transformation)
    _check_made(found)
    tried = [_try(found, tensor, rank) for tensor in _tensors() for rank in _RANKS]
    for i in range(0, len(tried), len(_RANKS)):
        _check_shapes(found, tried[i : i + len(_RANKS)])
    code = _fingerprint(found)
    OPTIMIZERS[name] = Optimizer(
        name=name,
        settings=settings,
        transformation=make_transformation,
        mixes_elements=True,  # it may
        fingerprint=code,
    )


def _settings(name: str, make: Any) -> dict[str, OptimizerSetting]:
    """Returns the settings of a transformation: its parameters with defaults."""
    if not callable(make):
        raise ConfigError(
            f"optimizer {name!r}: make_transformation is {make!r:.80}, and must be a "
            "function of learning_rate and weight_decay. Pass the function that makes "
            "the transformation."
        )
    parameters = dict(inspect.signature(make).parameters)
    if list(parameters)[:2] != list(_RATES):
        raise ConfigError(
            f"optimizer {name!r}: make_transformation has the parameters "
            f"({', '.join(parameters)}), and must begin with learning_rate and "
            "weight_decay. Add them, and use them in the transformation."
        )
    found = {}
    for key, parameter in parameters.items():
        default = parameter.default
        if key in _RATES:
            continue
        if not isinstance(default, int | float) or not 0 <= default < np.inf:
            is_missing = default is inspect.Parameter.empty
            given = "no default" if is_missing else f"the default {default!r:.80}"
            raise ConfigError(
                f"optimizer {name!r}: the parameter {key} of make_transformation has "
                f"{given}, and must have a number that is at least 0, which jobs set "
                "in optimizer_args. Give it one, or take the parameter away."
            )
        found[key] = OptimizerSetting(default=default)
    return found


def _check_made(optimizer: Optimizer) -> None:
    settings = {name: one.default for name, one in optimizer.settings.items()}
    made = optimizer.transformation(1e-3, 0.0, **settings)
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer {optimizer.name!r}: make_transformation returned a "
            f"{type(made).__name__}, and must return an optax.GradientTransformation. "
            "Return one, such as optax.chain(...)."
        )


def _tensors() -> tuple[str, ...]:
    return LORA_A.name, LORA_B.name


def _weight(tensor: str, rank: int) -> dict[str, jax.Array]:
    shape = (_FEATURES, rank) if tensor == LORA_A.name else (rank, _FEATURES)
    values = np.random.default_rng(0).normal(size=shape)
    return {tensor: jnp.array(values, jnp.float32)}


def _try(optimizer: Optimizer, tensor: str, rank: int) -> Any:
    """Returns the shapes of a state after trying a step.

    Raises:
        ConfigError: The state or the step breaks a rule.
    """
    name, weight = optimizer.name, _weight(tensor, rank)
    state = transformation(optimizer).init(weight)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            text = " ".join(repr(leaf).split())
            raise ConfigError(
                f"optimizer {name!r}: its state has {text:.80} at "
                f"{jax.tree_util.keystr(path)}, and must have arrays of numbers only, "
                "which are kept by slot. Make it a jnp array (of a random key, "
                "jax.random.PRNGKey), or keep it out of the state."
            )
    _check_start(optimizer, weight, state)
    shapes = jax.eval_shape(lambda: state)
    try:
        updates, after = jax.eval_shape(_step, *_traced(optimizer, weight, state))
    except (jax.errors.JAXTypeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"optimizer {name!r}: a step of {tensor} fails when it is traced: "
            f"{error}\nUse jnp functions, no Python conditions or float() on the "
            "learning rate, weight decay, settings and arrays."
        ) from error
    given = jax.eval_shape(lambda: weight)
    for what, found, wanted in (("updates", updates, given), ("state", after, shapes)):
        if _signature(found) != _signature(wanted):
            raise ConfigError(
                f"optimizer {name!r}: a step makes {what} {found!r:.200}, which must "
                f"be as before: {wanted!r:.200}. Keep structure, shapes and dtypes."
            )
    return shapes


def _check_start(optimizer: Optimizer, weight: Any, state: Any) -> None:
    """Checks that the state at the start depends on no setting."""
    other = {name: one.default / 2 + 0.25 for name, one in optimizer.settings.items()}
    found = transformation(optimizer, 0.5, 0.5, other).init(weight)
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(found), strict=True
    )
    for (path, one), another in leaves:
        if not np.array_equal(one, another, equal_nan=True):
            raise ConfigError(
                f"optimizer {optimizer.name!r}: its state at the start has a setting, "
                f"at {jax.tree_util.keystr(path)}, and must depend on the weights "
                "only, as learning rates change from step to step. Use the setting in "
                "update, and no optax.inject_hyperparams."
            )


def _traced(optimizer: Optimizer, weight: Any, state: Any) -> tuple[Any, ...]:
    settings = {name: jnp.float32(s.default) for name, s in optimizer.settings.items()}
    rates = jnp.float32(1e-3), jnp.float32(0.0)
    return _Static(optimizer), weight, state, jnp.int32(1), *rates, settings


@jax.tree_util.register_static
class _Static:
    """An optimizer as an argument of a traced function."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer


def _step(
    static: _Static,
    weight: Any,
    state: Any,
    rank: Any,
    learning_rate: Any,
    weight_decay: Any,
    settings: Mapping[str, Any],
) -> Any:
    made = transformation(static.optimizer, learning_rate, weight_decay, settings)
    return made.update(weight, state, weight, rank=rank)


def _signature(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _check_shapes(optimizer: Optimizer, states: list[Any]) -> None:
    """Checks that each axis of a state is the rank, or does not depend on it.

    Args:
        optimizer: The optimizer.
        states: Shapes of the states of a tensor, of each of `_RANKS`.
    """
    of_ranks = [jax.tree_util.tree_leaves_with_path(state) for state in states]
    for leaves in zip(*of_ranks, strict=True):
        path, shapes = leaves[0][0], [leaf.shape for _, leaf in leaves]
        has_other_axes = len({len(shape) for shape in shapes}) > 1
        if has_other_axes or any(
            len(set(sizes)) > 1 and sizes != _RANKS
            for sizes in zip(*shapes, strict=True)
        ):
            raise ConfigError(
                f"optimizer {optimizer.name!r}: for ranks {_RANKS[0]} and {_RANKS[1]}, "
                f"its state at {jax.tree_util.keystr(path)} has the shapes {shapes[0]} "
                f"and {shapes[1]}. An axis must be the rank itself or not depend on "
                "it, as a slot fills smaller ranks with zeros. Keep the axes of the "
                "matrix."
            )


def _fingerprint(optimizer: Optimizer) -> str:
    """Hash of what the transformation computes."""
    found = hashlib.sha256()
    for tensor in _tensors():
        weight = _weight(tensor, _RANKS[0])
        state = transformation(optimizer).init(weight)
        traced = jax.make_jaxpr(_step)(*_traced(optimizer, weight, state))
        start = jax.make_jaxpr(transformation(optimizer).init)(weight)
        for one in (traced, start):
            found.update(str(one).encode())
            for value in one.consts:
                found.update(np.asarray(value).tobytes())
    return found.hexdigest()
