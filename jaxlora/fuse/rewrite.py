"""Replaces the sites of a jaxpr, and of those inside it, by calls of the kernels."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core, linear_util

from jaxlora.fuse.choose import Choice, choose
from jaxlora.fuse.graph import BODIES, Graph
from jaxlora.fuse.linears.match import find_sites
from jaxlora.fuse.measure import SiteTimer
from jaxlora.fuse.place import Placed, part_equations
from jaxlora.fuse.producers import Part
from jaxlora.fuse.site import Refusal, Site, group_sites, ungroup
from jaxlora.fuse.trace import open_calls
from jaxlora.pallas_kernels import LINEAR_RESULTS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rewritten:
    """A jaxpr whose sites were replaced.

    Attributes:
        jaxpr: The new jaxpr; the old one itself if it has no sites.
        refusals: The near misses.
        choices: How its sites and those of the jaxprs inside it are computed.
    """

    jaxpr: core.Jaxpr
    refusals: tuple[Refusal, ...]
    choices: tuple[Choice, ...]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that are replaced."""
        return tuple(c.site for c in self.choices if c.part is not None)


def rewrite(
    jaxpr: core.Jaxpr, implementation: str, site_timer: SiteTimer | None = None
) -> Rewritten:
    """Replaces the sites of a jaxpr and of all jaxprs inside it.

    Args:
        jaxpr: The jaxpr.
        implementation: Name of a back end, or `auto`.
        site_timer: Measures times; None: the prediction and the rule decide.
    """
    return _Rewriter(implementation, site_timer).rewrite(jaxpr, ())


class _Rewriter:
    """Rewrites jaxprs, each once, however often it is called."""

    def __init__(self, implementation: str, site_timer: SiteTimer | None) -> None:
        self.implementation = implementation
        self.site_timer = site_timer
        self.traces: dict[Hashable, core.Jaxpr] = {}
        self.done: dict[tuple[int, tuple[str, ...]], tuple[core.Jaxpr, Rewritten]] = {}

    def rewrite(self, jaxpr: core.Jaxpr, path: tuple[str, ...]) -> Rewritten:
        key = id(jaxpr), path
        if key not in self.done:
            # The jaxpr is kept, so that its id is not used again.
            self.done[key] = jaxpr, self._rewrite(jaxpr, path)
        return self.done[key][1]

    def _rewrite(self, jaxpr: core.Jaxpr, path: tuple[str, ...]) -> Rewritten:
        opened, calls = open_calls(jaxpr)
        graph = Graph(opened)
        sites, refusals = find_sites(graph, path, self.implementation)
        for chosen in self._choices(group_sites(sites)):
            placed = Placed(graph, calls, _parts_of(chosen))
            nodes = placed.in_order()
            if nodes is not None:
                break
        else:
            raise AssertionError("sites depend on each other")
        choices = [c for c in chosen if not placed.is_in_body(c.outputs)]
        eqns: list[Any] = []
        for node in nodes:
            if isinstance(node, Part):
                eqns += part_equations(node, placed, self.traces)
                continue
            eqn, inner = self._with_bodies(node, path)
            eqns.append(eqn)
            for body in inner:
                choices += body.choices
                refusals += body.refusals
        new = jaxpr.replace(eqns=eqns, outvars=placed.results)
        return Rewritten(
            jaxpr=new if _parts_of(choices) else jaxpr,
            refusals=tuple(refusals),
            choices=tuple(choices),
        )

    def _choices(self, sites: Sequence[Site]) -> Iterator[list[Choice]]:
        """Yields what to do with sites, until no two parts depend on each other."""
        for some in (sites, [one for site in sites for one in ungroup(site)]):
            chosen = choose(some, self.implementation, self._program, self.site_timer)
            if some is sites:
                yield chosen
            yield [choice.apart() for choice in chosen]

    def _program(self, jaxpr: core.Jaxpr, parts: Sequence[Part]) -> core.Jaxpr | None:
        """Returns a jaxpr with parts in the kernels; None: they need each other."""
        placed = Placed(Graph(jaxpr), (), parts)
        nodes = placed.in_order()
        if nodes is None:
            return None
        eqns: list[Any] = []
        for node in nodes:
            is_part = isinstance(node, Part)
            eqns += part_equations(node, placed, self.traces) if is_part else [node]
        return jaxpr.replace(eqns=eqns, outvars=placed.results)

    def _with_bodies(self, eqn: Any, path: tuple[str, ...]) -> tuple[Any, list]:
        """Rewrites the jaxprs of an equation."""
        name = eqn.primitive.name
        if name == "shard_map":
            return self._with_mapped_body(eqn, path)
        params, inner = dict(eqn.params), []
        for key in BODIES.get(name, ()):
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


def _parts_of(choices: Iterable[Choice]) -> list[Part]:
    """Returns the calls of the kernels, each once."""
    return list(dict.fromkeys(c.part for c in choices if c.part is not None))
