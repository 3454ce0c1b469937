"""The device that runs the kernels: a Hopper GPU, or Pallas' interpreter in tests."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from jaxlora.pallas_kernels import device

_HOPPER = 90
# A `plgpu.InterpretGPUParams`, whose module only the kernels themselves import.
_INTERPRET: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "interpret", default=None
)
# The interpreter runs three threads for each simulated block, so a CPU with few cores
# can take only a few blocks.
_INTERPRETED_SMS = 2


@contextlib.contextmanager
def interpreted(params: Any) -> Iterator[None]:
    """Runs kernels that are traced inside in Pallas' interpreter, on any device.

    This is for tests.

    Args:
        params: The interpreter's settings, a `plgpu.InterpretGPUParams`.
    """
    token = _INTERPRET.set(params)
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpret_params() -> Any:
    """Returns the interpreter's parameters, or None outside `interpreted`."""
    return _INTERPRET.get()


def device_kind() -> str:
    """Returns the device's name, the key of the tuning table."""
    return "interpreter" if interpret_params() is not None else device.device_kind()


def num_sms() -> int:
    """Returns the number of multiprocessors of the device that is compiled for."""
    return _INTERPRETED_SMS if interpret_params() is not None else device.num_sms()


def unsupported_device() -> str | None:
    """Returns why the kernels cannot run on the default device, or None if they can."""
    if interpret_params() is not None:
        return None
    if (reason := device.not_nvidia()) is not None:
        return reason
    if (capability := device.capability()) != _HOPPER:
        return f"the GPU's compute capability is {capability / 10}, not Hopper's 9.0"
    return None
