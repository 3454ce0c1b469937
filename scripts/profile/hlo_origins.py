"""Source files of a compiled program's instructions, read from its text."""

import dataclasses
import re
from collections.abc import Mapping

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
