"""The methods that the kernel benchmark compares, on a small case."""

import jax
import numpy as np

from scripts.bench.kernels import benchmark
from scripts.bench.kernels.methods import (
    FROZEN,
    METHODS,
    call,
    operands,
    unsupported,
)
from scripts.bench.shapes import LARGE, KernelCase, linear_groups, products

CASE = KernelCase("small", 512, ((128, (128, 64)),), ranks=(8, 16), rate=0.0)


def test_methods_compute_lora_linears():
    """Each adapter has 256 rows of its own; the formula is written out in float32."""
    (group,), block_adapter = operands(CASE)
    x = np.float32(group.x).reshape(2, 256, 128)
    for name in METHODS:
        if unsupported(name, CASE) is not None:
            continue
        ((one, two),) = jax.jit(call(name, with_gradient=False))([group], block_adapter)
        for y, p in zip((one, two), group.projections, strict=True):
            want = x @ np.float32(p.w)
            if not name.startswith("frozen"):
                want = want + 2.0 * (x @ np.float32(p.a)) @ np.float32(p.b)
            error = np.abs(np.float32(y).reshape(want.shape) - want).max()
            assert error < 0.05 * np.abs(want).max(), name


def test_programs_get_their_operands_as_arguments(monkeypatch):
    """XLA would compute products of constants when it compiles."""

    def device_times(run, *args, repeats):
        assert jax.make_jaxpr(run)(*args).consts == []
        return [1.0] * repeats

    monkeypatch.setattr(benchmark, "device_times", device_times)
    found = list(benchmark.time_jax(CASE, 3, [FROZEN, "jaxlora xla"], 0.0))
    assert [(name, what) for name, what, _ in found] == [
        (name, what) for name in (FROZEN, "jaxlora xla") for what in ("forward", "both")
    ]


def test_shapes_of_a_layer():
    q_k_v, o, gate_up, down = linear_groups(LARGE)
    assert q_k_v == (4096, (4096, 1024, 1024)) and o == (4096, (4096,))
    assert gate_up == (4096, (14336, 14336)) and down == (14336, (4096,))
    assert set(products(LARGE)) == {
        (4096, 4096),
        (4096, 1024),
        (1024, 4096),
        (4096, 14336),
        (14336, 4096),
    }


def test_a_method_that_cannot_run_here_is_known():
    assert unsupported(FROZEN, CASE) is None
    assert "not an NVIDIA GPU" in str(unsupported("jaxlora mosaic", CASE))
