"""Dependence of the values inside a linear with branches on its input and its mask.

They decide whether a value that something else reads too may stay computed beside
the kernels, as the gradients of A and B sum s and the masked x over rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from jaxlora.fuse.graph import RESULT
from jaxlora.fuse.normal_forms.forms import Dims, Factor, Form
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.site import Linear

USED = "is also used elsewhere, so it has to be computed anyway"


def inputs_in(form: Form, linear: Linear) -> list[Dims]:
    """Returns what the dimensions of x stand for, wherever a value holds x."""
    inputs = (linear.x.var, *linear.parts)
    groups = (g.array for t in form.terms for g in t.groups)
    factors = (f for t in form.terms for f in t.factors)
    return [a.dims for a in (*factors, *groups) if a.var in inputs]


def has_input(form: Form, linear: Linear) -> bool:
    """Returns whether a value is computed from x."""
    return bool(inputs_in(form, linear))


def is_product(form: Form, linear: Linear) -> bool:
    """Returns whether a value is a product of x with a weight, such as s."""
    is_sum = any(t.rounded is not None for t in form.terms)
    return is_sum and has_input(form, linear) and not holds_features(form, linear)


def holds_features(form: Form, linear: Linear) -> bool:
    """Returns whether the features of x are not summed."""
    held = set(form.indices)
    return any(
        set(dim) & held
        for dims in inputs_in(form, linear)
        for n, dim in enumerate(dims)
        if not _is_row(linear, n)
    )


def _is_row(linear: Linear, axis: int) -> bool:
    return set(linear.x.dims[axis]) <= set(linear.rows)


def is_masked(form: Form, linear: Linear) -> bool:
    """Returns whether a value is computed from the mask."""
    mask = linear.mask
    return mask is not None and any(
        f.var is mask.var for t in form.terms for f in t.factors
    )


def row_axes(form: Form, linear: Linear) -> set[int]:
    """Returns the axes of a value that are rows of x."""
    rows = {
        i
        for dims in inputs_in(form, linear)
        for n, dim in enumerate(dims)
        if _is_row(linear, n)
        for i in dim
    }
    return {n for n, dim in enumerate(form.dims) if set(dim) & rows}


def sums_axes(eqn: Any, value: core.Var, axes: set[int]) -> bool:
    """Returns whether an equation is a matmul that sums a value over just these axes.

    They may also be batch dimensions of the matmul, as for adapters of their own.
    """
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    sides = zip(eqn.invars, contracted, batch, strict=True)
    return all({*s, *b} == axes for atom, s, b in sides if atom is value)


class Readers:
    """Knows which equations may read a part of a linear beside it.

    Attributes:
        normalizer: Knows the form of each value.
        linears: The present linears, by the variables that hold their sums.
    """

    def __init__(
        self, normalizer: Normalizer, linears: Mapping[core.Var, Linear]
    ) -> None:
        self.normalizer = normalizer
        self.linears = linears
        self.eqns = normalizer.graph.jaxpr.eqns
        self.users = normalizer.graph.users

    def reason(self, linear: Linear, replaced: frozenset[int]) -> str | None:
        """Returns which part of a linear something else needs too, or None.

        Args:
            linear: The linear.
            replaced: Numbers of the equations that sites take the place of.
        """
        if linear.mask is not None:
            mask: Any = linear.mask.var
            others = [u for u in self.users.get(mask, []) if u not in replaced]
            if not self._drop_gradients(others, linear.mask):
                return f"its dropout mask {USED}"
        for value in self._values_in(linear):
            others = [u for u in self.users[value] if u not in linear.equations]
            if others and (reason := self._read_by(others, value, linear, replaced)):
                return self._within(linear, others) or reason
        return None

    def keep_s(self, linear: Linear) -> bool:
        """Returns whether s is computed beside the kernels, as a gradient reads it."""
        return any(
            not set(self.users[value]) <= linear.equations
            and is_product(self.normalizer.form(value), linear)
            for value in self._values_in(linear)
        )

    def _values_in(self, linear: Linear) -> Iterable[core.Var]:
        """Returns the values that are computed on the way to a linear's root."""
        outputs = (v for n in linear.equations for v in self.eqns[n].outvars)
        return (v for v in outputs if v is not linear.root)

    def _within(self, linear: Linear, users: Sequence[int]) -> str | None:
        """Returns why other terms of its own sum that use a part are no branches."""
        rest = frozenset().union(*(t.equations for t in linear.rest))
        if linear.rest_reason is not None and rest.issuperset(users):
            return linear.rest_reason
        return linear.used_reason

    def _read_by(
        self,
        users: Sequence[int],
        value: core.Var,
        linear: Linear,
        replaced: frozenset[int],
    ) -> str | None:
        """Returns why other users of a value inside a linear prevent its fusion."""
        form = self.normalizer.form(value)
        if is_product(form, linear):
            is_gradient = self._only_sum_rows(value, form, linear, users)
            return None if is_gradient else f"its branch or its frozen product {USED}"
        left = [user for user in users if user not in replaced]
        if not left or not is_masked(form, linear):
            return None
        if has_input(form, linear):
            is_gradient = self._only_sum_rows(value, form, linear, left)
            return None if is_gradient else f"its masked x {USED}"
        is_gradient = self._drop_gradients(left, linear.mask)
        return None if is_gradient else f"its dropout mask {USED}"

    def _only_sum_rows(
        self, value: core.Var, form: Form, linear: Linear, users: Sequence[int]
    ) -> bool:
        """Returns whether users only sum s or the masked x over rows, as dA does."""
        if is_product(form, linear):
            x, *_ = inputs_in(form, linear)
            held = {i for dim in x for i in dim}
            width = linear.size_of(i for i in form.indices if i not in held)
            if width * 2 > linear.out_features:
                return False
        axes = row_axes(form, linear)
        return RESULT not in users and all(
            sums_axes(self.eqns[user], value, axes) for user in users
        )

    def _drop_gradients(self, users: Sequence[int], mask: Factor | None) -> bool:
        """Returns whether users of a mask only drop elements of the branch's gradient.

        That is a product with the A of a branch that has the mask, as in a function
        that already is a gradient.
        """
        factors = {
            f.var
            for one in self.linears.values()
            if one.mask and mask and one.mask.var is mask.var
            for branch in one.branches
            for f in branch.a
        }
        if RESULT in users:
            return False
        forms = (self.normalizer.forms.get(self.eqns[u].outvars[0]) for u in users)
        return all(
            form is not None
            and all(
                t.rounded is not None and any(f.var in factors for f in t.factors)
                for t in form.terms
            )
            for form in forms
        )
