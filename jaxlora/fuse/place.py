"""Puts parts in a jaxpr in place of the equations that they compute."""

import bisect
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import networkx as nx
import numpy as np
from jax.extend import core

from jaxlora.fuse.graph import Graph, variables
from jaxlora.fuse.kernel_call import part_call
from jaxlora.fuse.normal_forms.forms import Index
from jaxlora.fuse.producers import Part
from jaxlora.fuse.row_program import RowExpression
from jaxlora.fuse.trace import Call, inlined


class Placed:
    """A jaxpr with parts in place of the equations that they compute.

    Attributes:
        eqns: The equations of the jaxpr, whose calls were opened.
        maker: The number of the equation that computes each variable.
        results: The atoms of the new jaxpr's results.
    """

    def __init__(
        self, graph: Graph, calls: Sequence[Call], parts: Sequence[Part]
    ) -> None:
        self.eqns, self.maker = graph.jaxpr.eqns, graph.maker
        self.left = dict(enumerate(parts))  # the parts that are not in kept calls
        self.kept: set[int] = set()  # the equations in calls that are kept
        self.made_by = {v: n for n, part in self.left.items() for v in part.outputs}
        # Equations that compute what a part reads or writes, with the part's number.
        self.touching = sorted(
            (self.maker[v], n)
            for n, part in self.left.items()
            for v in (*part.inputs, *part.outputs)
            if v in self.maker
        )
        self.names: dict[Any, Any] = {}
        # New equations, kept calls and parts, each with its place among those that do
        # not depend on each other.
        self.nodes: list[tuple[int, Any]] = []
        self._place(calls, 0, len(self.eqns))
        for var, eqn in graph.added.items():
            if var is eqn.outvars[0]:
                self._append(len(self.eqns), eqn)
        for part in self.left.values():
            self.nodes.append((min(self.maker[v] for v in part.outputs), part))
        self.results = [self.substitute(v) for v in graph.jaxpr.outvars]

    def substitute(self, atom: Any) -> Any:
        """Returns the variable that holds an opened call's value in the new jaxpr."""
        if isinstance(atom, core.Literal):
            return atom
        return self.names.get(atom, atom)

    def _place(self, calls: Sequence[Call], start: int, stop: int) -> None:
        place = start
        for call in (*calls, None):
            for number in range(place, stop if call is None else call.start):
                eqn = self.eqns[number]
                if not any(self.made_by.get(v) in self.left for v in eqn.outvars):
                    self._append(number, eqn)
            if call is not None:
                self._place_call(call)
                place = call.stop

    def _append(self, order: int, eqn: Any) -> None:
        invars = [self.substitute(v) for v in eqn.invars]
        if any(new is not old for new, old in zip(invars, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=invars)
        self.nodes.append((order, eqn))

    def _place_call(self, call: Call) -> None:
        """Keeps a call, unless a part has only some of its arrays inside it."""
        low, high = (
            bisect.bisect(self.touching, (n,)) for n in (call.start, call.stop)
        )
        numbers = {n for _, n in self.touching[low:high]} & self.left.keys()
        if not all(self._is_inside(self.left[n], call) for n in numbers):
            self._place(call.calls, call.start, call.stop)
            return
        # The body is rewritten on its own, and these sites are found again there.
        self.left = {n: p for n, p in self.left.items() if n not in numbers}
        self.kept |= set(range(call.start, call.stop))
        for out, atom in zip(call.eqn.outvars, call.results, strict=True):
            if self._is_within(atom, call):
                self.names.setdefault(atom, out)
        self._append(call.start, call.eqn)

    def _is_within(self, atom: Any, call: Call) -> bool:
        if isinstance(atom, core.Literal) or atom not in self.maker:
            return False
        return call.start <= self.maker[atom] < call.stop

    def is_in_body(self, some: Sequence[Any]) -> bool:
        """Returns whether bodies of kept calls compute all of some variables again."""
        return all(self.maker.get(var) in self.kept for var in some)

    def _is_inside(self, part: Part, call: Call) -> bool:
        return all(self._is_within(out, call) for out in part.outputs) and all(
            v in call.eqn.invars or self._is_within(v, call) for v in part.inputs
        )

    def in_order(self) -> list[Any] | None:
        """Returns equations and parts in an order in which they can run.

        None: parts depend on each other.
        """
        reads, maker = [], {}
        for number, (_, node) in enumerate(self.nodes):
            is_part = isinstance(node, Part)
            reads.append(map(self.substitute, node.inputs) if is_part else node.invars)
            maker |= dict.fromkeys(node.outputs if is_part else node.outvars, number)
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from(range(len(self.nodes)))
        graph.add_edges_from(
            (maker[var], number)
            for number, read in enumerate(reads)
            for var in variables(read)
            if var in maker
        )
        wanted = {maker[v] for v in variables(self.results) if v in maker}
        layers = nx.bfs_layers(graph.reverse(copy=False), wanted) if wanted else []
        needed = graph.subgraph(i for layer in layers for i in layer).copy()
        if not nx.is_directed_acyclic_graph(needed):
            return None
        order = nx.lexicographical_topological_sort(
            needed, key=lambda number: (self.nodes[number][0], number)
        )
        return [self.nodes[number][1] for number in order]


def part_equations(
    part: Part, placed: Placed, traces: dict[Hashable, core.Jaxpr]
) -> list[Any]:
    """Returns the equations that compute a part's outputs with the kernels.

    Args:
        part: The part.
        placed: The jaxpr that has the part.
        traces: The calls that were traced, by signature and mesh.
    """
    context = placed.eqns[placed.maker[part.outputs[0]]].ctx
    key = signature(part), context.cur_abstract_mesh
    if key not in traces:
        # As a call of jit, the kernels' own gradient also runs in an eager shard_map.
        call = jax.jit(part_call(part))
        with context.manager:
            traces[key] = jax.make_jaxpr(call)(*(v.aval for v in part.inputs))
    inputs = map(placed.substitute, part.inputs)
    return inlined(traces[key], inputs, part.outputs)[0]


def signature(part: Part) -> Hashable:
    """Describes a part without its place, its variables and the names of its indices.

    Calls of parts with equal signatures differ only in their variables, such as those
    of the layers of a decoder. Fields with `compare=False` are left out.
    """
    places = {v: i for i, v in enumerate(part.inputs)}
    sizes = part.site.first.indices.sizes
    names: dict[Index, int] = {}

    def describe(value: Any, *, is_index: bool = False) -> Hashable:
        if isinstance(value, tuple):
            return tuple(describe(part, is_index=True) for part in value)
        if isinstance(value, core.Var):
            return places.get(value), value.aval
        if isinstance(value, RowExpression):
            return value
        if isinstance(value, core.Literal):
            return np.asarray(value.val).tobytes(), value.aval
        if dataclasses.is_dataclass(value):
            fields = (f.name for f in dataclasses.fields(value) if f.compare)
            return type(value).__name__, *(describe(getattr(value, f)) for f in fields)
        if is_index and type(value) is int:  # all tuples of int hold indices
            return names.setdefault(value, len(names)), sizes[value]
        return value

    return describe(part)
