"""Reasons for which sums and products that look like an adapter are no sites.

Some linears cannot be computed by the kernels. In other sums, what is not linear is
read as if it were; only reasons follow from these forms, which are not those of the
values. Products with the shape of an adapter, `(x @ a) @ b` of a small rank, are found
by shapes alone, so that also those are listed which the normal form does not recognize.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlora.fuse.graph import RESULT, Graph
from jaxlora.fuse.linears.branches import MAX_RANK, RANK_FRACTION
from jaxlora.fuse.linears.open_sums import ADDS, PRODUCTS, carries
from jaxlora.fuse.linears.sharing import has_input, holds_features, inputs_in
from jaxlora.fuse.normal_forms.forms import Form, Opaque, align, holds, narrower
from jaxlora.fuse.normal_forms.like_terms import same_product
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.normal_forms.rules import RULES
from jaxlora.fuse.site import Linear

_KERNEL_DTYPES = tuple(map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


def weight_reason(linear: Linear, graph: Graph) -> str | None:
    """Returns why the weights of a linear are not parameters; None: they may be."""
    weight: Any = linear.w.var.aval

    def is_smaller(var: Any) -> bool:  # such as the scales of a weight
        return getattr(var.aval, "size", 0) < weight.size

    for var in graph.ancestors([linear.w.var], stops=is_smaller):
        eqn = graph.equation(var)
        if eqn and eqn.primitive.name in PRODUCTS and not is_smaller(var):
            return (
                "its weight is the result of another matrix product, as in attention "
                "scores"
            )
    features = {*linear.in_indices, *linear.out_indices}
    factors = [o for b in linear.branches for o in (*b.a, *b.b)]
    arrays = [f.var for f in (linear.w, *factors) if features & set(f.indices)]
    arrays += [f.var for f in linear.w_scales]
    if any(var is linear.x.var for var in graph.ancestors(arrays)):
        return "its weights are computed from its input"
    return None


def sharding_reason(linear: Linear) -> str | None:
    """Returns why the arrays' shardings keep kernels from reading rows of tokens."""
    branches = [o.var for b in linear.branches for o in (*b.a, *b.b)]
    scales = [f.var for f in (*linear.w_scales, *linear.scales)]
    for atom in (linear.x.var, linear.w.var, *scales, *branches):
        aval: Any = atom.aval
        if any(axis is not None for axis in aval.sharding.spec):
            return (
                f"it reads {aval.str_short(short_dtypes=True)}, which is sharded over "
                "explicit axes of a mesh: call jaxlora.fuse inside jax.shard_map"
            )
    return None


def rounding_reason(linear: Linear) -> str | None:
    """Returns why the kernels' result would be less exact than the original."""
    kernel, rounded = linear.x.dtype, linear.base.rounded
    if kernel not in _KERNEL_DTYPES:
        able = ", ".join(map(str, _KERNEL_DTYPES))
        return f"its dtype is {kernel}, and the kernels compute in {able}"
    if linear.w.dtype != kernel:
        return f"x is {kernel} and w is {linear.w.dtype}; kernels need one dtype"
    assert rounded is not None
    if not holds(kernel, rounded):
        return f"its sum is kept in {rounded}, and the kernels round it to {kernel}"
    for branch in linear.branches:
        dtype = branch.term.rounded
        if dtype is None or holds(kernel, dtype):
            continue
        if dtype.itemsize <= kernel.itemsize:
            return f"its branch is rounded to {dtype}, and the kernels use {kernel}"
        else:
            return (
                f"its branch is summed in {dtype}, and the kernels would round it and "
                f"its gradients to {kernel}. Cast x, A and B to {kernel} first"
            )
    if is_restored(linear):
        return (
            f"a sum in it is rounded to {_narrowest(linear)} and cast to a larger "
            "dtype, and the kernels would not round it"
        )
    return None


def is_restored(linear: Linear) -> bool:
    """Whether a sum was rounded to less than the kernels or the result hold.

    A sum that is rounded to the kernels' own dtype, and cast to a larger one to be
    scaled, is only rounded once less by the kernels.
    """
    kernel, rounded = linear.x.dtype, _narrowest(linear)
    result: Any = linear.root.aval
    is_exact = rounded is None or (
        holds(rounded, kernel) and holds(kernel, result.dtype)
    )
    return any(term.restored for term in linear.terms) and not is_exact


def _narrowest(linear: Linear) -> np.dtype | None:
    """Returns the smallest dtype to which a sum in a linear is rounded."""
    return functools.reduce(narrower, (term.rounded for term in linear.terms))


class LenientNormalizer(Normalizer):
    """A normalizer to which a function of a matrix product is that product.

    Attributes:
        functions: The name of the function at each equation that computes one.
        obstacles: What each other equation asks for and the kernels do not compute.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, RULES)
        self.functions: dict[int, str] = {}
        self.obstacles: dict[int, str] = {}

    def form_of(self, eqn: Any) -> Form | None:
        form = super().form_of(eqn)
        if form is not None:
            return form
        (out,) = eqn.outvars
        shape = getattr(out.aval, "shape", None)
        inputs = [v for v in eqn.invars if getattr(v.aval, "shape", None) == shape]
        products = [f for f in map(_product_in, map(self.form, inputs)) if f]
        if not products or not all(self._is_same(products[0], f) for f in products):
            return None
        if out.aval.dtype != bool:
            self.functions[self.number] = _name(eqn)
        return products[0]

    def obstacle(self, reason: str) -> None:
        self.obstacles[self.number] = reason

    def _is_same(self, first: Form, second: Form) -> bool:
        if first is second:
            return True
        try:
            first, second = align(self.indices, first, second)
        except Opaque:  # their dimensions have no common parts
            return False
        alike = len(first.terms) == len(second.terms) == 1
        outer = frozenset(first.indices)
        return alike and same_product(self, first.terms[0], second.terms[0], outer)


def _product_in(form: Form) -> Form | None:
    """Returns the matrix products of a sum."""
    terms = tuple(t for t in form.terms if t.rounded is not None)
    return Form(form.dims, terms) if terms else None


def _name(eqn: Any) -> str:
    """Returns the name of a primitive, or of the function that it calls."""
    if eqn.primitive.name == "convert_element_type":
        return f"a cast to {eqn.params['new_dtype'].name}"
    body = eqn.params.get("call_jaxpr")
    return eqn.primitive.name if body is None else body.debug_info.func_name


def obstacle_of(n: LenientNormalizer, linear: Linear) -> str | None:
    """Returns what keeps kernels from computing a linear that was read leniently.

    None: it is not known, as a function is applied to its input.

    Args:
        n: Has read the jaxpr.
        linear: The linear.
    """
    for number in sorted(linear.equations):
        if number in n.obstacles:
            return n.obstacles[number]
        if number not in n.functions:
            continue
        form = n.form(n.graph.jaxpr.eqns[number].outvars[0])
        if not has_input(form, linear):
            continue
        if holds_features(form, linear):
            return None
        where = _place(n, form, linear, number)
        return (
            f"{n.functions[number]} is applied {where}, and kernels compute matrix "
            "products only"
        )
    return None


def _place(n: Normalizer, form: Form, linear: Linear, number: int) -> str:
    """Says to which of its values a linear applies a function."""
    rows = {i for dims in inputs_in(form, linear) for dim in dims for i in dim}
    width = n.indices.size_of(i for i in form.indices if i not in rows)
    if width < linear.out_features:
        return "between A and B"
    is_base = number in linear.base.equations
    return "to its frozen product" if is_base else "to its branch"


@dataclasses.dataclass(frozen=True)
class _Side:
    """An operand of a matrix product.

    Attributes:
        atom: The operand.
        summed: Size of what is summed over.
        free: Size of its own dimensions of the result.
    """

    atom: Any
    summed: int
    free: int


def adapter_products(graph: Graph) -> Iterator[tuple[int, bool]]:
    """Yields the equations that multiply by B, and whether it is one adapter's.

    In a product of several, each has a batch dimension of its own.
    """
    for number, eqn in enumerate(graph.jaxpr.eqns):
        if not graph.live[number] or eqn.primitive.name != "dot_general":
            continue
        sides = _sides(eqn)
        for s, b in (sides, sides[::-1]):
            counts = [_adapters(graph, first, b) for first in _behind(graph, s.atom)]
            if any(counts):
                yield number, 1 in counts
                break


def sums_of(graph: Graph, number: int) -> Iterator[int]:
    """Yields the equations that add to an equation's result, or scale the sum."""
    todo, seen = [number], set()
    while todo:
        for value in graph.jaxpr.eqns[todo.pop()].outvars:
            for user in graph.users[value]:
                if user == RESULT or user in seen:
                    continue
                seen.add(user)
                eqn = graph.jaxpr.eqns[user]
                if eqn.primitive.name in ADDS or carries(eqn, value):
                    yield user
                    todo.append(user)


def _sides(eqn: Any) -> tuple[_Side, _Side]:
    contracted, batch = eqn.params["dimension_numbers"]
    sides = []
    for atom, axes, others in zip(eqn.invars, contracted, batch, strict=True):
        shape = atom.aval.shape
        summed = math.prod(shape[axis] for axis in axes)
        shared = math.prod(shape[axis] for axis in others)
        free = math.prod(shape) // max(summed * shared, 1)
        sides.append(_Side(atom, summed, free))
    return sides[0], sides[1]


def _behind(graph: Graph, atom: Any) -> Iterator[Any]:
    """Yields the matrix products of which a value is a multiple."""
    todo, seen = [atom], set()
    while todo:
        eqn = graph.equation(todo.pop())
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if eqn.primitive.name == "dot_general":
            yield eqn
        else:
            todo += [v for v in eqn.invars if carries(eqn, v)]


def _adapters(graph: Graph, first: Any, b: _Side) -> int:
    """Returns how many adapters two products may be the A and B of; 0: none."""
    rank = b.summed
    for x, a in (_sides(first), _sides(first)[::-1]):
        limit = min(MAX_RANK, min(a.summed, b.free) // RANK_FRACTION)
        if not 0 < rank <= limit or a.free % rank or x.free < rank:
            continue
        if not _is_computed(graph, a, b) and not _is_constant(graph, x):
            return a.free // rank
    return 0


def _is_constant(graph: Graph, side: _Side) -> bool:
    """Whether an operand depends on no argument, as the identity does."""
    return all(var in graph.maker for var in graph.ancestors([side.atom]))


def _is_computed(graph: Graph, *weights: _Side) -> bool:
    """Whether a weight is computed by a matrix product, and so no parameter."""
    eqns = map(graph.equation, graph.ancestors(side.atom for side in weights))
    return any(eqn and eqn.primitive.name in PRODUCTS for eqn in eqns)
