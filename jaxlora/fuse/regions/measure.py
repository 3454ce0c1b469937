"""Times the plans of a region on the device."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import eval_context
from jax.extend import core

from jaxlora.errors import ConfigError
from jaxlora.fuse.kernel_call import inputs_of
from jaxlora.fuse.regions import kept
from jaxlora.fuse.regions.candidates import Plan
from jaxlora.fuse.regions.part import Region
from jaxlora.pallas_kernels import compile_program

logger = logging.getLogger(__name__)

_SHORTEST_SECONDS = 0.02  # of calls that are timed together
_NUM_BATCHES = 5
_HEAVY = {
    "dot_general",
    "ragged_dot_general",
    "scan",
    "while",
    "cond",
    "custom_vjp_call",
}

# Returns the seconds of a call of a compiled function.
Timer = Callable[[Callable[..., Any], Sequence[Any]], float]


def time_call(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Returns the median time of a call in a series of calls, in seconds."""

    def batch(count: int) -> float:
        start, results = time.perf_counter(), None
        for _ in range(count):
            results = function(*arguments)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    batch(2)
    count = max(1, round(_SHORTEST_SECONDS / max(batch(2), 1e-7)))
    return statistics.median(batch(count) for _ in range(_NUM_BATCHES))


class Stopwatch:
    """Times plans until a limit is reached, and keeps the times."""

    def __init__(
        self,
        limit_seconds: float,
        *,
        timer: Timer = time_call,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts with all of its time.

        Args:
            limit_seconds: Time for compiling and running candidates, in all; 0: only
                times that are kept are used. The last candidate may exceed it.
            timer: Times a call.
            clock: Measures what is left of the limit.
        """
        self._left = limit_seconds
        self._timer, self._clock = timer, clock
        self._kept: dict[str, kept.Measured] | None = None

    def times(
        self,
        region: Region,
        key: str,
        plans: Sequence[Plan],
        program: Callable[[Plan], core.Jaxpr | None],
    ) -> tuple[dict[str, float], str | None]:
        """Returns the times of plans, by name, or no times and why.

        Args:
            region: The region.
            key: The digest of its normal form.
            plans: The plans, XLA's first.
            program: Returns the program of the region with a plan; None: it has none.

        Raises:
            ConfigError: There are several processes.
        """
        _check_processes()
        device = jax.devices()[0].device_kind
        if self._kept is None:
            self._kept = kept.shipped(device) | kept.read(device)
        names = [plan.name for plan in plans]
        if key in self._kept and (known := self._kept[key].of(names)):
            return known, None
        if "shard_map" in region.sites[0].path:
            return {}, "regions inside of shard_map are not timed"
        seconds = {}
        for plan in plans:
            if self._left <= 0:
                return {}, "measure_seconds are used up"
            start, jaxpr = self._clock(), program(plan)
            if jaxpr is not None:
                seconds[plan.name] = self._time(jaxpr, region)
            self._left -= self._clock() - start
        self._kept[key] = kept.Measured.now(key, seconds)
        kept.write(device, self._kept[key])
        return seconds, None

    def _time(self, jaxpr: core.Jaxpr, region: Region) -> float:
        """Times both passes of a program with random arguments."""
        # Another function may be traced around this one. JAX's public context of this
        # kind, `ensure_compile_time_eval`, would also evaluate what Mosaic's kernels
        # compute without arrays, such as the number of a warpgroup.
        with eval_context():
            frozen = frozen_inputs(region)
            values = [_random(v, number) for number, v in enumerate(jaxpr.invars)]
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

            shapes = jax.eval_shape(lambda *v: run(*v), *values)
            gradients = [jnp.ones(y.shape, y.dtype) for y in shapes if _is_float(y)]
            return self._timer(_compiled(step, values, gradients), (values, gradients))


def _compiled(step: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return compile_program(jax.jit(step).lower(*arguments))


def _check_processes() -> None:
    if jax.process_count() > 1:
        raise ConfigError(
            "measure_seconds is set, and there are several processes, which might "
            "choose different kernels. Leave it out, so that the prediction decides."
        )


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


def _random(var: core.Var, number: int) -> jax.Array:
    """Returns an array of a variable's type: random floats, keys or bits, or zeros."""
    aval: Any = var.aval
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
