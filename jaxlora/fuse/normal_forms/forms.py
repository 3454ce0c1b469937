"""Sums of products of arrays with named indices: the normal form of a value.

A value is a sum of terms. A term is a number times a product of arrays, whose
dimensions are named by indices, summed over every index that the value itself lacks.
So all ways to write the same sum of products have the same normal form, up to names.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

MAX_TERMS = 8  # a value with more is an opaque array

Index = int  # names one dimension, or a part of one, of the arrays of a sum
Dims = tuple[tuple[Index, ...], ...]
Atom = core.Var | core.Literal
Names = dict[Index, tuple[Index, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A choice of one table entry for each row, by an array of zeros and ones.

    Attributes:
        key: Equal for choices that are the same for every input.
        is_ragged: Whether the variable holds the number of consecutive rows of each
            entry, as for `jax.lax.ragged_dot`, and not the entry of each row.
        outside: What a row that chooses no entry gets: that of the nearest entry
            (`clip`), zeros (`zero`) or NaN (`nan`).
    """

    key: Hashable
    is_ragged: bool
    outside: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Factor:
    """An array in a product.

    Attributes:
        var: The array.
        dims: The indices that make up each of its dimensions, slowest first. A
            dimension of size 1 has none.
        dtype: The dtype to which it was cast.
        keeps: For a mask of truth values, or of zeros and ones, the value that means 1;
            None for other arrays.
        choice: For an array of zeros and ones that chooses from a table, how `var`
            gives it; its last dimension is the table's.
    """

    var: Atom
    dims: Dims
    dtype: Any  # also that of keys
    keeps: bool | None = None
    choice: Choice | None = None

    @property
    def indices(self) -> tuple[Index, ...]:
        return tuple(itertools.chain.from_iterable(self.dims))

    @property
    def is_number(self) -> bool:
        """Whether it is neither a mask nor a choice."""
        return self.keeps is None and self.choice is None

    def renamed(self, names: Names) -> "Factor":
        """Returns the array with other indices."""
        dims = _rename_dims(self.dims, names)
        return Factor(self.var, dims, self.dtype, self.keeps, self.choice)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Group:
    """An array that holds a number times one or several of the factors of a term.

    Attributes:
        number: The number.
        array: The array.
        members: Positions of the factors.
        equations: The equations that computed it.
    """

    number: float
    array: Factor
    members: frozenset[int]
    equations: frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Term:
    """A number times a product of arrays.

    Attributes:
        coefficient: The number.
        factors: The arrays.
        rounded: The dtype of the narrowest sum of the product; None: it has no sum over
            an index yet.
        restored: Whether a sum in it was rounded to a dtype and then cast to one that
            holds more values.
        precisions: What its matrix products were asked for.
        groups: The variables that hold products of several of its factors.
        equations: The equations that computed it from its factors.
    """

    coefficient: float
    factors: tuple[Factor, ...]
    rounded: np.dtype | None = None
    restored: bool = False
    precisions: frozenset[lax.Precision] = frozenset()
    groups: tuple[Group, ...] = ()
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
    ) -> tuple[Names, Names]:
        """Names the parts of one dimension that two arrays split differently.

        Returns:
            What to replace each array's indices by.
        """
        one, two = [*first], [*second]
        sizes = _refine([self.sizes[i] for i in one], [self.sizes[i] for i in two])
        new = tuple(map(self.new, sizes))
        return self._parts(one, new), self._parts(two, new)

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


def _rename_dims(dims: Dims, names: Names) -> Dims:
    return tuple(tuple(n for i in dim for n in names.get(i, (i,))) for dim in dims)


def rename_term(term: Term, names: Names) -> Term:
    """Replaces indices in a term."""
    factors = tuple(f.renamed(names) for f in term.factors)
    groups = tuple(
        Group(g.number, g.array.renamed(names), g.members, g.equations)
        for g in term.groups
    )
    return Term(
        term.coefficient,
        factors,
        term.rounded,
        term.restored,
        term.precisions,
        groups,
        term.equations,
    )


def rename(form: Form, names: Names) -> Form:
    """Replaces indices in a form."""
    if not names:
        return form
    terms = tuple(rename_term(t, names) for t in form.terms)
    return Form(_rename_dims(form.dims, names), terms)


def align(indices: Indices, first: Form, second: Form) -> tuple[Form, Form]:
    """Gives the dimensions of two values the same indices.

    A dimension of size 1 gets those of the other value, as it is repeated.
    """
    one: Names = {}
    two: Names = {}
    for a, b in zip(first.dims, second.dims, strict=True):
        if a != b and a and b:
            in_one, in_two = indices.unify(a, b)
            one |= in_one
            two |= in_two
    first, second = rename(first, one), rename(second, two)
    pairs = list(zip(first.dims, second.dims, strict=True))
    dims = tuple(a or b for a, b in pairs)
    return Form(dims, first.terms), Form(dims, second.terms)


def unify_axes(
    indices: Indices,
    left: Form,
    right: Form,
    axes_l: Sequence[int],
    axes_r: Sequence[int],
) -> tuple[Form, Form]:
    """Gives pairs of axes of two forms the same indices."""
    names_l: Names = {}
    names_r: Names = {}
    for axis_l, axis_r in zip(axes_l, axes_r, strict=True):
        dim_l, dim_r = left.dims[axis_l], right.dims[axis_r]
        sizes_l, sizes_r = ([indices.sizes[i] for i in dim] for dim in (dim_l, dim_r))
        if sizes_l == sizes_r:  # keep the names of the left, so that equal ones stay so
            names_r |= {j: (i,) for i, j in zip(dim_l, dim_r, strict=True)}
            continue
        in_l, in_r = indices.unify(dim_l, dim_r)
        names_l |= in_l
        names_r |= in_r
    return rename(left, names_l), rename(right, names_r)


def fresh(indices: Indices, form: Form) -> Form:
    """Renames all indices of a form, so that no other form shares one."""
    used = {i for t in form.terms for f in t.factors for i in f.indices}
    used.update(form.indices)
    return rename(form, {i: (indices.new(indices.sizes[i]),) for i in used})


def multiply(first: Form, second: Form, dims: Dims) -> Form:
    """Multiplies two forms in which shared indices have the same names."""
    if len(first.terms) * len(second.terms) > MAX_TERMS:
        raise Opaque
    pairs = itertools.product(first.terms, second.terms)
    return Form(dims, tuple(_product(a, b) for a, b in pairs))


def _product(first: Term, second: Term) -> Term:
    shift = len(first.factors)
    moved = (
        dataclasses.replace(g, members=frozenset(m + shift for m in g.members))
        for g in second.groups
    )
    return Term(
        first.coefficient * second.coefficient,
        first.factors + second.factors,
        narrower(first.rounded, second.rounded),
        first.restored or second.restored,
        first.precisions | second.precisions,
        (*first.groups, *moved),
        first.equations | second.equations,
    )


def narrower(first: np.dtype | None, second: np.dtype | None) -> np.dtype | None:
    """Returns the smaller of two dtypes; None is larger than any."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second, key=lambda dtype: dtype.itemsize)


def holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Returns whether every value of one type of numbers is a value of another.

    Neither of float16 and bfloat16 holds the other.
    """
    if wide == narrow:
        return True
    if jnp.issubdtype(narrow, jnp.integer):
        least, most = jnp.iinfo(narrow).min, jnp.iinfo(narrow).max
        if jnp.issubdtype(wide, jnp.integer):
            return jnp.iinfo(wide).min <= least and most <= jnp.iinfo(wide).max
        if jnp.issubdtype(wide, jnp.floating):
            return most < 2 ** (jnp.finfo(wide).nmant + 1) < 2 ** jnp.finfo(wide).maxexp
        return False
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wide, narrow)):
        return False
    wider, other = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(wider.nmant >= other.nmant and wider.maxexp >= other.maxexp)


def scaled(form: Form, number: float) -> Form:
    """Multiplies a form by a number.

    Raises:
        Opaque: The number is 0, and some terms are no constants: 0 times NaN is NaN.
    """
    if number == 0 and constant(form) is None:
        raise Opaque
    terms = (
        dataclasses.replace(t, coefficient=t.coefficient * number) for t in form.terms
    )
    return Form(form.dims, tuple(terms))


def sum_over(indices: Indices, form: Form, summed: Sequence[Index], dtype) -> Form:
    """Sums over indices, which get names of their own."""
    sizes = indices.sizes
    names: Names = {i: (indices.new(sizes[i]),) for i in summed}
    terms = []
    for old in form.terms:
        held = {i for f in old.factors for i in f.indices}
        absent = math.prod(sizes[i] for i in summed if i not in held)
        terms.append(
            dataclasses.replace(
                rename_term(old, names),
                coefficient=old.coefficient * absent,
                rounded=narrower(old.rounded, dtype),
            )
        )
    return Form(form.dims, tuple(terms))


def constant(form: Form) -> float | None:
    """Returns the number that all elements of a value equal; None: not a constant."""
    if any(term.factors for term in form.terms):
        return None
    return sum(term.coefficient for term in form.terms)


def sum_of_constants(eqn: Any, first: Form, second: Form) -> float | None:
    """Returns the sum or difference of two known scalars in the result's dtype."""
    aval, numbers = eqn.outvars[0].aval, (constant(first), constant(second))
    if aval.shape or not is_float(aval) or None in numbers:
        return None
    one, other = (aval.dtype.type(number) for number in numbers)
    return float(one - other if eqn.primitive.name == "sub" else one + other)


def is_moderate(number: float, dtype: Any) -> bool:
    """Whether a number may be moved across a product without an overflow or underflow.

    The normal form collects the constants of a term, and the kernels multiply by them
    at a place of their own, so what was computed before or behind them there differs by
    these constants. This is harmless while they are near 1 beside the range of the
    dtype: within 2^-16 and 2^16, or 2^-4 and 2^4 for float16.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return True
    limit = 2.0 ** min(jnp.finfo(dtype).maxexp // 4, 16)
    return 1 / limit <= abs(number) <= limit


def cast_term(term: Term, dtype: np.dtype) -> Term:
    """Returns a product whose arrays are cast to a dtype, but for masks and choices."""
    factors = (
        dataclasses.replace(f, dtype=dtype) if f.is_number else f for f in term.factors
    )
    return dataclasses.replace(term, factors=tuple(factors))


def is_float(aval: Any) -> bool:
    """Returns whether an array has floating-point numbers."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


def only_masks(form: Form) -> bool:
    """Returns whether a value is a product of masks."""
    return len(form.terms) == 1 and all(not f.is_number for f in form.terms[0].factors)


def flipped(form: Form) -> Form:
    """Returns the form of a mask's complement."""
    (term,) = form.terms
    if len(term.factors) != 1 or term.factors[0].keeps is None:
        raise Opaque
    mask = dataclasses.replace(term.factors[0], keeps=not term.factors[0].keeps)
    return Form(form.dims, (dataclasses.replace(term, factors=(mask,)),))
