"""The kernel of a norm's gradient, against the definition in float64."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import norm_gradient, unsupported_norm_gradient
from jaxlora.pallas_kernels.mosaic import norm_gradient as kernels
from jaxlora.pallas_kernels.mosaic.norm_gradient import Pieces
from tests.deviceless import compile_deviceless
from tests.drawn import Draws
from tests.pallas_kernels.fused import mosaic_kernels
from tests.scheduled_hlo import entry_ops

EPS = 1e-5


@pytest.fixture(autouse=True)
def _kernels():
    with mosaic_kernels():
        yield


@dataclasses.dataclass
class Problem:
    """Random arguments; the last rows are padding, which is zero."""

    t: int
    d: int
    dtype: jnp.dtype
    offset: bool = False
    num_padding: int = 1

    def __post_init__(self):
        draws = Draws(self.t * self.d)
        self.scale = (0.8 * draws.normal(self.d) + (not self.offset)).astype(self.dtype)
        # Rows differ in size, and their features have a mean.
        sizes = jnp.exp(2 * draws.normal(self.t, 1)).at[-self.num_padding :].set(0)
        self.h = (sizes * (draws.normal(self.t, self.d) + 0.5)).astype(self.dtype)
        dx, dh = draws.normal(self.t, self.d) + 0.5, draws.normal(self.t, self.d)
        live = sizes > 0
        self.dx, self.dh = ((x * live).astype(self.dtype) for x in (dx, dh))

    def run(self):
        arrays = self.h, self.scale, self.dx, self.dh
        options = dict(eps=EPS, offset=self.offset, implementation="mosaic")
        return np.asarray(norm_gradient(*arrays, **options))

    def exact(self):
        h, scale, dx, dh = (
            np.asarray(x, np.float64) for x in (self.h, self.scale, self.dx, self.dh)
        )
        root = np.sqrt(np.mean(h**2, axis=1, keepdims=True) + EPS)
        g = dx * (1 + scale if self.offset else scale)
        along = np.mean(g * h, axis=1, keepdims=True) / root**2
        return dh + (g - along * h) / root


# Whole pieces; pieces that overlap; wide, narrow and odd ones.
@pytest.mark.parametrize(
    ("t", "d", "dtype", "offset"),
    [
        (7, 576, jnp.bfloat16, False),
        (3, 2048, jnp.bfloat16, True),
        (2, 3584, jnp.bfloat16, False),
        (9, 130, jnp.float16, True),
        (5, 577, jnp.float32, False),
        (3, 1408, jnp.float32, True),
    ],
)
def test_it_is_the_definition_rounded_once(t, d, dtype, offset):
    problem = Problem(t, d, jnp.dtype(dtype), offset)
    got, want = problem.run(), problem.exact()
    assert got.dtype == dtype and got.shape == (t, d)
    # Half a unit in the last place, and float32's errors in the sums.
    allowed = 0.5 * float(jnp.finfo(dtype).eps) * np.abs(want)
    size = np.max(np.abs(want), axis=1, keepdims=True)
    error = np.abs(got.astype(np.float64) - want)
    assert np.all(error <= 1.01 * allowed + 2e-6 * size)
    assert not got[-1].any()


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_rows_do_not_change_each_other(num_rows, monkeypatch):
    """Neither within a program nor from one to the next, and two calls are alike."""
    monkeypatch.setattr(kernels, "rows_of_a_program", lambda *_: num_rows)
    problem = Problem(5, 200, jnp.dtype(jnp.bfloat16))
    first = problem.run()
    for name in ("h", "dx", "dh"):
        bad = dataclasses.replace(problem)
        setattr(bad, name, getattr(problem, name).at[1].set(jnp.nan))
        found = bad.run()
        others = np.arange(5) != 1
        assert np.isnan(found[1].astype(np.float32)).all()
        assert found[others].tobytes() == first[others].tobytes()


def test_the_bits_do_not_depend_on_the_rows_of_a_program(monkeypatch):
    problem = Problem(5, 328, jnp.dtype(jnp.bfloat16))
    found = set()
    for num_rows in (1, 1, 2, 4, 8):
        monkeypatch.setattr(kernels, "rows_of_a_program", lambda *_, n=num_rows: n)
        found.add(problem.run().tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_pieces_hold_each_feature_once(dtype):
    """Up to the overlap, and vectors start where device memory is aligned to them."""
    for d in [*range(128, 1200), 2048, 2560, 3072, 3584, 4096, 5120, 5376, 8192]:
        pieces = Pieces.of(d, dtype)
        own = [range(start, start + pieces.width) for start in pieces.starts]
        own[-1] = own[-1][pieces.overlap :]
        assert [i for one in own for i in one] == list(range(d))
        assert all(start % pieces.vector == 0 for start in (d, *pieces.starts))
        assert pieces.width == 128 * pieces.vector


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((8, 127), jnp.bfloat16, r"\[8, 127\], not \[T, D\] with D from 128 to 8192"),
        ((8, 8193), jnp.float32, "with D from 128 to 8192"),
        ((8, 2, 128), jnp.bfloat16, r"\[8, 2, 128\], not"),
        ((8, 128), jnp.int8, "the rows are int8"),
    ],
)
def test_what_it_does_not_take(shape, dtype, reason):
    h = jax.ShapeDtypeStruct(shape, dtype)
    assert unsupported_norm_gradient(h, implementation="xla")
    found = unsupported_norm_gradient(h, implementation="mosaic")
    assert found is not None and re.search(reason, found)


@pytest.mark.grid
def test_kernels_for_an_h200_spill_no_registers(tmp_path):
    out, hlo = tmp_path / "out", tmp_path / "hlo"
    compile_deviceless("tests.pallas_kernels.h200_norm_gradient", out, hlo)
    spills = [line for line in out.read_text().splitlines() if "spill stores" in line]
    assert len(spills) == 9
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
    # A norm of 512 rows: nothing but the kernel reads or copies them backward.
    ops = entry_ops(hlo.read_text())
    rows = {op.name for op in ops if ("bf16", (512, 4096)) in op.shapes}
    readers = [op.kind for op in ops if rows & set(op.operands)]
    assert readers.count("custom-call") == 1
    assert sum(op.kind == "copy" for op in ops) == 0
