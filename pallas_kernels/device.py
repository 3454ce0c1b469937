"""Facts about the device that kernels are compiled for."""

import jax


def device_kind() -> str:
    """Returns the device's name."""
    return jax.devices()[0].device_kind


def num_sms() -> int:
    """Returns the number of multiprocessors of the device that is compiled for."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:  # compiled for a device that is not here
        return target.num_cores
    return jax.devices()[0].core_count


def not_nvidia() -> str | None:
    """Returns why the default device is no NVIDIA GPU, or None if it is one."""
    if jax.default_backend() != "gpu":
        return f"the device is a {jax.default_backend()}, not an NVIDIA GPU"
    if "cuda" not in jax.devices()[0].client.platform_version.lower():
        return f"the GPU is a {device_kind()}, not an NVIDIA GPU"
    return None


def capability() -> int:
    """Returns ten times the default GPU's compute capability, such as 89 for 8.9."""
    return int(str(jax.devices()[0].compute_capability).replace(".", ""))
