"""Where the kernels run: the multiprocessors of a GPU, or Pallas' interpreter."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_INTERPRET: contextvars.ContextVar[plgpu.InterpretGPUParams | None] = (
    contextvars.ContextVar("interpret", default=None)
)
# Each simulated block takes three threads, which a small CPU has to serve.
_INTERPRETED_SMS = 2


@contextlib.contextmanager
def interpreted(params: plgpu.InterpretGPUParams) -> Iterator[None]:
    """Kernels traced inside run in Pallas' interpreter, on any device. For tests."""
    token = _INTERPRET.set(params)
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpret_params() -> plgpu.InterpretGPUParams | None:
    """The interpreter's parameters, or None on a GPU."""
    return _INTERPRET.get()


def num_sms() -> int:
    """Multiprocessors of the device that is compiled for."""
    if interpret_params() is not None:
        return _INTERPRETED_SMS
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:  # compiled for a device that is not here
        return target.num_cores
    return jax.devices()[0].core_count


def unsupported_device() -> str | None:
    """Why the kernels cannot run on the default device, or None if they can."""
    if interpret_params() is not None:
        return None
    if jax.default_backend() != "gpu":
        return f"the device is a {jax.default_backend()}, not an NVIDIA GPU"
    capability = str(jax.devices()[0].compute_capability)
    if capability != "9.0":
        return f"the GPU's compute capability is {capability}, not Hopper's 9.0"
    return None
