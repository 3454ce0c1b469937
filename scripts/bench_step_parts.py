"""A training step's time by part: every kernel goes to the part that it computes.

A kernel is found again in the compiled program, whose instructions know the source
lines that they come from; the frozen and the adapters' products are told apart by
their shapes, and kernels that stand for themselves by name. Of products through cuBLAS
in a CUDA graph the profiler says no more than a name.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import jax

from jaxlora.data.pack import PackedBatch
from scripts.bench_training import Training
from scripts.device_trace import Kernel, busy_ms, trace
from scripts.hlo_origins import Origin, module_name, origins

FROZEN = "frozen and expand products"
CUBLAS = "products through cuBLAS"
OWN = "adapters' own"
ATTENTION = "attention"
HEAD = "loss head"
ELEMENTWISE = "element-wise"
OPTIMISER = "optimiser"
OTHER = "other"
GAPS = "gaps"
PARTS = (FROZEN, CUBLAS, OWN, ATTENTION, HEAD, ELEMENTWISE, OPTIMISER, OTHER)

_NAMES = (
    (re.compile(r"lora_expand"), FROZEN),  # y = x W + s B is one kernel
    (re.compile(r"lora_"), OWN),
    (re.compile(r"cudnn|fmha|flash|attention", re.IGNORECASE), ATTENTION),
)
# Where nothing else is known. Only the head's products have float32 results ("tss").
_LIBRARIES = (
    (re.compile(r"nvjet_sm\d+_tss"), HEAD),
    (re.compile(r"nvjet|cublas|cutlass"), CUBLAS),
)
_FILES = (
    ("attention", ATTENTION),
    ("modules/loss.py", HEAD),
    ("modules/multi_lora_linear.py", ELEMENTWISE),  # but for products
    ("modules/", ELEMENTWISE),
    ("models/", ELEMENTWISE),
    ("pallas_kernels/", OWN),  # but for products
    ("adapters/optimizer.py", OPTIMISER),
    ("train/step.py", OWN),  # sums of gradients
)
_PRODUCT_FILES = ("pallas_kernels/", "modules/multi_lora_linear.py")
_REPEATS = 3
_SHOWN = 25


class Attribution:
    """Tells which part a kernel belongs to."""

    def __init__(self, programs: Mapping[str, jax.stages.Compiled], rank: int):
        """Reads the programs.

        Args:
            programs: By role; that of `step` is the optimiser's.
            rank: Of the adapters, which no frozen product has among its dimensions.
        """
        self._rank = rank
        self._origins: dict[str, dict[str, Origin]] = {}
        self._optimisers: set[str] = set()
        for role, program in programs.items():
            text = program.as_text()
            assert text is not None
            name = module_name(text)
            self._origins[name] = origins(text)
            if role == "step":
                self._optimisers.add(name)

    def part(self, kernel: Kernel) -> str:
        """One of `PARTS`."""
        module = kernel.module.split("(")[0]
        if module in self._optimisers:
            return OPTIMISER
        for pattern, part in _NAMES:
            if pattern.search(kernel.name):
                return part
        origin = self._origin(kernel, module)
        if origin is not None:
            return self._by_file(origin)
        libraries = (part for name, part in _LIBRARIES if name.search(kernel.name))
        return next(libraries, OTHER)

    def _origin(self, kernel: Kernel, module: str) -> Origin | None:
        tables = [self._origins[module]] if module in self._origins else []
        for table in tables or self._origins.values():
            if kernel.instruction in table:
                return table[kernel.instruction]
            # A fusion's kernel has its name, with the dot written as an underscore.
            dotted = re.sub(r"_(\d+)$", r".\1", kernel.name)
            for name in (kernel.name, dotted):
                if name in table:
                    return table[name]
        return None

    def _by_file(self, origin: Origin) -> str:
        for file in origin.files:
            if origin.is_product and any(end in file for end in _PRODUCT_FILES):
                return OWN if self._rank in origin.dims else FROZEN
            for end, part in _FILES:
                if end in file:
                    return part
        return OTHER


def by_part(kernels: Sequence[Kernel], attribution: Attribution) -> dict[str, float]:
    """Milliseconds of each part."""
    out = dict.fromkeys(PARTS, 0.0)
    for kernel in kernels:
        out[attribution.part(kernel)] += kernel.ms
    return out


def measure(
    training: Training, batches: Sequence[PackedBatch], wall_ms: float
) -> dict[str, float]:
    """Milliseconds of each part of a step, and of the gaps between kernels.

    Args:
        training: What runs.
        batches: Of a step.
        wall_ms: Time of a step outside the profiler, which slows the host down.
    """
    training.run(batches)
    kernels = trace(lambda: training.start(batches)(), _REPEATS)
    if not kernels:
        print("the profiler saw no kernel", file=sys.stderr)
        return {}
    attribution = Attribution(training.programs, training.setup.rank)
    parts = by_part(kernels, attribution)
    _print_largest(kernels, attribution)
    out = {part: round(parts[part] / _REPEATS, 3) for part in PARTS}
    return out | {GAPS: round(max(0.0, wall_ms - busy_ms(kernels) / _REPEATS), 3)}


def _print_largest(kernels: Sequence[Kernel], attribution: Attribution) -> None:
    """The kernels that take the most time, and where they went; to stderr."""
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    count: Counter[tuple[str, str]] = Counter()
    for kernel in kernels:
        key = attribution.part(kernel), kernel.name
        total[key] += kernel.ms
        count[key] += 1
    for (part, name), ms in sorted(total.items(), key=lambda x: -x[1])[:_SHOWN]:
        print(
            f"{ms / _REPEATS:9.3f} ms {count[part, name] // _REPEATS:5} x "
            f"{part:28} {name[:80]}",
            file=sys.stderr,
        )
