"""The linear that a draw describes, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.jaxlora.fuse.generator.draw import Draw

NUMBER = 1.75
Arrays = dict[str, Any]


def arguments(draw: Draw) -> Arrays:
    """Returns the arguments of a draw's linear, by name."""
    rng = np.random.default_rng(draw.seed)
    k, n, r, g = draw.sizes
    table = () if draw.choice == "none" else (g,)

    def normal(*shape, dtype, size=None):
        size = (shape[-2] or 1) ** -0.5 if size is None and len(shape) > 1 else size
        return jnp.asarray(rng.normal(size=shape) * (size or 1.0), dtype)

    made: Arrays = {
        "x": normal(*draw.rows, k, dtype=draw.x_dtype or draw.dtype, size=1.0),
        "w": normal(k, n, dtype=draw.dtype),
        "a": normal(*table, k, r, dtype=draw.lora_dtype),
        "b": normal(*table, r, n, dtype=draw.lora_dtype),
    }
    if draw.bias != "none":
        made["bias"] = normal(n, dtype=draw.bias_dtype, size=draw.bias_size)
    if draw.second:
        made |= {
            "w2": normal(k, n, dtype=draw.dtype),
            "a2": normal(k, r, dtype=draw.lora_dtype),
            "b2": normal(r, n, dtype=draw.lora_dtype),
        }
    if draw.magnitude != "none":
        made["m"] = jnp.asarray(rng.uniform(0.5, 2.0, n), draw.dtype)
    if draw.dropout != "none":
        made["key"] = jax.random.key(draw.seed)
    shapes = {
        "scalar": (),
        "rank": (r,),
        "column": (n,),
        "feature": (k,),
        "row": (*draw.rows, 1),
        "adapter": (g,),
    }
    if draw.scale in shapes:
        size = rng.uniform(0.5, 2.0, shapes[draw.scale])
        made["scale"] = jnp.asarray(size, draw.scale_dtype)
    if draw.choice not in ("none", "ragged"):
        made["ids"] = jnp.asarray(_ids(draw, rng))
    return made | _transposed(draw, made)


def _transposed(draw: Draw, p: Arrays) -> Arrays:
    """The weights that are stored transposed, as they are not stored in `p`."""
    return {name: jnp.swapaxes(p[name], -1, -2) for name in draw.stored}


def _ids(draw: Draw, rng: np.random.Generator) -> np.ndarray:
    """One id for each row of a matrix, or for each sequence of a batch."""
    g, dtype = draw.sizes[3], np.dtype(draw.ids_dtype)
    most = np.iinfo(dtype).max if dtype.kind in "iu" else 2**20
    low, high = 0, min(g, most)
    if draw.ids in ("negative", "both"):
        low = -min(g, most)
    if draw.ids in ("outside", "both"):
        high = min(g + 3, most)
        low = low and max(low - 3, -most)
    ids = rng.integers(low, max(high, low + 1), draw.rows[:1])
    if ids.size > 2 and high - 1 <= most:
        ids[0], ids[-1] = low, high - 1
    if dtype.kind == "f":
        return (ids + 0.5 * (rng.random(ids.shape) < 0.3)).astype(dtype)
    return ids.astype(dtype)


def by_row(draw: Draw) -> tuple[str, ...]:
    """Names of the arguments whose first dimension is that of x."""
    return ("x", "ids", "scale") if draw.scale == "row" else ("x", "ids")


def linear(draw: Draw, p: Arrays) -> tuple[Any, ...]:
    """Computes the linear, and what else the draw returns."""
    extra: dict[str, Any] = {}
    p = p | _transposed(draw, p)
    x = _rounded(draw, "x", p["x"])
    w = _rounded(draw, "w", p["w"])
    a, b = p["a"], p["b"]
    if draw.choice == "ragged":
        p = p | {"sizes": _group_sizes(x.shape[0], a.shape[0])}
    if draw.cast_lora:
        a, b = a.astype(x.dtype), b.astype(x.dtype)
    a = _scaled(draw, "a", _rounded(draw, "a", a), p)
    b = _scaled(draw, "b", b, p)
    if draw.order == "merged":
        y = _dot(draw, "base", x, w - a @ b if draw.minus else w + a @ b)
        return _finished(draw, y, x, p, extra)
    base_x, branch_x = _inputs(draw, x, p, extra)
    base = _dot(draw, "base", base_x, w)
    if draw.fault.startswith("series"):
        branch_x = base
        base = _dot(draw, "base", base, w) if "wide" in draw.fault else base
    elif draw.fault == "attention":
        base = base @ jnp.swapaxes(base, -1, -2)
        b = jnp.swapaxes(_dot(draw, "s", base_x, a), -1, -2)
    branch = _branch(draw, branch_x, a, b, p, extra)
    if draw.fault == "base has a reader":
        extra["base"] = base
    y = _sum(draw, base, branch, p)
    return _finished(draw, y, x, p, extra)


def _group_sizes(rows: int, groups: int):
    """The first adapter has a third of the rows and the last has the others."""
    sizes = np.zeros(groups, np.int32)
    if groups:
        sizes[0], sizes[-1] = rows // 3, rows - rows // 3
    return jnp.asarray(sizes)


def _finished(draw, y, x, p, extra) -> tuple[Any, ...]:
    y = _rounded(draw, "sum", y)
    if draw.bias in ("after", "both") and draw.fault != "attention":
        y = y + p["bias"]
    if draw.post == "tanh":
        y = jnp.tanh(y)
    elif draw.post == "residual":
        y = y + jnp.sum(x, axis=-1, keepdims=True)
    elif draw.post != "none":
        y = y.astype(draw.post)
    if draw.second:
        extra["y2"] = x @ p["w2"] + NUMBER * (x @ p["a2"]) @ p["b2"]
    return (y, *extra.values())


def _sum(draw, base, branch, p):
    if draw.times != 1.0:
        base = draw.times * base
    if draw.bias in ("before", "both") and draw.fault != "attention":
        base = base + p["bias"]
    base, branch = _rounded(draw, "base", base), _rounded(draw, "branch", branch)
    if draw.constraint:
        base, branch = _constrained(base), _constrained(branch)
    if draw.fault == "multiplied":
        return base * branch
    if draw.fault == "branch twice":
        base = base + branch
    if draw.magnitude != "none":
        return _magnified(draw, base, -branch if draw.minus else branch, p["m"])
    if draw.minus:
        return -branch + base if draw.branch_first else base - branch
    return branch + base if draw.branch_first else base + branch


def _magnified(draw, base, branch, m):
    if draw.magnitude == "sum":
        return m * (base + branch)
    if draw.magnitude == "both":
        return base * m + branch * m
    offset = m - 1
    if draw.magnitude == "rounded":
        offset = offset.astype("bfloat16").astype(m.dtype)
    return base + (offset * base + m * branch)


def _constrained(value):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data", *[None] * (value.ndim - 1))
    return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def _branch(draw, x, a, b, p, extra):
    if draw.order == "ab" and draw.choice == "none":
        return _scaled(draw, "branch", _dot(draw, "branch", x, a @ b), p)
    choose = CHOOSE[draw.choice]
    s = choose(draw, "s", x, a, p)
    s = _scaled(draw, "s", _rounded(draw, "s", s), p)
    if draw.policy == "names":
        s = checkpoint_name(s, "s")
    if draw.fault == "activation of s":
        s = jnp.tanh(s)
    elif draw.fault == "normalised s":
        s = s / jnp.sqrt(1e-6 + jnp.mean(s * s, axis=-1, keepdims=True))
    elif draw.fault == "stopped s":
        s = lax.stop_gradient(s)
    elif draw.fault == "s has a reader":
        extra["s"] = s
    if draw.fault == "b of another adapter":
        b = jnp.roll(b, 1, axis=0)
    branch = choose(draw, "branch", s, b, p)
    branch = _scaled(draw, "branch", branch, p)
    if draw.fault == "activation of branch":
        branch = jnp.tanh(branch)
    elif draw.fault == "stopped branch":
        branch = lax.stop_gradient(branch)
    elif draw.fault == "branch has a reader":
        extra["branch"] = branch
    return branch


def _rounded(draw: Draw, name: str, value):
    for place, dtype in draw.roundings:
        if place == name and dtype == "reduced":
            value = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
        elif place == name:
            value = value.astype(dtype).astype(value.dtype)
    return value


def _scaled(draw: Draw, name: str, value, p):
    if draw.scale_at != name:
        return value
    if draw.scale in ("number", "whole"):
        return (NUMBER if draw.scale == "number" else 2) * value
    scale = p["scale"]
    if draw.scale == "adapter":
        scale = _entries(draw, scale, p["ids"])
        scale = scale.reshape(*scale.shape, *[1] * (value.ndim - scale.ndim))
    return scale * value


def _dot(draw: Draw, name: str, x, w):
    """A product over the last dimension of x and the second last of w."""
    options: dict[str, Any] = {}
    for place, dtype in draw.preferred:
        if place == name:
            options["preferred_element_type"] = jnp.dtype(dtype)
    for place, precision in draw.precision:
        if place == name:
            options["precision"] = lax.Precision[precision]
    if w.ndim > 2 and x.ndim == w.ndim - 1:  # a matrix for each row
        return jnp.einsum("tk,tkr->tr", x, w, **options)
    if w.ndim > 2 and x.ndim > w.ndim:
        return jnp.einsum("b...k,bkr->b...r", x, w, **options)
    if w.ndim > 2 or draw.product == "matmul":
        return jnp.matmul(x, w, **options)
    if draw.product == "einsum":
        return jnp.einsum("...k,kn->...n", x, w, **options)
    if draw.product == "dot_general":
        dtype = jnp.promote_types(x.dtype, w.dtype)
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        return lax.dot_general(x.astype(dtype), w.astype(dtype), numbers, **options)
    if draw.product == "left":
        return jnp.moveaxis(jnp.tensordot(w.T, x, (1, x.ndim - 1), **options), 0, -1)
    return jnp.matmul(x, jnp.swapaxes(w.T + 0, 0, 1), **options)


def _inputs(draw: Draw, x, p, extra):
    """Returns what the base reads and what the branch reads."""
    base_x = x
    if draw.fault == "other x":
        x = jnp.flip(x, 0)
    x = _rounded(draw, "branch_x", x)
    if draw.dropout != "none":
        x, kept = _dropped(draw, x, p["key"])
        if draw.mask_reader == "returned":
            extra["mask"] = kept
        elif draw.mask_reader == "other":
            extra["other"] = jnp.where(kept, jnp.sin(base_x), 0)
        elif draw.mask_reader == "base":
            base_x = x
    return base_x, _scaled(draw, "x", x, p)


def _dropped(draw: Draw, x, key):
    shape = {
        "elements": x.shape,
        "rows": (*x.shape[:-1], 1),
        "features": x.shape[-1:],
    }[draw.mask]
    keep = draw.keep
    if draw.dropout == "uniform":
        kept = jax.random.uniform(key, shape) < keep
        return jnp.where(kept, x / keep, 0), kept
    if draw.dropout == "equinox":
        kept = jax.random.bernoulli(key, keep, shape)
        return jnp.where(kept, x / lax.stop_gradient(jnp.asarray(keep)), 0), kept
    kept = jax.random.bernoulli(key, keep, shape)
    if draw.dropout == "select":
        return jnp.where(kept, x / keep, jnp.zeros_like(x)), kept
    if draw.dropout == "divided after":
        return jnp.where(kept, x, 0.0) / keep, kept
    if draw.dropout == "multiplied":
        return kept * x / keep, kept
    return x * (kept.astype(x.dtype) / keep), kept


def _entries(draw: Draw, table, ids):
    """The entries of a table for each id, as a draw's mode reads ids outside."""
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        ids = ids.astype(jnp.int32)
    kind, _, value = draw.mode.partition(" ")
    fill = {"fill_value": float(value)} if value else {}
    if draw.choice == "take":
        mode = None if kind == "default" else kind
        return jnp.take(table, ids, axis=0, mode=mode, **fill)
    if kind == "default":
        return table[ids]
    modes = {"promise": "promise_in_bounds"}
    if kind == "promise":
        ids = jnp.clip(ids, 0, table.shape[0] - 1)
    return table.at[ids].get(mode=modes.get(kind, kind), **fill)


def _by_gather(draw, name, x, table, p):
    return _dot(draw, name, x, _entries(draw, table, p["ids"]))


def _one_hot(draw, table, p):
    return jax.nn.one_hot(p["ids"], table.shape[0], dtype=table.dtype)


def _by_one_hot(draw, name, x, table, p):
    chosen = _one_hot(draw, table, p)
    return jnp.einsum("t...k,gkr,tg->t...r", x, table, chosen)


def _by_one_hot_of_tables(draw, name, x, table, p):
    chosen = jnp.einsum("tg,gkr->tkr", _one_hot(draw, table, p), table)
    return _dot(draw, name, x, chosen)


def _by_comparison(draw, name, x, table, p):
    chosen = p["ids"][:, None] == jnp.arange(table.shape[0])
    return jnp.einsum("t...k,gkr,tg->t...r", x, table, chosen.astype(table.dtype))


def _by_ragged_dot(draw, name, x, table, p):
    dtype = jnp.promote_types(x.dtype, table.dtype)
    return lax.ragged_dot(x.astype(dtype), table.astype(dtype), p["sizes"])


CHOOSE = {
    "none": lambda draw, name, x, table, p: _dot(draw, name, x, table),
    "gather": _by_gather,
    "take": _by_gather,
    "one hot": _by_one_hot,
    "one hot of tables": _by_one_hot_of_tables,
    "compared": _by_comparison,
    "ragged": _by_ragged_dot,
}
