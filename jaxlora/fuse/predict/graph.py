"""The data-flow graph of a jaxpr: equations with their work, and tensors between them.

Nested jaxprs are part of the same graph. The body of a loop is there once, and each of
its equations knows how often it runs.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import networkx as nx
from jax.extend import core

from jaxlora.fuse.predict.work import (
    NO_ARITHMETIC,
    Arithmetic,
    Kind,
    arithmetic_of,
    kind_of,
    shape_of,
)

_KEY_BYTES = 8  # of a random key, whose dtype may not say


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A value of the program.

    Attributes:
        index: Its number in the graph.
        shape: Its shape.
        dtype: Name of its dtype.
        num_bytes: Its size in memory.
        runs: How often it is computed, as a part of loops.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: float
    runs: float = 1.0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An equation of the program.

    Attributes:
        index: Its number in the graph, in an order of execution.
        name: Name of the primitive.
        kind: How XLA treats it.
        path: Loops and calls around it, such as `scan/remat`.
        work: Arithmetic of one run.
        runs: How often it runs, as a part of loops. A branch of a conditional counts
            as a fraction of a run, and a loop of unknown length as one.
        reads: Tensors that it reads.
        writes: Tensors that it writes.
        sizes: For a matrix product, its batches, rows, columns and contracted length.
    """

    index: int
    name: str
    kind: Kind
    path: str = ""
    work: Arithmetic = NO_ARITHMETIC
    runs: float = 1.0
    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()
    sizes: tuple[int, int, int, int] | None = None

    @property
    def bytes_read(self) -> float:
        """Bytes that one run reads, if nothing is fused."""
        return 0.0 if self._is_free else _sum_bytes(self.reads)

    @property
    def bytes_written(self) -> float:
        """Bytes that one run writes, if nothing is fused."""
        return 0.0 if self._is_free else _sum_bytes(self.writes)

    @property
    def _is_free(self) -> bool:
        return self.kind in (Kind.VIEW, Kind.INPUT, Kind.OUTPUT)


def _sum_bytes(tensors: Sequence[Tensor]) -> float:
    return sum(t.num_bytes for t in {t.index: t for t in tensors}.values())


def data_flow(jaxpr: core.Jaxpr) -> nx.MultiDiGraph:
    """Makes the data-flow graph of a jaxpr.

    Nodes are the indices of operations, in an order of execution, with the attribute
    `operation`. Each edge is a tensor, from the operation that writes it to one that
    reads it: its key is the tensor's index, and its attribute `tensor` the `Tensor`.
    The graph has attributes `inputs` and `outputs`, the tensors of the function. It
    has no cycles: what a loop carries to its next run is no edge.
    """
    builder = _Builder()
    given = [builder.source(v.aval, "argument") for v in jaxpr.invars]
    results = builder.call(jaxpr, given, "", 1.0)
    builder.add("output", Kind.OUTPUT, reads=results)
    graph = builder.graph
    graph.graph["inputs"] = tuple(given)
    graph.graph["outputs"] = tuple(t for t in results if t is not None)
    return graph


def operations(graph: nx.MultiDiGraph) -> list[Operation]:
    """Returns the operations of a graph in an order of execution."""
    return [graph.nodes[n]["operation"] for n in sorted(graph.nodes)]


class _Builder:
    """Adds operations to a graph while it walks through jaxprs.

    A value that is None is a literal, which takes no memory.
    """

    def __init__(self):
        self.graph = nx.MultiDiGraph()
        self._num_tensors = 0
        self._writer: dict[int, int] = {}

    def source(self, aval, name: str) -> Tensor:
        tensor = self._tensor(aval, 1.0)
        self.add(name, Kind.INPUT, writes=(tensor,))
        return tensor

    def _tensor(self, aval, runs: float) -> Tensor:
        shape = tuple(getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        itemsize = getattr(dtype, "itemsize", _KEY_BYTES) if dtype is not None else 0
        self._num_tensors += 1
        return Tensor(
            index=self._num_tensors,
            shape=shape,
            dtype=str(dtype),
            num_bytes=math.prod(shape) * itemsize,
            runs=runs,
        )

    def add(
        self,
        name: str,
        kind: Kind,
        *,
        reads: Sequence[Tensor | None] = (),
        writes: Sequence[Tensor] = (),
        **fields,
    ) -> None:
        """Adds an operation and the edges of what it reads."""
        index = self.graph.number_of_nodes()
        read = tuple(t for t in reads if t is not None)
        operation = Operation(
            index=index,
            name=name,
            kind=kind,
            reads=read,
            writes=tuple(writes),
            **fields,
        )
        self.graph.add_node(index, operation=operation)
        for tensor in read:
            self.graph.add_edge(
                self._writer[tensor.index], index, key=tensor.index, tensor=tensor
            )
        for tensor in operation.writes:
            self._writer[tensor.index] = index

    def call(
        self, jaxpr: core.Jaxpr, values: Sequence[Tensor | None], path: str, runs: float
    ) -> list[Tensor | None]:
        """Adds the equations of a jaxpr; returns its results."""
        known: dict[core.Var, Tensor | None] = {
            v: self.source(v.aval, "constant") for v in jaxpr.constvars
        }
        known.update(zip(jaxpr.invars, values, strict=True))
        read = lambda v: None if isinstance(v, core.Literal) else known[v]
        for equation in jaxpr.eqns:
            arguments = [read(v) for v in equation.invars]
            results = self._equation(equation, arguments, path, runs)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(
        self, equation: core.JaxprEqn, values: list, path: str, runs: float
    ) -> list[Tensor | None]:
        name = equation.primitive.name
        inner = f"{path}/{name}".lstrip("/")
        if name == "scan":
            return self._scan(equation, values, inner, runs)
        if name == "while":
            return self._while(equation, values, inner, runs)
        if name == "cond":
            return self._cond(equation, values, inner, runs)
        if (body := called_jaxpr(equation)) is not None:
            return self.call(body, values, inner, runs)
        return self._plain(equation, values, path, runs)

    def _plain(self, equation, values, path, runs) -> list[Tensor | None]:
        writes = [self._tensor(v.aval, runs) for v in equation.outvars]
        kind = kind_of(equation)
        self.add(
            equation.primitive.name,
            kind,
            path=path,
            work=arithmetic_of(equation),
            runs=runs,
            reads=values,
            writes=writes,
            sizes=_matmul_sizes(equation) if kind is Kind.MATMUL else None,
        )
        return [*writes]

    def _scan(self, equation, values, path, runs) -> list[Tensor | None]:
        body, inside = equation.params["jaxpr"], runs * equation.params["length"]
        consts, carry, _ = map(len, equation.params["ft_in"].unpack())
        kept = consts + carry
        slices = [
            self._view("slice", value, v.aval, path, inside)
            for value, v in zip(values[kept:], body.invars[kept:], strict=True)
        ]
        results = self.call(body, [*values[:kept], *slices], path, inside)
        stacked = [
            self._view("stack", value, v.aval, path, runs)
            for value, v in zip(results[carry:], equation.outvars[carry:], strict=True)
        ]
        return [*results[:carry], *stacked]

    def _while(self, equation, values, path, runs) -> list[Tensor | None]:
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        carry = values[first + second :]
        self.call(params["cond_jaxpr"], values[:first] + carry, path, runs)
        consts = values[first : first + second]
        return self.call(params["body_jaxpr"], consts + carry, path, runs)

    def _cond(self, equation, values, path, runs) -> list[Tensor | None]:
        branches = equation.params["branches"]
        each = [
            self.call(branch, values[1:], path, runs / len(branches))
            for branch in branches
        ]
        writes = [self._tensor(v.aval, runs) for v in equation.outvars]
        reads = [values[0], *(value for results in each for value in results)]
        self.add("cond", Kind.VIEW, path=path, runs=runs, reads=reads, writes=writes)
        return [*writes]

    def _view(self, name, value, aval, path, runs) -> Tensor | None:
        """Adds a part of a tensor, or a tensor of parts, which takes no time."""
        write = self._tensor(aval, runs)
        self.add(name, Kind.VIEW, path=path, runs=runs, reads=[value], writes=[write])
        return write


def called_jaxpr(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the jaxpr that an equation only calls, such as that of `jit`, or None.

    A kernel's own program is no part of the data flow between kernels.
    """
    if equation.primitive.name == "pallas_call":
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = equation.params.get(name)
        if isinstance(body, core.Jaxpr):
            borders = len(body.invars), len(body.outvars)
            same = borders == (len(equation.invars), len(equation.outvars))
            return body if same else None
    return None


def inner_jaxprs(
    jaxpr: core.Jaxpr, runs: float = 1.0
) -> Iterator[tuple[core.Jaxpr, float]]:
    """Returns a jaxpr and all jaxprs in it, each with how often it runs."""
    yield jaxpr, runs
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name == "scan":
            yield from inner_jaxprs(params["jaxpr"], runs * params["length"])
        elif equation.primitive.name == "while":
            for name in ("cond_jaxpr", "body_jaxpr"):
                yield from inner_jaxprs(params[name], runs)
        elif equation.primitive.name == "cond":
            for branch in params["branches"]:
                yield from inner_jaxprs(branch, runs / len(params["branches"]))
        elif (body := called_jaxpr(equation)) is not None:
            yield from inner_jaxprs(body, runs)


def _matmul_sizes(equation: core.JaxprEqn) -> tuple[int, int, int, int]:
    """Returns batches, rows, columns and the contracted length of a product."""
    left, result = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    output = math.prod(result)
    if equation.primitive.name == "dot_general":
        (contracted, _), (batches, _) = equation.params["dimension_numbers"]
        inner = math.prod(left[i] for i in contracted)
        batch = math.prod(left[i] for i in batches)
        rows = math.prod(left) // max(inner * batch, 1)
        return batch, rows, output // max(batch * rows, 1), inner
    columns = result[-1]
    inner = arithmetic_of(equation).matmul_flops / max(2 * output, 1)
    return 1, output // max(columns, 1), columns, round(inner)
