"""The kernels that a device ran, from JAX's profiler."""

import dataclasses
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One run of one kernel.

    Attributes:
        name: Name of the compiled kernel.
        instruction: Instruction of the program that it belongs to; "" if unknown.
        module: Name of the program; "" if unknown.
        device: Number of the device on this machine.
        start_ms: Start time from an arbitrary origin.
        ms: Duration.
    """

    name: str
    instruction: str
    module: str
    start_ms: float
    ms: float
    device: int = 0


def trace(run: Callable[[], object], repeats: int) -> list[Kernel]:
    """Returns the kernels of several calls of `run`, which must wait for its end.

    On a CPU, which has no kernels, these are the program's instructions as its threads
    ran them.
    """
    with tempfile.TemporaryDirectory(prefix="jaxlora-profile-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # The reader's types are deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            profile = ProfileData.from_file(str(path))
            return list(_kernels(list(profile.planes)))


def _kernels(planes: Sequence[Any]) -> Iterator[Kernel]:
    on_gpu = any(plane.name.startswith("/device:GPU") for plane in planes)
    for plane in planes:
        if not plane.name.startswith("/device:GPU" if on_gpu else "/host:CPU"):
            continue
        for line in plane.lines:
            # A GPU's other lines repeat the events of its streams.
            if on_gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                facts: dict[str, Any] = dict(event.stats)
                if on_gpu or "hlo_op" in facts:
                    yield Kernel(
                        name=event.name,
                        instruction=str(facts.get("hlo_op", "")),
                        module=str(facts.get("hlo_module", "")),
                        start_ms=event.start_ns / 1e6,
                        ms=event.duration_ns / 1e6,
                        device=_device(plane.name, facts),
                    )


def _device(plane: str, facts: dict[str, Any]) -> int:
    """Returns the device of an event; a GPU has a plane of its own, a CPU has not."""
    _, is_gpu, number = plane.partition("/device:GPU:")
    return int(number.split()[0] if is_gpu else facts.get("device_ordinal", 0))


_EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")


def is_exchange(kernel: Kernel) -> bool:
    """Whether a kernel passes data between devices."""
    if "nccl" in kernel.name.lower():
        return True
    return any(word in kernel.instruction for word in _EXCHANGES)


def busy_ms(kernels: list[Kernel]) -> float:
    """Returns the time during which at least one of the kernels ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_ms):
        end = kernel.start_ms + kernel.ms
        total += max(0.0, end - max(until, kernel.start_ms))
        until = max(until, end)
    return total
