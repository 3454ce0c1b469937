"""Writes the values of a jaxpr as sums of products of arrays with named indices.

A value is a sum of terms. A term is a number times a product of arrays, whose
dimensions are named by indices, summed over every index that the value itself lacks.
So all ways to write the same sum of products have the same normal form, up to names.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxlora.fuse.site import Index

MAX_TERMS, MAX_FACTORS = 8, 9  # a value with more is an opaque array

Dims = tuple[tuple[Index, ...], ...]
Atom = core.Var | core.Literal
Names = dict[Index, tuple[Index, ...]]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Factor:
    """An array in a product.

    Attributes:
        var: The array.
        dims: The indices that make up each of its dimensions.
        dtype: The dtype to which it was cast.
        keeps: For a boolean mask, the value that means 1; None for a number.
        masked: For a mask, the last variable that holds nothing but a number times an
            array times the mask, as (number, variable, dims).
    """

    var: Atom
    dims: Dims
    dtype: np.dtype
    keeps: bool | None = None
    masked: tuple[float, Atom, Dims] | None = None

    @property
    def indices(self) -> tuple[Index, ...]:
        return tuple(i for dim in self.dims for i in dim)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Term:
    """A number times a product of arrays.

    Attributes:
        coefficient: The number.
        factors: The arrays.
        rounded: The smallest dtype to which the product was rounded; None: it has no
            sum over an index yet.
        source: A number and a variable, with what its dimensions stand for, whose
            product this term is.
        equations: The equations that computed it from its factors.
    """

    coefficient: float
    factors: tuple[Factor, ...]
    rounded: np.dtype | None = None
    source: tuple[float, Atom, Dims] | None = None
    equations: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Form:
    """The normal form of a value: what its dimensions stand for, and its terms."""

    dims: Dims
    terms: tuple[Term, ...]

    @property
    def indices(self) -> tuple[Index, ...]:
        return tuple(i for dim in self.dims for i in dim)


class Opaque(Exception):
    """A value has no bounded normal form other than itself."""


class Indices:
    """Makes indices, and knows their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[Index, int] = {}

    def new(self, size: int) -> Index:
        index = len(self.sizes)
        self.sizes[index] = size
        return index

    def size_of(self, indices: Iterable[Index]) -> int:
        return math.prod(self.sizes[i] for i in indices)

    def new_dims(self, shape: Sequence[int]) -> Dims:
        """Names the dimensions of an array; those of size 1 need no index."""
        return tuple((self.new(n),) if n != 1 else () for n in shape)

    def split(
        self, indices: Iterable[Index], sizes: Sequence[int]
    ) -> tuple[Dims, Names]:
        """Distributes indices over dimensions of given sizes, splitting some.

        Returns:
            The indices of each dimension, and what the split ones were replaced by.

        Raises:
            Opaque: A dimension would need a part of an index that is no factor of it.
        """
        left, dims = list(indices), []
        replaced: Names = {}
        for size in sizes:
            dim: list[Index] = []
            while size != 1:
                if not left:
                    raise Opaque
                index = left.pop(0)
                length = self.sizes[index]
                if size % length == 0:
                    dim.append(index)
                    size //= length
                    continue
                if length % size:
                    raise Opaque
                outer, inner = self.new(size), self.new(length // size)
                _replace(replaced, index, (outer, inner))
                dim.append(outer)
                left.insert(0, inner)
                size = 1
            dims.append(tuple(dim))
        return tuple(dims), replaced

    def unify(
        self, first: Sequence[Index], second: Sequence[Index]
    ) -> tuple[tuple[Index, ...], Names, Names]:
        """Names the parts of one dimension that two arrays split differently.

        Returns:
            New indices, and what to replace each array's indices by.
        """
        one, two = [*first], [*second]
        sizes = _refine([self.sizes[i] for i in one], [self.sizes[i] for i in two])
        new = tuple(map(self.new, sizes))
        return new, self._parts(one, new), self._parts(two, new)

    def _parts(self, indices: list[Index], new: tuple[Index, ...]) -> Names:
        parts, rest = {}, list(new)
        for index in indices:
            part, size = [], self.sizes[index]
            while size > 1:
                part.append(rest.pop(0))
                size //= self.sizes[part[-1]]
            parts[index] = tuple(part)
        return parts


def _replace(replaced: dict, index: Index, parts: tuple[Index, ...]) -> None:
    """Notes a split, also of an index that is itself a part of a split one."""
    for key, old in replaced.items():
        if index in old:
            at = old.index(index)
            replaced[key] = (*old[:at], *parts, *old[at + 1 :])
            return
    replaced[index] = parts


def _refine(one: list[int], two: list[int]) -> list[int]:
    """Returns the coarsest factorization that refines two; raises Opaque if none."""
    sizes = []
    while one and two:
        size = min(one[0], two[0])
        if one[0] % size or two[0] % size:
            raise Opaque
        sizes.append(size)
        for left in (one, two):
            left[0] //= size
            if left[0] == 1:
                left.pop(0)
    if one or two:
        raise Opaque
    return sizes


# --- renaming


def _rename_dims(dims: Dims, names: Names) -> Dims:
    return tuple(tuple(n for i in dim for n in names.get(i, (i,))) for dim in dims)


def _rename_factor(factor: Factor, names) -> Factor:
    masked = factor.masked
    if masked is not None:
        masked = (masked[0], masked[1], _rename_dims(masked[2], names))
    return dataclasses.replace(
        factor, dims=_rename_dims(factor.dims, names), masked=masked
    )


def rename_term(term: Term, names: Names) -> Term:
    """Replaces indices in a term."""
    source = term.source
    if source is not None:
        source = (source[0], source[1], _rename_dims(source[2], names))
    factors = tuple(_rename_factor(f, names) for f in term.factors)
    return dataclasses.replace(term, factors=factors, source=source)


def _rename(form: Form, names: Names) -> Form:
    if not names:
        return form
    terms = tuple(rename_term(t, names) for t in form.terms)
    return Form(_rename_dims(form.dims, names), terms)


class Normalizer:
    """Computes the normal form of each value of a jaxpr, in the order of equations.

    Attributes:
        indices: The indices of all forms.
        forms: The form of each variable that was computed.
    """

    def __init__(self) -> None:
        self.indices = Indices()
        self.forms: dict[core.Var, Form] = {}

    def leaf(self, atom: Atom) -> Form:
        """Returns the form of an array of which nothing is known."""
        aval: Any = atom.aval
        if isinstance(atom, core.Literal) and not aval.shape and _is_number(atom):
            return Form((), (Term(float(atom.val), ()),))
        dims = self.indices.new_dims(aval.shape)
        factor = Factor(atom, dims, aval.dtype, True if aval.dtype == bool else None)
        return Form(dims, (Term(1.0, (factor,), source=(1.0, atom, dims)),))

    def form(self, atom: Atom) -> Form:
        """Returns the form of a variable or literal."""
        if isinstance(atom, core.Literal):
            return self.leaf(atom)
        if atom not in self.forms:
            self.forms[atom] = self.leaf(atom)
        return self.forms[atom]

    def add_equation(self, number: int, eqn: Any) -> None:
        """Computes the forms of an equation's results."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is None or len(eqn.outvars) != 1:
            return
        (out,) = eqn.outvars
        try:
            form = rule(self, eqn)
        except Opaque:
            return
        terms = [t for t in form.terms if t.coefficient != 0]
        if len(terms) > MAX_TERMS or any(len(t.factors) > MAX_FACTORS for t in terms):
            return
        self.forms[out] = Form(
            form.dims, tuple(_finish(t, number, out, form.dims, terms) for t in terms)
        )

    def forget(self, var: core.Var) -> None:
        """Makes a variable an opaque array from now on."""
        self.forms[var] = self.leaf(var)

    def align(self, first: Form, second: Form) -> tuple[Form, Form]:
        """Gives the dimensions of two values of the same shape the same indices."""
        one: Names = {}
        two: Names = {}
        for a, b in zip(first.dims, second.dims, strict=True):
            if a != b:
                _, in_one, in_two = self.indices.unify(a, b)
                one |= in_one
                two |= in_two
        return _rename(first, one), _rename(second, two)

    def fresh(self, form: Form) -> Form:
        """Renames all indices of a form, so that no other form shares one."""
        used = {i for t in form.terms for f in t.factors for i in f.indices}
        used.update(form.indices)
        sizes = self.indices.sizes
        return _rename(form, {i: (self.indices.new(sizes[i]),) for i in used})

    def multiply(self, first: Form, second: Form, dims: Dims) -> Form:
        """Multiplies two forms whose shared indices have the same names."""
        if len(first.terms) * len(second.terms) > MAX_TERMS:
            raise Opaque
        pairs = itertools.product(first.terms, second.terms)
        return Form(dims, tuple(_product(a, b) for a, b in pairs))


def _is_number(atom: core.Literal) -> bool:
    return np.issubdtype(np.result_type(atom.val), np.number) or _is_float(atom.aval)


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _product(first: Term, second: Term) -> Term:
    """Multiplies two terms."""
    return Term(
        first.coefficient * second.coefficient,
        first.factors + second.factors,
        _narrower(first.rounded, second.rounded),
        None,
        first.equations | second.equations,
    )


def _narrower(first: np.dtype | None, second: np.dtype | None) -> np.dtype | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second, key=lambda dtype: dtype.itemsize)


def _finish(term: Term, number: int, out: core.Var, dims: Dims, terms: list) -> Term:
    """Notes that an equation computed a term."""
    equations = term.equations | {number}
    if len(terms) > 1:
        return dataclasses.replace(term, equations=equations)
    factors = term.factors
    if len(factors) == 2 and term.rounded is None:
        masked = (term.coefficient, out, dims)
        factors = tuple(
            f if f.keeps is None else dataclasses.replace(f, masked=masked)
            for f in factors
        )
    return dataclasses.replace(
        term, factors=factors, source=(1.0, out, dims), equations=equations
    )


def _scaled(form: Form, number: float) -> Form:
    """Multiplies a form by a number."""
    terms = []
    for term in form.terms:
        source = term.source and (term.source[0] * number, *term.source[1:])
        coefficient = term.coefficient * number
        terms.append(dataclasses.replace(term, coefficient=coefficient, source=source))
    return Form(form.dims, tuple(terms))


# --- rules: the form of an equation's result


def _add(n: Normalizer, eqn) -> Form:
    if not _is_float(eqn.outvars[0].aval):
        raise Opaque
    first, second = (n.form(v) for v in eqn.invars)
    sign = -1.0 if eqn.primitive.name == "sub" else 1.0
    if sign < 0:
        second = _scaled(second, sign)
    shape = eqn.outvars[0].aval.shape
    first, second = n.align(_spread(n, first, shape), _spread(n, second, shape))
    return Form(first.dims, first.terms + second.terms)


def _spread(n: Normalizer, form: Form, shape: tuple[int, ...]) -> Form:
    """Gives a scalar the dimensions of an array."""
    if len(form.dims) == len(shape):
        return form
    return Form(n.indices.new_dims(shape), form.terms)


def _neg(n: Normalizer, eqn) -> Form:
    return _scaled(n.form(eqn.invars[0]), -1.0)


def _identity(n: Normalizer, eqn) -> Form:
    return n.form(eqn.invars[0])


def _scalar_value(form: Form) -> float | None:
    """Returns the number that every element of a value is; None: it is no constant."""
    if any(term.factors for term in form.terms):
        return None
    return sum(term.coefficient for term in form.terms)


def _mul(n: Normalizer, eqn) -> Form:
    out = eqn.outvars[0].aval
    if not _is_float(out):
        raise Opaque
    first, second = (n.form(v) for v in eqn.invars)
    for one, other in ((first, second), (second, first)):
        if (number := _scalar_value(one)) is not None:
            return _scaled(_spread(n, other, out.shape), number)
    first, second = _spread(n, first, out.shape), _spread(n, second, out.shape)
    second = n.fresh(second)
    first, second = n.align(first, second)
    if not _worth_multiplying(first, second):
        raise Opaque
    return n.multiply(first, second, first.dims)


def _worth_multiplying(first: Form, second: Form) -> bool:
    """Tells whether an elementwise product is more than a new array.

    It is if one value is a mask, a scalar, a vector that scales sums, or if neither has
    all indices, as in a matrix product that is written as a product and a sum.
    """
    if any(map(_only_masks, (first, second))):
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
    is_sum = all(t.rounded is not None for t in other.terms)
    return len(vector.terms) == 1 and (is_scalar or is_sum)


def _only_masks(form: Form) -> bool:
    return len(form.terms) == 1 and all(
        f.keeps is not None for f in form.terms[0].factors
    )


def _div(n: Normalizer, eqn) -> Form:
    if not _is_float(eqn.outvars[0].aval):
        raise Opaque
    number = _scalar_value(n.form(eqn.invars[1]))
    if not number:
        raise Opaque
    form = n.form(eqn.invars[0])
    return _scaled(_spread(n, form, eqn.outvars[0].aval.shape), 1.0 / number)


def _convert(n: Normalizer, eqn) -> Form:
    (source,), (out,) = eqn.invars, eqn.outvars
    dtype = out.aval.dtype
    if not _is_float(out.aval) or dtype.itemsize < 2:
        raise Opaque
    form = n.form(source)
    number = _scalar_value(form)
    if number is None and not (source.aval.dtype == bool or _is_float(source.aval)):
        raise Opaque
    return Form(form.dims, tuple(_cast(term, dtype) for term in form.terms))


def _cast(term: Term, dtype: np.dtype) -> Term:
    if term.rounded is not None:
        return dataclasses.replace(term, rounded=_narrower(term.rounded, dtype))
    factors = (
        f if f.keeps is not None else dataclasses.replace(f, dtype=dtype)
        for f in term.factors
    )
    return dataclasses.replace(term, factors=tuple(factors))


def _not(n: Normalizer, eqn) -> Form:
    form = n.form(eqn.invars[0])
    if not _only_masks(form) or len(form.terms[0].factors) != 1:
        raise Opaque
    term = form.terms[0]
    (mask,) = term.factors
    mask = dataclasses.replace(mask, keeps=not mask.keeps)
    return Form(form.dims, (dataclasses.replace(term, factors=(mask,)),))


def _select(n: Normalizer, eqn) -> Form:
    which, *cases = eqn.invars
    out = eqn.outvars[0]
    if len(cases) != 2 or which.aval.dtype != bool or not _is_float(out.aval):
        raise Opaque
    forms = [n.form(case) for case in cases]
    zero = [_scalar_value(form) == 0 for form in forms]
    mask = n.form(which)
    if sum(zero) != 1 or not _only_masks(mask) or not which.aval.shape:
        raise Opaque
    if zero[1]:  # the mask keeps where it is False
        (term,) = mask.terms
        if len(term.factors) != 1:
            raise Opaque
        flipped = dataclasses.replace(term.factors[0], keeps=not term.factors[0].keeps)
        mask = Form(mask.dims, (dataclasses.replace(term, factors=(flipped,)),))
    kept = forms[zero.index(False)]
    kept, mask = n.align(kept, n.fresh(mask))
    return n.multiply(kept, mask, kept.dims)


def _transpose(n: Normalizer, eqn) -> Form:
    form = n.form(eqn.invars[0])
    dims = tuple(form.dims[i] for i in eqn.params["permutation"])
    return Form(dims, form.terms)


def _reshape(n: Normalizer, eqn) -> Form:
    if eqn.params["dimensions"] is not None:
        raise Opaque
    form = n.form(eqn.invars[0])
    shape = eqn.outvars[0].aval.shape
    dims, replaced = n.indices.split(form.indices, shape)
    return Form(dims, _rename(form, replaced).terms)


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
    if not _is_float(eqn.outvars[0].aval):
        raise Opaque
    form, axes = n.form(eqn.invars[0]), eqn.params["axes"]
    summed = [i for axis in axes for i in form.dims[axis]]
    dims = tuple(d for axis, d in enumerate(form.dims) if axis not in axes)
    return _sum_over(n, Form(dims, form.terms), summed, eqn.outvars[0].aval.dtype)


def _sum_over(n: Normalizer, form: Form, summed: list[Index], dtype) -> Form:
    """Sums over indices, which get names of their own."""
    sizes = n.indices.sizes
    names: Names = {i: (n.indices.new(sizes[i]),) for i in summed}
    terms = []
    for old in form.terms:
        held = {i for f in old.factors for i in f.indices}
        absent = math.prod(sizes[i] for i in summed if i not in held)
        term = rename_term(old, names)
        terms.append(
            dataclasses.replace(
                term,
                coefficient=term.coefficient * absent,
                rounded=_narrower(term.rounded, dtype),
                source=None,
            )
        )
    return Form(form.dims, tuple(terms))


def _dot(n: Normalizer, eqn) -> Form:
    out = eqn.outvars[0].aval
    if not _is_float(out):
        raise Opaque
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    left, right = n.form(eqn.invars[0]), n.fresh(n.form(eqn.invars[1]))
    left, right = _unify_axes(
        n, left, right, (*contract_l, *batch_l), (*contract_r, *batch_r)
    )
    summed = [i for axis in contract_l for i in left.dims[axis]]
    free_l = [d for i, d in enumerate(left.dims) if i not in (*contract_l, *batch_l)]
    free_r = [d for i, d in enumerate(right.dims) if i not in (*contract_r, *batch_r)]
    dims = (*(left.dims[i] for i in batch_l), *free_l, *free_r)
    return _sum_over(n, n.multiply(left, right, dims), summed, out.dtype)


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
    return _rename(left, names_l), _rename(right, names_r)


_RULES: dict[str, Callable[[Normalizer, Any], Form]] = {
    "add": _add,
    "add_any": _add,
    "broadcast_in_dim": _expand_dims,
    "convert_element_type": _convert,
    "copy": _identity,
    "copy_p": _identity,
    "div": _div,
    "dot_general": _dot,
    "mul": _mul,
    "neg": _neg,
    "not": _not,
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "select_n": _select,
    "squeeze": _squeeze,
    "sub": _add,
    "transpose": _transpose,
}
