"""Computes the normal form of each value of a jaxpr; rules.py has the rules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.normal_forms.forms import (
    MAX_TERMS,
    Atom,
    Factor,
    Form,
    Group,
    Indices,
    Opaque,
    Term,
    is_float,
    is_moderate,
)
from jaxlora.fuse.trace import inlined

MAX_SAME = 6  # variables that hold the same product, but for a number; the latest
MAX_FACTORS = 12  # a value with a longer product is an opaque array


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that derives the form of an equation's result from those of its inputs.

    Attributes:
        form: Returns the form of the result, or raises `Opaque`.
        reads: The parameters of the equation that `form` takes into account, or that
            do not change the result. The result is an opaque array if another
            parameter is set to anything but None, False or nothing.
    """

    form: Callable[["Normalizer", Any], Form]
    reads: frozenset[str] = frozenset()

    def covers(self, eqn: Any) -> bool:
        """Returns whether the rule knows all that an equation's parameters ask for."""
        others = (v for name, v in eqn.params.items() if name not in self.reads)
        return not any(value and not _is_whole(value) for value in others)


def _is_whole(value: Any) -> bool:
    """Returns whether a parameter is the sharding of an array that is not split."""
    spec = value.spec if isinstance(value, jax.sharding.NamedSharding) else (value,)
    return all(axis is None for axis in spec)


class Normalizer:
    """Computes the normal form of each value of a jaxpr, in the order of equations.

    Attributes:
        indices: The indices of all forms.
        forms: The form of each variable that was computed.
        graph: The jaxpr.
        number: The number of the present equation.
    """

    def __init__(self, graph: Graph, rules: Mapping[str, Rule]) -> None:
        """Starts without forms.

        Args:
            graph: The jaxpr.
            rules: The rule of each primitive, by its name; results of others are opaque
                arrays.
        """
        self.graph = graph
        self._rules = rules
        self.indices = Indices()
        self.forms: dict[core.Var, Form] = {}
        self.number = -1
        self._reciprocals: dict[Any, core.Var] = {}

    def leaf(self, atom: Atom) -> Form:
        """Returns the form of an array of which nothing is known."""
        aval: Any = atom.aval
        if isinstance(atom, core.Literal) and not aval.shape and _is_real(aval):
            return Form((), (Term(float(atom.val), ()),))
        dims = self.indices.new_dims(aval.shape)
        keeps = True if aval.dtype == bool else None
        return Form(dims, (Term(1.0, (Factor(atom, dims, aval.dtype, keeps),)),))

    def form(self, atom: Atom) -> Form:
        """Returns the form of a variable or literal."""
        if isinstance(atom, core.Literal):
            return self.leaf(atom)
        if atom not in self.forms:
            self.forms[atom] = self.leaf(atom)
        return self.forms[atom]

    def add_equation(self, number: int, eqn: Any) -> None:
        """Computes the form of an equation's result."""
        self.number = number
        if len(eqn.outvars) != 1:
            return
        (out,) = eqn.outvars
        if any(0 in getattr(v.aval, "shape", ()) for v in (*eqn.invars, out)):
            return  # empty arrays have no indices
        form = self.form_of(eqn)
        if form is None:
            return
        terms = [t for t in form.terms if t.coefficient != 0 or t.factors]
        terms = terms or list(form.terms[:1])
        if len(terms) > MAX_TERMS or any(len(t.factors) > MAX_FACTORS for t in terms):
            return
        if not all(_has_moderate_constants(t, out) for t in terms):
            return
        self.forms[out] = Form(
            form.dims,
            tuple(_finish(t, number, out, form, terms, _rounds(eqn)) for t in terms),
        )

    def add(
        self, eqn: Any, function: Callable[..., jax.Array], atoms: Sequence[Atom]
    ) -> core.Var:
        """Adds the equations of a function of variables; returns their result.

        Args:
            eqn: The equation in whose context the function is traced.
            function: The function.
            atoms: Its arguments; none may be a literal.
        """
        if any(isinstance(atom, core.Literal) for atom in atoms):
            raise Opaque
        with eqn.ctx.manager:
            made = jax.make_jaxpr(function)(*(atom.aval for atom in atoms))
        eqns, (result,) = inlined(made, atoms)
        for new in eqns:
            self.graph.added |= dict.fromkeys(new.outvars, new)
        return result

    def reciprocal(self, form: Form, eqn: Any) -> Form:
        """Returns the form of 1 divided by a product of arrays.

        Args:
            form: The form of the product.
            eqn: The division.
        """
        (term, *others), factors = form.terms, []
        if others or term.rounded is not None or not term.coefficient:
            raise Opaque
        for factor in term.factors:
            aval: Any = factor.var.aval
            is_number = factor.is_number and isinstance(factor.var, core.Var)
            if not is_number or not is_float(factor) or aval.dtype != factor.dtype:
                raise Opaque
            if factor.var not in self._reciprocals:
                self._reciprocals[factor.var] = self.add(eqn, _inverted, [factor.var])
            dtype = jnp.promote_types(factor.dtype, jnp.float32)
            factors.append(Factor(self._reciprocals[factor.var], factor.dims, dtype))
        return Form(form.dims, (Term(1 / term.coefficient, tuple(factors)),))

    def form_of(self, eqn: Any) -> Form | None:
        """Computes the form of an equation's only result; None: it has no rule."""
        rule = self._rules.get(eqn.primitive.name)
        if rule is None or not rule.covers(eqn):
            return None
        try:
            return rule.form(self, eqn)
        except Opaque:
            return None

    def obstacle(self, reason: str) -> None:
        """Ends a rule at what the kernels do not compute.

        Args:
            reason: What that is, as a clause without a full stop.

        Raises:
            Opaque: Always, unless obstacles are only noted.
        """
        raise Opaque(reason)

    def forget(self, var: core.Var) -> None:
        """Makes a variable an opaque array from now on."""
        self.forms[var] = self.leaf(var)


def _inverted(value: jax.Array) -> jax.Array:
    return 1 / value.astype(jnp.promote_types(value.dtype, jnp.float32))


def _finish(
    term: Term, number: int, out: core.Var, form: Form, terms: list, rounds: bool
) -> Term:
    """Notes that an equation computed a term, and that it rounded it."""
    equations = term.equations | {number}
    is_bare = len(term.factors) < 2 and term.coefficient == 1
    if len(terms) > 1 or not term.factors or not term.coefficient or is_bare:
        return dataclasses.replace(term, equations=equations)
    everything = frozenset(range(len(term.factors)))
    aval: Any = out.aval
    array = Factor(out, form.dims, aval.dtype)
    group = Group(term.coefficient, array, everything, equations)
    parts = [g for g in term.groups if g.members != everything]
    same = [g for g in term.groups if g.members == everything and not rounds]
    groups = (group, *same[: MAX_SAME - 1], *parts)
    return dataclasses.replace(term, groups=groups, equations=equations)


def _has_moderate_constants(term: Term, out: core.Var) -> bool:
    """Whether the constants of a term may be moved; see `is_moderate`.

    Terms that cancel have a coefficient of 0, and are kept for their arrays' NaN.
    """
    if not term.factors or term.coefficient == 0:
        return True
    aval: Any = out.aval
    return is_moderate(term.coefficient, aval.dtype)


def _rounds(eqn: Any) -> bool:
    """Returns whether an equation casts to a smaller dtype."""
    (source, *_), (out,) = eqn.invars, eqn.outvars
    is_cast = eqn.primitive.name == "convert_element_type"
    return is_cast and out.aval.dtype.itemsize < source.aval.dtype.itemsize


def is_arithmetic(aval: Any) -> bool:
    """Returns whether values are numbers, for which sums and products are defined."""
    return jnp.issubdtype(aval.dtype, jnp.number)


def _is_real(aval: Any) -> bool:
    return is_arithmetic(aval) and not jnp.issubdtype(aval.dtype, np.complexfloating)
