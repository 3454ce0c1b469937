"""The device for which Triton compiles the kernels, and the linears they run there."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.operands import padded_rank, unsupported_linear
from jaxlora.pallas_kernels.projection import RANK_STEP, LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight

_OLDEST = 80  # Ampere: the first with bfloat16 products and asynchronous copies
# Hopper and the Blackwell of data centers have products of their own, `wgmma` and
# `tcgen05`. Triton 3.6's code of these kernels with `wgmma` gave wrong results on an
# H200, and that with `tcgen05` was never run. See docs/portable_kernels.md.
_OTHER_PRODUCTS = range(90, 120)
HOPPER = 90
_INTERPRETED_SMS = 4
MOST_GATHERED = 2  # linears whose s one kernel computes
_ALIGNED_FEATURES = 8  # rows of 16 bytes, which one asynchronous copy moves
_MISSING = (
    "the package {} is not installed (run `pip install 'jaxlora[triton]'`)".format
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The device that kernels are compiled for; equal targets share programs.

    Attributes:
        capability: Ten times the compute capability, such as 89 for an L40S.
        num_sms: Number of multiprocessors.
        interpreter: Runs a kernel instead of a GPU; see `interpreted`.
    """

    capability: int
    num_sms: int
    interpreter: Callable[..., list] | None = None


# JAX traces a function again where this is another one.
_TARGET = jax.make_user_context(None)


@contextlib.contextmanager
def interpreted(interpreter: Callable[..., list]) -> Iterator[None]:
    """Runs kernels that are traced inside in an interpreter, on any device.

    This is for tests.

    Args:
        interpreter: Is called with the kernel, its NumPy inputs, the shapes and dtypes
            of its outputs, the grid and the constants by name; returns the outputs.
    """
    target = Target(
        capability=_OLDEST, num_sms=_INTERPRETED_SMS, interpreter=interpreter
    )
    with _TARGET(target):
        yield


@contextlib.contextmanager
def forced_capability(capability: int, num_sms: int | None = None) -> Iterator[None]:
    """Compiles kernels inside for another GPU than the default device.

    Newer GPUs run such code: it is assembled for the device that is here, if there is
    one. This is for tests and benchmarks.

    Args:
        capability: Ten times the compute capability.
        num_sms: Number of multiprocessors; None: the present device's.
    """
    with _TARGET(Target(capability=capability, num_sms=num_sms or device.num_sms())):
        yield


def present_target(*, hopper: bool = False) -> Target:
    """Returns the target of kernels that are traced now.

    Args:
        hopper: Whether Hopper's own products are right in these kernels.
    """
    forced: Target | None = _TARGET.value
    if forced is not None:
        return forced
    capability = device.capability()
    is_right = hopper and capability == HOPPER
    is_other = capability in _OTHER_PRODUCTS and not is_right
    return Target(
        capability=_OLDEST if is_other else capability, num_sms=device.num_sms()
    )


def unsupported_device() -> str | None:
    """Returns why the kernels cannot run on the default device, or None if they can."""
    forced: Target | None = _TARGET.value
    if forced is not None and forced.interpreter is not None:
        return None
    if forced is None:
        if (reason := device.not_nvidia()) is not None:
            return reason
        if (capability := device.capability()) < _OLDEST:
            return f"the GPU's compute capability is {capability / 10}, less than 8.0"
    if device.planned_device() is not None:
        return None  # it is to have the packages
    needed = ("triton", "jax_triton")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        return _MISSING(missing[0].replace("_", "-"))
    return None


def slow_device() -> str | None:
    """Returns why XLA's products are faster on the default device, or None."""
    if _TARGET.value is not None or device.not_nvidia() is not None:
        return None
    if (capability := device.capability()) not in _OTHER_PRODUCTS:
        return None
    return (
        f"its products use the instructions of Ampere, with which a GPU of compute "
        f"capability {capability / 10} reaches about half its speed"
    )


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear here, or None if they can."""
    if (reason := unsupported_device()) is not None:
        return reason
    if shape.weight_format == Fp8Weight.format:
        return "its kernels have no products with fp8 weights"
    return unsupported_linear(shape, multiple=_ALIGNED_FEATURES)


def unsupported_gather(
    projections: Sequence[Projection], *, is_gradient: bool
) -> str | None:
    """Returns why `gather` cannot compute s or ds of some linears, or None."""
    if _TARGET.value is None and device.planned_device() is not None:
        return "plans are made where its packages may be missing"
    if (reason := unsupported_device()) is not None:
        return reason
    if not is_gradient and any(p.dropout is not None for p in projections):
        return "it has no masks"
    rank = padded_rank(max(p.a.shape[2] for p in projections))
    if len(projections) > MOST_GATHERED or rank > RANK_STEP:
        return f"{len(projections)} side products of rank {rank} leave no room"
    return None
