"""One AdamW for each slot: the optimizer of one adapter, mapped over the slots."""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.modules.trained_tensors import tensor_of

Tables = dict[str, Float[Array, "G L ..."]]  # stacks, by name: see models/stacks.py


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """Gradients of each slot's incomplete global batch.

    On several devices, all arrays have a first axis F more: each device sums its own
    microbatches, and the sums are added once, before the optimizer step.

    Attributes:
        gradients: Sum of the gradients so far.
        is_finite: Whether the losses and hidden states are finite so far.
    """

    gradients: Tables
    is_finite: Bool[Array, "*G"]


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
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


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerInputs:
    """Settings of one optimizer step, one row per slot.

    Attributes:
        step_mask: Whether each slot's global batch is complete; other slots stay
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

    step_mask: Bool[Array, "*G"]
    count: Int[Array, "*G"]
    learning_rate: Float[Array, "*G"]
    rate_ratio: dict[str, Float[Array, "*G"]]
    weight_decay: Float[Array, "*G"]
    b1: Float[Array, "*G"]
    b2: Float[Array, "*G"]
    eps: Float[Array, "*G"]
    max_norm: Float[Array, "*G"]


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
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
    placement: StageSharding = ONE_DEVICE,
) -> AdapterState:
    """Makes empty slots.

    Args:
        shapes: Shapes of the tables, by name.
        num_slots: Number of slots G.
        placement: Where the slots live.
    """
    tables = placement.committed(placement.by_slot)
    partial = placement.committed(placement.partial)
    parts = () if placement.num_devices == 1 else (placement.num_parts,)

    def zeros(where, *axes: int) -> Tables:
        return {
            path: jnp.zeros((*axes, *s.shape), s.dtype, device=where)
            for path, s in shapes.items()
        }

    pending = Pending(
        gradients=zeros(partial, *parts),
        is_finite=jnp.ones((*parts, num_slots), jnp.bool_, device=partial),
    )
    return AdapterState(
        params=zeros(tables), mu=zeros(tables), nu=zeros(tables), pending=pending
    )


def _adapter_step(
    tables: tuple[Tables, Tables, Tables],
    gradients: Tables,
    measured: "GradientNorms",
    hyper: OptimizerInputs,
) -> tuple[tuple[Tables, Tables, Tables], StepResult]:
    """Applies AdamW to one adapter; `optimizer_step` maps this over the slots.

    Args:
        tables: Weights, first and second moments.
        gradients: Gradients of the global batch.
        measured: Measures of the global batch over all stages.
        hyper: Settings of the step.

    Returns:
        Weights and moments afterwards, and the result.
    """
    old, mu, nu = tables
    norm = jnp.sqrt(measured.squares)
    clip = jnp.where(norm > hyper.max_norm, hyper.max_norm / norm, 1.0)
    gradients = jax.tree.map(lambda g: g * clip, gradients)
    adamw = optax.adamw(
        hyper.learning_rate,
        b1=hyper.b1,
        b2=hyper.b2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
    )
    before = optax.tree.set(adamw.init(old), count=hyper.count, mu=mu, nu=nu)
    updates, after = adamw.update(gradients, before, old)
    factors = hyper.rate_ratio
    ratio = {path: factors.get(tensor_of(path).name, 1.0) for path in old}
    updates = jax.tree.map(jnp.multiply, updates, ratio)
    params = jax.tree.map(jnp.add, old, updates)
    # Otherwise weights that are not finite would outlast the batch that caused them.
    is_finite = measured.is_finite & jnp.isfinite(norm)
    taken = hyper.step_mask & is_finite
    stepped = params, optax.tree.get(after, "mu"), optax.tree.get(after, "nu")
    tables = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped, tables)
    return tables, StepResult(norm=norm, is_finite=is_finite)


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """Measures of a pending batch that clipping needs of all stages.

    Attributes:
        squares: Sum of the squares of each slot's pending gradients.
        is_finite: Whether the losses and hidden states of the pending batch are finite.
    """

    squares: Float[Array, "*G"]
    is_finite: Bool[Array, "*G"]


def measure(pending: Pending) -> GradientNorms:
    """Measures the pending gradients of every slot on this device.

    Args:
        pending: Gradients that are summed over the devices for the slots that step; see
            `exchange`. The measures of other slots have no meaning.
    """
    pending = _own(pending)

    def squares(gradients: Tables) -> jax.Array:
        return jnp.asarray(optax.tree.norm(gradients, squared=True), jnp.float32)

    size = pending.is_finite.shape[0]  # as a stage may have no adapted linears
    return GradientNorms(
        squares=jax.vmap(squares, axis_size=size)(pending.gradients),
        is_finite=pending.is_finite,
    )


def _own(pending: Pending) -> Pending:
    """Returns this device's gradients without the first axis, of devices, if any."""
    return pending if pending.is_finite.ndim == 1 else jax.tree.map(_first, pending)


def _first(parts: jax.Array) -> jax.Array:
    return parts[0]


def _over_stages(measured: Sequence[GradientNorms]) -> GradientNorms:
    return GradientNorms(
        squares=functools.reduce(jnp.add, [one.squares for one in measured]),
        is_finite=functools.reduce(
            jnp.logical_and, [one.is_finite for one in measured]
        ),
    )


def optimizer_step(
    state: AdapterState,
    hyper: OptimizerInputs,
    stages: Sequence[GradientNorms] = (),
) -> tuple[AdapterState, StepResult]:
    """Applies an optimizer step to the slots whose global batch is complete.

    A slot whose batch is not finite keeps its weights and moments. The device decides
    this, so that it does not wait until the host has read the losses.

    Args:
        state: All slots. The pending gradients of those that step are summed over the
            devices; see `exchange`.
        hyper: Settings of the slots; `step_mask` selects the slots that step.
        stages: Measures of the batch on every stage, in the order of the stages, as the
            norm of an adapter is over all of them; empty: there is only this stage.

    References:
        AdamW, arXiv 1711.05101; LoRA+, arXiv 2402.12354.
    """
    measured = _over_stages(stages or [measure(state.pending)])
    tables = state.params, state.mu, state.nu
    step = jax.vmap(_adapter_step)
    gradients = _summed(state.pending, hyper.step_mask)
    tables, result = step(tables, gradients, measured, hyper)
    # If gradients were emptied before they are used, XLA would copy them on a CPU.
    tables, emptied = jax.lax.optimization_barrier((tables, hyper.step_mask))
    params, mu, nu = tables
    pending = _emptied(state.pending, emptied)
    return AdapterState(params=params, mu=mu, nu=nu, pending=pending), result


def _summed(pending: Pending, step_mask: Bool[Array, " G"]) -> Tables:
    """Returns the gradients of the slots that step.

    On several devices, those of other slots are not summed yet, and zero here. (On a
    CPU, that also decides which products and sums LLVM fuses, and so a last bit.)
    """
    if pending.is_finite.ndim == 1:
        return pending.gradients

    def selected(gradients):
        axes = range(1, gradients.ndim)
        return jnp.where(jnp.expand_dims(step_mask, axes), gradients, 0.0)

    return jax.tree.map(selected, _own(pending).gradients)


def _emptied(pending: Pending, slots: Bool[Array, " G"]) -> Pending:
    """Removes the gradients of some slots; arrays may have a first axis of devices."""
    first = pending.is_finite.ndim - 1

    def empty(gradients):
        axes = (*range(first), *range(first + 1, gradients.ndim))
        return jnp.where(jnp.expand_dims(slots, axes), 0.0, gradients)

    return Pending(
        gradients=jax.tree.map(empty, pending.gradients),
        is_finite=slots | pending.is_finite,
    )
