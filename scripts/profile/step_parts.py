"""Splits a step's device time into parts, by attributing every kernel.

A kernel is looked up in the compiled program, whose instructions know the source lines
that they come from. Shapes tell frozen products from the adapters' products, and
kernels with telling names need no lookup. For cuBLAS products in a CUDA graph, the
profiler reports only a name.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxlora.profile.device_trace import Kernel, busy_ms, trace
from jaxlora.profile.hlo_origins import Origin, module_name, origins

FROZEN = "frozen and expand products"
CUBLAS = "products through cuBLAS"
OWN = "adapters' own"
QUANTIZING = "quantizing and dequantizing"
ATTENTION = "attention"
HEAD = "loss head"
ELEMENTWISE = "element-wise"
OPTIMIZER = "optimizer"
OTHER = "other"
GAPS = "gaps"
PARTS = (
    FROZEN,
    CUBLAS,
    OWN,
    QUANTIZING,
    ATTENTION,
    HEAD,
    ELEMENTWISE,
    OPTIMIZER,
    OTHER,
)

_NAMES = (
    # y = x W + s B is one kernel. The names are those of Mosaic's and Triton's kernels.
    (re.compile(r"lora_expand|^expand_kernel"), FROZEN),
    (re.compile(r"lora_quantize"), QUANTIZING),
    (re.compile(r"lora_produce"), ELEMENTWISE),  # norms and gates that compute s
    (re.compile(r"lora_|^(shrink|dual|outer)_kernel"), OWN),
    (re.compile(r"cudnn|fmha|flash|attention", re.IGNORECASE), ATTENTION),
)
# These apply to kernels without an origin. Only the head's products have float32
# results ("tss").
_LIBRARIES = (
    (re.compile(r"nvjet_sm\d+_tss"), HEAD),
    (re.compile(r"nvjet|cublas|cutlass"), CUBLAS),
)
# Products in `_PRODUCT_FILES` are told apart by their shapes before this table is used.
_FILES = (
    ("attention", ATTENTION),
    ("modules/loss.py", HEAD),
    ("modules/multi_lora_linear.py", ELEMENTWISE),
    ("modules/", ELEMENTWISE),
    ("models/", ELEMENTWISE),
    ("pallas_kernels/quantized/", QUANTIZING),
    ("pallas_kernels/dequantize.py", QUANTIZING),
    ("pallas_kernels/", OWN),
    ("adapters/optimizer.py", OPTIMIZER),
    ("train/execute/step.py", OWN),  # sums of gradients
)
_PRODUCT_FILES = ("pallas_kernels/", "modules/multi_lora_linear.py")
_REPEATS = 3
_SHOWN = 25


class Attribution:
    """Attributes kernels to parts."""

    def __init__(self, programs: Mapping[str, jax.stages.Compiled], rank: int):
        """Reads the text of compiled programs.

        Args:
            programs: Programs by role. The role `step` is the optimizer's.
            rank: Rank of the adapters. No dimension of a frozen product equals it.
        """
        self._rank = rank
        self._origins: dict[str, dict[str, Origin]] = {}
        self._optimizers: set[str] = set()
        for role, program in programs.items():
            text = program.as_text()
            assert text is not None
            name = module_name(text)
            self._origins[name] = origins(text)
            if role == "step":
                self._optimizers.add(name)

    def part(self, kernel: Kernel) -> str:
        """Returns the part of a kernel, one of `PARTS`."""
        module = kernel.module.split("(")[0]
        if module in self._optimizers:
            return OPTIMIZER
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
            # A kernel has its fusion's name, with the dot written as an underscore.
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
    """Returns the milliseconds of each part."""
    out = dict.fromkeys(PARTS, 0.0)
    for kernel in kernels:
        out[attribution.part(kernel)] += kernel.ms
    return out


def measure(
    run: Callable[[], object], attribution: Attribution, step_ms: float
) -> dict[str, float]:
    """Returns the milliseconds of each part of a step, and of gaps between kernels.

    Args:
        run: Runs one step and waits for its end.
        attribution: Knows the programs of the step.
        step_ms: Time of a step without the profiler, which slows the host down.
    """
    run()
    kernels = trace(run, _REPEATS)
    if not kernels:
        print("the profiler saw no kernel", file=sys.stderr)
        return {}
    parts = by_part(kernels, attribution)
    _print_largest(kernels, attribution)
    out = {part: round(parts[part] / _REPEATS, 3) for part in PARTS}
    return out | {GAPS: round(max(0.0, step_ms - busy_ms(kernels) / _REPEATS), 3)}


def _print_largest(kernels: Sequence[Kernel], attribution: Attribution) -> None:
    """Prints the kernels that take the most time, with their parts, to stderr."""
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
