"""The rules by which normal forms are computed, one for each primitive.

A rule returns the form of an equation's result, or raises `Opaque`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from jaxlora.fuse.normal_forms.choose import (
    chosen_form,
    gather_form,
    one_hot_form,
    or_chosen,
    ragged_dot_form,
)
from jaxlora.fuse.normal_forms.forms import (
    Factor,
    Form,
    Index,
    Opaque,
    Term,
    align,
    cast_term,
    constant,
    flipped,
    fresh,
    holds,
    is_float,
    multiply,
    narrower,
    only_masks,
    rename,
    scaled,
    sum_of_constants,
    sum_over,
    unify_axes,
)
from jaxlora.fuse.normal_forms.intervals import whole_form
from jaxlora.fuse.normal_forms.like_terms import merged
from jaxlora.fuse.normal_forms.normal import Normalizer, Rule, is_arithmetic
from jaxlora.fuse.normal_forms.segments import concatenate_form


def _add(n: Normalizer, eqn) -> Form:
    if not is_arithmetic(eqn.outvars[0].aval):
        raise Opaque
    first, second = (n.form(v) for v in eqn.invars)
    if (number := sum_of_constants(eqn, first, second)) is not None:
        return Form((), (Term(number, ()),))
    if not any(t.rounded is not None for t in (*first.terms, *second.terms)):
        raise Opaque  # a sum of arrays is an array, such as the input of a linear
    sign = -1.0 if eqn.primitive.name == "sub" else 1.0
    if sign < 0:
        second = scaled(second, sign)
    shape = eqn.outvars[0].aval.shape
    first, second = align(
        n.indices, _spread(n, first, shape), _spread(n, second, shape)
    )
    return merged(n, Form(first.dims, first.terms + second.terms))


def _stop_gradient(n: Normalizer, eqn) -> Form:
    form = n.form(eqn.invars[0])
    if constant(form) is None:
        raise Opaque
    return form


def _spread(n: Normalizer, form: Form, shape: tuple[int, ...]) -> Form:
    """Gives a scalar the dimensions of an array."""
    if len(form.dims) == len(shape):
        return form
    return Form(n.indices.new_dims(shape), form.terms)


def _neg(n: Normalizer, eqn) -> Form:
    return scaled(n.form(eqn.invars[0]), -1.0)


def _identity(n: Normalizer, eqn) -> Form:
    return n.form(eqn.invars[0])


def _mul(n: Normalizer, eqn) -> Form:
    out = eqn.outvars[0].aval
    if not is_arithmetic(out):
        raise Opaque
    first, second = (n.form(v) for v in eqn.invars)
    for one, other in ((first, second), (second, first)):
        if (number := constant(one)) is not None:
            return scaled(_spread(n, other, out.shape), number)
    return _times(n, first, second, eqn)


def _times(n: Normalizer, first: Form, second: Form, eqn: Any) -> Form:
    """Multiplies two values by element, of which none is a constant."""
    shape = eqn.outvars[0].aval.shape
    first, second = _spread(n, first, shape), _spread(n, second, shape)
    second = fresh(n.indices, second)
    first, second = align(n.indices, first, second)
    if not _worth_multiplying(first, second):
        raise Opaque
    return multiply(first, second, first.dims)


def _worth_multiplying(first: Form, second: Form) -> bool:
    """Returns whether an elementwise product is more than a new array.

    It is if one value is a mask, a scalar, a vector that scales sums or that each row
    chooses, or if neither has all indices, as in a matrix product that is written as a
    product and a sum.
    """
    if any(map(only_masks, (first, second))):
        return True
    own = [
        {i for t in f.terms for x in t.factors for i in x.indices}
        for f in (first, second)
    ]
    all_indices = set(first.indices)
    covers = [all_indices <= indices for indices in own]
    if not any(covers):
        return True
    vector, other = (second, first) if covers[0] else (first, second)
    if all(covers):
        return False
    is_scalar = not own[1 if covers[0] else 0] & all_indices
    is_sum = any(t.rounded is not None for t in other.terms)
    is_chosen = any(f.choice for t in vector.terms for f in t.factors)
    return len(vector.terms) == 1 and (is_scalar or is_sum or is_chosen)


def _div(n: Normalizer, eqn) -> Form:
    if not is_float(eqn.outvars[0].aval):
        raise Opaque
    form, divisor = map(n.form, eqn.invars)
    number = constant(divisor)
    if number is None and any(t.rounded is not None for t in form.terms):
        return _times(n, form, n.reciprocal(divisor, eqn), eqn)
    if not number:
        raise Opaque
    return scaled(_spread(n, form, eqn.outvars[0].aval.shape), 1.0 / number)


def _not(n: Normalizer, eqn) -> Form:
    form = n.form(eqn.invars[0])
    if len(form.terms) != 1:
        raise Opaque
    return flipped(form)


def _select(n: Normalizer, eqn) -> Form:
    which, *cases = eqn.invars
    out = eqn.outvars[0]
    if len(cases) != 2 or which.aval.dtype != bool or not is_float(out.aval):
        raise Opaque
    forms = [n.form(case) for case in cases]
    zero = [constant(form) == 0 for form in forms]
    mask = n.form(which)
    if sum(zero) != 1 or not only_masks(mask) or not which.aval.shape:
        raise Opaque
    if zero[1]:  # the mask keeps where it is False
        mask = flipped(mask)
    kept = forms[zero.index(False)]
    kept, mask = align(n.indices, kept, fresh(n.indices, mask))
    return multiply(kept, mask, kept.dims)


def _transpose(n: Normalizer, eqn) -> Form:
    form = n.form(eqn.invars[0])
    dims = tuple(form.dims[i] for i in eqn.params["permutation"])
    return Form(dims, form.terms)


def _reshape(n: Normalizer, eqn) -> Form:
    form = n.form(eqn.invars[0])
    shape = eqn.outvars[0].aval.shape
    dims, replaced = n.indices.split(form.indices, shape)
    return Form(dims, rename(form, replaced).terms)


def _squeeze(n: Normalizer, eqn) -> Form:
    form = n.form(eqn.invars[0])
    gone = eqn.params["dimensions"]
    return Form(tuple(d for i, d in enumerate(form.dims) if i not in gone), form.terms)


def _expand_dims(n: Normalizer, eqn) -> Form:
    form, shape = n.form(eqn.invars[0]), eqn.params["shape"]
    place = eqn.params["broadcast_dimensions"]
    dims: list[tuple[Index, ...]] = []
    for i, size in enumerate(shape):
        old = form.dims[place.index(i)] if i in place else ()
        is_new = size != 1 and n.indices.size_of(old) != size
        dims.append((n.indices.new(size),) if is_new else old)
    return Form(tuple(dims), form.terms)


def _reduce_sum(n: Normalizer, eqn) -> Form:
    if not is_arithmetic(eqn.outvars[0].aval):
        raise Opaque
    form, axes = n.form(eqn.invars[0]), eqn.params["axes"]
    summed = [i for axis in axes for i in form.dims[axis]]
    dims = tuple(d for axis, d in enumerate(form.dims) if axis not in axes)
    return sum_over(
        n.indices, Form(dims, form.terms), summed, eqn.outvars[0].aval.dtype
    )


def _dot(n: Normalizer, eqn) -> Form:
    out = eqn.outvars[0].aval
    if not is_arithmetic(out):
        raise Opaque
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    left, right = (_read(n.form(v), v.aval.dtype) for v in eqn.invars)
    right = fresh(n.indices, right)
    left, right = unify_axes(
        n.indices, left, right, (*contract_l, *batch_l), (*contract_r, *batch_r)
    )
    summed = [i for axis in contract_l for i in left.dims[axis]]
    free_l = [d for i, d in enumerate(left.dims) if i not in (*contract_l, *batch_l)]
    free_r = [d for i, d in enumerate(right.dims) if i not in (*contract_r, *batch_r)]
    dims = (*(left.dims[i] for i in batch_l), *free_l, *free_r)
    product = sum_over(n.indices, multiply(left, right, dims), summed, out.dtype)
    return _at_its_precision(n, product, eqn)


def _read(form: Form, dtype: np.dtype) -> Form:
    """Notes sums of a product that were rounded to less than its arrays hold.

    What the kernels round to their own dtype, such as s, is not noted.
    """
    terms = (
        dataclasses.replace(
            t,
            restored=t.restored
            or not all(holds(dtype, f.dtype) for f in t.factors if f.is_number),
        )
        if t.rounded is not None
        else t
        for t in form.terms
    )
    return Form(form.dims, tuple(terms))


def _at_its_precision(n: Normalizer, form: Form, eqn: Any) -> Form:
    """Notes what a matrix product was asked for.

    Products of types with 16 bits are exact in float32, at any `jax.lax.Precision`.
    """
    asked = eqn.params["precision"]
    given = set(asked if isinstance(asked, tuple) else (asked,))
    if len(given) > 1 or not isinstance(min(given, key=str), lax.Precision | None):
        named = " and ".join(sorted(map(str, given)))
        n.obstacle(f"one of its products is asked for precision {named}")
        return form
    if any(v.aval.dtype.itemsize <= 2 for v in eqn.invars[:2]):
        return form
    precisions = {p or lax.Precision.DEFAULT for p in given}
    terms = (
        dataclasses.replace(t, precisions=t.precisions | precisions) for t in form.terms
    )
    return Form(form.dims, tuple(terms))


def _constrained(n: Normalizer, eqn) -> Form:
    """A constraint on a sum inside a linear ends with that sum; others stay."""
    form = n.form(eqn.invars[0])
    if any(t.rounded is None for t in form.terms):
        raise Opaque
    return form


def _convert(n: Normalizer, eqn) -> Form:
    (source,), (out,) = eqn.invars, eqn.outvars
    dtype = out.aval.dtype
    if not is_float(out.aval) or dtype.itemsize < 2:
        raise Opaque
    form = n.form(source)
    number = constant(form)
    if number is not None:
        return Form(form.dims, (Term(float(dtype.type(number)), ()),))
    if not (source.aval.dtype == bool or is_float(source.aval)):
        return whole_form(n, eqn)
    is_sum = any(t.rounded is not None for t in form.terms)
    if not is_sum and any(_was_rounded(f) for t in form.terms for f in t.factors):
        form = n.leaf(source)  # what was rounded stays so if it is cast back
    restored = is_sum and not holds(source.aval.dtype, dtype)
    if is_sum:
        return Form(form.dims, tuple(_rounded(t, dtype, restored) for t in form.terms))
    return Form(form.dims, tuple(cast_term(term, dtype) for term in form.terms))


def _rounded(term: Term, dtype: np.dtype, restored: bool) -> Term:
    """Rounds a term of a sum with matrix products; arrays beside them are not cast."""
    if term.rounded is None:
        return term
    return dataclasses.replace(
        term,
        rounded=narrower(term.rounded, dtype),
        restored=term.restored or restored,
    )


def _was_rounded(factor: Factor) -> bool:
    """Returns whether a factor is cast to a smaller dtype than its array's."""
    aval: Any = factor.var.aval
    return factor.is_number and factor.dtype.itemsize < aval.dtype.itemsize


def _ragged_dot(n: Normalizer, eqn) -> Form:
    return _at_its_precision(n, ragged_dot_form(n, eqn), eqn)


def _rule(form: Callable[[Normalizer, Any], Form], *reads: str) -> Rule:
    return Rule(form, frozenset(reads))


_POINTWISE = (
    "abs",
    "exp",
    "exp2",
    "integer_pow",
    "log",
    "logistic",
    "max",
    "min",
    "pow",
    "rsqrt",
    "sqrt",
    "square",
    "tanh",
)
_CAST = ("new_dtype", "weak_type")
_DOT = ("dimension_numbers", "precision", "preferred_element_type")
_GATHER = ("dimension_numbers", "slice_sizes", "mode", "fill_value")
_PROMISES = ("indices_are_sorted", "unique_indices")  # they change no value
_PLACE = ("sharding", "layout", "context_mesh", "unconstrained_dims")
_RAGGED = ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")

RULES: dict[str, Rule] = {
    "add": _rule(functools.partial(or_chosen, _add)),
    "add_any": _rule(_add),
    "ceil": _rule(whole_form),
    "broadcast_in_dim": _rule(_expand_dims, "shape", "broadcast_dimensions"),
    "concatenate": _rule(concatenate_form, "dimension"),
    "convert_element_type": _rule(functools.partial(or_chosen, _convert), *_CAST),
    "copy": _rule(_identity),
    "copy_p": _rule(_identity),
    "div": _rule(functools.partial(or_chosen, _div)),
    "dot_general": _rule(_dot, *_DOT),
    "eq": _rule(one_hot_form),
    "floor": _rule(whole_form),
    "gather": _rule(gather_form, *_GATHER, *_PROMISES),
    "mul": _rule(functools.partial(or_chosen, _mul)),
    "name": _rule(_identity, "name"),
    "neg": _rule(_neg),
    "not": _rule(_not),
    "pvary": _rule(_identity, "axes"),
    "ragged_dot_general": _rule(_ragged_dot, *_RAGGED),
    "reduce_sum": _rule(_reduce_sum, "axes"),
    "reshape": _rule(_reshape, "new_sizes"),
    "round": _rule(whole_form, "rounding_method"),
    "select_n": _rule(_select),
    "sharding_constraint": _rule(_constrained, *_PLACE),
    "stop_gradient": _rule(_stop_gradient),
    "squeeze": _rule(_squeeze, "dimensions"),
    "sub": _rule(functools.partial(or_chosen, _add)),
    "transpose": _rule(_transpose, "permutation"),
} | {name: _rule(chosen_form, "accuracy", "y") for name in _POINTWISE}
