"""A back end in plain JAX that also computes s beside row-wise functions.

It computes each op by its definition, so that regions can be tested without kernels.
"""

import functools
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from jaxlora.pallas_kernels import BACKENDS, Backend
from jaxlora.pallas_kernels.xla import layer as xla

NAME = "reference"


def _kept(x, projection, slot):
    blocks = x.reshape(slot.shape[0], -1, x.shape[1])
    if projection.dropout is None:
        return blocks
    return jnp.where(projection.dropout.keep(slot, x.shape), blocks, 0)


def _narrow(x, tables, projection, slot):
    """`factor * x A` by token block, rounded to the dtype of x: s, or ds."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    s = product("btk,bkr->btr", x, tables.astype(x.dtype)[slot])
    s = s * projection.factor[slot][:, None, None]
    return s.astype(x.dtype).reshape(-1, s.shape[2])


def forward(x, projections, layer, block_adapter, *, w_transposed, s=None):
    if s is None:
        s = shrink(x, projections, block_adapter)
    slot = jnp.maximum(block_adapter, 0)
    ys = []
    for p, narrow in zip(projections, s, strict=True):
        w = p.dense_w[layer[0]]
        base = jnp.matmul(
            x, w.T if w_transposed else w, preferred_element_type=jnp.float32
        )
        blocks = narrow.reshape(slot.shape[0], -1, narrow.shape[1])
        b = p.b.astype(x.dtype)[slot]
        y = base + jnp.einsum(
            "btr,brn->btn", blocks, b, preferred_element_type=jnp.float32
        ).reshape(base.shape)
        if p.bias is not None:
            y = y + p.bias
        ys.append(y.astype(x.dtype))
    return ys, list(s)


def backward(dy, x, projections, s, layer, block_adapter, *, w_transposed, ds=None):
    """Uses ds if it is given; a wrong one shows in the gradients."""
    blocks = [one.reshape(block_adapter.shape[0], -1, one.shape[1]) for one in s]
    rest = blocks, layer, block_adapter
    if ds is None:
        return xla.backward(dy, x, projections, *rest, w_transposed=w_transposed)
    slot = jnp.maximum(block_adapter, 0)
    num = projections[0].a.shape[0]
    mine = (block_adapter == jnp.arange(num)[:, None])[:, :, None, None]
    dx, gradients = 0.0, []
    for d, p, narrow, one in zip(dy, projections, s, ds, strict=True):
        w = p.dense_w[layer[0]]
        d_blocks = d.reshape(slot.shape[0], -1, d.shape[1])
        one = one.reshape(slot.shape[0], -1, one.shape[1]).astype(jnp.float32)
        narrow = narrow.reshape(one.shape)
        db = jnp.einsum("btr,btn->brn", narrow, d_blocks.astype(jnp.float32))
        da = jnp.einsum("btk,btr->bkr", _kept(x, p, slot).astype(jnp.float32), one)
        through = jnp.einsum("btr,bkr->btk", one, p.a.astype(x.dtype)[slot])
        if p.dropout is not None:
            through = jnp.where(p.dropout.keep(slot, x.shape), through, 0)
        spec = "tn,nk->tk" if w_transposed else "tn,kn->tk"
        base = jnp.einsum(spec, d, w, preferred_element_type=jnp.float32)
        dx = dx + base + through.reshape(x.shape)
        sums = [jnp.where(mine, v, 0).sum(axis=1) for v in (da, db)]
        gradients.append(dict(zip("ab", sums, strict=True)))
    return dx.astype(x.dtype), gradients


def shrink(x, projections, block_adapter):
    slot = jnp.maximum(block_adapter, 0)
    return [_narrow(_kept(x, p, slot), p.a, p, slot) for p in projections]


def produce(function, arguments, projections, block_adapter, *, is_gradient):
    rows = [row[:, None] for row in arguments.rows]
    features = [feature[None] for feature in arguments.features]
    results = list(function(*arguments.tiles, *rows, *features))
    if not is_gradient:
        return results, shrink(results[0], projections, block_adapter)
    slot = jnp.maximum(block_adapter, 0)
    split = lambda d: d.reshape(slot.shape[0], -1, d.shape[1])
    return results, [
        _narrow(split(d), p.b.transpose(0, 2, 1), p, slot)
        for d, p in zip(results, projections, strict=True)
    ]


def unsupported(function, arguments, projections, *, is_gradient):
    del function, arguments, projections, is_gradient


REFERENCE = Backend(
    name=NAME,
    forward=forward,
    backward=backward,
    unsupported=xla.unsupported,
    produce=produce,
    unsupported_producer=unsupported,
    stores_masks=True,
    is_plain=True,
    partitionable=True,
)


@pytest.fixture
def reference(monkeypatch) -> Iterator[str]:
    """Adds the back end to the table; returns its name."""
    monkeypatch.setitem(BACKENDS, NAME, REFERENCE)
    yield NAME
