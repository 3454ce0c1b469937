"""One AdamW for each slot: the optimizer of one adapter, mapped over the slots."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxlora.modules.trained_tensors import tensor_of

Tables = dict[str, Float[Array, "G L ..."]]  # stacks, by name: see models/stacks.py


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """Gradients of each slot's incomplete global batch.

    Attributes:
        gradients: Sum of the gradients so far.
        is_finite: Whether the losses and hidden states are finite so far.
    """

    gradients: Tables
    is_finite: Bool[Array, "*G"]


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterState:
    """Adapters and their optimizer state, float32, stacked by slot.

    Attributes:
        params: Trained tensors of every adapted linear.
        mu: First moments.
        nu: Second moments.
        pending: Gradients of the incomplete global batches.
    """

    params: Tables
    mu: Tables
    nu: Tables
    pending: Pending


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyper:
    """Settings of one optimizer step, one row per slot.

    Attributes:
        steps_now: Whether each slot's global batch is complete; other slots stay
            bitwise unchanged.
        count: Optimizer steps that the slot has done.
        learning_rate: Learning rate of this step.
        rate_ratio: Factors of the learning rates of trained tensors, by name, for those
            that have one; see `jaxlora.modules.trained_tensors`.
        weight_decay: Decoupled decay.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        max_norm: Largest gradient norm; infinity never clips.
    """

    steps_now: Bool[Array, "*G"]
    count: Int[Array, "*G"]
    learning_rate: Float[Array, "*G"]
    rate_ratio: dict[str, Float[Array, "*G"]]
    weight_decay: Float[Array, "*G"]
    b1: Float[Array, "*G"]
    b2: Float[Array, "*G"]
    eps: Float[Array, "*G"]
    max_norm: Float[Array, "*G"]


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of an optimizer step; only the rows of slots that stepped are meaningful.

    Attributes:
        norm: Norm of the gradient, before clipping.
        is_finite: Whether losses, hidden states and gradient are all finite; if not,
            the slot has kept its weights and moments.
    """

    norm: Float[Array, "*G"]
    is_finite: Bool[Array, "*G"]


def zero_state(
    shapes: dict[str, jax.ShapeDtypeStruct],
    num_slots: int,
    sharding: jax.sharding.Sharding | None = None,
) -> AdapterState:
    """Makes empty slots.

    Args:
        shapes: Shapes of the tables, by name.
        num_slots: Number of slots G.
        sharding: Sharding of all arrays; None: JAX's default device.
    """

    def zeros() -> Tables:
        return {
            path: jnp.zeros(s.shape, s.dtype, device=sharding)
            for path, s in shapes.items()
        }

    pending = Pending(
        gradients=zeros(),
        is_finite=jnp.ones(num_slots, jnp.bool_, device=sharding),
    )
    return AdapterState(params=zeros(), mu=zeros(), nu=zeros(), pending=pending)


def _adapter_step(state: AdapterState, hyper: Hyper):
    """Applies AdamW to one adapter; `optimizer_step` maps this over the slots."""
    pending = state.pending
    norm = optax.tree.norm(pending.gradients)
    clip = jnp.where(norm > hyper.max_norm, hyper.max_norm / norm, 1.0)
    gradients = jax.tree.map(lambda g: g * clip, pending.gradients)
    adamw = optax.adamw(
        hyper.learning_rate,
        b1=hyper.b1,
        b2=hyper.b2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
    )
    before = optax.tree.set(
        adamw.init(state.params), count=hyper.count, mu=state.mu, nu=state.nu
    )
    updates, after = adamw.update(gradients, before, state.params)
    factors = hyper.rate_ratio
    ratio = {path: factors.get(tensor_of(path).name, 1.0) for path in state.params}
    updates = jax.tree.map(jnp.multiply, updates, ratio)
    params = jax.tree.map(jnp.add, state.params, updates)
    # Otherwise weights that are not finite would outlast the batch that caused them.
    is_finite = pending.is_finite & jnp.isfinite(norm)
    taken = hyper.steps_now & is_finite
    stepped = AdapterState(
        params=params,
        mu=optax.tree.get(after, "mu"),
        nu=optax.tree.get(after, "nu"),
        pending=pending,
    )
    state = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped, state)
    emptied = Pending(
        gradients=jax.tree.map(
            lambda g: jnp.where(hyper.steps_now, 0.0, g), pending.gradients
        ),
        is_finite=hyper.steps_now | pending.is_finite,
    )
    state = dataclasses.replace(state, pending=emptied)
    return state, StepResult(norm=norm, is_finite=is_finite)


def optimizer_step(
    state: AdapterState, hyper: Hyper
) -> tuple[AdapterState, StepResult]:
    """Applies an optimizer step to the slots whose global batch is complete.

    A slot whose batch is not finite keeps its weights and moments. The device decides
    this, so that it does not wait until the host has read the losses.

    Args:
        state: All slots.
        hyper: Settings of the slots; `steps_now` selects the slots that step.

    References:
        AdamW, arXiv 1711.05101; LoRA+, arXiv 2402.12354.
    """
    return jax.vmap(_adapter_step)(state, hyper)
