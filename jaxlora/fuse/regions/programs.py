"""Programs of regions: what is timed to choose how a region is computed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxlora.fuse.kernel_call import inputs_of
from jaxlora.fuse.regions.part import Region

_HEAVY = {
    "dot_general",
    "ragged_dot_general",
    "scan",
    "while",
    "cond",
    "custom_vjp_call",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BothPasses:
    """The forward and the backward pass of a program.

    Attributes:
        function: Takes a list with the program's arguments, and one with the gradients
            of its results; returns the results and the gradients of what is trained.
        values: Types of the arguments.
        gradients: Types of the gradients.
    """

    function: Callable[..., Any]
    values: list[jax.ShapeDtypeStruct]
    gradients: list[jax.ShapeDtypeStruct]

    def arguments(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns random arguments, and gradients."""
        values = [_random(v, number) for number, v in enumerate(self.values)]
        return values, [jnp.ones(one.shape, one.dtype) for one in self.gradients]


def both_passes(jaxpr: core.Jaxpr, region: Region) -> BothPasses:
    """Returns both passes of a program of a region."""
    frozen = frozen_inputs(region)
    values = [_type_of(v) for v in jaxpr.invars]
    trained = [i for i, v in enumerate(jaxpr.invars) if _is_trained(v, frozen)]
    run = core.jaxpr_as_fun(jaxpr)

    def step(values, gradients):
        def results(some):
            every = list(values)
            for place, value in zip(trained, some, strict=True):
                every[place] = value
            return [y for y in run(*every) if _is_float(y)]

        ys, pull = jax.vjp(results, [values[i] for i in trained])
        return ys, pull(gradients)

    results = jax.eval_shape(lambda *v: run(*v), *values)
    gradients = [y for y in results if _is_float(y)]
    return BothPasses(function=step, values=values, gradients=gradients)


def _type_of(var: core.Var) -> jax.ShapeDtypeStruct:
    aval: Any = var.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def frozen_inputs(region: Region) -> set[Any]:
    """Returns the variables of a region's weights, biases and values of features."""
    frozen = {v for maker in region.makers.values() for v in maker.features}
    for site in region.sites:
        for p in site.projections:
            operands = (p.w, *p.w_scales, *(() if p.bias is None else (p.bias,)))
            frozen |= {o.var for o in operands}
    return frozen


def _is_trained(var: core.Var, frozen: set[Any]) -> bool:
    return var not in frozen and _is_float(var.aval)


def _random(aval: jax.ShapeDtypeStruct, number: int) -> jax.Array:
    """Returns an array of a type: random floats, keys or bits, or zeros."""
    key = jax.random.key(number)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, aval.shape) if aval.shape else key
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return (jax.random.normal(key, aval.shape) / 16).astype(aval.dtype)
    if aval.dtype == jnp.uint32:  # a key, or random bits
        return jax.random.bits(key, aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


def region_program(region: Region) -> core.Jaxpr:
    """Returns the region as a program of its own, as its author wrote it.

    Dropout masks are drawn in it, and what row-wise functions read of rows is computed
    in it, if that takes no product.
    """
    jaxpr = region.sites[0].jaxpr
    made = {maker.x for maker in region.makers.values()}
    read = {maker.read for maker in region.makers.values()}
    roots = [p.root for site in region.sites for p in site.projections]
    inputs = {v for site in region.sites for v in inputs_of(site)} - read - {*roots}
    for maker in region.makers.values():
        inputs |= {*maker.inputs} - {*roots}
    number_of = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    small = {v for maker in region.makers.values() for v in maker.rows}
    small |= _masks(region)
    inner = frozenset().union(*(m.equations for m in region.makers.values()))
    inner = inner.union(*(site.equations for site in region.sites))
    for var in small & inputs:
        needed, leaves = _behind(jaxpr, number_of, [var], inputs - {var})
        names = {jaxpr.eqns[n].primitive.name for n in needed - inner}
        is_light = not names & _HEAVY and not any(_is_large(v, inputs) for v in leaves)
        if needed and is_light:
            inputs.remove(var)
    outputs = [v for v in (*roots, *made) if _is_read(jaxpr, v, inner)]
    needed, leaves = _behind(jaxpr, number_of, outputs, inputs)
    order = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    place = lambda v: (number_of.get(v, -1), order.get(v, len(order)))
    return jaxpr.replace(
        constvars=[],
        invars=sorted(leaves, key=place),
        outvars=sorted(outputs, key=place),
        eqns=[jaxpr.eqns[number] for number in sorted(needed)],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _is_large(var: core.Var, inputs: set[Any]) -> bool:
    """Tells whether a variable is an array of floats that the region does not read."""
    aval: Any = var.aval
    return var not in inputs and _is_float(aval) and aval.size > 1


def _masks(region: Region) -> set[Any]:
    masks = (p.mask for site in region.sites for p in site.projections)
    return {m.operand.var for m in masks if m is not None}


def _is_read(jaxpr: core.Jaxpr, var: core.Var, inner: frozenset[int]) -> bool:
    """Tells whether something outside of a region reads a variable."""
    if any(v is var for v in jaxpr.outvars):
        return True
    return any(
        any(v is var for v in eqn.invars)
        for number, eqn in enumerate(jaxpr.eqns)
        if number not in inner
    )


def _behind(jaxpr, number_of, outputs, inputs) -> tuple[set[int], list[Any]]:
    """Returns the equations from inputs to outputs, and what they read."""
    todo, needed, leaves = list(outputs), set(), {}
    while todo:
        var = todo.pop()
        number = number_of.get(var)
        if var in inputs or number is None:
            leaves[var] = None
        elif number not in needed:
            needed.add(number)
            eqn = jaxpr.eqns[number]
            todo += [v for v in eqn.invars if isinstance(v, core.Var)]
    return needed, list(leaves)
