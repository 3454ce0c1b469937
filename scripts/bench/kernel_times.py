"""The kernels that a device ran: their times, and kinds by their names.

JAX's profiler knows when each kernel ran and in which program, and slows the host down.
CUPTI counts the kernels of a call, whose sum is the call's device time.
"""

import collections
import dataclasses
import pathlib
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData

# Kinds of kernels by their names, the first that fits. The names of jaxlora's kernels
# are those of Mosaic and of Triton. Only the head's products have float32 results.
_KINDS = (
    ("frozen products with s B", re.compile(r"lora_expand|^expand_kernel")),
    ("quantizing", re.compile(r"lora_quantize")),
    ("norms and gates", re.compile(r"lora_produce|norm_gradient")),
    ("adapters' own", re.compile(r"lora_|^(shrink|dual|outer)_kernel")),
    ("attention", re.compile(r"cudnn|fmha|flash|attention", re.IGNORECASE)),
    ("the head's products", re.compile(r"nvjet_sm\d+_tss")),
    ("XLA's products", re.compile(r"gemm|nvjet|cublas|cutlass|dot", re.IGNORECASE)),
)
_OTHER = "element-wise and random numbers"
KINDS = (*(kind for kind, _ in _KINDS), _OTHER)

Named = tuple[str, float]  # a kernel's name, and the time of one run
Call = Sequence[Named]  # the kernels of a call, in their order, in microseconds


def by_kind(kernels: Iterable[Named], digits: int = 1) -> Mapping[str, float]:
    """Returns the time of each kind, in the unit of the kernels' times."""
    out = dict.fromkeys(KINDS, 0.0)
    for name, time in kernels:
        fitting = (kind for kind, pattern in _KINDS if pattern.search(name))
        out[next(fitting, _OTHER)] += time
    return {kind: round(time, digits) for kind, time in out.items()}


def ranked(kernels: Iterable[Named]) -> list[tuple[str, int, float]]:
    """Returns each name with its number of runs and their time, the longest first."""
    times: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for name, time in kernels:
        times[name].append(time)
    found = [(name, len(own), sum(own)) for name, own in times.items()]
    return sorted(found, key=lambda one: -one[2])


def measure_calls(
    run: Callable[..., Any], arguments: Sequence[Any], repeats: int
) -> list[Call]:
    """Measures the device time of each kernel of several calls by CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.Cupti(finalize=False)
    _, found = cupti.measure(run, aggregate=False, iterations=repeats)(*arguments)
    assert found is not None, "CUPTI saw no kernel"
    # CUPTI returns the kernels themselves, not a list of calls, for a single call.
    calls: Any = found if isinstance(found[0], list) else [found]
    return [[(name, 1000 * ms) for name, ms in call] for call in calls]


def device_times(run: Callable, *args: object, repeats: int) -> list[float]:
    """Measures the device time of each call, in microseconds."""
    return [total(call) for call in measure_calls(run, args, repeats)]


def total(call: Call) -> float:
    """Returns the device time of a call."""
    return sum(us for _, us in call)


def median_kernels(calls: Sequence[Call]) -> Call:
    """Returns the median time of each kernel of calls that ran the same kernels."""
    return [
        (name, statistics.median(call[i][1] for call in calls))
        for i, (name, _) in enumerate(calls[0])
    ]


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
    if "nccl" in kernel.name.lower() or kernel.name == "MemcpyP2P":  # a copy engine
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
