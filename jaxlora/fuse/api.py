"""`fuse`: runs the low-rank branches of any function in the fused kernels."""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src.config import trace_context
from jax._src.core import NamedAxisEffect
from jax.extend import core

from jaxlora.errors import ConfigError, FuseError
from jaxlora.fuse.backend import check_implementation
from jaxlora.fuse.measure import SiteTimer
from jaxlora.fuse.rewrite import Rewritten, rewrite

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_ANY_PLACE, _ANY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
# The structure of (args, kwargs), and for each leaf None if it is an array, or else
# (type, value).
Signature = tuple[jax.tree_util.PyTreeDef, tuple[tuple[type, Any] | None, ...]]
MAX_PROGRAMS = 128  # signatures of one function whose programs are kept


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A function traced for one signature, and what was found in it.

    Attributes:
        traced: The jaxpr of the function.
        rewritten: That jaxpr with its sites replaced.
        out_tree: The structure of the function's results.
    """

    traced: core.Jaxpr
    rewritten: Rewritten
    out_tree: jax.tree_util.PyTreeDef


def fuse[**P, R](
    fn: Callable[P, R],
    *,
    strict: bool = False,
    frozen: int | str | Sequence[int | str] | None = None,
    implementation: str = "auto",
    measure_seconds: float | None = None,
) -> Callable[P, R]:
    """Returns a function of the same value whose LoRA linears run in fused kernels.

    The function is traced once for each signature. Each sum of `x @ w` and low-rank
    branches `s * (x @ a) @ b` of the same x is computed by
    `pallas_kernels.multi_lora_linears`, however it is written, also inside scans,
    rematerialized functions and other calls, before or after `jax.grad`. If x is made
    by a norm or a gate, and the function draws dropout masks for its linears, the
    kernel of the norm or gate computes `x @ a` too. The rest of the function stays as
    it is, to the bit. The result can be given to `jax.jit` and `jax.grad`, and has the
    gradients of the original with respect to every argument. It cannot be
    differentiated in forward mode.

    Args:
        fn: A pure function of pytrees. Leaves that are neither arrays nor Python
            floats are constants; so are floats, if the function's code reads their
            values.
        strict: Whether it is an error if nothing is fused, or if products with the
            shape of an adapter, `(x @ a) @ b`, are in no linear that was found.
        frozen: Positions or names of arguments whose gradients are zero, because the
            caller does not need them. By default, a gradient is computed where it is
            asked for.
        implementation: Name of a back end, or `auto` for the first that can run a
            linear on this device. With `auto`, linears that would be slower in its
            kernels stay as they are; `jaxlora.explain` says which and why.
        measure_seconds: Time to spend on measuring, in all, compiling included: when a
            call is traced, the ways to compute each linear, with the norm and gate
            around it, are compiled, several at the same time, and timed on this device
            one by one, beside XLA's, and the fastest is taken. Times hold for the
            function that `fuse` returns and are not kept. None: the prediction
            decides, so all machines of one kind take the same kernels.

    Raises:
        ConfigError: The implementation is unknown, `measure_seconds` is not above 0 or
            not finite, or the function has no argument of a name or position in
            `frozen`. When the function is called: `measure_seconds` is set, and there
            are several processes.
        FuseError: When the function is called: it has side effects, or `strict` is
            set and nothing is fused or an adapter is not found.
    """
    check_implementation(implementation)
    options = FuseOptions(implementation, _site_timer(measure_seconds))
    stopped = _both_names(fn, frozen)
    programs: dict[Hashable, Program] = {}
    reads_numbers = False  # whether the code of fn reads the values of Python floats

    def traced(args: tuple, kwargs: dict) -> tuple[Program, list[Any]]:
        """Returns the program of a call, and the arrays that it takes."""
        nonlocal reads_numbers
        arrays, signature = _split(args, kwargs, reads_numbers=reads_numbers)
        # The settings of JAX on which a trace depends, as in `jax.jit`.
        context = trace_context(), jax.config.jax_default_prng_impl
        key = signature, tuple(map(jax.typeof, arrays)), context
        if key in programs:
            return programs[key], arrays
        try:
            program = trace(fn, options, arrays, signature)
        except _NEEDS_A_VALUE:
            if reads_numbers or not any(map(_is_float, arrays)):
                raise
            reads_numbers = True
            return traced(args, kwargs)
        if not any(isinstance(c, jax.core.Tracer) for c in program.traced.consts):
            if len(programs) >= MAX_PROGRAMS:
                programs.pop(next(iter(programs)))
            programs[key] = program
        return program, arrays

    @functools.wraps(fn)
    def fused(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = _stop_gradients(args, kwargs, stopped)
        program, arrays = traced(args, kwargs)
        if strict:
            _check_all_found(fn, program.rewritten)
        if not program.rewritten.sites:
            return fn(*args, **kwargs)
        results = core.jaxpr_as_fun(program.rewritten.jaxpr)(*arrays)
        return jax.tree.unflatten(program.out_tree, results)

    _FUSED[fused] = fn, options
    return fused


@dataclasses.dataclass(frozen=True)
class FuseOptions:
    """How a function is fused.

    Attributes:
        implementation: Name of a back end, or `auto`.
        site_timer: Measures times; None: the prediction and the rule decide.
    """

    implementation: str = "auto"
    site_timer: SiteTimer | None = None


# The functions that were fused, and how.
_FUSED: weakref.WeakKeyDictionary[Callable[..., Any], tuple[Any, FuseOptions]] = (
    weakref.WeakKeyDictionary()
)


def options_of(fn: Callable[..., Any]) -> tuple[Callable[..., Any], FuseOptions]:
    """Returns the function that was fused, and how; one that was not has defaults."""
    return _FUSED[fn] if fn in _FUSED else (fn, FuseOptions())


def _site_timer(measure_seconds: float | None) -> SiteTimer | None:
    if measure_seconds is None:
        return None
    if not 0 < measure_seconds < float("inf"):
        raise ConfigError(
            f"measure_seconds={measure_seconds} is no time to spend. Use a number of "
            "seconds above 0, or None to measure nothing."
        )
    return SiteTimer(measure_seconds)


def trace_call(
    fn: Callable[..., Any], options: FuseOptions, args: tuple, kwargs: dict
) -> Program:
    """Traces a call of a function and replaces its sites.

    Raises:
        FuseError: The function has side effects.
    """
    try:
        return trace(fn, options, *_split(args, kwargs))
    except _NEEDS_A_VALUE:
        return trace(fn, options, *_split(args, kwargs, reads_numbers=True))


def trace(
    fn: Callable[..., Any],
    options: FuseOptions,
    arrays: Sequence[Any],
    signature: Signature,
) -> Program:
    """Traces a function and replaces its sites.

    Raises:
        FuseError: The function has side effects.
    """
    out_tree, lost = None, []

    def flat(*arrays: Any) -> list[Any]:
        nonlocal out_tree, lost
        (tree, constants), rest = signature, iter(arrays)
        leaves = (next(rest) if c is None else c[1] for c in constants)
        args, kwargs = jax.tree.unflatten(tree, leaves)
        leaves, out_tree = jax.tree.flatten(fn(*args, **kwargs))
        lost = _lost_state((args, kwargs), (*arrays, *leaves))
        return leaves

    traced = jax.make_jaxpr(flat)(*arrays)
    if lost:
        raise FuseError(
            f"{_name(fn)} changes the state of a module that is its argument: "
            f"{', '.join(lost)}. A fused function cannot change its arguments. Pass "
            "nnx.Dropout its key at each call (rngs=key), or split the module outside "
            "of the function, merge it inside, and return the state that changes."
        )
    # A collective has the effect that an axis of this name must be mapped.
    effects = [e for e in traced.effects if not isinstance(e, NamedAxisEffect)]
    if effects:
        effects = ", ".join(sorted(map(str, effects)))
        raise FuseError(
            f"{_name(fn)} has side effects: {effects}. Fuse a pure function: take "
            "prints, callbacks and writes to references out of it."
        )
    assert out_tree is not None
    rewritten = rewrite(traced, options.implementation, options.site_timer)
    return Program(traced=traced, rewritten=rewritten, out_tree=out_tree)


def _lost_state(arguments: Any, known: Sequence[Any]) -> list[str]:
    """Names the states of nnx modules that a function changed and did not return.

    Args:
        arguments: The arguments after the call.
        known: The arrays that the function was given, and those that it returned.
    """
    is_module = lambda value: isinstance(value, nnx.Module)
    kept = set(map(id, known))
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for module in filter(is_module, jax.tree.leaves(arguments, is_leaf=is_module))
        for path, leaf in jax.tree_util.tree_leaves_with_path(module)
        if isinstance(leaf, jax.core.Tracer) and id(leaf) not in kept
    ]


def _is_float(leaf: Any) -> bool:
    return type(leaf) in (float, complex)


def _split(
    args: tuple, kwargs: dict, *, reads_numbers: bool = False
) -> tuple[list[Any], Signature]:
    """Splits arguments into arrays and the rest.

    As in `jax.jit`, a Python float is an array, unless `reads_numbers` is set.
    Integers and truth values are constants, as shapes and conditions are made of them.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = lambda leaf: (
        isinstance(leaf, _ARRAYS) or (_is_float(leaf) and not reads_numbers)
    )
    constants = tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
    return [leaf for leaf in leaves if is_array(leaf)], (tree, constants)


def _both_names(
    fn: Callable[..., Any], frozen: int | str | Sequence[int | str] | None
) -> set[int | str]:
    """Returns both the position and the name of each frozen argument.

    Raises:
        ConfigError: The function has no such argument.
    """
    found: set[int | str] = set()
    if frozen is None:
        return found
    parameters = inspect.signature(fn).parameters
    names = list(parameters)
    kinds = {p.kind for p in parameters.values()}
    for argument in (frozen,) if isinstance(frozen, int | str) else frozen:
        is_place = isinstance(argument, int)
        if argument in (range(len(names)) if is_place else names):
            place = argument if is_place else names.index(argument)
            found |= {place, names[place]}
        elif (_ANY_PLACE if is_place else _ANY_NAME) in kinds:
            found.add(argument)
        else:
            raise ConfigError(
                f"frozen has {argument!r}, and {_name(fn)} has no such argument. Use "
                f"names, or positions from 0, of its arguments: {', '.join(names)}."
            )
    return found


def _stop_gradients(
    args: tuple, kwargs: dict, frozen: Iterable[int | str]
) -> tuple[Any, Any]:
    """Cuts the gradients of frozen arguments."""
    if not frozen:
        return args, kwargs
    stop = lambda tree: jax.tree.map(_stop_gradient, tree)
    args = tuple(stop(a) if i in frozen else a for i, a in enumerate(args))
    return args, {k: stop(v) if k in frozen else v for k, v in kwargs.items()}


def _stop_gradient(leaf: Any) -> Any:
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf


def _check_all_found(fn: Callable[..., Any], rewritten: Rewritten) -> None:
    """Raises FuseError if nothing is fused, or if an adapter is in no linear."""
    if not rewritten.sites:
        raise FuseError(_nothing_found(fn, rewritten))
    missed = [(r.location, r.reason) for r in rewritten.refusals if r.is_adapter]
    if missed:
        raise FuseError(
            f"{_name(fn)} has products with the shape of an adapter that are not "
            "fused. Use strict=False to run them as they are. Near misses:"
            f"{_lines(missed)}"
        )


def _lines(reasons: Iterable[tuple[str, str]]) -> str:
    distinct = dict.fromkeys(reasons)
    return "".join(f"\n  {location}: {reason}" for location, reason in distinct)


def _nothing_found(fn: Callable[..., Any], rewritten: Rewritten) -> str:
    reasons = [(r.location, r.reason) for r in rewritten.refusals]
    reasons += [
        (choice.site.location, choice.reason)
        for choice in rewritten.choices
        if choice.part is None
    ]
    near = (
        f"Near misses:{_lines(reasons)}"
        if reasons
        else "No sum comes near x @ w + s * (x @ a) @ b; docs/reference/fuse.md "
        "lists what is found and what is refused."
    )
    return (
        f"{_name(fn)} has no linear with a low-rank branch that can be fused. Use "
        f"strict=False to run it as it is. {near}"
    )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
