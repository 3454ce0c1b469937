"""Reads a scheduled HLO module: its gathers, and when their results are alive."""

import dataclasses
import math
import re

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
_BYTES |= {"f32": 4, "s64": 8, "u64": 8}
_LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)")
# These pass on their operands, so a buffer stays alive as long as their results.
_VIEWS = {"get-tuple-element", "bitcast", "tuple", "all-gather-done", "opt-barrier"}


@dataclasses.dataclass(frozen=True)
class Op:
    """An instruction of the entry computation.

    Attributes:
        name: Its name.
        kind: Its opcode.
        shapes: Shapes of its results, with their dtypes.
        operands: Names of its operands.
        index: The element that a `get-tuple-element` takes; None: it is none.
    """

    name: str
    kind: str
    shapes: list[tuple[str, tuple[int, ...]]]
    operands: list[str]
    index: int | None


@dataclasses.dataclass
class Gathered:
    """An array that an all-gather makes.

    Attributes:
        shape: Its shape.
        num_bytes: Its size.
        start: Number of the instruction that starts to write it.
        done: Number of the instruction after which it is complete.
        last: Number of the last instruction that uses it.
    """

    shape: tuple[int, ...]
    num_bytes: int
    start: int
    done: int
    last: int


def entry_ops(text: str) -> list[Op]:
    """Returns the instructions of the entry computation, in their order."""
    lines = text[text.index("\nENTRY") :].split("\n")
    return [_op(*match.groups()) for line in lines if (match := _LINE.match(line))]


def _op(name: str, rest: str) -> Op:
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    result, call = rest[:end], rest[end:].strip()
    kind, _, tail = call.partition("(")
    end = _closing("(" + tail) - 1
    index = re.search(r"index=(\d+)", tail[end:])
    return Op(
        name=name,
        kind=kind,
        shapes=_shapes(result),
        operands=re.findall(r"%([\w.\-]+)", tail[:end]),
        index=int(index[1]) if index and kind == "get-tuple-element" else None,
    )


def _closing(text: str) -> int:
    """Returns where the bracket that opens the text is closed."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i + 1
    raise AssertionError(f"unbalanced: {text}")


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    found = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return [
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in found
        if dtype in _BYTES
    ]


def gathered_arrays(ops: list[Op]) -> list[Gathered]:
    """Returns the floating-point arrays that are gathered, in order."""
    found: list[Gathered] = []
    held: dict[str, dict[int, Gathered]] = {}  # by instruction and tuple element
    for number, op in enumerate(ops):
        if op.kind in ("all-gather", "all-gather-start"):
            shapes = op.shapes
            if op.kind == "all-gather-start":  # its result holds the operands too
                shapes = shapes[len(shapes) // 2 :]
            held[op.name] = {
                i: Gathered(shape, _num_bytes(dtype, shape), number, number, number)
                for i, (dtype, shape) in enumerate(shapes)
                if dtype in ("bf16", "f32")
            }
            found += held[op.name].values()
            continue
        held[op.name] = _views(op, held, number)
    return found


def _views(op: Op, held: dict[str, dict[int, Gathered]], number: int):
    """Notes the use of gathered arrays; returns those that the result passes on."""
    result = {}
    for place, operand in enumerate(op.operands):
        for element, array in held.get(operand, {}).items():
            if op.index is not None and element != op.index:
                continue
            array.last = number
            if op.kind == "all-gather-done":
                array.done = number
            if op.kind in _VIEWS:
                is_one = op.index is not None
                key = 0 if is_one else place if op.kind == "tuple" else element
                result[key] = array
    return result


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _BYTES[dtype] * math.prod(shape)


def most_alive_bytes(arrays: list[Gathered]) -> int:
    """Returns the largest number of gathered bytes that are alive at once."""
    return max(
        sum(a.num_bytes for a in arrays if a.start <= number <= a.last)
        for number in {array.start for array in arrays}
    )
