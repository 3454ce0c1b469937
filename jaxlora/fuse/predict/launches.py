"""The kernels into which XLA compiles a data-flow graph for a GPU, with their work.

These rules were compared with the programs that XLA compiles for an H200 from linears
with adapters and dropout, forward and backward (jax 0.11.2):

- A matrix product is a kernel by itself. It also adds a tensor to its result if
  nothing else reads the result.
- Element-wise operations with no such kernel between them are one loop, which also
  keeps what later kernels read, such as a dropout mask.
- A reduction is in the loop that makes its input; what reads its result is not.
"""

import dataclasses
from collections.abc import Iterable

import networkx as nx

from jaxlora.fuse.predict.graph import Operation, Tensor, operations
from jaxlora.fuse.predict.kernel_rates import KernelRates
from jaxlora.fuse.predict.work import NO_ARITHMETIC, Arithmetic, Kind

_SUMS = {"add", "add_any"}
_THROUGH = {"convert_element_type"}
_THIN = 64  # a matrix product with a side this narrow waits for memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A kernel.

    Attributes:
        operations: Indices of its operations.
        bytes_read: Bytes that one run reads.
        bytes_written: Bytes that one run writes.
        work: Arithmetic of one run.
        runs: How often it runs.
        sizes: For a matrix product, its batches, rows, columns and contracted length.
    """

    operations: tuple[int, ...]
    bytes_read: float
    bytes_written: float
    work: Arithmetic
    runs: float
    sizes: tuple[int, int, int, int] | None

    @property
    def num_bytes(self) -> float:
        """Bytes that all runs read and write."""
        return self.runs * (self.bytes_read + self.bytes_written)

    def seconds(self, device: KernelRates) -> float:
        """Predicts the time of all runs, in seconds."""
        longest = max(self._memory_seconds(device), self._compute_seconds(device))
        return self.runs * (device.launch_seconds + longest)

    def _memory_seconds(self, device: KernelRates) -> float:
        is_thin = self.sizes is not None and min(self.sizes[1:]) <= _THIN
        rate = device.speed.memory_bytes
        rate *= device.thin_share if is_thin else device.memory_share
        return (self.bytes_read + self.bytes_written) / rate

    def _compute_seconds(self, device: KernelRates) -> float:
        vector = self.work.vector_operations / device.vector_operations
        integer = self.work.integer_operations / device.integer_operations
        matmul = 0.0 if self.sizes is None else device.matmul_seconds(self.sizes)
        return max(matmul, vector + integer)


def xla_launches(graph: nx.MultiDiGraph) -> list[Launch]:
    """Predicts the kernels of a graph, in the order of their last operations."""
    ops = operations(graph)
    origins = Origins(ops)
    clusters = _clusters(ops, origins)
    readers: dict[int, set[int]] = {}  # clusters that read a tensor
    for op in ops:
        if op.kind is Kind.VIEW:
            continue
        for tensor in op.reads:
            root = origins.tensor(tensor)
            readers.setdefault(root.index, set()).add(clusters[op.index])
    members: dict[int, list[Operation]] = {}
    for op in ops:
        if op.kind not in (Kind.INPUT, Kind.OUTPUT, Kind.VIEW):
            members.setdefault(clusters[op.index], []).append(op)
    launches = (
        _launch(cluster, found, readers, origins) for cluster, found in members.items()
    )
    found = (launch for launch in launches if launch is not None)
    return sorted(found, key=lambda launch: launch.operations[-1])


class Origins:
    """Finds the tensors of which views are made.

    Attributes:
        writer: Index of the operation that writes a tensor, by the tensor's index.
    """

    def __init__(self, ops: Iterable[Operation]):
        self._root: dict[int, tuple[Tensor, float]] = {}
        self.writer: dict[int, int] = {}
        for op in ops:
            for tensor in op.writes:
                self._root[tensor.index] = self._find(op, tensor)
                self.writer[tensor.index] = op.index

    def _find(self, op: Operation, tensor: Tensor) -> tuple[Tensor, float]:
        if op.kind is not Kind.VIEW:
            return tensor, tensor.num_bytes
        if not op.reads:
            return tensor, 0.0
        root, num_bytes = self._root[op.reads[-1].index]
        return root, min(num_bytes, tensor.num_bytes)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Returns the tensor that a kernel wrote."""
        return self._root[tensor.index][0]

    def num_bytes(self, tensor: Tensor) -> float:
        """Returns how many of its bytes a reader of the view reads."""
        return self._root[tensor.index][1]


def _is_alone(op: Operation) -> bool:
    return op.kind in (Kind.MATMUL, Kind.KERNEL)


def _clusters(ops: list[Operation], origins: Origins) -> list[int]:
    """Returns a number for each operation; those of one kernel have the same."""
    parent = list(range(len(ops)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for product, last in _sums_in_products(ops, origins):
        parent[find(product)] = find(last)
    alone = {find(op.index) for op in ops if _is_alone(op)}
    levels = _levels(ops, origins, find)
    for op in ops:
        if op.kind not in (Kind.MAP, Kind.REDUCE) or find(op.index) in alone:
            continue
        for tensor in op.reads:
            writer = ops[origins.writer[origins.tensor(tensor).index]]
            is_loop = writer.kind is Kind.MAP and find(writer.index) not in alone
            is_now = levels[find(writer.index)] == levels[find(op.index)]
            if is_loop and is_now and writer.runs == op.runs:
                parent[find(writer.index)] = find(op.index)
    return [find(op.index) for op in ops]


def _sums_in_products(ops: list[Operation], origins: Origins) -> list[tuple[int, int]]:
    """Returns the matrix products that add a tensor, and the operations that do."""
    num_readers: dict[int, int] = {}
    for op in ops:
        for tensor in op.reads:
            num_readers[tensor.index] = num_readers.get(tensor.index, 0) + 1
    taken: set[int] = set()
    found = []
    for op in ops:
        if op.name not in _SUMS:
            continue
        options = []
        for tensor in op.reads:
            chain = _product_behind(tensor, ops, origins, num_readers)
            if chain and chain[-1].index not in taken:
                options.append(chain)
        if options:
            chain = max(options, key=lambda c: c[-1].work.matmul_flops)
            taken.add(chain[-1].index)
            found += [(part.index, op.index) for part in chain]
    return found


def _product_behind(
    tensor: Tensor, ops: list[Operation], origins: Origins, num_readers: dict[int, int]
) -> list[Operation]:
    """Returns the views and casts of a product's result that nothing else reads."""
    chain = []
    while num_readers[tensor.index] == 1:
        op = ops[origins.writer[tensor.index]]
        chain.append(op)
        if op.kind is Kind.MATMUL:
            return chain
        if len(op.reads) != 1 or not (op.kind is Kind.VIEW or op.name in _THROUGH):
            return []
        if op.reads[0].num_bytes < tensor.num_bytes and op.kind is Kind.VIEW:
            return []  # a broadcast
        (tensor,) = op.reads
    return []


def _levels(ops: list[Operation], origins: Origins, find) -> list[int]:
    """Returns the topological level at which each cluster starts, by its number.

    Kernels start as soon as they can. Loops start with the first kernel that reads
    them: XLA puts what is read into the loop that reads it.
    """
    order = nx.DiGraph()
    order.add_nodes_from(find(op.index) for op in ops)
    closes: set[int] = set()
    for op in ops:
        if _is_alone(op) or op.kind is Kind.REDUCE:
            closes.add(find(op.index))
        for tensor in op.reads:
            writer = find(origins.writer[tensor.index])
            if writer != find(op.index):
                order.add_edge(writer, find(op.index))
    levels = [0] * len(ops)
    nodes = list(nx.topological_sort(order))
    for node in nodes:
        before = (levels[p] + (p in closes) for p in order.predecessors(node))
        levels[node] = max(before, default=0)
    for node in reversed(nodes):
        if node not in closes:
            after = (levels[s] for s in order.successors(node))
            levels[node] = max(levels[node], min(after, default=levels[node]))
    return levels


def _launch(
    cluster: int,
    members: list[Operation],
    readers: dict[int, set[int]],
    origins: Origins,
) -> Launch | None:
    """Sums up a kernel; None if it only computes scalars, which take no kernel."""
    inside = {op.index for op in members}
    read: dict[int, float] = {}
    written: dict[int, float] = {}
    for op in members:
        for tensor in op.reads:
            root = origins.tensor(tensor)
            if origins.writer[root.index] not in inside:
                size = max(read.get(root.index, 0.0), origins.num_bytes(tensor))
                read[root.index] = size
        for tensor in op.writes:
            if readers.get(tensor.index, set()) - {cluster}:
                written[tensor.index] = tensor.num_bytes
    if all(t.num_bytes <= 8 for op in members for t in op.writes):
        return None
    products = [op for op in members if op.sizes is not None]
    return Launch(
        operations=tuple(sorted(inside)),
        bytes_read=sum(read.values()),
        bytes_written=sum(written.values()),
        work=sum((op.work for op in members), NO_ARITHMETIC),
        runs=members[0].runs,
        sizes=products[0].sizes if products else None,
    )
