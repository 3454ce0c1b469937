"""Evaluates jaxprs with NumPy.

XLA takes seconds to compile what a thread of an interpreted kernel runs, which is
hundreds of operations on single numbers and on a few small tiles. NumPy takes less time
to run it.
"""

import functools
from collections.abc import Iterable

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal


@functools.cache
def compile_functions() -> None:
    """Compiles the functions that JAX evaluates, as XLA's rounding is compared with.

    A thread of a kernel that compiled them might end the process: LLVM has once crashed
    in such a thread, as programs of tests are compiled quickly.
    """
    for shape in ((64,), (64, 64)):
        for function in (lax.exp_p, lax.logistic_p, lax.rsqrt_p):
            function.bind(np.ones(shape, np.float32), accuracy=None)


def _quotient(x, y):
    """Divides; quotients of integers are rounded towards zero."""
    if np.issubdtype(x.dtype, np.integer):
        return (x - np.fmod(x, y)) // y
    return x / y


def _shifted_right(x, places):
    """Shifts bits; zeros come in, also into a negative number."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(unsigned) >> places.astype(unsigned)).view(x.dtype)


def _iota(*, dtype, shape, dimension, **_):
    ones = [1] * len(shape)
    ones[dimension] = shape[dimension]
    numbers = np.arange(shape[dimension], dtype=dtype).reshape(ones)
    return np.broadcast_to(numbers, shape)


def _stack(*arrays, axis):
    return np.stack(arrays, axis)


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    with_ones = np.ones(len(shape), int)
    with_ones[list(broadcast_dimensions)] = x.shape
    return np.broadcast_to(x.reshape(with_ones), shape)


def _slice(x, *, start_indices, limit_indices, strides):
    steps = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _dynamic_slice(x, *starts, slice_sizes):
    ends = np.array(x.shape) - slice_sizes
    first = np.clip(starts, 0, ends).tolist()
    return x[tuple(slice(i, i + n) for i, n in zip(first, slice_sizes, strict=True))]


# NumPy's functions for the primitives that kernels use most, by name.
_ELEMENTWISE = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "sign": np.sign,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": np.left_shift,
    "shift_right_logical": _shifted_right,
    "select_n": lambda which, first, second: np.where(which, second, first),
}
_WITH_PARAMETERS = {
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "stack": _stack,
}


def _call(*args, jaxpr, **_):
    return _evaluate(jaxpr, [*jaxpr.consts, *args])


def _cond(index, *args, branches, **_):
    last = len(branches) - 1
    return _call(*args, jaxpr=branches[min(max(int(index), 0), last)])


def _while(*args, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts):
    num_consts = cond_nconsts + body_nconsts
    shared, carry = args[:num_consts], args[num_consts:]
    while _call(*shared[:cond_nconsts], *carry, jaxpr=cond_jaxpr)[0]:
        carry = _call(*shared[cond_nconsts:], *carry, jaxpr=body_jaxpr)
    return carry


def _scan(*args, jaxpr, length, ft_in, ft_out, **_):
    consts, carry, each = map(list, ft_in.update(args).unpack())
    if each or len(ft_out) > len(carry):
        raise NotImplementedError("only loops without arrays of inputs or outputs")
    for _ in range(length):
        carry = _call(*consts, *carry, jaxpr=jaxpr)
    return carry


def _callback(*args, callback, result_avals, **_):
    # The results may be views of memory that changes afterwards.
    results = [np.array(result) for result in callback(*args)]
    for got, want in zip(results, result_avals, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), (callback, got, want)
    return results


# The primitives that call Python or run jaxprs; they return lists.
_CONTROL = {
    "jit": _call,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "io_callback": _callback,
}


def evaluate(jaxpr: Jaxpr, values: Iterable) -> None:
    """Runs a jaxpr and its callbacks, in their order.

    Args:
        jaxpr: Primitives without a function here are run by JAX.
        values: Those of its constants and its arguments.
    """
    with np.errstate(all="ignore"):  # XLA does not warn either
        _evaluate(jaxpr, map(np.asarray, values))


def _evaluate(jaxpr: Jaxpr, values: Iterable) -> list:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

    def read(atom):
        if isinstance(atom, Literal):
            return np.asarray(atom.val, atom.aval.dtype)
        return env[atom]

    for eqn in jaxpr.eqns:
        results = _apply(eqn, map(read, eqn.invars))
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _apply(eqn: JaxprEqn, args: Iterable) -> Iterable:
    name = eqn.primitive.name
    if name in _ELEMENTWISE:
        assert eqn.params.get("out_dtype") is None
        return [_ELEMENTWISE[name](*args)]
    if name in _WITH_PARAMETERS:
        return [_WITH_PARAMETERS[name](*args, **eqn.params)]
    if name in _CONTROL:
        return _CONTROL[name](*args, **eqn.params)
    results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return map(np.asarray, jax.tree.leaves(results))
