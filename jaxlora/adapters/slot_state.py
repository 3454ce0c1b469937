"""The state of empty slots, and where the state of slots lives."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.adapters.division import WHOLE, TableDivision
from jaxlora.adapters.optimizer import AdapterState, Pending
from jaxlora.adapters.optimizer_state import state_shapes
from jaxlora.adapters.optimizers import ADAMW
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding


def empty_state(
    shapes: dict[str, jax.ShapeDtypeStruct],
    num_slots: int,
    placement: StageSharding,
    optimizers: Sequence[str],
    division: TableDivision = WHOLE,
) -> AdapterState:
    """Computes the state of empty slots; see `zero_state`."""
    parts = () if placement.num_devices == 1 else (placement.num_parts,)
    terms = tuple(n * placement.num_tensor for n in parts)

    def zeros(name: str, *axes: int) -> jax.Array:
        return jnp.zeros((*axes, *shapes[name].shape), shapes[name].dtype)

    is_finite = jnp.ones((*parts, num_slots), jnp.bool_)
    gradients = {
        n: zeros(n, *(parts if n in division.weights else terms)) for n in shapes
    }
    return AdapterState(
        params={name: zeros(name) for name in shapes},
        optimizer_state={
            kind: {n: jnp.zeros(s.shape, s.dtype) for n, s in tables.items()}
            for kind, tables in state_shapes(optimizers, shapes).items()
        },
        pending=Pending(gradients=gradients, is_finite=is_finite),
    )


def state_specs(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    placement: StageSharding,
    optimizers: Sequence[str],
    division: TableDivision = WHOLE,
) -> Any:
    """Returns partition specs of the state of slots; see `zero_state`."""
    # With partition specs in the place of arrays.
    state: Any = AdapterState
    states = state_shapes(optimizers, dict(shapes))
    return state(
        params=placement.tables(shapes, division.weights),
        optimizer_state={
            kind: placement.tables(tables, division.states.get(kind, {}))
            for kind, tables in states.items()
        },
        pending=_pending_specs(shapes, placement, division),
    )


def _pending_specs(
    names: Iterable[str], placement: StageSharding, division: TableDivision
) -> Any:
    """Returns partition specs of `Pending`, for stacks of these names."""
    pending: Any = Pending
    gradients = placement.gradients(names, division.weights)
    return pending(gradients=gradients, is_finite=placement.partial)


def zero_state(
    shapes: dict[str, jax.ShapeDtypeStruct],
    num_slots: int,
    placement: StageSharding = ONE_DEVICE,
    optimizers: Sequence[str] = (ADAMW.name,),
) -> AdapterState:
    """Makes empty slots.

    Args:
        shapes: Shapes of the tables, by name.
        num_slots: Number of slots G.
        placement: Where the slots live.
        optimizers: Names of the optimizers of the run.
    """
    return _make_empty(tuple(shapes.items()), num_slots, placement, tuple(optimizers))()


@functools.lru_cache(maxsize=32)
def _make_empty(
    shapes: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
    num_slots: int,
    placement: StageSharding,
    optimizers: tuple[str, ...],
) -> Callable[[], AdapterState]:
    make = functools.partial(
        empty_state, dict(shapes), num_slots, placement, optimizers
    )
    specs = state_specs(dict(shapes), placement, optimizers)
    return jax.jit(make, out_shardings=placement.all_committed(specs))
