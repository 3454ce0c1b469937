"""The kernels of a program, with their device times and kinds."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Kinds of kernels by their names, the first that fits.
_KINDS = (
    ("frozen products with s B", re.compile(r"lora_expand")),
    ("norms and gates", re.compile(r"lora_produce|norm_gradient")),
    ("adapters' own", re.compile(r"lora_")),
    ("attention", re.compile(r"cudnn|fmha|flash|attention", re.IGNORECASE)),
    ("XLA's products", re.compile(r"gemm|nvjet|cublas|cutlass|dot", re.IGNORECASE)),
)
_OTHER = "element-wise and random numbers"

Call = Sequence[tuple[str, float]]  # name and microseconds of each kernel of a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """The kernels of a program's calls.

    Attributes:
        totals: Microseconds of all kernels of each call.
        kernels: Name and median microseconds of each kernel of a call, in its order.
    """

    totals: Sequence[float]
    kernels: Sequence[tuple[str, float]]

    @staticmethod
    def of(calls: Sequence[Call]) -> "KernelTimes":
        """Returns the times of calls that ran the same kernels."""
        kernels = [
            (name, statistics.median(call[i][1] for call in calls))
            for i, (name, _) in enumerate(calls[0])
        ]
        totals = [sum(us for _, us in call) for call in calls]
        return KernelTimes(totals=totals, kernels=kernels)

    def ranked(self) -> list[tuple[str, int, float]]:
        """Returns each name with its number of kernels and their microseconds."""
        counts: collections.Counter[str] = collections.Counter()
        times: collections.defaultdict[str, float] = collections.defaultdict(float)
        for name, us in self.kernels:
            counts[name] += 1
            times[name] += us
        names = sorted(times, key=lambda name: -times[name])
        return [(name, counts[name], times[name]) for name in names]


def measure_calls(
    run: Callable[..., Any], arguments: Sequence[Any], repeats: int
) -> list[Call]:
    """Measures the device time of each kernel of several calls, as CUPTI counts it."""
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.Cupti(finalize=False)
    _, found = cupti.measure(run, aggregate=False, iterations=repeats)(*arguments)
    assert found is not None, "CUPTI saw no kernel"
    # CUPTI returns the kernels themselves, not a list of calls, for a single call.
    calls: Any = found if isinstance(found[0], list) else [found]
    return [[(name, 1000 * ms) for name, ms in call] for call in calls]


def by_kind(kernels: Sequence[tuple[str, float]]) -> Mapping[str, float]:
    """Returns the microseconds of each kind."""
    out = dict.fromkeys([*(kind for kind, _ in _KINDS), _OTHER], 0.0)
    for name, us in kernels:
        fitting = (kind for kind, pattern in _KINDS if pattern.search(name))
        out[next(fitting, _OTHER)] += us
    return {kind: round(us, 1) for kind, us in out.items()}
