"""The rules of casts, and of arrays that are made whole numbers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlora.fuse.normal_forms.forms import (
    Factor,
    Form,
    Opaque,
    Term,
    constant,
    holds,
    narrower,
)
from jaxlora.fuse.normal_forms.intervals import is_zero_or_one
from jaxlora.fuse.normal_forms.normal import Normalizer


def is_float(aval: Any) -> bool:
    """Returns whether an array has floating-point numbers."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


def convert_form(n: Normalizer, eqn) -> Form:
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


def cast_term(term: Term, dtype: np.dtype) -> Term:
    factors = (
        dataclasses.replace(f, dtype=dtype) if f.is_number else f for f in term.factors
    )
    return dataclasses.replace(term, factors=tuple(factors))


def _was_rounded(factor: Factor) -> bool:
    """Returns whether a factor is cast to a smaller dtype than its array's."""
    aval: Any = factor.var.aval
    return factor.is_number and factor.dtype.itemsize < aval.dtype.itemsize


def whole_form(n: Normalizer, eqn: Any) -> Form:
    """Returns the form of an array of whole numbers, which is a mask of zeros and ones.

    It is one if it is the floor of a number from 0.8 to 1.8, as in dropout.
    """
    (out,) = eqn.outvars
    if not is_float(out.aval) or not is_zero_or_one(n.graph, out):
        raise Opaque
    dims = n.indices.new_dims(out.aval.shape)
    return Form(dims, (Term(1.0, (Factor(out, dims, out.aval.dtype, keeps=True),)),))
