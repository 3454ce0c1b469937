"""Replaces the sites of a jaxpr, and of those inside it, by calls of the kernels."""

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core, linear_util

from jaxlora.fuse.group import group_sites, ungroup
from jaxlora.fuse.kernel_call import inputs_of, kernel_call
from jaxlora.fuse.linears.match import find_sites
from jaxlora.fuse.predict.cost import decide
from jaxlora.fuse.signature import signature
from jaxlora.fuse.site import Refusal, Site
from jaxlora.fuse.trace import Call, Opened, open_calls
from jaxlora.pallas_kernels import LINEAR_RESULTS

# The jaxprs of the primitives whose bodies are rewritten in place.
_BODIES = {
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "cond": ("branches",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rewritten:
    """A jaxpr whose sites were replaced.

    Attributes:
        jaxpr: The new jaxpr; the old one itself if it has no sites.
        sites: Its sites and those of the jaxprs inside it.
        refusals: The near misses.
        declined: Sites that are left as they are, because the kernels would be slower.
    """

    jaxpr: core.Jaxpr
    sites: tuple[Site, ...]
    refusals: tuple[Refusal, ...]
    declined: tuple[Site, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Node:
    """An equation or a site, with the variables that it reads and writes.

    Attributes:
        order: Its place among nodes that do not depend on each other.
        inputs: The variables that it reads.
        outputs: The variables that it writes.
        eqn: The equation; None for a site.
        site: The site; None for an equation.
    """

    order: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    eqn: Any = None
    site: Site | None = None


def rewrite(jaxpr: core.Jaxpr, implementation: str) -> Rewritten:
    """Replaces the sites of a jaxpr and of all jaxprs inside it.

    Args:
        jaxpr: The jaxpr.
        implementation: Name of a back end, or `auto`.
    """
    return _Rewriter(implementation).rewrite(jaxpr, ())


class _Rewriter:
    """Rewrites jaxprs, each once, however often it is called."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.traces: dict[Hashable, core.Jaxpr] = {}
        self.done: dict[tuple[int, tuple[str, ...]], tuple[core.Jaxpr, Rewritten]] = {}

    def rewrite(self, jaxpr: core.Jaxpr, path: tuple[str, ...]) -> Rewritten:
        key = id(jaxpr), path
        if key not in self.done:
            # The jaxpr is kept, so that its id is not used again.
            self.done[key] = jaxpr, self._rewrite(jaxpr, path)
        return self.done[key][1]

    def _rewrite(self, jaxpr: core.Jaxpr, path: tuple[str, ...]) -> Rewritten:
        opened = open_calls(jaxpr)
        found = find_sites(opened.jaxpr, path, self.implementation)
        grouped = group_sites(found.sites)
        fused = tuple(filter(self._is_fused, grouped))
        declined = [site for site in grouped if site not in fused]
        rewritten, nodes = _rewritten(opened, fused, found.added)
        eqns: list[Any] = []
        sites: list[Site] = []
        refusals = [r for r in found.refusals]
        for node in nodes:
            if node.site is not None:
                eqns += _site_equations(node.site, rewritten, self.traces)
                sites.append(node.site)
                continue
            eqn, inner = self._with_bodies(node.eqn, path)
            eqns.append(eqn)
            for body in inner:
                sites += body.sites
                refusals += body.refusals
                declined += body.declined
        new = jaxpr.replace(eqns=eqns, outvars=rewritten.results) if sites else jaxpr
        return Rewritten(
            jaxpr=new,
            sites=tuple(sites),
            refusals=tuple(refusals),
            declined=tuple(declined),
        )

    def _is_fused(self, site: Site) -> bool:
        """Tells whether to fuse a site; a back end that is named runs every site."""
        return self.implementation != "auto" or decide(site).fused

    def _with_bodies(self, eqn: Any, path: tuple[str, ...]) -> tuple[Any, list]:
        """Rewrites the jaxprs of an equation."""
        name = eqn.primitive.name
        if name == "shard_map":
            return self._with_mapped_body(eqn, path)
        params, inner = dict(eqn.params), []
        for key in _BODIES.get(name, ()):
            old = eqn.params[key]
            many = old if isinstance(old, tuple | list) else (old,)
            new = [self.rewrite(body, (*path, name)) for body in many]
            inner += new
            bodies = tuple(body.jaxpr for body in new)
            params[key] = bodies if isinstance(old, tuple | list) else bodies[0]
        if not any(body.sites for body in inner):
            return eqn, inner
        if params.get("policy") is not None:
            sites = [site for body in inner for site in body.sites]
            params["policy"] = _keeping_results(params["policy"], sites)
        if "fwd_jaxpr_thunk" in params:
            thunk = params["fwd_jaxpr_thunk"]
            params["fwd_jaxpr_thunk"] = self._forward(thunk, (*path, name))
        return eqn.replace(params=params), inner

    def _with_mapped_body(
        self, eqn: Any, path: tuple[str, ...]
    ) -> tuple[Any, list[Rewritten]]:
        """Rewrites the body of a shard_map inside of one, where its axes have names."""
        params, inner = eqn.params, []

        def run(*args: jax.Array) -> list[jax.Array]:
            inner[:] = [self._rewrite(params["jaxpr"], (*path, "shard_map"))]
            return core.jaxpr_as_fun(inner[0].jaxpr)(*args)

        mapped = jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=params["in_specs"],
            out_specs=list(params["out_specs"]),
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )
        with eqn.ctx.manager:
            traced = jax.make_jaxpr(mapped)(*(v.aval for v in eqn.invars))
        if not inner[0].sites:
            return eqn, inner
        (new,) = traced.eqns
        return eqn.replace(params=new.params), inner

    def _forward(self, thunk: Any, path: tuple[str, ...]) -> Any:
        """Rewrites what a custom_vjp runs in place of its body under jax.grad."""

        def rewritten(*is_perturbed: bool):
            jaxpr, consts = thunk.call_wrapped(*is_perturbed)
            return self.rewrite(jaxpr, path).jaxpr, consts

        return linear_util.wrap_init(rewritten, debug_info=thunk.debug_info)


def _keeping_results(
    policy: Callable[..., Any], sites: Sequence[Site]
) -> Callable[..., Any]:
    """Makes a policy keep what fused linears name, if it keeps their products.

    A policy such as `dots_saveable` knows JAX's products, and not the kernels.
    """
    products = [
        eqn
        for site in sites
        for eqn in (site.jaxpr.eqns[number] for number in site.equations)
        if eqn.primitive.name == "dot_general"
    ]
    asked = [
        policy(e.primitive, *(v.aval for v in e.invars), **e.params) for e in products
    ]
    kept = next((answer for answer in asked if answer), False)

    def extended(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "name" and params["name"] == LINEAR_RESULTS and kept:
            return kept
        return policy(primitive, *avals, **params)

    return extended


class _Rewritten:
    """The nodes of a rewritten jaxpr: equations, kept calls, and sites.

    Attributes:
        nodes: The nodes.
        results: The atoms of the jaxpr's results.
    """

    def __init__(
        self, opened: Opened, sites: Sequence[Site], added: Sequence[Any]
    ) -> None:
        self.eqns = opened.jaxpr.eqns
        self.sites = list(sites)
        self.number_of = {
            v: number for number, eqn in enumerate(self.eqns) for v in eqn.outvars
        }
        self.names: dict[Any, Any] = {}
        self.nodes: list[_Node] = []
        self._place(opened.calls, 0, len(self.eqns))
        for eqn in added:
            self._append_equation(len(self.eqns), eqn)
        for site in self.sites:
            roots = tuple(p.root for p in site.projections)
            first = min(self.number_of[root] for root in roots)
            self._append(first, inputs_of(site), roots, site=site)
        self.results = [self.substitute(v) for v in opened.jaxpr.outvars]

    def maker(self, var: core.Var) -> Any:
        """Returns the equation of the old jaxpr that computes a variable."""
        return self.eqns[self.number_of[var]]

    def substitute(self, atom: Any) -> Any:
        """Returns the variable that holds an opened call's value in the new jaxpr."""
        if isinstance(atom, core.Literal):
            return atom
        return self.names.get(atom, atom)

    def _append(self, order: int, inputs: Iterable[Any], outputs, **what: Any) -> None:
        read = (self.substitute(v) for v in inputs if isinstance(v, core.Var))
        self.nodes.append(
            _Node(order=order, inputs=tuple(read), outputs=tuple(outputs), **what)
        )

    def _place(self, calls: Sequence[Call], start: int, stop: int) -> None:
        roots = {p.root for site in self.sites for p in site.projections}
        place = start
        for call in (*calls, None):
            for number in range(place, stop if call is None else call.start):
                eqn = self.eqns[number]
                if roots.isdisjoint(eqn.outvars):
                    self._append_equation(number, eqn)
            if call is not None:
                self._place_call(call)
                place = call.stop

    def _append_equation(self, order: int, eqn: Any) -> None:
        invars = [self.substitute(v) for v in eqn.invars]
        eqn = eqn.replace(invars=invars)
        self._append(order, eqn.invars, eqn.outvars, eqn=eqn)

    def _place_call(self, call: Call) -> None:
        """Keeps a call, unless a site has only a part of its arrays inside it."""
        touching = [site for site in self.sites if self._touches(site, call)]
        if not all(self._is_inside(site, call) for site in touching):
            self._place(call.calls, call.start, call.stop)
            return
        # The body is rewritten on its own, and these sites are found again there.
        self.sites = [site for site in self.sites if site not in touching]
        for out, atom in zip(call.eqn.outvars, call.results, strict=True):
            if self._is_within(atom, call):
                self.names.setdefault(atom, out)
        self._append_equation(call.start, call.eqn)

    def _is_within(self, atom: Any, call: Call) -> bool:
        if isinstance(atom, core.Literal) or atom not in self.number_of:
            return False
        return call.start <= self.number_of[atom] < call.stop

    def _touches(self, site: Site, call: Call) -> bool:
        atoms = [*inputs_of(site), *(p.root for p in site.projections)]
        return any(self._is_within(atom, call) for atom in atoms)

    def _is_inside(self, site: Site, call: Call) -> bool:
        roots = [p.root for p in site.projections]
        return all(self._is_within(root, call) for root in roots) and all(
            v in call.eqn.invars or self._is_within(v, call) for v in inputs_of(site)
        )


def _rewritten(
    opened: Opened, sites: Sequence[Site], added: Sequence[Any]
) -> tuple[_Rewritten, list[_Node]]:
    """Returns the nodes of a rewritten jaxpr in an order in which they can run."""
    rewritten = _Rewritten(opened, sites, added)
    needed = _needed(rewritten.nodes, rewritten.results)
    nodes = _sorted(needed)
    if len(nodes) < len(needed):  # two groups of sites depend on each other
        single = [one for site in sites for one in ungroup(site)]
        rewritten = _Rewritten(opened, single, added)
        needed = _needed(rewritten.nodes, rewritten.results)
        nodes = _sorted(needed)
    assert len(nodes) == len(needed), "sites depend on each other"
    return rewritten, nodes


def _needed(nodes: Sequence[_Node], results: Sequence[Any]) -> list[_Node]:
    """Returns the nodes on which the results depend."""
    maker = {v: node for node in nodes for v in node.outputs}
    todo = [v for v in results if isinstance(v, core.Var)]
    kept: dict[int, _Node] = {}
    while todo:
        node = maker.get(todo.pop())
        if node is None or id(node) in kept:
            continue
        kept[id(node)] = node
        todo += node.inputs
    return list(kept.values())


def _sorted(nodes: Sequence[_Node]) -> list[_Node]:
    """Sorts nodes so that each comes after those that it reads.

    Nodes that depend on each other are left out.
    """
    maker = {v: node for node in nodes for v in node.outputs}
    waits, readers = {}, {}
    for node in nodes:
        before = {id(maker[v]) for v in node.inputs if v in maker}
        waits[id(node)] = len(before)
        for other in before:
            readers.setdefault(other, []).append(node)
    ready = [(n.order, i, n) for i, n in enumerate(nodes) if not waits[id(n)]]
    heapq.heapify(ready)
    done: list[_Node] = []
    while ready:
        *_, node = heapq.heappop(ready)
        done.append(node)
        for reader in readers.get(id(node), ()):
            waits[id(reader)] -= 1
            if not waits[id(reader)]:
                heapq.heappush(ready, (reader.order, len(nodes) + len(done), reader))
    return done


def _site_equations(
    site: Site, rewritten: "_Rewritten", traces: dict[Hashable, core.Jaxpr]
) -> list[Any]:
    """Returns the equations that compute a site's roots with the kernels.

    Args:
        site: The site.
        rewritten: The nodes of the jaxpr that has the site.
        traces: The kernel calls that were traced, by signature and mesh.
    """
    inputs = inputs_of(site)
    context = rewritten.maker(site.projections[0].root).ctx
    key = signature(site), context.cur_abstract_mesh
    if key not in traces:
        # As a call of jit, the kernels' own gradient also runs in an eager shard_map.
        call = jax.jit(kernel_call(site))
        with context.manager:
            traces[key] = jax.make_jaxpr(call)(*(v.aval for v in inputs))
    traced, substitute = traces[key], rewritten.substitute
    env: dict[Any, Any] = dict(zip(traced.invars, map(substitute, inputs), strict=True))
    consts = zip(traced.constvars, traced.consts, strict=True)
    env |= {v: core.Literal(value, v.aval) for v, value in consts}
    for root, out in zip(site.projections, traced.outvars, strict=True):
        env[out] = root.root
    return list(_renamed(traced.eqns, env))


def _renamed(eqns: Iterable[Any], env: dict[Any, Any]) -> Iterable[Any]:
    """Yields equations with the variables of `env`, and new ones for the others."""

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else env[atom]

    for eqn in eqns:
        for out in eqn.outvars:
            env.setdefault(out, core.Var(out.aval))
        yield eqn.replace(
            invars=[read(v) for v in eqn.invars], outvars=[env[v] for v in eqn.outvars]
        )
