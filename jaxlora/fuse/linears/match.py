"""Finds the linears with low-rank branches in a jaxpr."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from jaxlora.fuse.backend import Chosen, choose_backend
from jaxlora.fuse.graph import Graph, variables
from jaxlora.fuse.linears.adapter_shapes import adapter_products, sums_of
from jaxlora.fuse.linears.bases import repeated
from jaxlora.fuse.linears.branches import find_linear, is_vector
from jaxlora.fuse.linears.linear import Linear, rank_of
from jaxlora.fuse.linears.near_misses import LenientNormalizer, obstacle_of
from jaxlora.fuse.linears.open_sums import ADDS, OpenSums
from jaxlora.fuse.linears.refusals import (
    is_restored,
    precision_of,
    rounding_reason,
    sharding_reason,
    weight_reason,
)
from jaxlora.fuse.linears.sharing import USED, Candidate, Readers
from jaxlora.fuse.normal_forms.forms import Dims, Form, Indices, Term, holds
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.normal_forms.rules import RULES
from jaxlora.fuse.rows import is_sorted, sorted_blocks
from jaxlora.fuse.site import Names, Operand, Refusal, Site, SiteProjection
from jaxlora.fuse.trace import source_of
from jaxlora.pallas_kernels.dropout import TILE_TOKENS

_NO_SUM = (
    "its result is not added to a frozen product of the same x, which is used for this "
    "sum only"
)
_BEHIND = "it is added behind the sum of a linear that is scaled"
_SUMS = ("add", "add_any", "sub", "dot_general", "reduce_sum")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The sites and the near misses of one jaxpr, without those of inner jaxprs.

    Attributes:
        sites: The sites.
        refusals: The near misses.
        added: Equations of variables that sites may read beside those of the jaxpr.
    """

    sites: tuple[Site, ...]
    refusals: tuple[Refusal, ...]
    added: tuple[Any, ...] = ()


def find_sites(jaxpr: core.Jaxpr, path: tuple[str, ...], implementation: str) -> Found:
    """Finds the sites of a jaxpr.

    Args:
        jaxpr: A jaxpr without calls; see `open_calls`.
        path: Names of the primitives around it.
        implementation: Name of a back end, or `auto`.
    """
    finder = _Finder(jaxpr, path, implementation)
    sites = finder.find()
    return Found(
        sites=tuple(sites),
        refusals=tuple(finder.refusals[n] for n in sorted(finder.refusals)),
        added=tuple(finder.normalizer.added),
    )


class _Finder:
    """Reads a jaxpr from its first equation to its last, and collects candidates.

    Attributes:
        refusals: The near misses, by the number of the equation.
        normalizer: Knows the form of each value.
    """

    def __init__(self, jaxpr: core.Jaxpr, path: tuple[str, ...], implementation: str):
        self.jaxpr = jaxpr
        self.path = path
        self.implementation = implementation
        self.graph = Graph(jaxpr)
        self.live = self.graph.live
        self.normalizer = Normalizer(self.graph, RULES)
        self.open_sums = OpenSums(self.graph, self.normalizer)
        self.closed: set[core.Var] = set()  # sums that became arrays of their own
        self.candidates: dict[core.Var, Candidate] = {}
        self.readers = Readers(self.graph, self.normalizer, self.candidates)
        self.accepted: set[int] = set()  # numbers of sums that are candidates
        self.refusals: dict[int, Refusal] = {}
        self.refused_by: dict[int, int] = {}  # the near miss that has an equation
        self.hints: dict[int, str] = {}  # why other sums may be no linears

    def find(self) -> list[Site]:
        """Returns the sites."""
        for number, eqn in enumerate(self.jaxpr.eqns):
            if self.live[number]:
                self._add(number, eqn)
        kept = self._unshared()
        self._explain(kept)
        found = {c: self._site(c) for c in kept}
        self._list_unfused([c for c, site in found.items() if site is not None])
        return [site for site in found.values() if site is not None]

    def _explain(self, sites: Sequence[Candidate]) -> None:
        """Finds which functions that are not linear keep sums from being sites."""
        kept = {c.number for c in sites}
        inside = frozenset().union(*(c.equations for c in sites))
        if not any(
            eqn.primitive.name in _SUMS and self.live[number] and number not in inside
            for number, eqn in enumerate(self.jaxpr.eqns)
        ):
            return
        lenient = LenientNormalizer(self.graph)
        for number, eqn in enumerate(self.jaxpr.eqns):
            if not self.live[number]:
                continue
            lenient.add_equation(number, eqn)
            is_grown = number in self.accepted and number not in self.refusals
            if number not in kept and (is_grown or eqn.primitive.name not in _SUMS):
                continue
            (root,) = eqn.outvars
            if number in kept or self._find_obstacle(lenient, number, root):
                lenient.forget(root)

    def _find_obstacle(
        self, lenient: LenientNormalizer, number: int, root: core.Var
    ) -> bool:
        """Returns whether a sum would be a linear without what is not linear in it."""
        form = lenient.form(root)
        if len(form.terms) < 2:
            return False
        linear, reasons = find_linear(lenient, form)
        if linear is None:
            if reasons:
                self.hints[number] = reasons[0]
            return False
        reason = obstacle_of(lenient, self.jaxpr, linear)
        if reason is not None:
            self._refuse(number, reason, linear.equations)
        elif not self._computed_by(linear.equations).isdisjoint(self.closed):
            self.hints[number] = f"a part of its sum {USED}"
        return True

    def _computed_by(self, numbers: Iterable[int]) -> set[core.Var]:
        return {v for number in numbers for v in self.jaxpr.eqns[number].outvars}

    def _list_unfused(self, sites: Sequence[Candidate]) -> None:
        """Adds a near miss for each product with an adapter's shape in no site."""
        inside = frozenset().union(*(c.equations for c in sites))
        scaled = {c.root for c in sites if c.linear.scales or c.linear.coefficient != 1}
        for number, is_single in adapter_products(self.graph):
            if number in inside:
                continue
            sums = [number, *sums_of(self.graph, number)]
            if any(v in scaled for n in sums for v in variables(self.jaxpr.eqns[n])):
                self._refuse(number, _BEHIND)
                continue
            refused = next((n for n in sums if n in self.refused_by), None)
            refused = None if refused is None else self.refused_by[refused]
            if refused is None and is_single:
                hints = (self.hints[n] for n in sums if n in self.hints)
                self._refuse(number, next(hints, _NO_SUM))
                refused = number
            if refused is not None:
                old = self.refusals[refused]
                self.refusals[refused] = dataclasses.replace(old, is_adapter=True)

    def _add(self, number: int, eqn: Any) -> None:
        if self._grow(number, eqn):
            return
        self.normalizer.add_equation(number, eqn)
        if eqn.primitive.name not in _SUMS:
            return
        (root,) = eqn.outvars
        form = self.normalizer.forms.get(root)
        if form is None or len(form.terms) < 2:
            return
        linear, reasons = find_linear(self.normalizer, form)
        if linear is not None:
            reason = weight_reason(linear, self.graph) or repeated(linear)
            if reason is None:
                self._accept(number, root, form, linear, reasons)
                return
            reasons = [reason]
        if reasons and not self._is_refused(form, reasons[0]):
            self._refuse(number, reasons[0], _equations_of(form))
        if not self.open_sums.is_open(root, form):
            self.closed.add(root)
            self.normalizer.forget(root)

    def _accept(
        self,
        number: int,
        root: core.Var,
        form: Form,
        linear: Linear,
        reasons: Sequence[str],
    ) -> None:
        """Adds a candidate.

        Args:
            number: Number of the equation that computes its sum.
            root: The variable that holds the sum.
            form: The form of the sum.
            linear: The linear.
            reasons: Why other terms of the sum are no branches.
        """
        equations = linear.equations | {number}
        self.accepted.add(number)
        linear = dataclasses.replace(linear, parts=self._slices_of(linear.x.var))
        self.candidates[root] = Candidate(
            root=root,
            form=form,
            linear=linear,
            number=number,
            equations=equations,
            rest_reason=next(iter(reasons), None),
        )
        self.normalizer.forget(root)

    def _slices_of(self, atom: Any) -> frozenset[core.Var]:
        """Returns the variables that are slices of one."""
        is_literal = isinstance(atom, core.Literal)
        users = () if is_literal else self.readers.users.get(atom, ())
        eqns = [self.jaxpr.eqns[user] for user in users if user >= 0]
        cuts = [eqn for eqn in eqns if eqn.primitive.name in ("slice", "split")]
        return frozenset(v for eqn in cuts for v in eqn.outvars)

    def _grow(self, number: int, eqn: Any) -> bool:
        """Adds a bias, a branch or a cast to the candidate that an equation reads.

        A scale is added where the kernels would round the sum before it is scaled.
        """
        name = eqn.primitive.name
        if name not in (*ADDS, "convert_element_type", "mul", "div"):
            return False
        for root in eqn.invars:
            if isinstance(root, core.Literal) or root not in self.candidates:
                continue
            old, aval = self.candidates[root], root.aval
            if name in ("mul", "div") and holds(old.linear.x.dtype, aval.dtype):
                continue
            if self.readers.users[root] != [number]:
                continue
            opaque = self.normalizer.forms[root]
            self.normalizer.forms[root] = old.form
            self.normalizer.add_equation(number, eqn)
            self.normalizer.forms[root] = opaque
            form = self.normalizer.forms.get(eqn.outvars[0])
            linear, reasons = None, []
            if form is not None:
                linear, reasons = find_linear(self.normalizer, form)
            result: Any = eqn.outvars[0].aval
            if linear and form and _is_gain(old, linear, result.dtype):
                del self.candidates[root]
                self._accept(number, eqn.outvars[0], form, linear, reasons)
                return True
            self.normalizer.forms.pop(eqn.outvars[0], None)
            if linear and (reason := repeated(linear)) is not None:
                self.candidates[root] = dataclasses.replace(old, used_reason=reason)
            if linear is None and reasons:
                del self.candidates[root]
                self._refuse(number, reasons[0], old.equations)
                return True
        return False

    def _is_refused(self, form: Form, reason: str) -> bool:
        """Returns whether a sum inside a sum was refused for the same reason."""
        inside = (self.refusals.get(n) for t in form.terms for n in t.equations)
        return any(refusal.reason == reason for refusal in inside if refusal)

    def _refuse(
        self, number: int, reason: str, equations: frozenset[int] = frozenset()
    ) -> None:
        """Adds a near miss.

        Args:
            number: Number of the equation that computes the sum.
            reason: Why it is no site.
            equations: Numbers of the equations that compute its products.
        """
        self.refused_by |= dict.fromkeys(equations | {number}, number)
        self.refusals[number] = Refusal(
            path=self.path, location=source_of(self.jaxpr.eqns[number]), reason=reason
        )

    def _unshared(self) -> list[Candidate]:
        """Returns the candidates whose parts nothing else needs."""
        kept = list(self.candidates.values())
        while True:
            replaced = frozenset().union(*(c.equations for c in kept))
            reasons = {c: self.readers.reason(c, replaced) for c in kept}
            for candidate, reason in reasons.items():
                if reason is not None:
                    self._refuse(candidate.number, reason, candidate.equations)
            if all(reason is None for reason in reasons.values()):
                return kept
            kept = [c for c, reason in reasons.items() if reason is None]

    def _names_in(self, candidate: Candidate) -> Names:
        """Returns the names that the function gives results inside a linear."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for number in sorted(candidate.equations - {candidate.number}):
            eqn = self.jaxpr.eqns[number]
            if eqn.primitive.name == "name":
                (held,) = (set(self.normalizer.form(v).indices) for v in eqn.outvars)
                is_whole = held >= set(candidate.linear.out_indices)
                names[is_whole].append(eqn.params["name"])
        return Names(of_s=tuple(names[False]), of_y=tuple(names[True]))

    def _site(self, candidate: Candidate) -> Site | None:
        linear, sizes = candidate.linear, self.normalizer.indices
        rows = [i for i in linear.rows if i not in linear.adapter_indices]
        projection = projection_of(linear, candidate.root, candidate.form, sizes.sizes)
        precision = precision_of(linear)
        chosen = choose_backend(
            self.implementation,
            dtype=linear.x.dtype,
            features=(sizes.size_of(linear.in_indices), projection.out_features),
            rank=projection.rank,
            blocks=block_sizes(linear, sizes),
            precision=precision or lax.Precision.DEFAULT,
            mesh=self.jaxpr.eqns[candidate.number].ctx.cur_abstract_mesh,
        )
        reason = chosen if isinstance(chosen, str) else None
        if len(projection.rest) < len(linear.rest):
            reason = "its sum has a further product, which no variable holds by itself"
        if precision is None:
            reason = "its products are asked for different precisions"
        aval: Any = candidate.root.aval
        rounding = rounding_reason(linear, aval.dtype)
        reason = sharding_reason(linear) or rounding or reason
        if reason is not None:
            self._refuse(candidate.number, reason, candidate.equations)
            return None
        assert isinstance(chosen, Chosen) and precision is not None
        return Site(
            path=self.path,
            location=source_of(self.jaxpr.eqns[candidate.number]),
            graph=self.graph,
            equations=candidate.equations,
            x=linear.x.operand,
            projections=(projection,),
            sizes=sizes.sizes,
            adapter_indices=linear.adapter_indices,
            selection=linear.selection,
            row_indices=tuple(rows),
            in_indices=linear.in_indices,
            dtype=linear.x.dtype,
            precision=precision,
            names=self._names_in(candidate),
            implementation=chosen.name,
            block_tokens=chosen.block_tokens,
            keeps_s=self.readers.keep_s(candidate),
        )


def _equations_of(form: Form) -> frozenset[int]:
    return frozenset().union(*(term.equations for term in form.terms))


def _is_gain(old: Candidate, new: Linear, result: np.dtype) -> bool:
    """Whether a larger sum is a linear of which the kernels compute as much.

    A vector over output features is added behind a sum that is scaled.

    Args:
        old: The smaller sum.
        new: The larger one.
        result: Its dtype.
    """
    aval: Any = old.root.aval
    if is_restored(new, result) and not is_restored(old.linear, aval.dtype):
        return False
    is_scaled = bool(new.scales) or new.coefficient != 1
    vectors = [t for t in new.rest if is_scaled and is_vector(t, new)]
    return len(new.rest) - len(vectors) <= len(old.linear.rest)


def projection_of(
    linear: Linear, root: core.Var, form: Form, sizes: dict[int, int]
) -> SiteProjection:
    """Returns the projection of a linear.

    Summands that no variable holds are left out.

    Args:
        linear: The linear.
        root: The variable that holds its sum.
        form: The form of the sum.
        sizes: The size of each index.
    """
    rest = (_summand(term, form.dims) for term in linear.rest)
    return SiteProjection(
        root=root,
        root_dims=form.dims,
        w=linear.w.operand,
        w_scales=tuple(f.operand for f in linear.w_scales),
        branches=linear.branches,
        mask=linear.mask,
        bias=None if linear.bias is None else linear.bias.factors[0].operand,
        scales=(*_number(linear.coefficient), *(f.operand for f in linear.scales)),
        rest=tuple(summand for summand in rest if summand is not None),
        out_indices=linear.out_indices,
        rank=rank_of(linear.branches, sizes),
        out_features=int(np.prod([sizes[i] for i in linear.out_indices])),
    )


def _number(value: float) -> tuple[Operand, ...]:
    """Returns a number as an array that scales a sum; none for 1."""
    if value == 1:
        return ()
    literal = core.Literal(np.float32(value), jax.typeof(np.float32(value)))
    return (Operand(var=literal, dims=(), dtype=np.dtype(np.float32)),)


def block_sizes(linear: Linear, indices: Indices) -> tuple[int, ...]:
    """Returns the sizes of token blocks that suit a linear, the best first."""
    rows = indices.size_of(i for i in linear.rows if i not in linear.adapter_indices)
    if linear.selection is not None and is_sorted(rows):
        table = indices.size_of(linear.selection.table_indices)
        return sorted_blocks(indices.size_of(linear.rows), table)
    return rows, -(-rows // TILE_TOKENS) * TILE_TOKENS


def _summand(term: Term, dims: Dims) -> tuple[float, Operand] | None:
    """Returns a number and a variable whose product a term is, or None.

    Args:
        term: The term.
        dims: What the dimensions of the sum stand for.
    """
    (first, *others), outer = term.factors, {i for dim in dims for i in dim}
    if not others and first.is_number and set(first.indices) <= outer:
        return term.coefficient, term.factors[0].operand
    for group in term.groups:
        if len(group.members) == len(term.factors):
            aval: Any = group.var.aval
            operand = Operand(var=group.var, dims=group.dims, dtype=aval.dtype)
            return term.coefficient / group.number, operand
    return None
