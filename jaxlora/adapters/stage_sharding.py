"""The sharding of a stage's adapter slots over its devices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

# The axes of a stage's mesh; together they number its devices.
DEVICES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSharding:
    """The devices of one stage, and how slots and rows of tokens lie on them.

    Attributes:
        mesh: Mesh with the axes `data` and `fsdp`; None: one device, which is JAX's
            default or the one on which the base is.
        is_pinned: Whether the slots are divided among the replicas (axis `data`), so
            that each job runs on one replica only. If not, every device holds all
            slots, and the samples of a job may run on all of them.
        device: The one device, if there is no mesh; None: JAX's default.
    """

    mesh: jax.sharding.Mesh | None = None
    is_pinned: bool = False
    device: Sharding | None = None

    def __post_init__(self):
        assert self.mesh is None or self.mesh.axis_names == DEVICES

    @property
    def num_devices(self) -> int:
        """Number of devices, each of which runs a microbatch of its own."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def num_replicas(self) -> int:
        """Number of replicas among which slots are divided; 1 if they are not."""
        if self.mesh is None or not self.is_pinned:
            return 1
        return self.mesh.shape["data"]

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Axes over which the gradients of a slot are summed; empty: one device."""
        if self.num_devices == 1:
            return ()
        return ("fsdp",) if self.is_pinned else DEVICES

    @property
    def num_parts(self) -> int:
        """Number of devices with gradients of the same slot."""
        return self.num_devices // self.num_replicas

    # ---- partition specs, inside the mesh --------------------------------------------

    @property
    def rows(self) -> PartitionSpec:
        """Per-device data, such as rows of tokens."""
        return PartitionSpec(DEVICES)

    @property
    def by_slot(self) -> PartitionSpec:
        """Arrays whose first axis is the slot: weights, moments and hyperparameters."""
        return PartitionSpec("data") if self.is_pinned else PartitionSpec()

    @property
    def by_linear_and_slot(self) -> PartitionSpec:
        """Settings of the slots in every linear, M G."""
        return PartitionSpec(None, "data") if self.is_pinned else PartitionSpec()

    @property
    def partial(self) -> PartitionSpec:
        """Sums of each device, F G ...: gradients and losses before they are added."""
        return PartitionSpec("fsdp", "data") if self.is_pinned else self.rows

    def sharding(self, spec: PartitionSpec) -> Sharding | None:
        """Returns the placement of an array; None: JAX's default device."""
        return self.device if self.mesh is None else NamedSharding(self.mesh, spec)

    def committed(self, spec: PartitionSpec) -> Sharding:
        """Returns the placement of an array that never moves.

        JAX compiles a function again for each combination of committed and uncommitted
        arrays, so the state of the slots is committed from the start.
        """
        with jax.ensure_compile_time_eval():
            return self.sharding(spec) or jnp.zeros(()).sharding


ONE_DEVICE = StageSharding()
