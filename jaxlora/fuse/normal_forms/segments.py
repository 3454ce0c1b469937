"""Normal forms of rows that are computed in segments and concatenated.

`concatenate([x[:8] @ a0 @ b0, x[8:] @ a1 @ b1])` is a product of x with tables of A and
B, in which each block of rows chooses its entry. The tables are new variables, whose
equations are added to the jaxpr if a site reads them.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.normal_forms.forms import (
    Choice,
    Dims,
    Factor,
    Form,
    Index,
    Indices,
    Names,
    Opaque,
    Term,
    cast_term,
    constant,
    fresh,
    is_float,
    multiply,
    narrower,
    rename,
    rename_term,
)
from jaxlora.fuse.normal_forms.normal import Normalizer

_MIN_FACTORS = 3  # of a branch: x, A and B


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The segments of a concatenation, all written in the same way.

    Attributes:
        eqn: The concatenation.
        sizes: Rows of each segment.
        entries: The table's entry of each segment; -1: the segment is zero.
        terms: The term of each entry, with the indices of the first.
        row: The index of the first segment's rows.
        dims: What the dimensions of the first segment stand for.
    """

    eqn: Any
    sizes: tuple[int, ...]
    entries: tuple[int, ...]
    terms: tuple[Term, ...]
    row: Index
    dims: Dims


def concatenate_form(n: Normalizer, eqn: Any) -> Form:
    """Returns the form of a concatenation of branches, one for each segment of rows."""
    if not is_float(eqn.outvars[0].aval):
        raise Opaque
    segments = _read(n, eqn)
    place, source, axis = _source_of(n, segments)
    form, dtype = n.form(source), segments.terms[0].factors[place].dtype
    if len(form.terms) != 1 or dtype != source.aval.dtype:
        form = n.leaf(source)
        form = Form(form.dims, tuple(cast_term(term, dtype) for term in form.terms))
    return _joined(n, segments, place, form, axis)


def _read(n: Normalizer, eqn: Any) -> Segments:
    """Reads a concatenation whose parts differ in arrays alone; raises `Opaque`."""
    axis, forms = eqn.params["dimension"], [n.form(v) for v in eqn.invars]
    parts = [form for form in forms if constant(form) != 0]
    is_branch = [len(f.terms) == 1 and bool(f.dims[axis]) for f in parts]
    if len(parts) < 2 or not all(is_branch):
        raise Opaque
    first = parts[0]
    if len(first.terms[0].factors) < _MIN_FACTORS or len(first.dims[axis]) != 1:
        raise Opaque
    (row,) = first.dims[axis]
    terms = [first.terms[0]]
    terms += [_renamed_like(n.indices, first, part, row) for part in parts[1:]]
    numbers = iter(range(len(parts)))
    return Segments(
        eqn=eqn,
        sizes=tuple(v.aval.shape[axis] for v in eqn.invars),
        entries=tuple(-1 if constant(f) == 0 else next(numbers) for f in forms),
        terms=tuple(terms),
        row=row,
        dims=first.dims,
    )


def _renamed_like(indices: Indices, first: Form, part: Form, row: Index) -> Term:
    """Returns the term of a segment with the indices of the first segment."""
    (wanted,), (term,) = first.terms, part.terms
    if len(wanted.factors) != len(term.factors):
        raise Opaque
    names: Names = {}
    for one, other in zip(wanted.factors, term.factors, strict=True):
        alike = [(f.dtype, f.keeps, list(map(len, f.dims))) for f in (one, other)]
        if alike[0] != alike[1] or one.choice or other.choice:
            raise Opaque
        for i, j in zip(one.indices, other.indices, strict=True):
            if indices.sizes[i] != indices.sizes[j] and i != row:
                raise Opaque
            if names.setdefault(j, (i,)) != (i,):
                raise Opaque
    renamed = rename(part, names)
    if renamed.dims != first.dims:
        raise Opaque
    return renamed.terms[0]


def _source_of(n: Normalizer, segments: Segments) -> tuple[int, Any, int]:
    """Finds x; returns its position, the variable, and the axis of its rows."""
    for place, factor in enumerate(segments.terms[0].factors):
        source = _source(n, segments, place)
        if source is not None and factor.is_number:
            return place, *source
    raise Opaque


def _source(n: Normalizer, segments: Segments, place: int) -> tuple[Any, int] | None:
    """Returns the array whose consecutive slices a factor is, and their axis."""
    dims = segments.terms[0].factors[place].dims
    if (segments.row,) not in dims:
        return None
    axis, found = dims.index((segments.row,)), set()
    start = 0
    for size, entry in zip(segments.sizes, segments.entries, strict=True):
        if entry >= 0:
            var = segments.terms[entry].factors[place].var
            found.add(_slice_of(n.graph, var, axis, start))
        start += size
    source = found.pop()
    if found or source is None or source.aval.shape[axis] != start:
        return None
    return source, axis


def _joined(
    n: Normalizer, segments: Segments, place: int, form: Form, axis: int
) -> Form:
    """Returns the form of the concatenation.

    Args:
        n: Knows the form of each value.
        segments: The segments.
        place: Position of x among the factors.
        form: The form of the whole x.
        axis: The axis of x's rows.
    """
    first = segments.terms[0]
    form, rows, block_rows = _split_rows(n, segments, form, axis)
    names: Names = {segments.row: rows}
    replaced: Names = {}
    for mine, theirs in zip(first.factors[place].dims, form.dims, strict=True):
        if mine != (segments.row,) and mine:
            in_mine, in_theirs = n.indices.unify(mine, theirs)
            names |= in_mine
            replaced |= in_theirs
    entry = n.indices.new(len(segments.terms))
    factors = [
        _table(n, segments, i, entry) for i in range(len(first.factors)) if i != place
    ]
    coefficient, scales = _scales(segments, entry)
    term = Term(
        coefficient,
        (*factors, *scales, _choice(n, segments, block_rows, entry)),
        functools.reduce(narrower, (t.rounded for t in segments.terms)),
        any(t.restored for t in segments.terms),
        frozenset().union(*(t.precisions for t in segments.terms)),
        equations=_equations(n.graph, segments, place),
    )
    term = rename_term(term, names)
    dims = rename(Form(segments.dims, ()), names).dims
    return multiply(rename(form, replaced), Form(dims, (term,)), dims)


def _split_rows(
    n: Normalizer, segments: Segments, form: Form, axis: int
) -> tuple[Form, tuple[Index, ...], tuple[Index, ...]]:
    """Splits the rows of x into blocks that have one entry each, if it can."""
    form = fresh(n.indices, form)
    rows, size = form.dims[axis], math.gcd(*segments.sizes)
    count = sum(segments.sizes) // size
    try:
        (blocks, inner), names = n.indices.split(rows, (count, size))
    except Opaque:
        return form, rows, rows
    return rename(form, names), (*blocks, *inner), blocks


def _equations(graph: Graph, segments: Segments, place: int) -> frozenset[int]:
    """Returns the numbers of all equations of the segments, and of x's slices."""
    sources = (t.factors[place].var for t in segments.terms)
    slices = {graph.maker[v] for v in sources if isinstance(v, core.Var)}
    return frozenset(slices).union(*(t.equations for t in segments.terms))


def _choice(
    n: Normalizer, segments: Segments, rows: tuple[Index, ...], entry: Index
) -> Factor:
    """Returns the choice of each block of rows."""
    size = sum(segments.sizes) // n.indices.size_of(rows)
    counts = [count // size for count in segments.sizes]
    entries = np.repeat(np.asarray(segments.entries, np.int32), counts)
    choice = Choice(("segments", entries.tobytes()), False, "zero")
    literal = core.Literal(entries, jax.typeof(entries))
    return Factor(literal, (rows, (entry,)), entries.dtype, choice=choice)


def _table(n: Normalizer, segments: Segments, place: int, entry: Index) -> Factor:
    """Returns a factor of all segments."""
    first = segments.terms[0].factors[place]
    atoms = [t.factors[place].var for t in segments.terms]
    if segments.row in first.indices:
        source = _source(n, segments, place)
        if source is not None:
            return dataclasses.replace(first, var=source[0])
        if (segments.row,) not in first.dims or -1 in segments.entries:
            raise Opaque
        axis = first.dims.index((segments.row,))
        joined = n.add(segments.eqn, lambda *v: jnp.concatenate(v, axis), atoms)
        return dataclasses.replace(first, var=joined)
    if all(atom is atoms[0] for atom in atoms):
        return first
    table = n.add(segments.eqn, lambda *v: jnp.stack(v), atoms)
    return dataclasses.replace(first, var=table, dims=((entry,), *first.dims))


def _slice_of(graph: Graph, var: Any, axis: int, start: int) -> Any:
    """Returns the array of which a variable is the slice that starts at a row."""
    eqn = graph.equation(var)
    if eqn is None:
        return None
    (source, *_), params = eqn.invars, eqn.params
    if eqn.primitive.name == "split":
        before = sum(params["sizes"][: eqn.outvars.index(var)])
        return source if (params["axis"], before) == (axis, start) else None
    if eqn.primitive.name != "slice" or set(params["strides"] or (1,)) != {1}:
        return None
    shape, wanted = list(source.aval.shape), list(var.aval.shape)
    starts = [0] * len(shape)
    starts[axis], shape[axis] = start, wanted[axis]
    return (
        source if (tuple(starts), shape) == (params["start_indices"], wanted) else None
    )


def _scales(segments: Segments, entry: Index) -> tuple[float, list[Factor]]:
    """Returns the number that all entries share, or one factor with those of each."""
    numbers = [term.coefficient for term in segments.terms]
    if len(set(numbers)) == 1:
        return numbers[0], []
    values = np.asarray(numbers, np.float32)
    literal = core.Literal(values, jax.typeof(values))
    return 1.0, [Factor(literal, ((entry,),), values.dtype)]
