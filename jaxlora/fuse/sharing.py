"""How the values inside a linear with branches depend on its input and its mask.

They decide whether a value that something else reads too may stay computed beside
the kernels, as the gradients of A and B sum s and the masked x over rows.
"""

from typing import Any

from jax.extend import core

from jaxlora.fuse.forms import Dims, Form
from jaxlora.fuse.linear import Linear


def inputs_in(form: Form, linear: Linear) -> list[Dims]:
    """Returns what the dimensions of x stand for, wherever a value holds x."""
    inputs = (linear.x.var, *linear.parts)
    arrays = (a for t in form.terms for a in (*t.factors, *t.groups))
    return [a.dims for a in arrays if a.var in inputs]


def has_input(form: Form, linear: Linear) -> bool:
    """Tells whether a value is computed from x."""
    return bool(inputs_in(form, linear))


def is_product(form: Form, linear: Linear) -> bool:
    """Tells whether a value is a product of x with a weight, such as s."""
    is_sum = any(t.rounded is not None for t in form.terms)
    return is_sum and has_input(form, linear) and not _holds_features(form, linear)


def _holds_features(form: Form, linear: Linear) -> bool:
    """Tells whether the features of x are not summed."""
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
    """Tells whether a value is computed from the mask."""
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
    """Tells whether an equation is a matmul that sums a value over exactly these axes.

    They may also be batch dimensions of the matmul, as for adapters of their own.
    """
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    sides = zip(eqn.invars, contracted, batch, strict=True)
    return all({*s, *b} == axes for atom, s, b in sides if atom is value)
