"""nf4 is stored as bitsandbytes stores it, by an implementation in NumPy.

The formulas are those of QLoRA (arXiv 2305.14314), and the layout is that of tensors
in checkpoints.
"""

import statistics

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import Nf4Weight
from jaxlora.pallas_kernels.quantized import nf4
from tests.pallas_kernels.quantized.weights import dequantized, quantized


def quantiles():
    """Returns the 16 values by the paper's construction, from normal quantiles."""
    inverse = statistics.NormalDist().inv_cdf
    above = [inverse(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    below = [-inverse(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    return np.array(sorted([*below, 0.0, *above])) / max(above)


def dynamic_map():
    """Returns the 256 values of the signed dynamic map, in float32 throughout."""
    values = [np.float32(0), np.float32(1)]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2**exponent + 1, dtype=np.float32)
        centers = (edges[1:] + edges[:-1]) / 2 * np.float32(10.0 ** (exponent - 6))
        values += [*centers, *-centers]
    return np.sort(np.array(values, np.float32))


def nearest(codebook, x):
    """Returns the index of the nearest value by trying all."""
    return np.abs(x[..., None] - codebook).argmin(axis=-1).astype(np.uint8)


def numpy_quantize(w):
    """Returns packed codes, codes of absmax, nested absmax and offset, all flat."""
    blocks = w.reshape(-1, 64)
    absmax = np.abs(blocks).max(axis=1)
    code = nearest(quantiles(), blocks / absmax[:, None]).reshape(-1)
    packed = code[0::2] * 16 + code[1::2]
    offset = absmax.mean()
    centered, nested_code, nested_absmax = absmax - offset, [], []
    for first in range(0, len(centered), 256):
        block = centered[first : first + 256]
        nested_absmax.append(np.abs(block).max())
        nested_code.append(nearest(dynamic_map(), block / nested_absmax[-1]))
    return packed, np.concatenate(nested_code), np.array(nested_absmax), offset


def numpy_dequantize(packed, absmax, shape):
    """Returns W from packed codes and float32 absmax."""
    code = np.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], -1).reshape(-1)
    return (quantiles()[code].reshape(-1, 64) * absmax.reshape(-1, 1)).reshape(shape)


def random_weight(n=24, k=1088):
    """Returns a weight with 408 blocks, so that its second nested block is partial."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((n, k)) * rng.uniform(0.01, 0.05, (n, 1))).astype("f4")


def test_codebooks():
    assert np.abs(nf4.NF4 - quantiles()).max() < 1e-6
    assert len(np.unique(nf4.DYNAMIC)) == 256
    np.testing.assert_allclose(nf4.DYNAMIC, dynamic_map(), rtol=2e-7)


def test_ties_go_to_the_lower_value():
    """bitsandbytes compares with the middle of two values by `>`."""
    middle = (nf4.NF4[:-1] + nf4.NF4[1:]) / 2
    above = np.nextafter(middle, np.float32(2))
    got = nf4.nearest(nf4.NF4, jnp.asarray(np.stack([middle, above])))
    np.testing.assert_array_equal(got, np.arange(15) + np.array([[0], [1]]))


def test_a_weight_is_stored_as_bitsandbytes_stores_it():
    w = random_weight()
    packed, code, nested_absmax, offset = numpy_quantize(w)
    got = quantized("nf4", jnp.asarray(w))
    np.testing.assert_array_equal(np.ravel(got.values), packed)
    np.testing.assert_array_equal(np.ravel(got.absmax), code)
    np.testing.assert_allclose(got.nested_absmax, nested_absmax, rtol=1e-5)
    assert float(got.nested_offset) == pytest.approx(float(offset), rel=1e-6)


def test_a_stored_weight_is_read():
    w = random_weight()
    packed, code, nested_absmax, offset = numpy_quantize(w)
    blocks = np.arange(code.size) // 256
    absmax = dynamic_map()[code] * nested_absmax[blocks] + offset
    weight = Nf4Weight(
        values=jnp.asarray(packed.reshape(24, -1)),
        absmax=jnp.asarray(code.reshape(24, -1)),
        nested_absmax=jnp.asarray(nested_absmax),
        nested_offset=jnp.asarray(offset),
    )
    weight.check()
    wanted = numpy_dequantize(packed, absmax, w.shape)
    np.testing.assert_allclose(dequantized(weight), wanted, rtol=2e-6)
    plain = Nf4Weight(
        values=weight.values, absmax=jnp.asarray(absmax.reshape(24, -1).astype("f4"))
    )
    plain.check()
    np.testing.assert_allclose(dequantized(plain), wanted, rtol=2e-6)


def test_blocks_of_zeros_are_zero():
    """Their absmax, less the mean and quantized, need not become zero again."""
    w = random_weight()
    w[2, 64:128] = 0
    got = np.asarray(dequantized(quantized("nf4", jnp.asarray(w))))
    assert not got[2, 64:128].any()
