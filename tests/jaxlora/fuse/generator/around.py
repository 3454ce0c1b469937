"""JAX's transforms around a function of named arrays, and the same without them.

Each transform is a pair. The first is what a user writes. The second computes the same
by loops in Python, so that the reference does not depend on how JAX batches or shards.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tests.jaxlora.fuse.generator.body import Arrays, by_row
from tests.jaxlora.fuse.generator.draw import Draw

Function = Callable[[Arrays], Any]
PARTS = 2  # into which rows are split
AXIS = "data"


def split_floats(p: Arrays) -> tuple[Arrays, Arrays]:
    """Splits arguments into those that have a gradient, and the others."""
    is_float = lambda v: jnp.issubdtype(v.dtype, jnp.floating)
    floats = {name: v for name, v in p.items() if is_float(v)}
    return floats, {name: v for name, v in p.items() if name not in floats}


def cotangent(y: Any) -> Any:
    """A cotangent of a result, the same for all results of a shape and dtype."""
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return np.zeros(y.shape, jax.dtypes.float0)
    rng = np.random.default_rng(y.size)
    return jnp.asarray(rng.normal(size=y.shape), y.dtype)


def gradient(function: Function) -> Function:
    """Returns the function of all gradients of a function."""

    def gradients(p: Arrays) -> Arrays:
        floats, others = split_floats(p)

        def loss(floats):
            leaves = jax.tree.leaves(function(floats | others))
            leaves = [y for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)]
            return sum(jnp.sum((y * cotangent(y)).astype("float32")) for y in leaves)

        return jax.grad(loss)(floats)

    return gradients


def _chunks(draw: Draw, p: Arrays) -> tuple[Arrays, Arrays]:
    """Splits the arguments into parts of the rows, and those that all parts share."""
    rows = {
        name: p[name].reshape(PARTS, -1, *p[name].shape[1:])
        if p[name].size
        else p[name].reshape(PARTS, p[name].shape[0] // PARTS, *p[name].shape[1:])
        for name in by_row(draw)
        if name in p
    }
    return rows, {name: v for name, v in p.items() if name not in rows}


def _joined(results: Any) -> Any:
    """Joins results that are stacked by part."""
    return jax.tree.map(
        lambda y: y.reshape(PARTS * y.shape[1], *y.shape[2:]) if y.ndim > 1 else y,
        results,
    )


def _in_vmap(draw: Draw, function: Function) -> Function:
    def outer(p):
        rows, shared = _chunks(draw, p)
        axes = dict.fromkeys(rows, 0) | dict.fromkeys(shared)
        return _joined(jax.vmap(function, in_axes=(axes,))(rows | shared))

    return outer


def _in_scan(draw: Draw, function: Function) -> Function:
    def outer(p):
        rows, shared = _chunks(draw, p)
        body = lambda carry, rows: (carry, function(shared | rows))
        return _joined(lax.scan(body, 0, rows)[1])

    return outer


def _in_loop(draw: Draw, function: Function) -> Function:
    def outer(p):
        rows, shared = _chunks(draw, p)
        parts = [
            function(shared | {name: v[i] for name, v in rows.items()})
            for i in range(PARTS)
        ]
        return _joined(jax.tree.map(lambda *ys: jnp.stack(ys), *parts))

    return outer


def _in_cond(draw: Draw, function: Function) -> Function:
    def nothing(p):
        return jax.tree.map(lambda y: y & False if y.dtype == bool else y * 0, x(p))

    x = function
    return lambda p: lax.cond(jnp.sum(p["w"]) < 1e4, function, nothing, p)


def _in_remat(draw: Draw, function: Function) -> Function:
    policies = jax.checkpoint_policies
    policy = {
        "none": None,
        "names": policies.save_only_these_names("s"),
        "dots": policies.dots_saveable,
        "nothing": policies.nothing_saveable,
    }[draw.policy]
    return jax.checkpoint(function, policy=policy)


def _in_custom_vjp(draw: Draw, function: Function) -> Function:
    """The author's rule doubles all gradients, so that its loss can be seen."""

    @jax.custom_vjp
    def doubled(floats, others):
        return function(floats | others)

    def forward(floats, others):
        return doubled(floats, others), (floats, others)

    def backward(residuals, dy):
        floats, others = residuals
        _, vjp = jax.vjp(lambda floats: function(floats | others), floats)
        twice = lambda d: d if d.dtype == jax.dtypes.float0 else 2 * d
        return *vjp(jax.tree.map(twice, dy)), None

    doubled.defvjp(forward, backward)
    return lambda p: doubled(*split_floats(p))


def _in_shard_map(draw: Draw, function: Function) -> Function:
    def local(p):
        if draw.collective == "all_gather":
            p = p | {"w": lax.all_gather(p["w"], AXIS, tiled=True)}
        y, *rest = jax.tree.leaves(function(p))
        if draw.collective == "psum":
            y = y + _share(y, lax.psum(jnp.sum(y, 0), AXIS))
        elif draw.collective == "axis_index":
            y = y * (1 + lax.axis_index(AXIS)).astype(y.dtype)
        return (y, *rest)

    def outer(p):
        mesh = Mesh(np.array(jax.devices()[:PARTS]), (AXIS,))
        rows, whole = PartitionSpec(AXIS), PartitionSpec()
        split = by_row(draw)
        split += ("w",) if draw.collective == "all_gather" else ()
        specs = {name: rows if name in split else whole for name in p}
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=rows,
            check_vma=draw.check_vma,
        )(p)

    return outer


def _share(y, total):
    return jnp.asarray(0.125, y.dtype) * total


def _in_shards(draw: Draw, function: Function) -> Function:
    def outer(p):
        rows, shared = _chunks(draw, p)
        parts = []
        for i in range(PARTS):
            local = shared | {name: v[i] for name, v in rows.items()}
            parts.append(jax.tree.leaves(function(local)))
        if draw.collective == "psum":
            total = sum(jnp.sum(part[0], 0) for part in parts)
            parts = [[y + _share(y, total), *rest] for y, *rest in parts]
        elif draw.collective == "axis_index":
            parts = [[y * (1 + i), *rest] for i, (y, *rest) in enumerate(parts)]
        return tuple(_joined(jnp.stack(ys)) for ys in zip(*parts, strict=True))

    return outer


_KEEP = lambda draw, function: function
TRANSFORMS: dict[str, tuple[Any, Any]] = {
    "jit": (lambda draw, function: jax.jit(function), _KEEP),
    "vmap": (_in_vmap, _in_loop),
    "scan": (_in_scan, _in_loop),
    "cond": (_in_cond, _KEEP),
    "remat": (_in_remat, _KEEP),
    "custom_vjp": (_in_custom_vjp, _in_custom_vjp),
    "shard_map": (_in_shard_map, _in_shards),
}


def inside(draw: Draw, function: Function, *, plain: bool = False) -> Function:
    """Returns the function that `fuse` is given."""
    for name in reversed(draw.around):
        function = TRANSFORMS[name][plain](draw, function)
    return gradient(function) if draw.gradient else function


def outside(draw: Draw, function: Function, *, plain: bool = False) -> Function:
    """Returns a function with the transforms around what `fuse` returns."""
    for name in reversed(draw.outside):
        function = TRANSFORMS[name][plain](draw, function)
    return function


def values(draw: Draw, function: Function) -> Callable[[Arrays], Arrays]:
    """Returns a function's results, with its gradients unless it returns gradients."""

    if draw.gradient:
        return lambda p: {f"gradient of {k}": v for k, v in function(p).items()}
    return with_gradients(function)


def with_gradients(function: Function) -> Callable[[Arrays], Arrays]:
    """Returns a function's results and the gradients of all its floats, by name."""

    def both(p: Arrays) -> Arrays:
        floats, others = split_floats(p)
        results, vjp = jax.vjp(lambda floats: function(floats | others), floats)
        (gradients,) = vjp(jax.tree.map(cotangent, results))
        named = {f"result {i}": y for i, y in enumerate(jax.tree.leaves(results))}
        return named | {f"gradient of {k}": v for k, v in gradients.items()}

    return both
