"""The rules by which normal forms are computed, one for each primitive.

A rule returns the form of an equation's result, or raises `Opaque`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlora.fuse.normal_forms.casts import (
    cast_term,
    convert_form,
    is_float,
    whole_form,
)
from jaxlora.fuse.normal_forms.choose import (
    chosen_form,
    entries_of,
    gather_form,
    one_hot_form,
    ragged_dot_form,
    value_key,
)
from jaxlora.fuse.normal_forms.forms import (
    Factor,
    Form,
    Index,
    Names,
    Opaque,
    Term,
    align,
    constant,
    flipped,
    fresh,
    holds,
    multiply,
    only_masks,
    rename,
    scaled,
    sum_of_constants,
    sum_over,
)
from jaxlora.fuse.normal_forms.like_terms import merged
from jaxlora.fuse.normal_forms.normal import Normalizer, Rule, is_arithmetic
from jaxlora.fuse.normal_forms.segments import read_segments


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
    left, right = _unify_axes(
        n, left, right, (*contract_l, *batch_l), (*contract_r, *batch_r)
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


def _unify_axes(
    n: Normalizer, left: Form, right: Form, axes_l: Sequence[int], axes_r: Sequence[int]
) -> tuple[Form, Form]:
    """Gives pairs of axes of two forms the same indices."""
    names_l: Names = {}
    names_r: Names = {}
    for i, j in zip(axes_l, axes_r, strict=True):
        sizes_l = [n.indices.sizes[x] for x in left.dims[i]]
        sizes_r = [n.indices.sizes[x] for x in right.dims[j]]
        if sizes_l == sizes_r:  # keep the names of the left, so that equal ones stay so
            pairs = zip(right.dims[j], left.dims[i], strict=True)
            names_r |= {x: (y,) for x, y in pairs}
            continue
        _, in_l, in_r = n.indices.unify(left.dims[i], right.dims[j])
        names_l |= in_l
        names_r |= in_r
    return rename(left, names_l), rename(right, names_r)


def _gather(n: Normalizer, eqn) -> Form:
    table = eqn.invars[0]
    if not is_arithmetic(table.aval):
        raise Opaque
    rows = entries_of(n.graph, eqn)
    key, form = value_key(n.graph, rows), fresh(n.indices, n.form(table))
    return gather_form(form, _entries(n, rows), key, eqn)


def _entries(n: Normalizer, atom: Any) -> Form:
    """Returns the form of numbers of entries; those that are chosen are an array."""
    form = n.form(atom)
    is_chosen = any(f.choice for t in form.terms for f in t.factors)
    return n.leaf(atom) if is_chosen else form


def _eq(n: Normalizer, eqn) -> Form:
    first, second = (_entries(n, v) for v in eqn.invars)
    if len(first.dims) != len(second.dims):
        raise Opaque
    return one_hot_form(first, second, n.graph)


def _ragged_dot(n: Normalizer, eqn) -> Form:
    left, right, sizes = eqn.invars
    key = value_key(n.graph, sizes)
    table = fresh(n.indices, n.form(right))
    product = ragged_dot_form(n.indices, n.form(left), table, sizes, key, eqn)
    return _at_its_precision(n, product, eqn)


def _concatenate(n: Normalizer, eqn) -> Form:
    if not is_float(eqn.outvars[0].aval):
        raise Opaque
    segments = read_segments(n.indices, [n.form(v) for v in eqn.invars], eqn)
    place, source, axis = n.joiner.source_of(segments)
    form, dtype = n.form(source), segments.terms[0].factors[place].dtype
    if len(form.terms) != 1 or dtype != source.aval.dtype:
        form = n.leaf(source)
        form = Form(form.dims, tuple(cast_term(term, dtype) for term in form.terms))
    return n.joiner.join(segments, place, form, axis)


def _or_chosen(form: Callable[[Normalizer, Any], Form], n: Normalizer, eqn) -> Form:
    """Applies a rule, or the one of functions of entries that each row chooses."""
    try:
        return form(n, eqn)
    except Opaque:
        return _chosen(n, eqn)


def _chosen(n: Normalizer, eqn) -> Form:
    if not is_float(eqn.outvars[0].aval):
        raise Opaque
    tables, form = chosen_form(n.indices, [n.form(v) for v in eqn.invars])
    arrays = [table for _, table in tables if table is not None]
    size = n.indices.size_of(arrays[0].indices)

    def function(*values: Any) -> Any:
        rest, operands = iter(values), []
        for (number, table), v in zip(tables, eqn.invars, strict=True):
            value = jnp.ones(size) if table is None else next(rest)
            value = value.reshape(-1).astype(v.aval.dtype)
            operands.append(value if number == 1 else value * number)
        return eqn.primitive.bind(*operands, **eqn.params)

    var = n.add(eqn, function, [table.var for table in arrays])
    (term,) = form.terms
    choice = next(f for f in term.factors if f.choice)
    aval: Any = var.aval
    table = Factor(var, (choice.dims[-1],), aval.dtype)
    chosen = dataclasses.replace(term, coefficient=1.0, factors=(table, choice))
    return Form(form.dims, (dataclasses.replace(chosen, groups=()),))


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
    "add": _rule(functools.partial(_or_chosen, _add)),
    "add_any": _rule(_add),
    "ceil": _rule(whole_form),
    "broadcast_in_dim": _rule(_expand_dims, "shape", "broadcast_dimensions"),
    "concatenate": _rule(_concatenate, "dimension"),
    "convert_element_type": _rule(functools.partial(_or_chosen, convert_form), *_CAST),
    "copy": _rule(_identity),
    "copy_p": _rule(_identity),
    "div": _rule(functools.partial(_or_chosen, _div)),
    "dot_general": _rule(_dot, *_DOT),
    "eq": _rule(_eq),
    "floor": _rule(whole_form),
    "gather": _rule(_gather, *_GATHER, *_PROMISES),
    "mul": _rule(functools.partial(_or_chosen, _mul)),
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
    "sub": _rule(functools.partial(_or_chosen, _add)),
    "transpose": _rule(_transpose, "permutation"),
} | {name: _rule(_chosen, "accuracy", "y") for name in _POINTWISE}
