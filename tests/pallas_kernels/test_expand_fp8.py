"""The expand kernel with e4m3 operands, against float32 with the same operands."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import Dropout, dropout_keys, kernel_settings
from jaxlora.pallas_kernels.dropout import mask_words
from jaxlora.pallas_kernels.mosaic.mask import make_mask
from jaxlora.pallas_kernels.mosaic.products import (
    expand_with_outers,
    expand_work,
    outer_work,
    run_expand,
)
from jaxlora.pallas_kernels.operands import Term, make_blocks
from jaxlora.pallas_kernels.quantized.rows import quantize_rows, row_scale
from tests.deviceless import compile_deviceless
from tests.drawn import Draws
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels.fused import ON_HOPPER, mosaic_kernels

SLOTS = np.array([2, -1, 2, 0, 0], np.int32)  # slot 1 has no rows
RANKS, RANK = (8, 3, 80), 128
ROW_SLOT = np.repeat(SLOTS, 64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Operands of P terms in float32, but for the quantized ones."""

    xq: list[jax.Array]
    wq: list[jax.Array]
    s: list[jax.Array]
    b: list[jax.Array]
    row_scale: jax.Array
    column_scale: jax.Array | None
    bias: jax.Array | None
    dropout: list[Dropout]

    def is_kept(self, p: int) -> Any:
        if not self.dropout:
            return True
        shape = len(ROW_SLOT), len(self.wq[p])
        kept = self.dropout[p].keep(jnp.maximum(SLOTS, 0), shape)
        return kept.reshape(shape)

    def masks(self) -> list:
        if not self.dropout:
            return []
        keys = jnp.stack([drop.given_key() for drop in self.dropout])
        token, n = self.dropout[0].token_index, len(self.wq[0])
        return list(map(make_mask, mask_words(keys, jnp.asarray(SLOTS), token, n)))

    def settings(self) -> list:
        shape = len(self.xq), len(RANKS)
        rates = [drop.rate for drop in self.dropout]
        return kernel_settings(
            jnp.ones(shape),
            jnp.broadcast_to(jnp.array(RANKS, jnp.int32), shape),
            jnp.stack(rates) if rates else None,
        )


@functools.partial(
    jax.jit,
    static_argnums=(0, 1),
    static_argnames=("features", "n", "columns", "bias", "dropout", "seed"),
)
def problem(
    features, n: int, *, columns=False, bias=False, dropout=False, seed=0
) -> Problem:
    normal = Draws(seed).normal
    t, g = len(ROW_SLOT), len(RANKS)
    x = [normal(t, k) * jnp.exp(normal(t, 1)) for k in features]
    w = [normal(n, k) * k**-0.5 for k in features]
    scale = functools.reduce(jnp.maximum, [row_scale(one) for one in x])
    column_scale = row_scale(w[0]) if columns else jnp.full(n, 0.01)
    live = jnp.arange(RANK) < jnp.array(RANKS)[:, None]
    tokens = jnp.arange(t, dtype=jnp.int32)
    step = jnp.zeros(g, jnp.int32)
    return Problem(
        xq=[quantize_rows(one, scale) for one in x],
        wq=[quantize_rows(one, column_scale) for one in w],
        s=[normal(t, RANK) * live[jnp.maximum(ROW_SLOT, 0)] for _ in features],
        b=[0.3 * normal(g, n, RANK) * live[:, None] for _ in features],
        row_scale=scale,
        column_scale=column_scale if columns else None,
        bias=normal(n) if bias else None,
        dropout=[
            Dropout(
                dropout_keys(step, step, layer=0, projection=p),
                jnp.array([0.5, 0.0, 0.2]),
                tokens,
            )
            for p in range(len(features) if dropout else 0)
        ],
    )


def run(p: Problem, *, outers: bool = False):
    """Runs the kernel, alone or in one launch with outer products."""
    blocks, settings, masks = _blocks(), p.settings(), p.masks()
    fold = 1.0 if masks else p.row_scale[:, None]
    s = [(one / fold).astype(jnp.bfloat16) for one in p.s]
    columns = 1.0 if masks or p.column_scale is None else p.column_scale[:, None]
    b = [(one / columns).astype(jnp.bfloat16) for one in p.b]
    w = [one[None] for one in p.wq]
    given = p.xq, w, s, b, settings, masks or [None] * len(s)
    terms = [Term(*one) for one in zip(*given, strict=True)]
    bias = None if p.bias is None else p.bias.astype(jnp.bfloat16)
    scales = tuple(one for one in (p.row_scale, p.column_scale) if one is not None)
    layer = jnp.zeros(1, jnp.int32)
    expand = expand_work(terms, layer, blocks, bias, transposed=True, scales=scales)
    if not outers:
        return run_expand(expand)
    wide = s[0]
    work = outer_work(wide, s, settings, blocks, [], transposed=False)
    return expand_with_outers(expand, [work], blocks)[0]


def _blocks():
    return make_blocks(jnp.asarray(SLOTS), len(RANKS), len(ROW_SLOT))


@functools.partial(jax.jit, static_argnums=1)
def definition(p: Problem, dtype):
    """Computes in float32 with s, B and bias rounded to `dtype`; returns it."""
    exact = functools.partial(jnp.matmul, precision="highest")
    rounded = lambda x: x.astype(dtype).astype(jnp.float32)
    columns = 1.0 if p.column_scale is None else p.column_scale
    y = sum(
        exact(xq.astype(jnp.float32), wq.astype(jnp.float32).T)
        for xq, wq in zip(p.xq, p.wq, strict=True)
    )
    y = y * p.row_scale[:, None] * columns
    for i, (s, b) in enumerate(zip(p.s, p.b, strict=True)):
        own = rounded(b)[jnp.maximum(ROW_SLOT, 0)]
        term = jnp.einsum("tr,tnr->tn", rounded(s), own, precision="highest")
        y = y + jnp.where(p.is_kept(i), term, 0)
    y = y if p.bias is None else y + rounded(p.bias)
    return jnp.where(ROW_SLOT[:, None] < 0, 0, y).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def with_other_rows(p: Problem, slot: int) -> Problem:
    """Changes the rows of all other slots; those of padding become NaN."""

    def change(x):
        x32 = x.astype(jnp.float32).reshape(len(x), -1)
        owner = ROW_SLOT[:, None]
        changed = jnp.where(owner == slot, x32, -x32[:, ::-1])
        changed = jnp.where(owner < 0, jnp.nan, changed)
        return changed.reshape(x.shape).astype(x.dtype)

    return dataclasses.replace(
        p,
        xq=list(map(change, p.xq)),
        s=list(map(change, p.s)),
        row_scale=jnp.abs(change(p.row_scale)),
    )


CASES = {
    "y": ({"features": (128,), "n": 384, "columns": True, "bias": True}, False),
    "dx with outer products": ({"features": (128, 384), "n": 384}, True),
    "masked dx": ({"features": (128, 256), "n": 128, "dropout": True}, False),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_matches_the_definition_whatever_other_rows_hold(case):
    options, outers = CASES[case]
    p = problem(**options)
    with mosaic_kernels():
        kernel = jax.jit(functools.partial(run, outers=outers))
        got = kernel(p)
        assert_as_accurate_as(
            actual=got,
            baseline=definition(p, jnp.bfloat16),
            exact=definition(p, jnp.float32),
        )
        got = np.asarray(got)
        assert not got[ROW_SLOT < 0].any()
        other = np.asarray(kernel(with_other_rows(p, slot=2)))
        np.testing.assert_array_equal(other[ROW_SLOT == 2], got[ROW_SLOT == 2])
        assert not np.array_equal(other, got)


@pytest.mark.skipif(not ON_HOPPER, reason="the interpreter accumulates in float32")
def test_sums_are_as_accurate_as_those_of_xla_in_e4m3():
    """The tensor cores add up products of e4m3 with fewer bits than float32 has."""
    p = problem((4096,), 512, columns=True)
    p = dataclasses.replace(p, s=[0 * one for one in p.s])
    contract = (((1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(
        p.xq[0], p.wq[0], contract, preferred_element_type=jnp.float32
    )
    baseline = sums * p.row_scale[:, None] * p.column_scale
    assert_as_accurate_as(
        actual=jax.jit(run)(p),
        baseline=jnp.where(ROW_SLOT[:, None] < 0, 0, baseline).astype(jnp.bfloat16),
        exact=definition(p, jnp.float32),
    )


def test_no_register_is_spilled_on_an_h200(tmp_path):
    out = tmp_path / "ptxas.txt"
    compile_deviceless("tests.pallas_kernels.h200_expand_fp8", out)
    lines = [line for line in out.read_text().splitlines() if "spill stores" in line]
    assert len(lines) == 3
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in lines)
