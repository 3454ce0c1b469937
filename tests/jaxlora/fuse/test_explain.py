"""An explanation lists sites, reasons and near misses, with predicted costs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxlora
from jaxlora.errors import FuseError
from jaxlora.fuse import choose
from jaxlora.fuse.api import FuseOptions, trace_call
from jaxlora.fuse.cost import decide
from jaxlora.fuse.explain import explain_sites
from tests.jaxlora.fuse import linears
from tests.jaxlora.fuse.linears import key_shape, shape

H200 = "NVIDIA H200"
SIZES = shape(8192, 4096), shape(4096, 4096), shape(4096, 16), shape(16, 4096)


def dropped(x, w, a, b, key):
    return linears.linear(x, w, a, b, key, 0.1)


def explain(function, *args, device=H200):
    program = trace_call(function, FuseOptions(), args, {})
    return explain_sites(program.traced, program.rewritten, device)


@pytest.fixture(scope="module")
def explained():
    return explain(dropped, *SIZES, key_shape())


def test_a_site_has_its_sizes_and_costs(explained):
    (site,) = explained.sites
    shape = site.shape
    assert (shape.tokens, shape.in_features) == (8192, 4096)
    assert (shape.out_features, shape.ranks, shape.adapters) == ((4096,), (16,), 1)
    assert (shape.masks, shape.draws_masks) == (1, True)
    assert site.decision.fused and explained.num_fused == 1
    assert explained.after.seconds < explained.before.seconds


def test_the_text_is_a_table_with_reasons(explained, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    lines = str(explained).splitlines()
    assert lines[0] == ("1 site found, 1 fused; times are predicted for NVIDIA H200")
    assert "linears.py:" in lines[2] and "8192 x 4096 x 4096" in lines[2]
    assert "1 of rank 16" in lines[2]
    assert lines[3].startswith("fused, linears.py:")
    assert lines[-1].startswith("all sites, forward and backward: ")


def test_the_text_fits_the_terminal(explained, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert max(map(len, str(explained).splitlines())) <= 100


def test_near_misses_are_listed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    args = shape(8192, 4096), shape(4096, 4096), shape(4096, 16), shape(16, 4096)
    relu = lambda x, w, a, b: x @ w + jax.nn.relu(x @ a) @ b
    found = explain(relu, *args)
    assert not found.sites and found.before == found.after
    assert all(refusal.reason in str(found) for refusal in found.refusals)


def test_products_with_the_shape_of_an_adapter_are_listed():
    """Also beside a linear that is fused, and where no sum is near one."""

    def run(x, w, a, b):
        y = x @ w + (x @ a) @ b
        return y, jnp.sin(((y @ w.T) @ a) * 2.0), ((jnp.sin(x) @ a) * 3.0) @ b

    found = explain(run, *SIZES)
    assert found.num_fused == 1
    (refusal,) = found.refusals
    assert refusal.is_adapter and "not added to a frozen product" in refusal.reason
    assert refusal.reason in " ".join(str(found).split())


def test_products_of_a_network_are_no_adapters():
    """Heads of attention, narrow layers and gradients of A have other shapes."""

    def run(x, w, a, b):
        q, k = ((x @ w).reshape(-1, 4, 64) for w in (w, 2 * w))
        scores = jnp.einsum("thd,shd->hts", q, k)
        narrow = jax.nn.relu(x @ a) @ b
        return jnp.einsum("hts,shd->thd", scores, k), narrow, x.T @ (narrow @ b.T)

    args = (shape(300, 256), shape(256, 256), shape(256, 8), shape(8, 256))
    assert not any(refusal.is_adapter for refusal in explain(run, *args).refusals)


def test_near_misses_of_one_reason_share_a_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(x, w, a, b):
        for _ in range(3):
            x = jax.nn.silu(x @ w + (2 * jnp.sin(x) @ a) @ b)
        return x

    found = explain(run, *SIZES)
    assert len(found.refusals) == 3
    (line,) = (s for s in str(found).splitlines() if s.startswith("near miss, "))
    assert "(3 times): the branch and the frozen product have different x" in line


def test_a_site_of_a_library_is_named_by_the_code_that_calls_it():
    base = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    module = nnx.LoRA(32, 4, 32, base_module=base, rngs=nnx.Rngs(1))
    found = explain(lambda x: module(x), shape(16, 32))
    assert "test_explain.py:" in found.sites[0].location


def test_an_unknown_device_has_the_times_of_a_typical_gpu(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    found = explain(
        lambda x, w, a, b: x @ w + (x @ a) @ b, *linears_small(), device="cpu"
    )
    assert "predicted for a typical GPU" in str(found)


def test_a_site_in_a_scan_counts_each_run():
    def run(x, layers):
        def layer(x, wab):
            w, a, b = wab
            return x @ w + (x @ a) @ b, None

        return jax.lax.scan(layer, x, layers)[0]

    layers = shape(6, 4096, 4096), shape(6, 4096, 16), shape(6, 16, 4096)
    found = explain(run, shape(8192, 4096), layers)
    (site,) = found.sites
    assert site.runs == 6
    saved = site.decision.before.seconds - site.decision.after.seconds
    total = found.before.seconds - found.after.seconds
    assert total == pytest.approx(6 * saved)


def test_sites_that_are_alike_share_a_row(monkeypatch):
    def run(x, layers):
        for w, a, b in layers:
            x = jax.nn.silu(x @ w + (x @ a) @ b)
        return x

    monkeypatch.setenv("COLUMNS", "160")
    found = explain(run, SIZES[0], [SIZES[1:]] * 3)
    assert len(found.sites) == 3
    (row,) = (s for s in str(found).splitlines() if "8192 x 4096 x 4096" in s)
    assert row.split("yes")[1].split()[0] == "3"


def test_small_sites_are_not_fused_and_the_text_says_why():
    small = shape(64, 256), shape(256, 256), shape(256, 8), shape(8, 256)
    found = explain(lambda x, w, a, b: x @ w + (x @ a) @ b, *small)
    assert len(found.sites) == 1 and found.num_fused == 0
    text = str(found).replace("\n", " ")
    assert "not fused, test_explain.py:" in text
    assert "fused kernels would be slower" in text
    assert found.before == found.after


def test_the_public_function_explains_for_this_device():
    args = [jnp.zeros(s.shape, jnp.float32) for s in linears_small()]
    found = jaxlora.explain(lambda x, w, a, b: x @ w + (x @ a) @ b, *args)
    assert len(found.sites) == 1
    assert (
        found.sites[0].decision.reason
        == "the back end xla is plain JAX and saves no time"
    )


def linears_small():
    return shape(64, 64), shape(64, 64), shape(64, 4), shape(4, 64)


def test_declined_sites_stay_as_they_are_and_are_explained(monkeypatch):
    """As on a device with fused kernels, which would be slower here."""
    as_on_h200 = lambda site, device=None: decide(site, H200)
    monkeypatch.setattr(choose, "decide", as_on_h200)
    function = lambda x, w, a, b: x @ w + (x @ a) @ b
    found = trace_call(function, FuseOptions(), linears_small(), {}).rewritten
    assert not found.sites and len(found.choices) == 1
    asked = trace_call(function, FuseOptions("xla"), linears_small(), {}).rewritten
    assert len(asked.sites) == len(asked.choices) == 1
    args = [jnp.zeros(s.shape, s.dtype) for s in linears_small()]
    with pytest.raises(FuseError, match="fused kernels would be slower"):
        jaxlora.fuse(function, strict=True)(*args)
