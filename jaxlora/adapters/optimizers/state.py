"""The tables of the state of optimizers, which follow from their transformations.

A transformation of optax makes a state for one trained tensor. Each array of it is a
state tensor, and has a table of the slots, unless it is named `count`: that is the
number of the job's step. The tables of all linears that share a stack are stacked as
the weights are; see `jaxlora.models.stacks`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Shaped

from jaxlora.adapters.optimizers.table import OPTIMIZERS, Optimizer
from jaxlora.modules.trained_tensors import TOKEN_ROW_WEIGHTS, WHOLE_TABLE, tensor_of

# A name of tables that outlast a global batch: of the weights, or of a state tensor.
Kind = str
Shape = tuple[int, ...]

Tables = dict[str, Float[Array, "G L ..."]]  # stacks, by name: see models/stacks.py
States = dict[Kind, dict[str, Shaped[Array, "G ..."]]]  # of those stacks that have it
# These have the tables of one slot. Stacks differ in L, so no axis has a name.
SlotTables = dict[str, Float[Array, "..."]]
SlotStates = dict[Kind, dict[str, Shaped[Array, "..."]]]

_COUNT = "count"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One of the arrays that an optimizer keeps for a trained tensor.

    Attributes:
        name: Name of its field in optax's state, such as `mu`.
        kind: Name of its tables. Optimizers share the tables of equal names if these
            are float32 and of the weights' shapes, as a slot has one optimizer. Others
            are named after the optimizer.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    kind: Kind
    shape: Shape
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """A state as optax has it.

    Attributes:
        tree: Its structure.
        leaves: The state tensors, in its order; None: a counter of steps.
    """

    tree: Any
    leaves: tuple[StateTensor | None, ...]

    def joined(self, state: Mapping[Kind, Any], count: Any) -> Any:
        """Makes optax's state from the state tensors by kind."""
        leaves = [count if t is None else state[t.kind] for t in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)

    def split(self, state: Any) -> dict[Kind, jax.Array]:
        """Returns the state tensors of optax's state, by kind."""
        pairs = zip(self.leaves, jax.tree.leaves(state), strict=True)
        return {t.kind: jnp.asarray(leaf, t.dtype) for t, leaf in pairs if t}


def transformation(
    optimizer: Optimizer,
    learning_rate: Any = 0.0,
    weight_decay: Any = 0.0,
    settings: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer's transformation; its start depends on no argument."""
    if settings is None:
        settings = {name: s.default for name, s in optimizer.settings.items()}
    made = optimizer.transformation(learning_rate, weight_decay, **settings)
    return optax.with_extra_args_support(made)


@functools.lru_cache(maxsize=4096)
def _layout(optimizer: Optimizer, tensor: str, shape: Shape) -> _Layout:
    weight = {tensor: jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = jax.eval_shape(transformation(optimizer).init, weight)
    found, tree = jax.tree_util.tree_flatten_with_path(state)
    names = _names([path for path, _ in found], tensor)
    leaves = []
    for name, (_, leaf) in zip(names, found, strict=True):
        if name is None:
            leaves.append(None)
            continue
        is_shared = leaf.shape == shape and leaf.dtype == jnp.float32
        kind = name if is_shared else f"{optimizer.name}.{name}"
        leaves.append(
            StateTensor(name=name, kind=kind, shape=leaf.shape, dtype=leaf.dtype)
        )
    return _Layout(tree=tree, leaves=tuple(leaves))


def _names(paths: Sequence[Sequence[Any]], tensor: str) -> list[str | None]:
    """Names the leaves of a state: by their fields, or if that is not unique, whole."""
    keys = [[_key(key) for key in path] for path in paths]
    whole = [[key for key in path if key != tensor] for path in keys]
    short = [
        next((key for key in reversed(path) if not key.isdigit()), "state")
        for path in whole
    ]
    return [
        None if name == _COUNT else name if short.count(name) == 1 else ".".join(path)
        for name, path in zip(short, whole, strict=True)
    ]


def _key(key: Any) -> str:
    """Returns a field's name, the key of a dict, or a number in a tuple, as text."""
    found = (getattr(key, kind, None) for kind in ("name", "key", "idx"))
    return next(str(one) for one in found if one is not None)


def is_stepped(optimizer: str, name: str) -> bool:
    """Whether an optimizer steps a trained tensor.

    Rows of tokens and whole embeddings are no matrices that features pass through, and
    jobs cannot have them with an optimizer that combines elements of a matrix.

    Args:
        optimizer: Name of the optimizer.
        name: A path or stack that ends in the name of the tensor.
    """
    is_outside = tensor_of(name) in (TOKEN_ROW_WEIGHTS, WHOLE_TABLE)
    return not (is_outside and OPTIMIZERS[optimizer].mixes_elements)


def state_tensors(
    optimizer: Optimizer, tensor: str, shape: Shape
) -> tuple[StateTensor, ...]:
    """Returns the state tensors of a trained tensor.

    Args:
        optimizer: The optimizer.
        tensor: Name of the trained tensor, or a path or stack that ends in it.
        shape: Its shape.
    """
    layout = _layout(optimizer, tensor_of(tensor).name, tuple(shape))
    return tuple(leaf for leaf in layout.leaves if leaf is not None)


def state_shapes(
    optimizers: Sequence[str], shapes: Mapping[str, jax.ShapeDtypeStruct], axes: int = 2
) -> dict[Kind, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the shapes of the tables of some optimizers, by kind and name.

    Args:
        optimizers: Names of the optimizers.
        shapes: Shapes of the tables of the weights, by path or name of the stack.
        axes: Axes of a table before those of a tensor: 2 for slots and layers.
    """
    found: dict[Kind, dict[str, jax.ShapeDtypeStruct]] = {}
    for optimizer in optimizers:
        for name, table in shapes.items():
            if not is_stepped(optimizer, name):
                continue
            before, own = table.shape[:axes], table.shape[axes:]
            for leaf in state_tensors(OPTIMIZERS[optimizer], name, own):
                shape = jax.ShapeDtypeStruct((*before, *leaf.shape), leaf.dtype)
                found.setdefault(leaf.kind, {})[name] = shape
    return dict(sorted(found.items()))


def own_shapes(
    optimizer: str, shapes: Mapping[str, Shape]
) -> Mapping[Kind, Mapping[str, Shape]]:
    """Returns the shapes of an adapter's state tensors, by kind and path.

    Args:
        optimizer: Name of the optimizer.
        shapes: Shapes of the trained tensors at their own ranks, by path.
    """
    return _own_shapes(optimizer, tuple(shapes.items()))


@functools.lru_cache  # adapters of a sweep that start together have few shapes
def _own_shapes(
    optimizer: str, shapes: tuple[tuple[str, Shape], ...]
) -> dict[Kind, dict[str, Shape]]:
    structs = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes}
    found = state_shapes([optimizer], structs, axes=0)
    return {k: {p: s.shape for p, s in own.items()} for k, own in found.items()}


# ---- of one trained tensor -----------------------------------------------------------


def updated(
    made: Any,
    optimizer: Optimizer,
    tensor: str,
    weight: jax.Array,
    state: Mapping[Kind, jax.Array],
    gradient: jax.Array,
    count: Any,
    rank: Any,
) -> tuple[jax.Array, dict[Kind, jax.Array]]:
    """Returns a trained tensor and its state after a step.

    Args:
        made: The transformation with the settings of the step.
        optimizer: The optimizer that it is of.
        tensor: Name of the trained tensor.
        weight: Its value, with the rank of the slots.
        state: Its state tensors, by kind.
        gradient: Its gradient.
        count: Steps done.
        rank: Rank of the adapter in the linear.
    """
    layout = _layout(optimizer, tensor, weight.shape)
    before = layout.joined(state, count)
    weights = {tensor: weight}
    updates, after = made.update({tensor: gradient}, before, weights, rank=rank)
    return weight + updates[tensor], layout.split(after)


def evaluated(optimizer: str, path: str, weight: Any, state: Mapping[Kind, Any]) -> Any:
    """Returns a trained tensor as it is evaluated and exported.

    Args:
        optimizer: Name of the optimizer; of one that is not registered here, the
            weights are as in training.
        path: A path or stack that ends in the name of the tensor.
        weight: Its value in training.
        state: Its state tensors, by kind.
    """
    found = OPTIMIZERS.get(optimizer)
    if found is None or found.evaluation is None:
        return weight
    leaves = state_tensors(found, path, weight.shape)
    return found.evaluation(weight, {leaf.name: state[leaf.kind] for leaf in leaves})


# ---- of all slots --------------------------------------------------------------------


def tables_of(
    optimizer: str, stack: str, shape: tuple[int, ...], state: SlotStates
) -> dict[Kind, jax.Array]:
    """Returns the tables of an optimizer for a stack, by kind."""
    tensors = state_tensors(OPTIMIZERS[optimizer], stack, shape)
    return {tensor.kind: state[tensor.kind][stack] for tensor in tensors}


def started(
    rows: SlotTables, optimizer: Int[Array, ""], optimizers: Sequence[str]
) -> SlotStates:
    """Returns the state of a slot whose job begins; zero where it has none.

    Args:
        rows: Weights of the slot.
        optimizer: Number of its optimizer in `optimizers`.
        optimizers: Names of the optimizers of the run.
    """
    found: dict[Kind, dict[str, jax.Array]] = {}
    for number, name in enumerate(optimizers):
        for stack, weights in rows.items():
            if not is_stepped(name, stack):
                continue
            made, tensor = transformation(OPTIMIZERS[name]), tensor_of(stack).name
            layout = _layout(OPTIMIZERS[name], tensor, weights.shape[1:])
            start = lambda weight, t=tensor, init=made.init: init({t: weight})
            for kind, table in layout.split(jax.vmap(start)(weights)).items():
                stacks = found.setdefault(kind, {})
                before = stacks.get(stack, jnp.zeros_like(table))
                stacks[stack] = jnp.where(optimizer == number, table, before)
    return found


def evaluation_weights(
    params: Tables,
    state: States,
    optimizer: Int[Array, " G"],
    optimizers: Sequence[str],
) -> Tables:
    """Returns the weights of all slots as they are evaluated and exported.

    Args:
        params: The weights in training.
        state: Optimizer state.
        optimizer: Number of each slot's optimizer in `optimizers`.
        optimizers: Names of the optimizers of the run.
    """
    for number, name in enumerate(optimizers):
        if OPTIMIZERS[name].evaluation is None:
            continue
        new = {}
        for stack, weights in params.items():
            if not is_stepped(name, stack):
                new[stack] = weights
                continue
            kept = tables_of(name, stack, weights.shape[2:], state)
            one = functools.partial(evaluated, name, stack)
            found = jax.vmap(jax.vmap(one))(weights, kept)
            is_own = jnp.expand_dims(optimizer == number, range(1, weights.ndim))
            new[stack] = jnp.where(is_own, found, weights)
        params = new
    return params
