"""Facts about the device that kernels are compiled for.

It is the present one, except inside `planned_for`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDevice:
    """NVIDIA GPUs that a run is planned for, which need not be here.

    Attributes:
        kind: JAX's `device_kind`.
        capability: Ten times the compute capability, such as 89 for 8.9.
        num_sms: Number of multiprocessors.
        memory_bytes: Memory of each GPU that JAX may use.
        count: Number of GPUs.
        num_hosts: Number of machines that they are in.
    """

    kind: str
    capability: int
    num_sms: int
    memory_bytes: int
    count: int = 1
    num_hosts: int = 1


# JAX traces a function again where one of these is another one.
_PLANNED = jax.make_user_context(None)
_SHAPES_ONLY = jax.make_user_context(False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Leaves the code of kernels out of traces inside, of which only shapes are used.

    To trace the code takes longer than all the rest.
    """
    with _SHAPES_ONLY(True):
        yield


def traces_shapes_only() -> bool:
    """Whether this is inside `shapes_only`."""
    return _SHAPES_ONLY.value


@contextlib.contextmanager
def planned_for(planned: PlannedDevice) -> Iterator[None]:
    """Makes the functions of this module describe other devices than the present ones.

    Programs can be traced inside, but not run.
    """
    with _PLANNED(planned):
        yield


def planned_device() -> PlannedDevice | None:
    """Returns the devices of `planned_for`; None outside of it."""
    return _PLANNED.value


def platform() -> str:
    """Returns the kind of the default device's platform: `gpu`, `cpu` or `tpu`."""
    return "gpu" if planned_device() is not None else jax.default_backend()


def num_devices() -> int:
    """Returns the number of devices of all processes."""
    planned = planned_device()
    return len(jax.devices()) if planned is None else planned.count


def device_kind() -> str:
    """Returns the device's name."""
    planned = planned_device()
    return jax.local_devices()[0].device_kind if planned is None else planned.kind


def num_sms() -> int:
    """Returns the number of multiprocessors of the device that is compiled for."""
    planned = planned_device()
    if planned is not None:
        return planned.num_sms
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:  # compiled for a device that is not here
        return target.num_cores
    return jax.devices()[0].core_count


def not_nvidia() -> str | None:
    """Returns why the default device is no NVIDIA GPU, or None if it is one."""
    if planned_device() is not None:
        return None
    if jax.default_backend() != "gpu":
        return f"the device is a {jax.default_backend()}, not an NVIDIA GPU"
    if "cuda" not in jax.devices()[0].client.platform_version.lower():
        return f"the GPU is a {device_kind()}, not an NVIDIA GPU"
    return None


def capability() -> int:
    """Returns ten times the default GPU's compute capability, such as 89 for 8.9."""
    planned = planned_device()
    if planned is not None:
        return planned.capability
    return int(str(jax.devices()[0].compute_capability).replace(".", ""))
