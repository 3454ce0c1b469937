"""Times the ways to compute a site on the device, where the user asks for it.

The site, with the norm and gate around it, becomes a program of its own, whose forward
and backward passes are timed: as XLA compiles it, with the linears in kernels, and with
everything in kernels that they can compute. Times are kept no longer than the function
that was fused.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import eval_context
from jax.extend import core

from jaxlora.errors import ConfigError
from jaxlora.fuse.graph import Graph
from jaxlora.fuse.normal_forms.forms import is_float
from jaxlora.fuse.place import signature
from jaxlora.fuse.producers import Part
from jaxlora.fuse.site_shape import draws_masks
from jaxlora.pallas_kernels import compile_program

# Operations too expensive to repeat to make the small inputs of a program.
_HEAVY = {
    "dot_general",
    "ragged_dot_general",
    "scan",
    "while",
    "cond",
    "custom_vjp_call",
}
_SHORTEST_SECONDS = 0.02  # of calls that are timed together
_NUM_BATCHES = 5
# The time of each way, by name; or no times, and the reason.
Times = tuple[dict[str, float], str | None]
_USED_UP: Times = {}, "measure_seconds are used up"


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


class SiteTimer:
    """Times ways until a limit is reached, and parts that are alike only once.

    The programs of a part are compiled at the same time, and timed one after the other
    once all are compiled. A compiler would disturb the timing: it runs kernels on the
    device too, and occupies the processors that launch the kernels being timed.
    """

    def __init__(
        self,
        limit_seconds: float,
        *,
        timer: Callable[[Callable[..., Any], Sequence[Any]], float] = time_call,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts with all of its time.

        Args:
            limit_seconds: Wall time for compiling and running all programs. When it is
                reached, no further program is compiled or timed; the current one may
                exceed it.
            timer: Times a call.
            clock: Measures what is left of the limit.
        """
        self._left = limit_seconds
        self._timer, self._clock = timer, clock
        self._known: dict[Hashable, Times] = {}

    def times(
        self,
        part: Part,
        ways: Mapping[str, Sequence[Part]],
        program: Callable[[core.Jaxpr, Sequence[Part]], core.Jaxpr | None],
    ) -> Times:
        """Returns the times of the ways to compute a part.

        Args:
            part: The part, with everything that kernels can compute.
            ways: The calls of the kernels, by the name of the way.
            program: Puts calls of the kernels into a jaxpr, or returns None if the
                calls depend on each other.

        Raises:
            ConfigError: There are several processes.
            Exception: A program does not compile or run.
        """
        if jax.process_count() > 1:
            raise ConfigError(
                "measure_seconds is set, and there are several processes, which might "
                "choose different kernels. Leave it out, so that the prediction "
                "decides."
            )
        key = signature(part), tuple(map(draws_masks, part.sites)), tuple(ways)
        if key in self._known:
            return self._known[key]
        if "shard_map" in part.site.path:
            return {}, "linears inside of shard_map are not timed"
        start = self._clock()
        try:
            times = self._timed(part, ways, program, until=start + self._left)
        finally:
            self._left -= self._clock() - start
        if times is not _USED_UP:
            self._known[key] = times
        return times

    def _timed(self, part, ways, program, *, until: float) -> Times:
        if self._clock() >= until:
            return _USED_UP
        plain = _program(part)
        made = {name: program(plain, parts) for name, parts in ways.items()}
        with _apart():
            programs = {
                name: both_passes(jaxpr, frozen_inputs(part))
                for name, jaxpr in made.items()
                if jaxpr is not None
            }
            lowered = list(map(_lowered, programs.values()))
        with ThreadPoolExecutor(len(lowered) or 1, "measure-compile") as pool:
            compiled = list(pool.map(compile_program, lowered))
        seconds = {}
        for (name, both), call in zip(programs.items(), compiled, strict=True):
            if self._clock() >= until:
                return _USED_UP
            with _apart():
                seconds[name] = self._timer(call, both.arguments())
        return seconds, None


def _program(part: Part) -> core.Jaxpr:
    """Returns a part as a program of its own, as its author wrote it.

    It draws the dropout masks and computes the values of rows that row-wise functions
    read, if that takes no product.
    """
    graph, makers = part.site.graph, part.makers
    jaxpr = graph.jaxpr
    roots = {root for site in part.sites for root in site.roots}
    inputs: set[Any] = {v for site in part.sites for v in site.inputs}
    inputs -= {maker.read for maker in makers} | roots
    inputs |= {v for maker in makers for v in maker.inputs} - roots
    inner = frozenset().union(*(each.equations for each in (*makers, *part.sites)))
    small = {v for site in part.sites for v in site.masks}
    for var in (small | {v for maker in makers for v in maker.rows}) & inputs:
        needed, leaves = _behind(graph, [var], inputs - {var})
        names = {jaxpr.eqns[n].primitive.name for n in needed - inner}
        is_light = not names & _HEAVY and not any(_is_large(v, inputs) for v in leaves)
        if needed and is_light:
            inputs.remove(var)
    results = [*roots, *(maker.x for maker in makers)]
    outputs = [v for v in results if graph.is_used_beside(v, inner)]
    needed, leaves = _behind(graph, outputs, inputs)
    order = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    place = lambda v: (graph.maker.get(v, -1), order.get(v, len(order)))
    return jaxpr.replace(
        constvars=[],
        invars=sorted(leaves, key=place),
        outvars=sorted(outputs, key=place),
        eqns=[jaxpr.eqns[number] for number in sorted(needed)],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _is_large(var: core.Var, inputs: set[Any]) -> bool:
    """Returns whether a variable is an array of floats that the part does not read."""
    aval: Any = var.aval
    return var not in inputs and is_float(aval) and aval.size > 1


def _behind(
    graph: Graph, outputs: Iterable[Any], inputs: set[Any]
) -> tuple[set[int], list[core.Var]]:
    """Returns the equations from inputs to outputs, and what they read."""
    is_read = lambda var: var in inputs or var not in graph.maker
    found = list(graph.ancestors(outputs, stops=is_read))
    needed = {graph.maker[var] for var in found if not is_read(var)}
    return needed, list(filter(is_read, found))


def _apart() -> contextlib.AbstractContextManager[None]:
    """Returns a context outside the functions that are being traced.

    JAX's public context of this kind, `ensure_compile_time_eval`, would also evaluate
    what Mosaic's kernels compute without arrays, such as the number of a warpgroup.
    """
    return eval_context()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BothPasses:
    """The forward and the backward pass of a program.

    Attributes:
        function: Takes a list with the program's arguments, and one with the gradients
            of its results; returns the results and the gradients of trained arguments.
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


def _lowered(program: BothPasses) -> jax.stages.Lowered:
    # It is traced in this thread, because JAX's settings belong to a thread. It is not
    # traced by `trace_program`, in whose worker processes kernels are lowered: JAX
    # caches traces of kernels, and the fused function, which shares them, may also run
    # uncompiled.
    return jax.jit(program.function).lower(program.values, program.gradients)


def both_passes(jaxpr: core.Jaxpr, frozen: set[Any]) -> BothPasses:
    """Returns both passes of a program, without gradients of frozen inputs."""
    avals: list[Any] = [v.aval for v in jaxpr.invars]
    values = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    trained = [
        i for i, v in enumerate(jaxpr.invars) if v not in frozen and is_float(v.aval)
    ]
    run = core.jaxpr_as_fun(jaxpr)

    def step(values, gradients):
        def results(some):
            every = list(values)
            for place, value in zip(trained, some, strict=True):
                every[place] = value
            return [y for y in run(*every) if is_float(y)]

        ys, pull = jax.vjp(results, [values[i] for i in trained])
        return ys, pull(gradients)

    results = jax.eval_shape(lambda *v: run(*v), *values)
    gradients = [y for y in results if is_float(y)]
    return BothPasses(function=step, values=values, gradients=gradients)


def _random(aval: jax.ShapeDtypeStruct, number: int) -> jax.Array:
    """Returns an array of a type with random floats, keys or bits, or with zeros."""
    key = jax.random.key(number)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, aval.shape) if aval.shape else key
    if is_float(aval):
        return (jax.random.normal(key, aval.shape) / 16).astype(aval.dtype)
    if aval.dtype == jnp.uint32:  # a key, or random bits
        return jax.random.bits(key, aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


def frozen_inputs(part: Part) -> set[Any]:
    """Returns the variables of a part's weights, biases and values of features."""
    frozen = {v for maker in part.makers for v in maker.features}
    for linear in (linear for site in part.sites for linear in site.linears):
        factors = (linear.w, *linear.w_scales, linear.bias)
        frozen |= {factor.var for factor in factors if factor is not None}
    return frozen
