"""Splits a step's device time into parts, by attributing every kernel.

A kernel is looked up in the compiled program, whose instructions know the source lines
that they come from. Shapes tell frozen products from the adapters' products, and
kernels with telling names need no lookup. For cuBLAS products in a CUDA graph, the
profiler reports only a name.
"""

import dataclasses
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax

from scripts.bench.device_trace import Kernel, busy_ms, trace

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_NAMED = re.compile(r'^(\d+) "(.*)"$')
_FIELDS = re.compile(r"(\w+)=(\d+)")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_OPERANDS = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_PRODUCTS = re.compile(r"gemm|matmul|cublas|dot", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of an instruction.

    Attributes:
        files: Source files of its stack, innermost first.
        is_product: Whether it is or contains a matrix product.
        dims: All dimensions of its operands and results.
    """

    files: tuple[str, ...]
    is_product: bool
    dims: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    opcode: str
    result: str
    rest: str
    computation: str

    def dims(self) -> set[int]:
        found = _SHAPE.findall(self.result)
        return {int(d) for dims in found for d in dims.split(",") if d}


def module_name(text: str) -> str:
    """Returns the program's name, as profiles show it."""
    return text.split(maxsplit=2)[1].rstrip(",")


def origins(text: str) -> dict[str, Origin]:
    """Returns the origin of each instruction in a program's `as_text()`."""
    files = _stacks(text)
    lines = _instructions(text)
    inside: dict[str, list[_Line]] = {}
    for line in lines.values():
        inside.setdefault(line.computation, []).append(line)
    return {name: _origin(name, lines, inside, files) for name in lines}


def _origin(
    name: str,
    lines: Mapping[str, _Line],
    inside: Mapping[str, list[_Line]],
    files: Mapping[int, tuple[str, ...]],
) -> Origin:
    line = lines[name]
    calls = _CALLS.search(line.rest)
    body = inside.get(calls[1], []) if calls else []
    stack: tuple[str, ...] = ()
    # A fusion without a frame has its root's, which is on the last line inside it.
    for candidate in (line, *reversed(body)):
        frame = re.search(r"stack_frame_id=(\d+)", candidate.rest)
        if frame:
            stack = files.get(int(frame[1]), ())
            break
    target = re.search(r'custom_call_target="([^"]*)"', line.rest)
    about = f"{name} {line.opcode} {target[1] if target else ''}"
    operands = _OPERANDS.findall(line.rest.split(")", 1)[0])
    dims = line.dims().union(*(lines[o].dims() for o in operands if o in lines))
    is_product = bool(_PRODUCTS.search(about)) or any(
        inner.opcode == "dot" for inner in body
    )
    return Origin(files=stack, is_product=is_product, dims=frozenset(dims))


def _instructions(text: str) -> dict[str, _Line]:
    out: dict[str, _Line] = {}
    computation = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            computation = header[1]
            continue
        found = _INSTRUCTION.match(line)
        if found:
            name, result, opcode, rest = found.groups()
            out[name] = _Line(
                opcode=opcode, result=result, rest=rest, computation=computation
            )
    return out


def _stacks(text: str) -> dict[int, tuple[str, ...]]:
    """Returns the source files of each stack frame, innermost first."""
    names: dict[int, str] = {}
    tables: dict[str, dict[int, dict[str, int]]] = {
        "FileLocations": {},
        "StackFrames": {},
    }
    table = ""
    for line in text.splitlines():
        if _TABLE.match(line):
            table = line
        elif table == "FileNames" and (found := _NAMED.match(line)):
            names[int(found[1])] = found[2]
        elif table in tables and (found := re.match(r"^(\d+) \{", line)):
            fields = {k: int(v) for k, v in _FIELDS.findall(line)}
            tables[table][int(found[1])] = fields
    return {frame: _files(frame, names, tables) for frame in tables["StackFrames"]}


def _files(frame: int, names, tables) -> tuple[str, ...]:
    out: list[str] = []
    seen: set[int] = set()
    while frame in tables["StackFrames"] and frame not in seen:
        seen.add(frame)
        fields = tables["StackFrames"][frame]
        place = tables["FileLocations"].get(fields["file_location_id"], {})
        out.append(names.get(place.get("file_name_id", 0), ""))
        frame = fields.get("parent_frame_id", 0)
    return tuple(out)


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
    # Norms and gates that compute s, and gradients of norms.
    (re.compile(r"lora_produce|norm_gradient"), ELEMENTWISE),
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
