"""What a device ran, kernel by kernel, from JAX's profiler."""

import dataclasses
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One run of one kernel.

    Attributes:
        name: As it was compiled.
        instruction: The instruction of the program that it is of; "" if unknown.
        module: The program's name; "" if unknown.
        start_ms: When it began, from any zero.
        ms: How long it took.
    """

    name: str
    instruction: str
    module: str
    start_ms: float
    ms: float


def trace(run: Callable[[], object], repeats: int) -> list[Kernel]:
    """The kernels of so many calls; `run` must wait for its end.

    On a CPU, which has no kernels, the program's instructions as its threads ran them.
    """
    with tempfile.TemporaryDirectory(prefix="jaxlora-profile-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's types
            return list(_kernels(ProfileData.from_file(str(path))))


def _kernels(profile: ProfileData) -> Iterator[Kernel]:
    planes = list(profile.planes)
    on_gpu = any(plane.name.startswith("/device:GPU") for plane in planes)
    for plane in planes:
        if not plane.name.startswith("/device:GPU" if on_gpu else "/host:CPU"):
            continue
        for line in plane.lines:
            # Other lines of a GPU repeat its streams, sorted in other ways.
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
                    )


def busy_ms(kernels: list[Kernel]) -> float:
    """How long at least one of them ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_ms):
        end = kernel.start_ms + kernel.ms
        total += max(0.0, end - max(until, kernel.start_ms))
        until = max(until, end)
    return total
