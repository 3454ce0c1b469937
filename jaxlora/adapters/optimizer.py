"""Optimizer steps of the slots: the step of one adapter, mapped over the slots."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxlora.adapters.division import WHOLE, TableDivision
from jaxlora.adapters.optimizers.state import (
    SlotStates,
    SlotTables,
    States,
    Tables,
    is_stepped,
    tables_of,
    transformation,
    updated,
)
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.modules.trained_tensors import rank_axis, tensor_of
from jaxlora.sharding.tensor import gathered


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
    """Adapters and their optimizer state, stacked by slot.

    Attributes:
        params: Trained tensors of every adapted linear, float32.
        optimizer_state: State tensors of the optimizers of the run, by kind, such as
            `mu`; see `jaxlora.adapters.optimizers.state`. In a slot whose optimizer
            does not have the tensor, it is zero.
        pending: Gradients of the incomplete global batches.
    """

    params: Tables
    optimizer_state: States
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
        settings: For each optimizer of the run, its other settings by name; 0 in slots
            with another optimizer.
        optimizer: Number of the slot's optimizer in `settings`, sorted by name.
        max_norm: Largest gradient norm; infinity never clips.
    """

    step_mask: Bool[Array, "*G"]
    count: Int[Array, "*G"]
    learning_rate: Float[Array, "*G"]
    rate_ratio: dict[str, Float[Array, "*G"]]
    weight_decay: Float[Array, "*G"]
    settings: dict[str, dict[str, Float[Array, "*G"]]]
    optimizer: Int[Array, "*G"]
    max_norm: Float[Array, "*G"]


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of an optimizer step; only the rows of slots that stepped are meaningful.

    Attributes:
        norm: Norm of the gradient, before clipping.
        is_finite: Whether losses, hidden states and gradient are all finite; if not,
            the slot has kept its weights and its optimizer state.
    """

    norm: Float[Array, "*G"]
    is_finite: Bool[Array, "*G"]


def _adapter_step(
    tables: tuple[SlotTables, SlotStates],
    gradients: SlotTables,
    measured: "GradientNorms",
    inputs: OptimizerInputs,
    ranks: dict[str, jax.Array],
) -> tuple[tuple[SlotTables, SlotStates], StepResult]:
    """Applies the optimizer of one adapter; `optimizer_step` maps this over the slots.

    Every optimizer of the run is computed, and that of the adapter is taken.

    Args:
        tables: Weights and optimizer state.
        gradients: Gradients of the global batch.
        measured: Measures of the global batch over all stages.
        inputs: Settings of the step.
        ranks: Rank of the adapter in each linear.

    Returns:
        Weights and optimizer state afterwards, and the result.
    """
    params, state = tables
    norm = jnp.sqrt(measured.squares)
    clip = jnp.where(norm > inputs.max_norm, inputs.max_norm / norm, 1.0)
    # Otherwise weights that are not finite would outlast the batch that caused them.
    is_finite = measured.is_finite & jnp.isfinite(norm)
    taken = inputs.step_mask & is_finite
    several = len(inputs.settings) > 1
    for number, name in enumerate(inputs.settings):
        update: Callable[..., Any] = functools.partial(_updated, name)
        mixes = OPTIMIZERS[name].mixes_elements
        if several or mixes:
            update = _by_itself(update)
        if mixes:
            # Sums over a matrix may be ordered by the number of matrices beside it.
            update = jax.custom_batching.sequential_vmap(update)
        # An optimizer changes its own slots only, so the next one may take its results
        # instead of keeping what was before. They then take memory in turn.
        stepped = [stack for stack in params if is_stepped(name, stack)]
        old = _only(params, stepped)
        own_state = {k: _only(tables, stepped) for k, tables in state.items()}
        own_gradients = _only(gradients, stepped)
        weights, own = update(old, own_state, own_gradients, clip, inputs, ranks)
        is_own = _chosen(taken, number, inputs) if several else taken
        params = params | _select(is_own, weights, old)
        for kind, stacks in own.items():
            before = {stack: state[kind][stack] for stack in stacks}
            stacks = _select(is_own, stacks, before)
            state = state | {kind: state[kind] | stacks}
    return (params, state), StepResult(norm=norm, is_finite=is_finite)


def _only(tables: dict[str, Any], stacks: Sequence[str]) -> dict[str, Any]:
    return {stack: tables[stack] for stack in stacks if stack in tables}


def _by_itself(update: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, compiled as it is whatever stands around it.

    XLA unrolls the loop over a single slot, and could join its ends to what is computed
    before and after it, which would order its sums in another way.
    """

    def alone(*arguments: Any) -> Any:
        return jax.lax.optimization_barrier(
            update(*jax.lax.optimization_barrier(arguments))
        )

    return alone


def _chosen(taken: Any, number: int, inputs: OptimizerInputs) -> Any:
    return taken & (inputs.optimizer == number)


def _select(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


def _updated(
    name: str,
    params: SlotTables,
    state: SlotStates,
    gradients: SlotTables,
    clip: jax.Array,
    inputs: OptimizerInputs,
    ranks: dict[str, jax.Array],
) -> tuple[SlotTables, SlotStates]:
    """Returns the weights and the state of one adapter after a step of an optimizer.

    Gradients are multiplied by `clip` here, so that no product of all is kept.
    """
    optimizer, settings = OPTIMIZERS[name], inputs.settings[name]
    weights: SlotTables = {}
    own: SlotStates = {}
    for stack, weight in params.items():
        tensor = tensor_of(stack).name
        rate = inputs.learning_rate
        if tensor in inputs.rate_ratio:
            rate *= inputs.rate_ratio[tensor]
        made = transformation(optimizer, rate, inputs.weight_decay, settings)

        def step(weight, kept, gradient, rank, tensor=tensor, made=made):
            new, kept = updated(
                *(made, optimizer, tensor, weight, kept, gradient),
                count=inputs.count,
                rank=rank,
            )
            return _without_padding(new, tensor, rank), kept

        kept = tables_of(name, stack, weight.shape[1:], state)
        weights[stack], kept = jax.vmap(step)(
            weight, kept, gradients[stack] * clip, ranks[stack]
        )
        for kind, table in kept.items():
            own.setdefault(kind, {})[stack] = table
    return weights, own


def _without_padding(weight: jax.Array, tensor: str, rank: Any) -> jax.Array:
    """Sets a tensor to zero beyond the rank, whatever an optimizer has added there."""
    axis = rank_axis(tensor)
    if axis is None:
        return weight
    numbers = jax.lax.broadcasted_iota(jnp.int32, weight.shape, axis)
    return jnp.where(numbers < rank, weight, 0.0)


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


def measure(pending: Pending, *, division: TableDivision = WHOLE) -> GradientNorms:
    """Measures the pending gradients of every slot on this stage.

    Args:
        pending: Gradients that are summed over the devices for the slots that step; see
            `exchange`. The measures of other slots have no meaning.
        division: The tables of which this device has a part.
    """
    divided = division.weights
    pending = _own(pending)

    def squares(gradients: Tables) -> jax.Array:
        return jnp.asarray(optax.tree.norm(gradients, squared=True), jnp.float32)

    size = pending.is_finite.shape[0]  # as a stage may have no adapted linears
    over_slots = jax.vmap(squares, axis_size=size)
    parts = {n: g for n, g in pending.gradients.items() if n in divided}
    whole = {n: g for n, g in pending.gradients.items() if n not in divided}
    total = over_slots(whole)
    if parts:
        every = gathered(over_slots(parts)[None], axis=0, over=division.over)
        total += every.sum(axis=0)
    return GradientNorms(squares=total, is_finite=pending.is_finite)


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
    inputs: OptimizerInputs,
    stages: Sequence[GradientNorms] = (),
    ranks: Int[Array, "M G"] | None = None,
    *,
    linears: Mapping[str, Sequence[int]] = MappingProxyType({}),
    division: TableDivision = WHOLE,
) -> tuple[AdapterState, StepResult]:
    """Applies an optimizer step to the slots whose global batch is complete.

    A slot whose batch is not finite keeps its weights and its optimizer state. The
    device decides this, so that it does not wait until the host has read the losses.

    Args:
        state: All slots. The pending gradients of those that step are summed over the
            devices; see `exchange`.
        inputs: Settings of the slots; `step_mask` selects the slots that step.
        stages: Measures of the batch on every stage, in the order of the stages, as the
            norm of an adapter is over all of them; empty: there is only this stage.
        ranks: Rank of each slot's adapter in every adapted linear; None: that of the
            tables.
        linears: Row of `ranks` of each layer of the stacks, by name.
        division: The tables of which this device has a part. They are joined for the
            step if an optimizer combines elements of a matrix.

    References:
        LoRA+, arXiv 2402.12354; those of the optimizers are in their table.
    """
    if not stages:
        stages = [measure(state.pending, division=division)]
    measured = _over_stages(stages)
    tables = state.params, state.optimizer_state
    gradients = _summed(state.pending, inputs.step_mask)
    mixes = any(OPTIMIZERS[name].mixes_elements for name in inputs.settings)
    joins = mixes and division.cuts_tables
    if joins:
        params, optimizer_state, gradients = division.join(*tables, gradients)
        tables = params, optimizer_state
    step = jax.vmap(_adapter_step)
    of_stacks = _ranks(state.params, ranks, linears)
    tables, result = step(tables, gradients, measured, inputs, of_stacks)
    if joins:
        tables = division.split(*tables)
    # If gradients were emptied before they are used, XLA would copy them on a CPU.
    tables, emptied = jax.lax.optimization_barrier((tables, inputs.step_mask))
    params, optimizer_state = tables
    pending = _emptied(state.pending, emptied)
    new = AdapterState(params=params, optimizer_state=optimizer_state, pending=pending)
    return new, result


def slot_step(
    state: AdapterState,
    slot: Int[Array, ""],
    inputs: OptimizerInputs,
    ranks: Int[Array, "M G"],
    *,
    linears: Mapping[str, Sequence[int]],
) -> tuple[AdapterState, StepResult]:
    """Applies an optimizer step to one slot, on one device; reads no other slot.

    It takes the time of one slot, however many there are.

    Args:
        state: All slots.
        slot: Number of the slot, int32.
        inputs: Settings of the step, of one row.
        ranks: As for `optimizer_step`, and so is `linears`.
        linears: Row of `ranks` of each layer of the stacks, by name.
    """
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), state)
    rank = jax.lax.dynamic_slice_in_dim(ranks, slot, 1, axis=1)
    own, result = optimizer_step(own, inputs, (), rank, linears=linears)

    def put(table, row):
        return jax.lax.dynamic_update_slice_in_dim(table, row, slot, 0)

    return jax.tree.map(put, state, own), result


def _ranks(
    params: Tables, ranks: jax.Array | None, linears: Mapping[str, Sequence[int]]
) -> dict[str, Int[Array, "G L"]]:
    """Returns the ranks in the layers of each stack."""
    found = {}
    for name, table in params.items():
        if ranks is not None and name in linears:
            found[name] = ranks[np.array(linears[name])].T
            continue
        axis = rank_axis(name)
        rank = 0 if axis is None else table.shape[2 + axis]
        found[name] = jnp.full(table.shape[:2], rank, jnp.int32)
    return found


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
