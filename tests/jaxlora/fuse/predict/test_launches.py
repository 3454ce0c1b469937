"""Predicted kernels are those of programs that XLA compiled for an H200."""

import jax
import jax.numpy as jnp
import pytest

from jaxlora.fuse.predict.graph import data_flow, operations
from jaxlora.fuse.predict.kernel_rates import describe_device
from jaxlora.fuse.predict.launches import xla_launches
from tests.jaxlora.fuse import linears
from tests.jaxlora.fuse.linears import shape

H200 = describe_device("NVIDIA H200")
WIDE, NARROW = 2 * 8192 * 4096, 2 * 8192 * 16


def kernels(jaxpr):
    """Names of the operations of each kernel, and the kernels."""
    graph = data_flow(jaxpr)
    names = {op.index: op.name for op in operations(graph)}
    found = xla_launches(graph)
    return [{names[i] for i in launch.operations} for launch in found], found


def trace(function, *args):
    return jax.make_jaxpr(function)(*args)


def test_a_training_linear_has_the_kernels_of_its_compiled_program():
    """Eight products, two of them with a sum, the two masked loops, the scalings."""
    names, launches = kernels(linears.training())
    assert len(launches) == 12
    assert sum({"dot_general"} <= n for n in names) == 8
    assert [
        n - {"dot_general"} for n in names if n & {"add", "add_any"} and len(n) == 2
    ]
    masked = [n for n in names if "select_n" in n]
    assert len(masked) == 2 and sum("random_bits" in n for n in masked) == 1


def test_a_dropout_mask_is_kept_for_the_backward_pass():
    names, launches = kernels(linears.training())
    (drawing,) = (x for n, x in zip(names, launches, strict=True) if "random_bits" in n)
    assert drawing.bytes_read == WIDE + 8  # x and the key
    assert drawing.bytes_written == WIDE + WIDE / 2


def test_a_product_adds_what_is_added_to_it():
    names, launches = kernels(linears.forward(rate=0.0))
    (large,) = (x for n, x in zip(names, launches, strict=True) if "add" in n)
    assert large.sizes == (1, 8192, 4096, 4096)
    assert large.bytes_read == WIDE + 2 * 4096**2 + WIDE
    assert large.bytes_written == WIDE


def test_a_product_that_is_read_twice_is_not_added_to():
    def run(x, w, y):
        product = x @ w
        return product + y, product

    names, _ = kernels(trace(run, shape(64, 64), shape(64, 64), shape(64, 64)))
    assert names == [{"dot_general"}, {"add"}]


def test_what_reads_a_reduction_is_another_kernel():
    def run(x):
        return x / jnp.sqrt((x * x).sum(-1, keepdims=True))

    args = shape(64, 64, dtype=jnp.float32)
    names, launches = kernels(trace(run, args))
    assert [bool(n & {"reduce_sum"}) for n in names] == [True, False]
    assert launches[0].bytes_read == 4 * 64 * 64


def test_a_loop_is_computed_where_it_is_read_first():
    def run(x, w, mask):
        return jnp.where(mask * 2 > 1, x @ w @ w, 0)

    args = shape(64, 64), shape(64, 64), shape(64, 64)
    names, _ = kernels(trace(run, *args))
    assert [len(n & {"mul", "select_n"}) for n in names] == [0, 0, 2]


def test_a_transposed_or_broadcast_tensor_is_not_written():
    def run(x, w, bias):
        return (x.T @ w) * bias

    args = shape(64, 32), shape(64, 128), shape(128)
    _, launches = kernels(trace(run, *args))
    assert launches[0].bytes_read == 2 * (64 * 32 + 64 * 128)
    assert launches[1].bytes_read == 2 * (32 * 128 + 128)


def test_loops_run_as_often_as_their_scan():
    def run(x, ws):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    args = shape(64, 64), shape(6, 64, 64)
    _, launches = kernels(trace(run, *args))
    assert {launch.runs for launch in launches} == {6}
    assert launches[0].bytes_read == 2 * 2 * 64 * 64
    assert launches[0].num_bytes == 6 * 3 * 2 * 64 * 64


# Medians of docs/kernels.csv: the frozen layer, forward, commit cd711e5.
@pytest.mark.parametrize(
    "t, k, n, measured_us",
    [
        (8192, 4096, 4096, 343),
        (8192, 4096, 14336, 1206),
        (8192, 14336, 4096, 1182),
        (16384, 4096, 4096, 671),
        (8192, 4096, 1024, 87),
    ],
)
def test_times_of_large_products_are_those_measured(t, k, n, measured_us):
    (launch,) = xla_launches(data_flow(trace(jnp.matmul, shape(t, k), shape(k, n))))
    assert 1e6 * launch.seconds(H200) == pytest.approx(measured_us, rel=0.05)


def test_drawing_a_mask_is_bound_by_its_integers():
    _, (launch,) = kernels(
        trace(
            lambda key: jax.random.bernoulli(key, shape=(8192, 4096)),
            linears.key_shape(),
        )
    )
    memory = launch.num_bytes / H200.memory_bytes
    assert launch.seconds(H200) > 5 * memory
