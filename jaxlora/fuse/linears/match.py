"""Finds the linears with low-rank branches in a jaxpr."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jaxlora.fuse.backend import choose_backend
from jaxlora.fuse.graph import RESULT, Graph, variables
from jaxlora.fuse.linears.bases import repeated
from jaxlora.fuse.linears.branches import find_linear, is_vector
from jaxlora.fuse.linears.open_sums import ADDS, is_open
from jaxlora.fuse.linears.reasons import (
    LenientNormalizer,
    adapter_products,
    is_restored,
    obstacle_of,
    rounding_reason,
    sharding_reason,
    sums_of,
    weight_reason,
)
from jaxlora.fuse.linears.sharing import USED, Readers
from jaxlora.fuse.normal_forms.forms import Factor, Form, Term, holds
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.normal_forms.rules import RULES
from jaxlora.fuse.rows import block_sizes
from jaxlora.fuse.site import Linear, Refusal, Site
from jaxlora.fuse.trace import source_of
from jaxlora.pallas_kernels import LinearShape

_NO_SUM = (
    "its result is not added to a frozen product of the same x, which is used for this "
    "sum only"
)
_BEHIND = "it is added behind the sum of a linear that is scaled"
_SUMS = ("add", "add_any", "sub", "dot_general", "reduce_sum")


def find_sites(
    graph: Graph, path: tuple[str, ...], implementation: str
) -> tuple[list[Site], list[Refusal]]:
    """Finds the sites and the near misses of a jaxpr, but for those of inner jaxprs.

    Args:
        graph: A jaxpr without calls; see `open_calls`.
        path: Names of the primitives around it.
        implementation: Name of a back end, or `auto`.
    """
    finder = _Finder(graph, path, implementation)
    sites = finder.find()
    return sites, [finder.refusals[number] for number in sorted(finder.refusals)]


class _Finder:
    """Reads a jaxpr from its first equation to its last, and collects linears.

    Attributes:
        refusals: The near misses, by the number of the equation.
    """

    def __init__(self, graph: Graph, path: tuple[str, ...], implementation: str):
        self.graph = graph
        self.eqns = graph.jaxpr.eqns
        self.path = path
        self.implementation = implementation
        self.normalizer = Normalizer(graph, RULES)
        self.closed: set[core.Var] = set()  # sums that became arrays of their own
        self.linears: dict[core.Var, Linear] = {}
        self.sums: dict[core.Var, Form] = {}  # of all linears, also of those refused
        self.readers = Readers(self.normalizer, self.linears)
        self.refusals: dict[int, Refusal] = {}
        self.refused_by: dict[int, int] = {}  # the near miss that has an equation
        self.hints: dict[int, str] = {}  # why other sums may be no linears

    def find(self) -> list[Site]:
        """Returns the sites."""
        for number, eqn in self._live():
            self._add(number, eqn)
        kept = self._unshared()
        self._explain(kept)
        sites = [site for site in map(self._site, kept) if site is not None]
        self._list_unfused(sites)
        return sites

    def _live(self) -> Iterable[tuple[int, Any]]:
        """Returns the equations on which a result depends, with their numbers."""
        return ((n, eqn) for n, eqn in enumerate(self.eqns) if self.graph.live[n])

    def _explain(self, linears: Sequence[Linear]) -> None:
        """Finds which functions that are not linear keep sums from being sites."""
        kept = {linear.root for linear in linears}
        inside = frozenset().union(*(linear.equations for linear in linears))
        sums = [
            v
            for number, eqn in self._live()
            if eqn.primitive.name in _SUMS and number not in inside
            for v in eqn.outvars
        ]
        lenient = LenientNormalizer(self.graph)
        needed = set(self.graph.ancestors(sums, stops=kept.__contains__))
        for number, eqn in self._live():
            if needed.isdisjoint(eqn.outvars):
                continue
            root = eqn.outvars[0]
            if root in kept:
                continue  # it is an array of its own
            lenient.add_equation(number, eqn)
            is_grown = root in self.sums and number not in self.refusals
            is_sum = eqn.primitive.name in _SUMS and not is_grown
            if is_sum and self._find_obstacle(lenient, number, root):
                lenient.forget(root)

    def _find_obstacle(
        self, lenient: LenientNormalizer, number: int, root: core.Var
    ) -> bool:
        """Returns whether a sum would be a linear without what is not linear in it."""
        if len(lenient.form(root).terms) < 2:
            return False
        linear, reasons = find_linear(lenient, root)
        if linear is None:
            if reasons:
                self.hints[number] = reasons[0]
            return False
        reason = obstacle_of(lenient, linear)
        if reason is not None:
            self._refuse(number, reason, linear.equations)
        elif any(
            v in self.closed for n in linear.equations for v in self.eqns[n].outvars
        ):
            self.hints[number] = f"a part of its sum {USED}"
        return True

    def _list_unfused(self, sites: Sequence[Site]) -> None:
        """Adds a near miss for each product with an adapter's shape in no site."""
        inside = frozenset().union(*(site.equations for site in sites))
        scaled = {site.first.root for site in sites if site.first.scales}
        for number, is_single in adapter_products(self.graph):
            if number in inside:
                continue
            sums = [number, *sums_of(self.graph, number)]
            if any(v in scaled for n in sums for v in variables(self.eqns[n].invars)):
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
        linear, reasons = find_linear(self.normalizer, root)
        if linear is not None:
            reason = weight_reason(linear, self.graph) or repeated(linear)
            if reason is None:
                self._accept(linear, reasons)
                return
            reasons = [reason]
        equations = frozenset().union(*(term.equations for term in form.terms))
        refused = (self.refusals[n].reason for n in equations if n in self.refusals)
        if reasons and reasons[0] not in refused:  # for a sum inside the sum
            self._refuse(number, reasons[0], equations)
        if not is_open(self.normalizer, root, form):
            self.closed.add(root)
            self.normalizer.forget(root)

    def _accept(self, linear: Linear, reasons: Sequence[str]) -> None:
        """Adds a linear, and why other terms of its sum are no branches."""
        self.sums[linear.root] = self.normalizer.forms[linear.root]
        self.linears[linear.root] = dataclasses.replace(
            linear,
            parts=self._slices_of(linear.x.var),
            rest_reason=next(iter(reasons), None),
        )
        self.normalizer.forget(linear.root)

    def _slices_of(self, atom: Any) -> frozenset[core.Var]:
        """Returns the variables that are slices of one."""
        is_literal = isinstance(atom, core.Literal)
        users = () if is_literal else self.graph.users.get(atom, ())
        eqns = [self.eqns[user] for user in users if user != RESULT]
        cuts = [eqn for eqn in eqns if eqn.primitive.name in ("slice", "split")]
        return frozenset(v for eqn in cuts for v in eqn.outvars)

    def _grow(self, number: int, eqn: Any) -> bool:
        """Adds a bias, a branch or a cast to the linear that an equation reads.

        A scale is added where the kernels would round the sum before it is scaled.
        """
        name = eqn.primitive.name
        if name not in (*ADDS, "convert_element_type", "mul", "div"):
            return False
        (result,), forms = eqn.outvars, self.normalizer.forms
        for root in eqn.invars:
            if isinstance(root, core.Literal) or root not in self.linears:
                continue
            old, aval = self.linears[root], root.aval
            if name in ("mul", "div") and holds(old.x.dtype, aval.dtype):
                continue
            if self.graph.users[root] != [number]:
                continue
            opaque, forms[root] = forms[root], self.sums[root]
            self.normalizer.add_equation(number, eqn)
            forms[root] = opaque
            linear, reasons = None, []
            if result in forms:
                linear, reasons = find_linear(self.normalizer, result)
            if linear and _is_gain(old, linear):
                del self.linears[root]
                self._accept(linear, reasons)
                return True
            forms.pop(result, None)
            if linear and (reason := repeated(linear)) is not None:
                self.linears[root] = dataclasses.replace(old, used_reason=reason)
            if linear is None and reasons:
                del self.linears[root]
                self._refuse(number, reasons[0], old.equations)
                return True
        return False

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
            path=self.path, location=source_of(self.eqns[number]), reason=reason
        )

    def _unshared(self) -> list[Linear]:
        """Returns the linears whose parts nothing else needs."""
        kept = list(self.linears.values())
        while True:
            replaced = frozenset().union(*(linear.equations for linear in kept))
            reasons = {one: self.readers.reason(one, replaced) for one in kept}
            for linear, reason in reasons.items():
                if reason is not None:
                    number = self.graph.maker[linear.root]
                    self._refuse(number, reason, linear.equations)
            if all(reason is None for reason in reasons.values()):
                return kept
            kept = [linear for linear, reason in reasons.items() if reason is None]

    def _site(self, linear: Linear) -> Site | None:
        number = self.graph.maker[linear.root]
        eqn = self.eqns[number]
        shapes = [
            LinearShape(
                dtype=linear.x.dtype,
                in_features=linear.in_features,
                out_features=linear.out_features,
                rank=linear.rank,
                block_tokens=block,
            )
            for block in block_sizes(linear)
        ]
        precision = linear.precision or lax.Precision.DEFAULT
        mesh = eqn.ctx.cur_abstract_mesh
        chosen = choose_backend(self.implementation, shapes, precision, mesh)
        reason = chosen if isinstance(chosen, str) else None
        summands = [_summand(term, linear) for term in linear.rest]
        added = tuple(summand for summand in summands if summand is not None)
        if len(added) < len(summands):
            reason = "its sum has a further product, which no variable holds by itself"
        if linear.precision is None:
            reason = "its products are asked for different precisions"
        reason = sharding_reason(linear) or rounding_reason(linear) or reason
        if reason is not None:
            self._refuse(number, reason, linear.equations)
            return None
        assert not isinstance(chosen, str) and linear.precision is not None
        implementation, block_tokens = chosen
        names = self._names_in(linear)
        return Site(
            linears=(dataclasses.replace(linear, added=added),),
            path=self.path,
            location=source_of(eqn),
            graph=self.graph,
            precision=linear.precision,
            s_names=tuple(names[False]),
            y_names=tuple(names[True]),
            implementation=implementation,
            block_tokens=block_tokens,
            keeps_s=self.readers.keep_s(linear),
        )

    def _names_in(self, linear: Linear) -> dict[bool, list[str]]:
        """Returns the names of results inside a linear, by whether they hold N."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for eqn in (self.eqns[number] for number in sorted(linear.equations)):
            if eqn.primitive.name == "name" and linear.root not in eqn.outvars:
                (held,) = (set(self.normalizer.form(v).indices) for v in eqn.outvars)
                is_whole = held >= set(linear.out_indices)
                names[is_whole].append(eqn.params["name"])
        return names


def _is_gain(old: Linear, new: Linear) -> bool:
    """Whether a larger sum is a linear of which the kernels compute as much.

    A vector over output features is added behind a sum that is scaled.
    """
    if is_restored(new) and not is_restored(old):
        return False
    vectors = [t for t in new.rest if new.scales and is_vector(t, new)]
    return len(new.rest) - len(vectors) <= len(old.rest)


def _summand(term: Term, linear: Linear) -> tuple[float, Factor] | None:
    """Returns a number and an array whose product a term of a sum is, or None."""
    (first, *others), outer = term.factors, {i for dim in linear.dims for i in dim}
    if not others and first.is_number and set(first.indices) <= outer:
        return term.coefficient, first
    for group in term.groups:
        if len(group.members) == len(term.factors):
            return term.coefficient / group.number, group.array
    return None
