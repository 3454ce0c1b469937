"""The sharding of a stage's adapter slots over its devices."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxlora.sharding.rules import EXPERT, TENSOR

# Specs of the tables of each stack, by name.
TableSpecs = dict[str, PartitionSpec]

# The axes of a stage's mesh whose devices have rows of their own.
LANES = ("data", "fsdp", EXPERT)
# Arrays that each device has whole, such as hyperparameters of the slots.
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSharding:
    """The devices of one stage, and how slots and rows of tokens lie on them.

    Every device holds all slots, and the samples of a job may run on all of them. Along
    `tensor`, a device holds its part of those tables that are divided; see
    `jaxlora.models.tensor_parallel`. Along `expert`, it holds the tables of its own
    experts; no mesh has both axes.

    Attributes:
        mesh: Mesh with the axes `data`, `fsdp`, `expert` and `tensor`; None: one
            device, which is JAX's default or the one on which the base is.
        device: The one device, if there is no mesh; None: JAX's default.
    """

    mesh: jax.sharding.Mesh | None = None
    device: Sharding | None = None

    def __post_init__(self):
        assert self.mesh is None or self.mesh.axis_names == (*LANES, TENSOR)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def num_tensor(self) -> int:
        """Number of devices that share each microbatch."""
        return 1 if self.mesh is None else self.mesh.shape[TENSOR]

    @property
    def num_expert(self) -> int:
        """Number of devices that share the experts."""
        return 1 if self.mesh is None else self.mesh.shape[EXPERT]

    @property
    def num_lanes(self) -> int:
        """Number of microbatches that run at the same time."""
        return self.num_devices // self.num_tensor

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Axes over whose microbatches a slot's gradients are summed; empty: one."""
        return () if self.num_lanes == 1 else LANES

    @property
    def num_parts(self) -> int:
        """Number of terms of the gradients of a divided table: one for each lane.

        The devices that share the experts run those of all their lanes at once.
        """
        return self.num_lanes // self.num_expert

    @property
    def divided_axes(self) -> tuple[str, ...]:
        """Axes over which the gradients of divided tables are summed."""
        return () if self.num_parts == 1 else self._part_axes

    @property
    def _part_axes(self) -> tuple[str, ...]:
        return LANES if self.num_expert == 1 else LANES[:-1]

    @property
    def divided_over(self) -> str:
        """The axis along which tables are divided, if any are."""
        return TENSOR if self.num_expert == 1 else EXPERT

    @property
    def whole_axes(self) -> tuple[str, ...]:
        """Axes over which tables are summed, too, that are not divided along them."""
        return () if self.num_tensor == 1 else (TENSOR,)

    # ---- partition specs, inside the mesh --------------------------------------------

    @property
    def rows(self) -> PartitionSpec:
        """Data of each microbatch, such as rows of tokens, or sums of losses."""
        return PartitionSpec(LANES)

    @property
    def hidden(self) -> PartitionSpec:
        """Hidden states of each microbatch, of which devices have a part of the rows.

        Along `tensor`, they have all rows only inside the halves of a layer.
        """
        return self.rows if self.num_tensor == 1 else self.by_device

    @property
    def by_device(self) -> PartitionSpec:
        """Data of each device, such as the residuals of a forward pass."""
        return PartitionSpec((*LANES, TENSOR))

    def tables(self, names: Iterable[str], axes: Mapping[str, int]) -> TableSpecs:
        """Tables of the slots, by name: weights and state of optimizers.

        Args:
            names: Names of the stacks.
            axes: Axis that is divided, of the tables that are.
        """
        over = self.divided_over
        return {name: _spec([None], axes.get(name), over) for name in names}

    def gradients(self, names: Iterable[str], axes: Mapping[str, int]) -> TableSpecs:
        """Sums of gradients on each device, by name, with an axis F before the slots.

        Those of tables that are whole on each device are terms of a sum over `tensor`,
        too.

        Args:
            names: Names of the stacks.
            axes: Axis that is divided, of the tables that are.
        """
        found, over = {}, self.divided_over
        for name in names:
            if name in axes:
                found[name] = _spec([self._part_axes, None], axes[name] + 1, over)
            else:
                found[name] = _spec([(*LANES, TENSOR)], None, over)
        return found

    def sharding(self, spec: PartitionSpec) -> Sharding | None:
        """Returns the placement of an array; None: JAX's default device."""
        return self.device if self.mesh is None else NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """Returns the placements of a tree of arrays."""
        return jax.tree.map(self.sharding, specs, is_leaf=_is_spec)

    def all_committed(self, specs: Any) -> Any:
        """Returns the placements of a tree of arrays that never move."""
        return jax.tree.map(self.committed, specs, is_leaf=_is_spec)

    def committed(self, spec: PartitionSpec) -> Sharding:
        """Returns the placement of an array that never moves.

        JAX compiles a function again for each combination of committed and uncommitted
        arrays, so the state of the slots is committed from the start.
        """
        with jax.ensure_compile_time_eval():
            return self.sharding(spec) or jax.device_put(np.zeros(())).sharding

    def jit(self, run: Callable[..., Any], takes: Any, gives: Any, **options) -> Any:
        """Jits a function that each device runs on its own part of the arrays.

        Args:
            run: The function.
            takes: Partition specs of its arguments.
            gives: Partition specs of its results.
            **options: Options of `jax.jit`.
        """
        # `partial` makes a new function, because jit caches programs by function.
        if self.mesh is None:
            return jax.jit(functools.partial(run), **options)
        # Pallas kernels cannot be partitioned, so each device runs them on its own
        # part. Gradients are not summed here: that comes once, before the optimizer
        # step.
        sharded = jax.shard_map(
            run, mesh=self.mesh, in_specs=takes, out_specs=gives, check_vma=False
        )
        # With other shardings of equal meaning, the next call would compile again.
        return jax.jit(sharded, out_shardings=self.shardings(gives), **options)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _spec(first: list[Any], axis: int | None, over: str) -> PartitionSpec:
    """Makes a spec of its first entries, and of the axis that `over` divides."""
    entries = first if axis is None else [*first, *[None] * (axis - len(first)), over]
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


ONE_DEVICE = StageSharding()
