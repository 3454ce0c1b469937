"""The data-flow graph has the work of every equation, also inside loops and calls."""

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from jax import lax

from jaxlora.fuse.predict.graph import data_flow, operations
from jaxlora.fuse.predict.kernel_rates import describe_device
from jaxlora.fuse.predict.work import THREEFRY_OPERATIONS, Kind
from tests.jaxlora.fuse import linears
from tests.jaxlora.fuse.linears import shape

H200 = describe_device("NVIDIA H200")


def graph_of(function, *args):
    return data_flow(jax.make_jaxpr(function)(*args))


def _with_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvps(None)
    return wrapped


def find(graph, name):
    return [op for op in operations(graph) if op.name == name]


def test_a_linear_has_its_flops_and_bytes():
    graph = data_flow(linears.forward(rate=0.0))
    large, shrink, expand = find(graph, "dot_general")
    assert large.work.flops == 2 * 8192 * 4096 * 4096
    assert shrink.work.flops == expand.work.flops == 2 * 8192 * 4096 * 16
    assert shrink.bytes_read == 2 * (8192 * 4096 + 4096 * 16)
    assert shrink.bytes_written == 2 * 8192 * 16


def test_edges_are_tensors_with_their_sizes():
    graph = data_flow(linears.forward(rate=0.0))
    _, shrink, expand = find(graph, "dot_general")
    (scale,) = find(graph, "mul")
    (edge,) = graph[shrink.index][scale.index].values()
    assert edge["tensor"].shape == (8192, 16)
    assert edge["tensor"].num_bytes == 2 * 8192 * 16
    assert expand.index in graph[scale.index]
    assert nx.is_directed_acyclic_graph(graph)


def test_random_bits_of_dropout_are_counted():
    graph = data_flow(linears.forward())
    (bits,) = find(graph, "random_bits")
    assert bits.work.integer_operations == THREEFRY_OPERATIONS * 8192 * 4096
    assert bits.path == "jit/jit"


def test_raw_threefry_counts_its_words():
    with jax.threefry_partitionable(False):
        graph = graph_of(lambda key: jax.random.bits(key, (64,)), jax.random.PRNGKey(0))
    total = sum(op.work.integer_operations for op in operations(graph))
    assert total == THREEFRY_OPERATIONS * 64


def test_the_body_of_a_scan_runs_once_for_each_slice():
    def run(x, ws):
        return lax.scan(lambda carry, w: (jnp.tanh(carry @ w), carry), x, ws)

    graph = graph_of(run, shape(4, 8), shape(6, 8, 8))
    (product,) = find(graph, "dot_general")
    assert (product.runs, product.path) == (6, "scan")
    assert product.work.flops == 2 * 4 * 8 * 8
    assert [t.shape for t in product.reads] == [(4, 8), (8, 8)]
    assert graph.graph["outputs"][1].shape == (6, 4, 8)


def test_runs_of_nested_loops_multiply():
    def inner(x, _):
        return lax.scan(lambda y, _: (y * 2, None), x, None, length=3)[0], None

    graph = graph_of(lambda x: lax.scan(inner, x, None, length=5)[0], shape(7))
    (product,) = find(graph, "mul")
    assert (product.runs, product.path) == (15, "scan/scan")


def test_a_branch_of_a_conditional_counts_as_a_fraction():
    def run(p, x):
        return lax.cond(p, lambda x: x @ x, lambda x: x * 2, x)

    graph = graph_of(run, shape(dtype=bool), shape(3, 3))
    (product,) = find(graph, "dot_general")
    assert product.runs == 0.5
    assert nx.has_path(graph, product.index, max(graph))


def test_a_while_loop_counts_as_one_run():
    def run(x):
        return lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ x), (0, x)
        )

    (product,) = find(graph_of(run, shape(3, 3)), "dot_general")
    assert product.runs == 1


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, _with_jvp])
def test_calls_are_looked_through(wrap):
    graph = graph_of(wrap(lambda x: x @ x), shape(8, 8))
    (product,) = find(graph, "dot_general")
    assert product.sizes == (1, 8, 8, 8)
    assert product.path


def test_ragged_products_count_a_row_once():
    def run(x, w, sizes):
        return lax.ragged_dot(x, w, sizes).astype(jnp.float32).sum()

    args = shape(8, 4), shape(2, 4, 5), shape(2, dtype=jnp.int32)
    graph = graph_of(jax.grad(run, (0, 1)), *args)
    products = find(graph, "ragged_dot_general")
    assert {op.work.flops for op in products} == {2 * 8 * 4 * 5}


def test_a_convolution_has_its_flops():
    def run(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")

    graph = graph_of(run, shape(1, 3, 10, 10), shape(7, 3, 5, 5))
    (product,) = find(graph, "conv_general_dilated")
    assert product.work.flops == 2 * 7 * 100 * 3 * 25


def test_views_cost_nothing():
    graph = graph_of(lambda x: x.T.reshape(-1)[None], shape(4, 8))
    views = [op for op in operations(graph) if op.kind is Kind.VIEW]
    assert views
    assert not any(op.bytes_read or op.bytes_written for op in views)
