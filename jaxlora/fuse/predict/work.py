"""Counts the arithmetic of one equation of a jaxpr, and says how XLA treats it."""

import dataclasses
import enum
import math
from typing import Any

from jax.extend import core

# Integer operations of Threefry-2x32 for each output: 20 rounds of an addition, a
# rotation and an exclusive or, the additions of the key, and the two counters. XLA's
# program for an H200 has 83 of them beside those that it folds.
THREEFRY_OPERATIONS = 83
_OTHER_GENERATOR_OPERATIONS = 10  # of Philox, which the GPU's own generators use
_FUNCTION_OPERATIONS = 8  # of an exponential and other functions in software


class Kind(enum.Enum):
    """The way in which XLA runs an equation.

    Attributes:
        MATMUL: A matrix product, which is a kernel by itself.
        MAP: Element-wise; fuses with its neighbours into a loop.
        REDUCE: Sums or maxima; fuses with what it reads, not with what reads it.
        VIEW: Another shape or order of a tensor, which costs nothing by itself.
        KERNEL: Anything else that is a kernel by itself.
        INPUT: An argument or a constant of the function.
        OUTPUT: The results of the function.
    """

    MATMUL = "matmul"
    MAP = "map"
    REDUCE = "reduce"
    VIEW = "view"
    KERNEL = "kernel"
    INPUT = "input"
    OUTPUT = "output"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Arithmetic of an equation, by the units that do it.

    Attributes:
        matmul_flops: Multiplications and additions of matrix products.
        vector_operations: Element-wise operations.
        integer_operations: Integer operations of random bits.
    """

    matmul_flops: float = 0.0
    vector_operations: float = 0.0
    integer_operations: float = 0.0

    def __add__(self, other: "Arithmetic") -> "Arithmetic":
        return Arithmetic(
            matmul_flops=self.matmul_flops + other.matmul_flops,
            vector_operations=self.vector_operations + other.vector_operations,
            integer_operations=self.integer_operations + other.integer_operations,
        )

    def __mul__(self, factor: float) -> "Arithmetic":
        return Arithmetic(
            matmul_flops=factor * self.matmul_flops,
            vector_operations=factor * self.vector_operations,
            integer_operations=factor * self.integer_operations,
        )

    @property
    def flops(self) -> float:
        """All operations together."""
        return self.matmul_flops + self.vector_operations + self.integer_operations


NO_ARITHMETIC = Arithmetic()

_MATMULS = {
    "dot_general",
    "ragged_dot_general",
    "conv_general_dilated",
    "scaled_dot",
}
_VIEWS = {
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "broadcast_in_dim",
    "copy",
    "stop_gradient",
    "optimization_barrier",
    "name",
    "random_wrap",
    "random_unwrap",
    "pvary",
    "pcast",
    "mesh_cast",
    "sharding_constraint",
    "reduce_precision",
    "iota",
    "split",
}
_REDUCTIONS = {
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "argmax",
    "argmin",
}
_KERNELS = {
    "cumsum",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "sort",
    "top_k",
    "fft",
    "pallas_call",
    "scatter",
    "scatter_add",
    "scatter-add",
    "scatter_mul",
    "reduce_window",
    "reduce_window_sum",
    "ffi_call",
    "custom_call",
    "triangular_solve",
    "cholesky",
    "all_gather",
    "psum",
    "psum_invariant",
    "reduce_scatter",
    "all_to_all",
    "ppermute",
}
_FUNCTIONS = {
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "tanh",
    "logistic",
    "sin",
    "cos",
    "tan",
    "erf",
    "erf_inv",
    "erfc",
    "rsqrt",
    "sqrt",
    "cbrt",
    "pow",
}
_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def kind_of(equation: core.JaxprEqn) -> Kind:
    """Returns how XLA treats an equation."""
    name = equation.primitive.name
    for names, kind in (
        (_MATMULS, Kind.MATMUL),
        (_VIEWS, Kind.VIEW),
        (_REDUCTIONS, Kind.REDUCE),
        (_KERNELS, Kind.KERNEL),
    ):
        if name in names:
            return kind
    return Kind.MAP


def is_random(equation: core.JaxprEqn) -> bool:
    """Tells whether an equation draws random bits."""
    return equation.primitive.name in _RANDOM


def arithmetic_of(equation: core.JaxprEqn) -> Arithmetic:
    """Counts the arithmetic of an equation; views and copies have none."""
    name, kind = equation.primitive.name, kind_of(equation)
    if is_random(equation):
        return Arithmetic(integer_operations=_random_operations(equation))
    if kind is Kind.MATMUL:
        return Arithmetic(matmul_flops=_matmul_flops(equation))
    if kind is Kind.VIEW:
        return NO_ARITHMETIC
    values = equation.invars if kind is Kind.REDUCE else equation.outvars
    elements = max((_size(v) for v in values), default=0)
    each = _FUNCTION_OPERATIONS if name in _FUNCTIONS else 1
    return Arithmetic(vector_operations=each * elements)


def shape_of(value: core.Var | core.Literal) -> tuple[int, ...]:
    """Returns the shape of a value of a jaxpr; () if it has none."""
    return tuple(getattr(value.aval, "shape", ()))


def dtype_of(value: core.Var | core.Literal) -> Any:
    """Returns the dtype of a value of a jaxpr; None if it has none."""
    return getattr(value.aval, "dtype", None)


def _size(value: core.Var | core.Literal) -> int:
    return math.prod(shape_of(value))


def _random_operations(equation: core.JaxprEqn) -> float:
    words = sum(
        _size(v) * max(dtype_of(v).itemsize / 4, 1)
        for v in equation.outvars
        if dtype_of(v).kind == "u"
    )
    # Typed keys name their generator.
    generator = str(dtype_of(equation.invars[0]))
    is_threefry = equation.primitive.name == "threefry2x32" or "fry" in generator
    return words * (THREEFRY_OPERATIONS if is_threefry else _OTHER_GENERATOR_OPERATIONS)


def _matmul_flops(equation: core.JaxprEqn) -> float:
    left, right = map(shape_of, equation.invars[:2])
    output = _size(equation.outvars[0])
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * output * math.prod(left[i] for i in contracted)
    if name == "conv_general_dilated":
        features = right[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * output * math.prod(right) / features
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        flops = 2.0 * output * math.prod(left[i] for i in contracted)
        # Where the rows of each group are summed, a row belongs to one group only.
        is_sum = set(numbers.lhs_ragged_dimensions) <= set(contracted)
        return flops / _size(equation.invars[2]) if is_sum else flops
    return 2.0 * output * left[-1]
