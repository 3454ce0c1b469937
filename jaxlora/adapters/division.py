"""The tables of slots that are divided along the axis `tensor` or `expert` of a mesh.

Along `tensor`, each table of a linear is divided by its features. Along `expert`, the
tables of the experts' linears are divided by expert, so each is whole on one device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxlora.adapters.optimizers.state import Kind, States, Tables, state_shapes
from jaxlora.sharding.rules import TENSOR
from jaxlora.sharding.tensor import gathered, own_part

Axes = Mapping[str, int]  # that are divided, by name of the stack
_TABLES = 1  # the axis of a stack's tables; what comes after it is in the tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableDivision:
    """Which tables are divided, and along which axis; the others are whole.

    The state of an optimizer is divided as the weights are: by expert, or if it has
    their shape by features.

    Attributes:
        weights: Axes of weights and gradients, G L ...
        states: Axes of the optimizer state, by kind.
        over: Axis of the mesh whose devices have the parts.
    """

    weights: Axes = dataclasses.field(default_factory=dict)
    states: Mapping[Kind, Axes] = dataclasses.field(default_factory=dict)
    over: str = TENSOR

    @staticmethod
    def of(
        axes: Axes,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        optimizers: Sequence[str],
        over: str = TENSOR,
    ) -> "TableDivision":
        """Returns the division of weights and state.

        Args:
            axes: Axes of the weights.
            shapes: Shapes of the tables of weights.
            optimizers: Names of the optimizers of the run.
            over: Axis of the mesh whose devices have the parts.
        """
        states = {
            kind: {
                name: axes[name]
                for name, table in tables.items()
                if name in axes
                and (axes[name] == _TABLES or table.shape == shapes[name].shape)
            }
            for kind, tables in state_shapes(optimizers, shapes).items()
        }
        return TableDivision(weights=axes, states=states, over=over)

    @property
    def cuts_tables(self) -> bool:
        """Whether a device has parts of tables, rather than some tables of a stack."""
        return any(axis != _TABLES for axis in self.weights.values())

    def join(
        self, weights: Tables, state: States, gradients: Tables
    ) -> tuple[Tables, States, Tables]:
        """Returns whole tables on each device, made of the parts of all devices."""
        whole = functools.partial(_each, gathered)
        states = {k: whole(own, self.states.get(k, {})) for k, own in state.items()}
        return whole(weights, self.weights), states, whole(gradients, self.weights)

    def split(self, weights: Tables, state: States) -> tuple[Tables, States]:
        """Returns this device's parts of whole tables."""
        part = functools.partial(_each, own_part)
        states = {k: part(own, self.states.get(k, {})) for k, own in state.items()}
        return part(weights, self.weights), states


def _each(
    change: Callable[[jax.Array, int], jax.Array], tables: Mapping[str, Any], axes: Axes
) -> dict[str, Any]:
    return {n: change(x, axes[n]) if n in axes else x for n, x in tables.items()}


WHOLE = TableDivision()
