"""What a function's results are if only its author rounds.

A jaxpr is evaluated in NumPy, in float64 or wider. Values are rounded where a cast, a
`preferred_element_type` or `reduce_precision` in it goes to a smaller dtype, and to no
operation's own dtype. So an author's roundings are part of the reference, and those of
the arithmetic are not. Nothing of jaxlora is used.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALL_NAMES = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
}
# How far a value may be from the exact one before it is rounded: so many times the
# precision of its dtype at the largest value of its array.
_NUDGE = 8.0


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates jaxprs.

    Attributes:
        wide: The dtype of all floats.
        nudge: What is added to values before the author's roundings, in roundings of
            their dtype; see `bounds`.
        cuts: The equations at which the author rounds.
    """

    wide: Any = np.float64
    nudge: float = 0.0
    cuts: list[Any] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr; results that are floats have the wide dtype."""
        env: dict[Any, Any] = {}
        for v, value in zip(
            (*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True
        ):
            env[v] = self._widened(value)
        for eqn in jaxpr.eqns:
            results = self._apply(eqn, [self._read(env, v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [self._read(env, v) for v in jaxpr.outvars]

    def _read(self, env: dict[Any, Any], atom: Any) -> Any:
        if not isinstance(atom, core.Literal):
            return env[atom]
        return self._widened(np.asarray(atom.val, atom.aval.dtype))

    def _widened(self, value: Any) -> Any:
        if is_key(value):
            return value
        value = np.asarray(value)
        return value.astype(self.wide) if is_float(value.dtype) else value

    def _apply(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALL_NAMES:
            body = next(params[key] for key in _CALLS if key in params)
            consts = body.consts if isinstance(body, core.ClosedJaxpr) else ()
            return self.run(getattr(body, "jaxpr", body), consts, values)
        result = NUMPY[name](eqn, *values) if name in NUMPY else _by_jax(eqn, values)
        results = result if eqn.primitive.multiple_results else [result]
        return [
            self._rounded(eqn, value, out.aval)
            for value, out in zip(results, eqn.outvars, strict=True)
        ]

    def _rounded(self, eqn: Any, value: Any, aval: Any) -> Any:
        if is_key(value):
            return value
        if not is_float(aval.dtype):
            return np.asarray(value).astype(aval.dtype).reshape(aval.shape)
        value = np.asarray(value, self.wide).reshape(aval.shape)
        inputs = [v.aval.dtype for v in eqn.invars if is_float(v.aval.dtype)]
        if eqn.primitive.name == "reduce_precision":
            self.cuts.append(eqn)
            return self._cut(value, _named_precision(eqn.params), inputs[0])
        if inputs and all(_bits(aval.dtype) < _bits(dtype) for dtype in inputs):
            self.cuts.append(eqn)
            return self._cut(value, aval.dtype, inputs[0])
        return value

    def _cut(self, value: Any, dtype: Any, before: Any) -> Any:
        finite = np.abs(value[np.isfinite(value)])
        size = np.max(finite, initial=0.0) * float(jnp.finfo(before).eps)
        value = value + self.nudge * size * (value != 0)
        with np.errstate(over="ignore", invalid="ignore"):
            return value.astype(dtype).astype(self.wide)


def bounds(closed: Any, args: Sequence[Any], *, wide: Any = np.float64):
    """Returns a function's exact results, and how far each element may be from them.

    Where a value lies between two numbers of a smaller dtype, a rounding of the
    arithmetic decides to which of both the author's cast takes it. Such elements are
    found by two further evaluations, in which everything that the author rounds is a
    little larger, or smaller.
    """
    evaluator = Evaluator(wide)
    exact = evaluator.run(closed.jaxpr, closed.consts, args)
    if not evaluator.cuts:
        return [(value, np.zeros(np.shape(value))) for value in exact]
    up, down = (
        Evaluator(wide, nudge).run(closed.jaxpr, closed.consts, args)
        for nudge in (_NUDGE, -_NUDGE)
    )
    with np.errstate(invalid="ignore"):
        slack = [
            np.abs(more - value) + np.abs(less - value)
            if is_float(value.dtype)
            else np.zeros(value.shape)
            for value, more, less in zip(exact, up, down, strict=True)
        ]
    return list(zip(exact, slack, strict=True))


def is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.extended)


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or dtype == np.longdouble


def _bits(dtype: Any) -> int:
    return jnp.finfo(dtype).nmant


def _named_precision(params: Any) -> Any:
    sizes = {(8, 7): jnp.bfloat16, (5, 10): jnp.float16, (8, 23): jnp.float32}
    return sizes[params["exponent_bits"], params["mantissa_bits"]]


def _by_jax(eqn: Any, values: list[Any]) -> Any:
    """Applies a primitive that has no definition here, in float64."""
    params = dict(eqn.params)
    for key in ("new_dtype", "preferred_element_type", "dtype"):
        if params.get(key) is not None and is_float(params[key]):
            params[key] = np.dtype(np.float64)
    with jax.enable_x64(True):
        narrow = [
            v if is_key(v) or not is_float(v.dtype) else v.astype(np.float64)
            for v in values
        ]
        if eqn.primitive.name == "scatter-add":
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices")
            options = {name: params[name] for name in (*names, "mode")}
            return np.asarray(lax.scatter_add(*map(jnp.asarray, narrow), **options))
        result = eqn.primitive.bind(*map(jnp.asarray, narrow), **params)
    if eqn.primitive.multiple_results:
        return [r if is_key(r) else np.asarray(r) for r in result]
    return result if is_key(result) else np.asarray(result)


def _dot_general(eqn: Any, x: Any, y: Any) -> Any:
    (in_x, in_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    of_x, of_y = list(range(x.ndim)), list(range(x.ndim, x.ndim + y.ndim))
    for i, j in (*zip(in_x, in_y, strict=True), *zip(batch_x, batch_y, strict=True)):
        of_y[j] = of_x[i]
    free = [d for i, d in enumerate(of_x) if i not in (*in_x, *batch_x)]
    free += [d for j, d in enumerate(of_y) if j not in (*in_y, *batch_y)]
    return np.einsum(x, of_x, y, of_y, [*(of_x[i] for i in batch_x), *free])


def _gather(eqn: Any, table: Any, rows: Any) -> Any:
    """Gathers the places of elements with JAX, and then the elements."""
    params = eqn.params
    places = np.arange(table.size, dtype=np.int32).reshape(table.shape)
    taken = np.asarray(
        lax.gather(
            places,
            rows,
            params["dimension_numbers"],
            params["slice_sizes"],
            mode=params["mode"],
            fill_value=-1,
        )
    )
    fill = params["fill_value"]
    if fill is None and is_float(table.dtype):
        fill = np.nan
    found = table.reshape(-1)[np.clip(taken, 0, None)] if table.size else taken
    return found if fill is None else np.where(taken < 0, fill, found)


def _broadcast(eqn: Any, value: Any) -> Any:
    shape = eqn.params["shape"]
    ones = [1] * len(shape)
    for place, size in zip(
        eqn.params["broadcast_dimensions"], value.shape, strict=True
    ):
        ones[place] = size
    return np.broadcast_to(value.reshape(ones), shape)


def _convert(eqn: Any, value: Any) -> Any:
    dtype = eqn.params["new_dtype"]
    return value if is_float(dtype) else value.astype(dtype)


def _select(eqn: Any, which: Any, *cases: Any) -> Any:
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _slice(eqn: Any, value: Any) -> Any:
    steps = eqn.params["strides"] or (1,) * value.ndim
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    return value[tuple(map(slice, starts, limits, steps))]


def _pad(eqn: Any, value: Any, fill: Any) -> Any:
    widths = eqn.params["padding_config"]
    if any(inner or low < 0 or high < 0 for low, high, inner in widths):
        return _by_jax(eqn, [value, fill])
    edges = [(low, high) for low, high, _ in widths]
    return np.pad(value, edges, constant_values=fill)


def _iota(eqn: Any) -> Any:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    ones = [1] * len(shape)
    ones[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis]).reshape(ones), shape)


def _split(eqn: Any, value: Any) -> Any:
    ends = np.cumsum(eqn.params["sizes"])[:-1]
    return np.split(value, ends, axis=eqn.params["axis"])


def _cumsum(eqn: Any, value: Any) -> Any:
    axis, back = eqn.params["axis"], eqn.params["reverse"]
    value = np.flip(value, axis) if back else value
    total = np.cumsum(value, axis, dtype=value.dtype)
    return np.flip(total, axis) if back else total


def _shift(function: Callable[..., Any]) -> Callable[..., Any]:
    """Shifts bits; as many as there are, or more, leave none."""

    def apply(eqn: Any, value: Any, by: Any) -> Any:
        bits = 8 * value.dtype.itemsize
        unsigned = np.dtype(f"u{value.dtype.itemsize}")
        wide = value.view(unsigned) if value.ndim else value.astype(unsigned)
        by = np.broadcast_to(np.asarray(by).astype(np.int64), wide.shape)
        kept = (by >= 0) & (by < bits)
        shifted = function(wide, np.where(kept, by, 0).astype(unsigned))
        return np.where(kept, shifted, 0).astype(unsigned).astype(value.dtype)

    return apply


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(eqn: Any, *values: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*values)

    return apply


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, value: function(value, axis=tuple(eqn.params["axes"]))


def _expand(eqn: Any, value: Any) -> Any:
    return value.reshape(eqn.outvars[0].aval.shape)


NUMPY: dict[str, Callable[..., Any]] = {
    "add": _elementwise(np.add),
    "add_any": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "div": _elementwise(
        lambda x, y: x / y if is_float(np.asarray(x).dtype) else lax.div(x, y)
    ),
    "neg": _elementwise(np.negative),
    "abs": _elementwise(np.abs),
    "sign": _elementwise(np.sign),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "exp": _elementwise(np.exp),
    "log": _elementwise(np.log),
    "sin": _elementwise(np.sin),
    "cos": _elementwise(np.cos),
    "tanh": _elementwise(np.tanh),
    "sqrt": _elementwise(np.sqrt),
    "rsqrt": _elementwise(lambda x: 1 / np.sqrt(x)),
    "logistic": _elementwise(lambda x: 1 / (1 + np.exp(-x))),
    "floor": _elementwise(np.floor),
    "ceil": _elementwise(np.ceil),
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "xor": _elementwise(np.bitwise_xor),
    "not": _elementwise(np.invert),
    "shift_left": _shift(np.left_shift),
    "shift_right_logical": _shift(np.right_shift),
    "cumsum": _cumsum,
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "is_finite": _elementwise(np.isfinite),
    "square": _elementwise(np.square),
    "integer_pow": lambda eqn, x: x ** eqn.params["y"],
    "pow": _elementwise(np.power),
    "clamp": _elementwise(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "reduce_sum": _reduce(np.sum),
    "reduce_max": _reduce(np.max),
    "reduce_precision": lambda eqn, x: x,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "reshape": _expand,
    "squeeze": _expand,
    "expand_dims": _expand,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "bitcast_convert_type": lambda eqn, x: x.view(eqn.params["new_dtype"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "pad": _pad,
    "iota": _iota,
    "gather": _gather,
    "dot_general": _dot_general,
    "stop_gradient": lambda eqn, x: x,
    "optimization_barrier": lambda eqn, *xs: xs,
    "name": lambda eqn, x: x,
    "copy": lambda eqn, x: x,
    "copy_p": lambda eqn, x: x,
}
