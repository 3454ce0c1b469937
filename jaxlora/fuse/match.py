"""Finds the linears with low-rank branches in a jaxpr."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from jaxlora.fuse.backend import Chosen, choose_backend
from jaxlora.fuse.branches import find_linear
from jaxlora.fuse.forms import Dims, Form, Indices, Term
from jaxlora.fuse.linear import Linear, rank_of
from jaxlora.fuse.normal import Normalizer
from jaxlora.fuse.refusals import (
    precision_of,
    rounding_reason,
    sharding_reason,
    weight_reason,
)
from jaxlora.fuse.rows import is_sorted, sorted_blocks
from jaxlora.fuse.rules import RULES
from jaxlora.fuse.sharing import (
    has_input,
    inputs_in,
    is_masked,
    is_product,
    mask_var,
    row_axes,
    sums_axes,
)
from jaxlora.fuse.site import Names, Operand, Refusal, Site, SiteProjection
from jaxlora.fuse.trace import live_equations, source_of
from jaxlora.pallas_kernels.dropout import TILE_TOKENS

_SUMS = ("add", "add_any", "sub", "dot_general", "reduce_sum")
_USED = "is also used elsewhere, so it has to be computed anyway"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """A linear with branches, before it is known who else uses its parts.

    Attributes:
        root: The variable that holds the sum.
        form: The form of the sum.
        linear: The linear.
        number: Number of the equation that computes the root.
        equations: Numbers of the equations that compute the root from x, w, a and b.
    """

    root: core.Var
    form: Form
    linear: Linear
    number: int
    equations: frozenset[int]


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
    return _Finder(jaxpr, path, implementation).find()


class _Finder:
    """Reads a jaxpr from its first equation to its last, and collects candidates."""

    def __init__(self, jaxpr: core.Jaxpr, path: tuple[str, ...], implementation: str):
        self.jaxpr = jaxpr
        self.path = path
        self.implementation = implementation
        self.live = live_equations(jaxpr)
        self.users = _users(jaxpr, self.live)
        self.normalizer = Normalizer(RULES)
        self.candidates: dict[core.Var, _Candidate] = {}
        self.refusals: dict[int, Refusal] = {}

    def find(self) -> Found:
        for number, eqn in enumerate(self.jaxpr.eqns):
            if self.live[number]:
                self._add(number, eqn)
        sites = [self._site(c) for c in self._unshared()]
        return Found(
            sites=tuple(site for site in sites if site is not None),
            refusals=tuple(self.refusals[number] for number in sorted(self.refusals)),
            added=tuple(self.normalizer.joiner.added),
        )

    def _add(self, number: int, eqn: Any) -> None:
        if self._grow(number, eqn):
            return
        self.normalizer.add_equation(number, eqn)
        if eqn.primitive.name not in _SUMS:
            return
        form = self.normalizer.forms.get(eqn.outvars[0])
        if form is None or len(form.terms) < 2:
            return
        linear, reasons = find_linear(form, self.normalizer.indices)
        if linear is None:
            if reasons:
                self._refuse(number, reasons[0])
            return
        if (reason := weight_reason(linear, self.normalizer.made_by)) is not None:
            self._refuse(number, reason)
            return
        self._accept(number, eqn.outvars[0], form, linear)

    def _accept(self, number: int, root: core.Var, form: Form, linear: Linear) -> None:
        equations = linear.equations | {number}
        linear = dataclasses.replace(linear, parts=self._slices_of(linear.x.var))
        self.candidates[root] = _Candidate(
            root=root, form=form, linear=linear, number=number, equations=equations
        )
        self.normalizer.forget(root)

    def _slices_of(self, atom: Any) -> frozenset[core.Var]:
        """Returns the variables that are slices of one."""
        users = () if isinstance(atom, core.Literal) else self.users.get(atom, ())
        eqns = [self.jaxpr.eqns[user] for user in users if user >= 0]
        cuts = [eqn for eqn in eqns if eqn.primitive.name in ("slice", "split")]
        return frozenset(v for eqn in cuts for v in eqn.outvars)

    def _grow(self, number: int, eqn: Any) -> bool:
        """Adds a bias, a branch or a cast to the candidate that an equation reads."""
        if eqn.primitive.name not in ("add", "add_any", "sub", "convert_element_type"):
            return False
        for root in eqn.invars:
            if isinstance(root, core.Literal) or root not in self.candidates:
                continue
            old = self.candidates[root]
            if self.users[root] != [number]:
                continue
            opaque = self.normalizer.forms[root]
            self.normalizer.forms[root] = old.form
            self.normalizer.add_equation(number, eqn)
            self.normalizer.forms[root] = opaque
            form = self.normalizer.forms.get(eqn.outvars[0])
            linear, reasons = None, []
            if form is not None:
                linear, reasons = find_linear(form, self.normalizer.indices)
            gains = old.linear.restored or not (linear and linear.restored)
            if linear and form and gains and len(linear.rest) <= len(old.linear.rest):
                del self.candidates[root]
                self._accept(number, eqn.outvars[0], form, linear)
                return True
            self.normalizer.forms.pop(eqn.outvars[0], None)
            if linear is None and reasons:
                del self.candidates[root]
                self._refuse(number, reasons[0])
                return True
        return False

    def _refuse(self, number: int, reason: str) -> None:
        self.refusals[number] = Refusal(
            path=self.path, location=source_of(self.jaxpr.eqns[number]), reason=reason
        )

    def _unshared(self) -> list[_Candidate]:
        """Returns the candidates whose parts nothing else needs."""
        kept = list(self.candidates.values())
        while True:
            replaced = frozenset().union(*(c.equations for c in kept))
            reasons = {c: self._shared(c, replaced) for c in kept}
            for candidate, reason in reasons.items():
                if reason is not None:
                    self._refuse(candidate.number, reason)
            if all(reason is None for reason in reasons.values()):
                return kept
            kept = [c for c, reason in reasons.items() if reason is None]

    def _shared(self, candidate: _Candidate, replaced: frozenset[int]) -> str | None:
        """Returns which part of a candidate something else needs too, or None."""
        linear = candidate.linear
        mask = mask_var(linear)
        if mask is not None:
            others = [u for u in self.users.get(mask, []) if u not in replaced]
            if not self._drop_gradients(others, linear):
                return f"its dropout mask {_USED}"
        for value in self._values_in(candidate):
            others = [u for u in self.users[value] if u not in candidate.equations]
            if others and (reason := self._read_by(others, value, linear, replaced)):
                return reason
        return None

    def _values_in(self, candidate: _Candidate) -> list[core.Var]:
        """Returns the values that are computed on the way to a candidate's root."""
        numbers = candidate.equations - {candidate.number}
        return [v for number in numbers for v in self.jaxpr.eqns[number].outvars]

    def _read_by(
        self,
        users: Sequence[int],
        value: core.Var,
        linear: Linear,
        replaced: frozenset[int],
    ) -> str | None:
        """Returns why other users of a value inside a linear prevent its fusion."""
        form = self.normalizer.form(value)
        if is_product(form, linear):
            is_gradient = self._only_sum_rows(value, form, linear, users)
            return None if is_gradient else f"its branch or its frozen product {_USED}"
        left = [user for user in users if user not in replaced]
        if not left or not is_masked(form, linear):
            return None
        if has_input(form, linear):
            is_gradient = self._only_sum_rows(value, form, linear, left)
            return None if is_gradient else f"its masked x {_USED}"
        is_gradient = self._drop_gradients(left, linear)
        return None if is_gradient else f"its dropout mask {_USED}"

    def _only_sum_rows(
        self, value: core.Var, form: Form, linear: Linear, users: Sequence[int]
    ) -> bool:
        """Tells whether users only sum s or the masked x over its rows, as dA does."""
        if is_product(form, linear):
            sizes, (x, *_) = self.normalizer.indices, inputs_in(form, linear)
            held = {i for dim in x for i in dim}
            width = sizes.size_of(i for i in form.indices if i not in held)
            if width * 2 > sizes.size_of(linear.out_indices):
                return False
        axes = row_axes(form, linear)
        eqns = [self.jaxpr.eqns[user] for user in users if user >= 0]
        return len(eqns) == len(users) and all(sums_axes(e, value, axes) for e in eqns)

    def _drop_gradients(self, users: Sequence[int], linear: Linear) -> bool:
        """Tells whether users of a mask only drop elements of the branch's gradient.

        That is a product with the A of a branch that has the mask, as in a function
        that already is a gradient.
        """
        factors = {
            operand.var
            for candidate in self.candidates.values()
            if mask_var(candidate.linear) is mask_var(linear)
            for branch in candidate.linear.branches
            for operand in branch.a
        }
        for user in users:
            if user < 0:
                return False
            form = self.normalizer.forms.get(self.jaxpr.eqns[user].outvars[0])
            if form is None or not all(
                t.rounded is not None and any(f.var in factors for f in t.factors)
                for t in form.terms
            ):
                return False
        return True

    def _keeps_s(self, candidate: _Candidate) -> bool:
        """Tells whether s is computed beside the kernels, as a gradient reads it."""
        return any(
            not set(self.users[value]) <= candidate.equations
            and is_product(self.normalizer.form(value), candidate.linear)
            for value in self._values_in(candidate)
        )

    def _names_in(self, candidate: _Candidate) -> Names:
        """Returns the names that the function gives results inside a linear."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for number in sorted(candidate.equations - {candidate.number}):
            eqn = self.jaxpr.eqns[number]
            if eqn.primitive.name == "name":
                (held,) = (set(self.normalizer.form(v).indices) for v in eqn.outvars)
                is_whole = held >= set(candidate.linear.out_indices)
                names[is_whole].append(eqn.params["name"])
        return Names(of_s=tuple(names[False]), of_y=tuple(names[True]))

    def _site(self, candidate: _Candidate) -> Site | None:
        linear, sizes = candidate.linear, self.normalizer.indices
        rows = [i for i in linear.rows if i not in linear.adapter_indices]
        projection = _projection(candidate, sizes.sizes)
        precision = precision_of(linear)
        chosen = choose_backend(
            self.implementation,
            dtype=linear.x.dtype,
            features=(sizes.size_of(linear.in_indices), projection.out_features),
            rank=projection.rank,
            blocks=_blocks(linear, sizes),
            precision=precision or lax.Precision.DEFAULT,
            mesh=self.jaxpr.eqns[candidate.number].ctx.cur_abstract_mesh,
        )
        reason = chosen if isinstance(chosen, str) else None
        if len(projection.rest) < len(linear.rest):
            reason = "its sum has a further product, which no variable holds by itself"
        if precision is None:
            reason = "its products are asked for different precisions"
        reason = sharding_reason(linear) or rounding_reason(linear) or reason
        if reason is not None:
            self._refuse(candidate.number, reason)
            return None
        assert isinstance(chosen, Chosen) and precision is not None
        return Site(
            path=self.path,
            location=source_of(self.jaxpr.eqns[candidate.number]),
            jaxpr=self.jaxpr,
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
            keeps_s=self._keeps_s(candidate),
        )


def _projection(candidate: _Candidate, sizes: dict[int, int]) -> SiteProjection:
    linear = candidate.linear
    branches = linear.branches
    dims = candidate.form.dims
    rest = tuple(s for t in linear.rest if (s := _summand(t, dims)) is not None)
    return SiteProjection(
        root=candidate.root,
        root_dims=candidate.form.dims,
        w=linear.w.operand,
        w_scales=tuple(f.operand for f in linear.w_scales),
        branches=branches,
        mask=linear.mask,
        bias=None if linear.bias is None else linear.bias.factors[0].operand,
        rest=rest,
        out_indices=linear.out_indices,
        rank=rank_of(branches, sizes),
        out_features=int(np.prod([sizes[i] for i in linear.out_indices])),
    )


def _blocks(linear: Linear, indices: Indices) -> tuple[int, ...]:
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


def _users(jaxpr: core.Jaxpr, live: Sequence[bool]) -> dict[core.Var, list[int]]:
    """Returns the numbers of the equations that read each variable; -1: a result."""
    users: dict[core.Var, list[int]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        for out in eqn.outvars:
            users.setdefault(out, [])
        for atom in dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)):
            if live[number]:
                users.setdefault(atom, []).append(number)
    for atom in jaxpr.outvars:
        if isinstance(atom, core.Var):
            users.setdefault(atom, []).append(-1)
    return users
