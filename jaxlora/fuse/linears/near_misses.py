"""Reads what is not linear as if it were, to say what keeps a sum from being a site.

Only reasons follow from these forms: they are not the forms of the values.
"""

from typing import Any

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.linears.sharing import has_input, holds_features, inputs_in
from jaxlora.fuse.normal_forms.forms import Form, Opaque, align
from jaxlora.fuse.normal_forms.like_terms import same_product
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.normal_forms.rules import RULES
from jaxlora.fuse.site import Linear


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
