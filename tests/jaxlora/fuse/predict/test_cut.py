"""The graph is split at the tensors where that is cheapest, which no rule names."""

import jax
import jax.numpy as jnp
import pytest

from jaxlora.fuse.predict.cut import find_cuts
from jaxlora.fuse.predict.graph import data_flow, operations
from jaxlora.fuse.predict.kernel_rates import describe_device
from tests.jaxlora.fuse import linears
from tests.jaxlora.fuse.linears import shape

H200 = describe_device("NVIDIA H200")


def cuts_of(jaxpr):
    return find_cuts(data_flow(jaxpr), H200)


def shapes(cut):
    return sorted(t.shape for t in cut.tensors)


# The widths of LoRAFusion's figures 3 and 16, and of Llama-3.1-8B.
@pytest.mark.parametrize("k, n", [(4096, 4096), (5120, 13824), (4096, 14336)])
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_paper_s_choice_is_the_cheapest_cut(k, n, rank, rate):
    """Arxiv 2510.00206, section 5.1, stores s = dropout(x) A."""
    (cut,) = cuts_of(linears.forward(k=k, n=n, rank=rank, rate=rate))
    assert shapes(cut) == [(8192, rank)]
    assert cut.num_bytes == 2 * 2 * 8192 * rank


def test_the_backward_pass_is_cut_at_ds_and_at_the_mask():
    graph = data_flow(linears.training())
    forward, backward = find_cuts(graph, H200)
    assert shapes(forward) == [(8192, 16)]
    assert shapes(backward) == [(8192, 16), (8192, 4096)]
    assert {t.dtype for t in backward.tensors} == {"bool", "bfloat16"}


def test_a_cast_is_cut_where_it_is_narrower():
    def run(x, w, a, b):
        s = jnp.dot(x, a, preferred_element_type=jnp.float32) * 2
        return x @ w + s.astype(x.dtype) @ b

    args = shape(8192, 4096), shape(4096, 4096), shape(4096, 16), shape(16, 4096)
    (cut,) = cuts_of(jax.make_jaxpr(run)(*args))
    assert [t.dtype for t in cut.tensors] == ["bfloat16"]


def test_the_cut_is_nowhere_when_the_rank_is_as_large_as_the_width():
    cuts = cuts_of(linears.forward(rank=4096))
    assert not any(cut.tensors for cut in cuts)


def test_the_cut_is_nowhere_when_one_tile_has_all_columns():
    """s would not be computed twice, and x would be read twice for it."""
    (cut,) = cuts_of(linears.forward(n=256, rate=0.0))
    assert cut.tensors == () and cut.before == frozenset()


def test_the_cut_is_nowhere_when_every_cut_is_as_wide_as_the_result():
    """x is kept after dropout for the gradient of A, and is wider than y."""
    cut, _ = cuts_of(linears.training(n=256))
    assert cut.tensors == () and cut.inside == {cut.product}


@pytest.mark.parametrize("sizes", [{"tokens": 64}, {"k": 256, "n": 256}])
def test_products_that_wait_for_memory_have_no_cut(sizes):
    assert cuts_of(linears.training(**sizes)) == []


def test_a_residual_and_a_gate_are_no_paths():
    def run(x, w, v):
        return x + jax.nn.silu(x @ w) * (x @ v)

    args = shape(8192, 4096), shape(4096, 4096), shape(4096, 4096)
    assert cuts_of(jax.make_jaxpr(run)(*args)) == []


def test_the_sides_are_disjoint_and_the_product_is_with_what_is_added():
    graph = data_flow(linears.forward())
    (cut,) = find_cuts(graph, H200)
    before, inside = cut.before, cut.inside
    assert not before & inside
    names = {op.name for op in operations(graph) if op.index in inside}
    assert names == {"dot_general", "add"}
    assert cut.product in inside
    assert len([op for op in operations(graph) if op.index in before and op.sizes]) == 1
