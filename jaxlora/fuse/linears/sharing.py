"""Dependence of the values inside a linear with branches on its input and its mask.

They decide whether a value that something else reads too may stay computed beside
the kernels, as the gradients of A and B sum s and the masked x over rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.linears.linear import Linear
from jaxlora.fuse.normal_forms.forms import Dims, Form
from jaxlora.fuse.normal_forms.normal import Normalizer

USED = "is also used elsewhere, so it has to be computed anyway"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A linear with branches, before it is known who else uses its parts.

    Attributes:
        root: The variable that holds the sum.
        form: The form of the sum.
        linear: The linear.
        number: Number of the equation that computes the root.
        equations: Numbers of the equations that compute the root from x, w, a and b.
        rest_reason: Why another term of the sum is no branch; None: it is not known.
        used_reason: Why a larger sum, which uses a part too, is no linear; None: it is
            not known.
    """

    root: core.Var
    form: Form
    linear: Linear
    number: int
    equations: frozenset[int]
    rest_reason: str | None
    used_reason: str | None = None


def inputs_in(form: Form, linear: Linear) -> list[Dims]:
    """Returns what the dimensions of x stand for, wherever a value holds x."""
    inputs = (linear.x.var, *linear.parts)
    arrays = (a for t in form.terms for a in (*t.factors, *t.groups))
    return [a.dims for a in arrays if a.var in inputs]


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


def mask_var(linear: Linear) -> Any:
    """Returns the variable that holds a linear's mask; None: it has no mask."""
    return None if linear.mask is None else linear.mask.operand.var


def is_masked(form: Form, linear: Linear) -> bool:
    """Returns whether a value is computed from the mask."""
    mask = mask_var(linear)
    return mask is not None and any(
        f.var is mask for t in form.terms for f in t.factors
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
    """Knows which equations read each value, and which may read a part of a linear.

    Attributes:
        users: The numbers of the equations that read each variable; -1: a result.
    """

    def __init__(
        self,
        graph: Graph,
        normalizer: Normalizer,
        candidates: Mapping[core.Var, Candidate],
    ) -> None:
        """Reads a jaxpr.

        Args:
            graph: The jaxpr.
            normalizer: Knows the form of each value.
            candidates: The present candidates, by the variables that hold their sums.
        """
        self.jaxpr = graph.jaxpr
        self.users = graph.users
        self.normalizer = normalizer
        self.candidates = candidates

    def reason(self, candidate: Candidate, replaced: frozenset[int]) -> str | None:
        """Returns which part of a candidate something else needs too, or None.

        Args:
            candidate: The candidate.
            replaced: Numbers of the equations that sites take the place of.
        """
        linear = candidate.linear
        mask = mask_var(linear)
        if mask is not None:
            others = [u for u in self.users.get(mask, []) if u not in replaced]
            if not self._drop_gradients(others, linear):
                return f"its dropout mask {USED}"
        for value in self._values_in(candidate):
            others = [u for u in self.users[value] if u not in candidate.equations]
            if others and (reason := self._read_by(others, value, linear, replaced)):
                return self._within(candidate, others) or reason
        return None

    def _within(self, candidate: Candidate, users: Sequence[int]) -> str | None:
        """Returns why other terms of its own sum that use a part are no branches."""
        rest = frozenset().union(*(t.equations for t in candidate.linear.rest))
        if candidate.rest_reason is not None and rest.issuperset(users):
            return candidate.rest_reason
        return candidate.used_reason

    def _values_in(self, candidate: Candidate) -> list[core.Var]:
        """Returns the values that are computed on the way to a candidate's root."""
        numbers = candidate.equations - {candidate.number}
        return [v for number in numbers for v in self.jaxpr.eqns[number].outvars]

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
        is_gradient = self._drop_gradients(left, linear)
        return None if is_gradient else f"its dropout mask {USED}"

    def _only_sum_rows(
        self, value: core.Var, form: Form, linear: Linear, users: Sequence[int]
    ) -> bool:
        """Returns whether users only sum s or the masked x over rows, as dA does."""
        if is_product(form, linear):
            sizes, (x, *_) = self.normalizer.indices, inputs_in(form, linear)
            held = {i for dim in x for i in dim}
            width = sizes.size_of(i for i in form.indices if i not in held)
            if width * 2 > sizes.size_of(linear.out_indices):
                return False
        axes = row_axes(form, linear)
        eqns = [self.jaxpr.eqns[user] for user in users if user >= 0]
        return len(eqns) == len(users) and all(sums_axes(e, value, axes) for e in eqns)

    def _drop_gradients(self, users: Sequence[int], linear: Linear) -> bool:
        """Returns whether users of a mask only drop elements of the branch's gradient.

        That is a product with the A of a branch that has the mask, as in a function
        that already is a gradient.
        """
        factors = {
            operand.var
            for candidate in self.candidates.values()
            if mask_var(candidate.linear) is mask_var(linear)
            for branch in candidate.linear.branches
            for operand in branch.a
        }
        for user in users:
            if user < 0:
                return False
            form = self.normalizer.forms.get(self.jaxpr.eqns[user].outvars[0])
            if form is None or not all(
                t.rounded is not None and any(f.var in factors for f in t.factors)
                for t in form.terms
            ):
                return False
        return True

    def keep_s(self, candidate: Candidate) -> bool:
        """Returns whether s is computed beside the kernels, as a gradient reads it."""
        return any(
            not set(self.users[value]) <= candidate.equations
            and is_product(self.normalizer.form(value), candidate.linear)
            for value in self._values_in(candidate)
        )
