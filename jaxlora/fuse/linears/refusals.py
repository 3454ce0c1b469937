"""Reasons for which the kernels cannot take the place of a linear with branches."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.linears.open_sums import PRODUCTS
from jaxlora.fuse.normal_forms.forms import holds, narrower
from jaxlora.fuse.site import Linear

KERNEL_DTYPES = tuple(map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


def weight_reason(linear: Linear, graph: Graph) -> str | None:
    """Returns why the weights of a linear are not parameters; None: they may be."""
    weight: Any = linear.w.var.aval

    def is_smaller(var: Any) -> bool:  # such as the scales of a weight
        return getattr(var.aval, "size", 0) < weight.size

    for var in graph.ancestors([linear.w.var], stops=is_smaller):
        eqn = graph.equation(var)
        if eqn and eqn.primitive.name in PRODUCTS and not is_smaller(var):
            return (
                "its weight is the result of another matrix product, as in attention "
                "scores"
            )
    features = {*linear.in_indices, *linear.out_indices}
    factors = [o for b in linear.branches for o in (*b.a, *b.b)]
    arrays = [f.var for f in (linear.w, *factors) if features & set(f.indices)]
    arrays += [f.var for f in linear.w_scales]
    if any(var is linear.x.var for var in graph.ancestors(arrays)):
        return "its weights are computed from its input"
    return None


def sharding_reason(linear: Linear) -> str | None:
    """Returns why the arrays' shardings keep kernels from reading rows of tokens."""
    branches = [o.var for b in linear.branches for o in (*b.a, *b.b)]
    scales = [f.var for f in (*linear.w_scales, *linear.scales)]
    for atom in (linear.x.var, linear.w.var, *scales, *branches):
        aval: Any = atom.aval
        if any(axis is not None for axis in aval.sharding.spec):
            return (
                f"it reads {aval.str_short(short_dtypes=True)}, which is sharded over "
                "explicit axes of a mesh: call jaxlora.fuse inside jax.shard_map"
            )
    return None


def rounding_reason(linear: Linear) -> str | None:
    """Returns why the kernels' result would be less exact than the original."""
    kernel, rounded = linear.x.dtype, linear.base.rounded
    if kernel not in KERNEL_DTYPES:
        able = ", ".join(map(str, KERNEL_DTYPES))
        return f"its dtype is {kernel}, and the kernels compute in {able}"
    if linear.w.dtype != kernel:
        return f"x is {kernel} and w is {linear.w.dtype}; kernels need one dtype"
    assert rounded is not None
    if not holds(kernel, rounded):
        return f"its sum is kept in {rounded}, and the kernels round it to {kernel}"
    for branch in linear.branches:
        dtype = branch.term.rounded
        if dtype is None or holds(kernel, dtype):
            continue
        if dtype.itemsize <= kernel.itemsize:
            return f"its branch is rounded to {dtype}, and the kernels use {kernel}"
        else:
            return (
                f"its branch is summed in {dtype}, and the kernels would round it and "
                f"its gradients to {kernel}. Cast x, A and B to {kernel} first"
            )
    if is_restored(linear):
        return (
            f"a sum in it is rounded to {_narrowest(linear)} and cast to a larger "
            "dtype, and the kernels would not round it"
        )
    return None


def is_restored(linear: Linear) -> bool:
    """Whether a sum was rounded to less than the kernels or the result hold.

    A sum that is rounded to the kernels' own dtype, and cast to a larger one to be
    scaled, is only rounded once less by the kernels.
    """
    kernel, rounded = linear.x.dtype, _narrowest(linear)
    result: Any = linear.root.aval
    is_exact = rounded is None or (
        holds(rounded, kernel) and holds(kernel, result.dtype)
    )
    return any(term.restored for term in linear.terms) and not is_exact


def _narrowest(linear: Linear) -> np.dtype | None:
    """Returns the smallest dtype to which a sum in a linear is rounded."""
    return functools.reduce(narrower, (term.rounded for term in linear.terms))
