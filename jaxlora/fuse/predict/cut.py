"""Splits a data-flow graph beside large matrix products, where it is thin.

A large product is a kernel that computes its result tile by tile. A path of other
operations is added to the result. What this path computes can be computed in three
places: in the kernel, once for each tile that needs it; in kernels before it, which
write it to memory; or partly here and partly there. The best partition is a minimum
cut: tensors that cross it are written and read, and operations on the kernel's side
are repeated for each column of tiles if another product follows them. Costs are in
bytes of device memory traffic; arithmetic counts as the bytes that move in its time.

LoRAFusion finds by hand that the cut of a low-rank path is its narrow tensor s (arXiv
2510.00206, section 5.1).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import networkx as nx

from jaxlora.fuse.predict.graph import Operation, Tensor, operations
from jaxlora.fuse.predict.kernel_rates import TILE_COLUMNS, KernelRates
from jaxlora.fuse.predict.launches import Origins, bound
from jaxlora.fuse.predict.work import Kind

_STEP = 64  # sides of the products in a tile are padded to multiples of it
_SOURCE, _SINK = "source", "sink"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The partition of a path beside a large product.

    Attributes:
        product: Index of the large product.
        tensors: The tensors that are written to memory for it; none if the graph is
            not split, as the path is best computed in the product's kernel, or is
            nowhere thinner than the product's result.
        num_bytes: Bytes of writing and reading these tensors.
        before: Operations of the path that are computed before the kernel.
        inside: Operations in the product's kernel: the product, the rest of the path,
            and the operations that add it to the result.
    """

    product: int
    tensors: tuple[Tensor, ...]
    num_bytes: float
    before: frozenset[int]
    inside: frozenset[int]


def find_cuts(graph: nx.MultiDiGraph, device: KernelRates) -> list[Cut]:
    """Returns the cuts of a graph, one for each large product with such a path.

    A product is large if it is bound by compute on the device. A path has at least one
    product that is bound by memory.
    """
    paths = _Paths(graph, device)
    return [_minimum_cut(path, device) for path in paths.find()]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Path:
    """Operations beside a large product.

    Attributes:
        product: The large product.
        members: The operations of the path, without views.
        joins: Operations that combine the product's result and the path's.
        results: Tensors that the joins read from the path.
        kept: Indices of tensors that other operations read too.
        origins: The tensors behind views.
    """

    product: Operation
    members: dict[int, Operation]
    joins: frozenset[int]
    results: frozenset[int]
    kept: frozenset[int]
    origins: Origins

    def repeated(self) -> set[int]:
        """Returns the operations that a product of the path depends on."""
        found: set[int] = set()
        for op in sorted(self.members.values(), key=lambda op: -op.index):
            if op.kind is Kind.MATMUL or op.index in found:
                found.update(self.writers(op))
        return found

    def writers(self, op: Operation) -> Iterator[int]:
        """Returns the members that write what an operation reads."""
        for tensor in op.reads:
            writer = self.origins.writer[self.origins.tensor(tensor).index]
            if writer in self.members:
                yield writer


class _Paths:
    """Finds the paths beside the large products of a graph."""

    def __init__(self, graph: nx.MultiDiGraph, device: KernelRates):
        self._graph = graph
        self._ops = operations(graph)
        self._origins = Origins(self._ops)
        self._large = {
            op.index
            for op in self._ops
            if op.kind is Kind.MATMUL and bound(op, device) == "compute"
        }
        self._depends = self._dependencies()

    def _dependencies(self) -> list[int]:
        """Returns for each operation the set of those before it, as bits."""
        found: list[int] = []
        for op in self._ops:
            bits = 0
            for writer in self._graph.predecessors(op.index):
                bits |= found[writer] | (1 << writer)
            found.append(bits)
        return found

    def _is_before(self, first: int, second: int) -> bool:
        return bool(self._depends[second] >> first & 1)

    def find(self) -> Iterator[_Path]:
        for index in sorted(self._large):
            product = self._ops[index]
            joins = self._joins(product)
            members = self._members(product, joins)
            if any(self._ops[i].kind is Kind.MATMUL for i in members):
                yield self._path(product, joins, members)

    def _joins(self, product: Operation) -> set[int]:
        """Returns the element-wise operations on the product's result."""
        size = math.prod(product.writes[0].shape)
        found: set[int] = set()
        todo = [product.index]
        while todo:
            for reader in self._graph.successors(todo.pop()):
                op = self._ops[reader]
                is_loop = op.kind in (Kind.MAP, Kind.VIEW)
                if not is_loop or op.runs != product.runs or reader in found:
                    continue
                if math.prod(op.writes[0].shape) == size:
                    found.add(reader)
                    todo.append(reader)
        return found

    def _members(self, product: Operation, joins: set[int]) -> set[int]:
        """Returns the operations that joins depend on, and the product does not."""
        found: set[int] = set()
        todo = list(joins)
        while todo:
            for writer in self._graph.predecessors(todo.pop()):
                op = self._ops[writer]
                if writer in found or writer in joins or writer in self._large:
                    continue
                if op.kind in (Kind.INPUT, Kind.KERNEL) or op.runs != product.runs:
                    continue
                if self._is_before(writer, product.index):
                    continue
                found.add(writer)
                todo.append(writer)
        return {i for i in found if not self._is_before(product.index, i)}

    def _path(self, product: Operation, joins: set[int], members: set[int]) -> _Path:
        known = {i: self._ops[i] for i in members if self._ops[i].kind is not Kind.VIEW}
        results, kept = set(), set()
        for index in members:
            for tensor in self._ops[index].writes:
                root = self._origins.tensor(tensor).index
                for reader in self._graph.successors(index):
                    edge = self._graph[index][reader]
                    if tensor.index in edge and reader in joins:
                        results.add(root)
                    elif tensor.index in edge and reader not in members:
                        kept.add(root)
        return _Path(
            product=product,
            members=known,
            joins=frozenset(joins),
            results=frozenset(results),
            kept=frozenset(kept),
            origins=self._origins,
        )


def _minimum_cut(path: _Path, device: KernelRates) -> Cut:
    network = _network(path, device)
    _, (early, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    before = frozenset(i for i in path.members if i in early)
    crossing = [
        tensor
        for i in before
        for tensor in path.members[i].writes
        if ("tensor", tensor.index) not in early and tensor.num_bytes
    ]
    widest = max((t.num_bytes for t in crossing), default=0.0)
    product = path.product.index
    if widest >= path.product.writes[0].num_bytes:
        return Cut(
            product=product,
            tensors=(),
            num_bytes=0.0,
            before=frozenset(path.members),
            inside=frozenset({product}),
        )
    return Cut(
        product=product,
        tensors=tuple(sorted(crossing, key=lambda t: t.index)),
        num_bytes=sum(_crossing_bytes(path, t) for t in crossing),
        before=before,
        inside=path.joins | {product} | (path.members.keys() - before),
    )


def _network(path: _Path, device: KernelRates) -> nx.DiGraph:
    """Makes the network whose minimum cut is the best partition.

    The source's side is computed before the kernel, and the sink's side in it.
    """
    network: nx.DiGraph[Any] = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    repeated = path.repeated()
    repeats = math.ceil(path.product.writes[0].shape[-1] / TILE_COLUMNS)
    read_by_product = {path.origins.tensor(t).index for t in path.product.reads}
    for index, op in path.members.items():
        times = repeats if index in repeated else 1
        cost = times * _seconds_inside(op, device) * device.memory_bytes
        network.add_edge(_SOURCE, index, capacity=cost)
        for tensor in op.writes:
            node = ("tensor", tensor.index)
            network.add_edge(index, node, capacity=_crossing_bytes(path, tensor))
            if tensor.index in path.results:
                network.add_edge(node, _SINK)  # without a capacity, it is infinite
        for tensor in op.reads:
            root = path.origins.tensor(tensor)
            writer = path.origins.writer[root.index]
            if writer in path.members:
                network.add_edge(("tensor", root.index), index)
                network.add_edge(index, writer)  # never computed after it is read
            elif root.index in read_by_product:
                # The kernel reads it anyway; kernels before it read it once more.
                network.add_edge(index, ("again", root.index))
                network.add_edge(("again", root.index), _SINK, capacity=root.num_bytes)
    return network


def _crossing_bytes(path: _Path, tensor: Tensor) -> float:
    """Bytes of writing a tensor and reading it; it may be written in any case."""
    return tensor.num_bytes * (1 if tensor.index in path.kept else 2)


def _seconds_inside(op: Operation, device: KernelRates) -> float:
    """Returns the time of an operation inside a kernel, if it is computed once."""
    if op.sizes is not None:
        batches, *sides = op.sizes
        padded = math.prod(_STEP * math.ceil(side / _STEP) for side in sides)
        return 2.0 * batches * padded / device.matmul_flops
    integer = op.work.integer_operations / device.integer_operations
    return integer + op.work.vector_operations / device.vector_operations
