"""Normal forms of the ways in which each row chooses an entry of a table.

A gather, a comparison with an iota and a ragged dot are all products with an array of
zeros and ones, which has a 1 where a row (first dimensions) chooses an entry (last
dimension). That array is a `Factor` with a `Choice`; it is never computed.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.normal_forms.forms import (
    Atom,
    Choice,
    Factor,
    Form,
    Index,
    Indices,
    Opaque,
    Term,
    align,
    constant,
    fresh,
    is_float,
    multiply,
    sum_over,
    unify_axes,
)
from jaxlora.fuse.normal_forms.normal import Normalizer, is_arithmetic

_CHOICE_DTYPE = np.dtype(np.int32)


def value_key(graph: Graph, atom: Atom, depth: int = 6) -> Hashable:
    """Returns a key that is equal for values computed in the same way.

    So the entries of `a[ids]` and `b[ids]` are known to be the same, although JAX
    corrects negative entries once for each.
    """
    if isinstance(atom, core.Literal):
        return np.asarray(atom.val).tobytes()
    eqn = graph.equation(atom)
    if eqn is None or len(eqn.outvars) != 1 or depth == 0:
        return atom
    params = tuple(sorted((name, str(value)) for name, value in eqn.params.items()))
    inputs = tuple(value_key(graph, v, depth - 1) for v in eqn.invars)
    return eqn.primitive.name, params, inputs


def gather_form(n: Normalizer, eqn: Any) -> Form:
    """Returns the form of rows of a table that are chosen along one of its axes."""
    if not is_arithmetic(eqn.invars[0].aval):
        raise Opaque
    ids = _entries_of(n.graph, eqn)
    key, table = value_key(n.graph, ids), fresh(n.indices, n.form(eqn.invars[0]))
    rows = _entries(n, ids)  # its last dimension has size 1
    axis, offset_dims = _gather_axis(eqn, len(table.dims))
    entry = table.dims[axis]
    chosen = _choice_term(rows, entry, Choice(key, False, _outside(eqn.params)))
    out = len(eqn.outvars[0].aval.shape)
    inner = [d for i, d in enumerate(table.dims) if i != axis]
    if len(offset_dims) > len(inner):  # the axis is kept, with size 1
        inner.insert(axis, ())
    outer = [*rows.dims[:-1]]
    dims = tuple(inner.pop(0) if i in offset_dims else outer.pop(0) for i in range(out))
    return multiply(table, Form(rows.dims, (chosen,)), dims)


def _entries(n: Normalizer, atom: Atom) -> Form:
    """Returns the form of numbers of entries; those that are chosen are an array."""
    form = n.form(atom)
    is_chosen = any(f.choice for t in form.terms for f in t.factors)
    return n.leaf(atom) if is_chosen else form


def _entries_of(graph: Graph, eqn: Any) -> Atom:
    """Returns the array that holds the entry that each row of a gather chooses.

    Under vmap, an index is given for each axis of the table. Those along whole axes are
    clipped to 0.
    """
    rows, axes = eqn.invars[1], eqn.params["dimension_numbers"].start_index_map
    if len(axes) == 1:
        return rows
    columns = graph.equation(rows)
    last = len(rows.aval.shape) - 1
    if (
        columns is None
        or columns.primitive.name != "concatenate"
        or columns.params["dimension"] != last
        or len(columns.invars) != len(axes)
    ):
        raise Opaque
    axis, _ = _gather_axis(eqn, len(eqn.invars[0].aval.shape))
    return columns.invars[axes.index(axis)]


def _gather_axis(eqn: Any, ndim: int) -> tuple[int, tuple[int, ...]]:
    """Returns the axis along which a gather chooses, and the results' other axes."""
    numbers = eqn.params["dimension_numbers"]
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if numbers.operand_batching_dims:
        raise Opaque
    axes = numbers.start_index_map
    if len(axes) > 1 and eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        axes = [axis for axis in axes if sizes[axis] != shape[axis]]
    if len(axes) != 1:
        raise Opaque
    (axis,) = axes
    whole = all(sizes[i] == shape[i] for i in range(ndim) if i != axis)
    if not whole or sizes[axis] != 1 or shape[axis] == 1:
        raise Opaque
    if numbers.collapsed_slice_dims not in ((), (axis,)):
        raise Opaque
    if len(eqn.invars[1].aval.shape) < 2:  # one entry for all rows is an array
        raise Opaque
    return axis, numbers.offset_dims


def _outside(params: dict[str, Any]) -> str:
    """Returns what a gather gives a row whose entry is outside of the table."""
    mode, fill = params["mode"], params["fill_value"]
    if mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS):
        return "clip"
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        raise Opaque
    if other_fill(params) is not None:
        raise Opaque
    return "nan" if fill is None or fill != fill else "zero"


def other_fill(params: dict[str, Any]) -> float | None:
    """Returns what a gather fills in, if that is neither 0 nor NaN."""
    mode, fill = params["mode"], params["fill_value"]
    is_filled = mode == lax.GatherScatterMode.FILL_OR_DROP and fill is not None
    return float(fill) if is_filled and fill == fill and fill != 0 else None


def or_chosen(form: Callable[[Normalizer, Any], Form], n: Normalizer, eqn: Any) -> Form:
    """Applies a rule, or the one of functions of entries that each row chooses."""
    try:
        return form(n, eqn)
    except Opaque:
        return chosen_form(n, eqn)


def chosen_form(n: Normalizer, eqn: Any) -> Form:
    """Returns the form of a function by element of entries that each row chooses.

    Rows choose an entry of one number from each table, all in the same way, so that a
    function of what they choose is a choice from a table of the function.
    """
    if not is_float(eqn.outvars[0].aval):
        raise Opaque
    tables, form = _tables(n.indices, [n.form(v) for v in eqn.invars])
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


def _tables(
    indices: Indices, forms: Sequence[Form]
) -> tuple[list[tuple[float, Factor | None]], Form]:
    """Returns a number and a table for each operand, and the form of one of them."""
    tables: list[tuple[float, Factor | None]] = []
    first: Form | None = None
    for form in forms:
        number = constant(form)
        if number is not None:
            tables.append((number, None))
            continue
        if first is not None:
            if len(form.dims) != len(first.dims):
                raise Opaque
            first, form = align(indices, first, form)
        table, choice = _table_and_choice(form)
        if first is not None:
            _, other = _table_and_choice(first)
            if choice.choice != other.choice or choice.dims[:-1] != other.dims[:-1]:
                raise Opaque
        first = form if first is None else first
        tables.append((form.terms[0].coefficient, table))
    if first is None:
        raise Opaque
    return tables, first


def _table_and_choice(form: Form) -> tuple[Factor, Factor]:
    """Returns the table of numbers from which rows choose, and their choice."""
    if len(form.terms) != 1 or len(form.terms[0].factors) != 2:
        raise Opaque
    (term,) = form.terms
    table, choice = sorted(term.factors, key=lambda f: f.choice is not None)
    if not table.is_number or choice.choice is None:
        raise Opaque
    if choice.choice.is_ragged or choice.choice.outside != "clip":
        raise Opaque  # a function of 0 may be another number
    if table.indices != choice.dims[-1]:
        raise Opaque
    return table, choice


def _choice_term(rows: Form, entry: tuple[Index, ...], choice: Choice) -> Term:
    if len(rows.terms) != 1 or len(rows.terms[0].factors) != 1:
        raise Opaque
    (term,) = rows.terms
    (factor,) = term.factors
    aval: Any = factor.var.aval
    if not jnp.issubdtype(aval.dtype, jnp.integer):
        raise Opaque  # a number between two entries chooses neither
    if term.coefficient != 1 or set(factor.indices) != set(rows.indices):
        raise Opaque
    chosen = Factor(factor.var, (*factor.dims, entry), _CHOICE_DTYPE, choice=choice)
    return dataclasses.replace(term, factors=(chosen,), groups=())


def one_hot_form(n: Normalizer, eqn: Any) -> Form:
    """Returns the form of `entries == iota`."""
    first, second = (_entries(n, v) for v in eqn.invars)
    if len(first.dims) != len(second.dims):
        raise Opaque
    for rows, iota in ((first, second), (second, first)):
        size = _iota_size(n.graph, iota)
        if size is None or len(rows.terms) != 1 or len(rows.terms[0].factors) != 1:
            continue
        (dim,) = (d for d in iota.dims if d)
        factor = rows.terms[0].factors[0]
        if set(factor.indices) & set(dim):
            continue
        choice = Choice(value_key(n.graph, factor.var), False, "zero")
        bare = Form(tuple(d for d in rows.dims if d != dim), rows.terms)
        term = _choice_term(bare, dim, choice)
        dims = tuple(a or b for a, b in zip(rows.dims, iota.dims, strict=True))
        return Form(dims, (term,))
    raise Opaque


def _iota_size(graph: Graph, form: Form) -> int | None:
    """Returns the size of an iota along its only dimension; None: it is not an iota."""
    if len(form.terms) != 1 or len(form.terms[0].factors) != 1:
        return None
    eqn = graph.equation(form.terms[0].factors[0].var)
    if eqn is None or eqn.primitive.name != "iota":
        return None
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    is_flat = math.prod(shape) == shape[axis] and sum(map(bool, form.dims)) == 1
    dtype = eqn.params["dtype"]
    if not jnp.issubdtype(dtype, jnp.integer) or not is_flat:
        return None
    return shape[axis] if shape[axis] - 1 <= jnp.iinfo(dtype).max else None


def ragged_dot_form(n: Normalizer, eqn: Any) -> Form:
    """Returns the form of a product of consecutive rows with an entry of a table."""
    numbers, sizes = eqn.params["ragged_dot_dimension_numbers"], eqn.invars[2]
    (contract_l, contract_r), (batch_l, _) = numbers.dot_dimension_numbers
    ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    if batch_l or len(contract_l) != 1 or len(ragged) != 1 or len(group) != 1:
        raise Opaque
    if ragged[0] in contract_l:
        raise Opaque
    left, right = (n.form(v) for v in eqn.invars[:2])
    right = fresh(n.indices, right)
    left, right = unify_axes(n.indices, left, right, contract_l, contract_r)
    dims = (left.dims[ragged[0]], right.dims[group[0]])
    how = Choice(value_key(n.graph, sizes), True, "zero")
    choice = Factor(sizes, dims, _CHOICE_DTYPE, choice=how)
    free_r = [d for i, d in enumerate(right.dims) if i not in (*contract_r, *group)]
    free_l = [d for i, d in enumerate(left.dims) if i not in contract_l]
    dims = (*free_l, *free_r)
    product = multiply(left, right, dims)
    product = multiply(product, Form(dims, (Term(1.0, (choice,)),)), dims)
    summed = left.dims[contract_l[0]]
    return sum_over(n.indices, product, summed, eqn.outvars[0].aval.dtype)
