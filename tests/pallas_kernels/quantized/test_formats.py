"""Every format quantizes within its error, and describes its own arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlora.pallas_kernels import FORMATS, Fp8Weight, Nf4Weight
from tests.pallas_kernels.quantized.weights import (
    dequantized,
    quantized,
    random_weight,
)


def values_of(weight):
    """Returns the arrays of a weight; e4m3 as bytes, as NumPy cannot compare it."""
    arrays = {k: np.asarray(v) for k, v in weight.arrays.items()}
    return {k: v.view(np.uint8) if v.itemsize == 1 else v for k, v in arrays.items()}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(48, 192), (5, 64), (300, 128)])
def test_shapes_are_those_of_a_quantized_weight(name, shape):
    w = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    got = jax.eval_shape(FORMATS[name].quantize, w)
    wanted = FORMATS[name].shapes(*shape)
    assert got.arrays == wanted
    got.check()
    assert got.shape == (got.in_features, got.out_features) == shape[::-1]
    sizes = [s.size * s.dtype.itemsize for s in wanted.values()]
    assert got.nbytes == sum(sizes)


def test_shapes_of_optional_arrays():
    w = jax.ShapeDtypeStruct((48, 192), jnp.bfloat16)
    both = jax.eval_shape(lambda w: Fp8Weight.quantize(w, transposed=True), w)
    assert both.arrays == Fp8Weight.shapes(48, 192, transposed=True)
    plain = Nf4Weight(**Nf4Weight.shapes(48, 192, double_quant=False))
    plain.check()
    assert plain.absmax.dtype == jnp.float32


def test_bytes_per_weight():
    """nf4 takes 4.127 bits: a code, 8 bits per 64 values and 32 per 16,384."""
    sizes = {
        name: 8 * f(**f.shapes(4096, 4096)).nbytes / 4096**2
        for name, f in FORMATS.items()
    }
    assert sizes["nf4"] == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, abs=1e-5)
    assert sizes["int8"] == sizes["fp8"] == pytest.approx(8 + 32 / 4096)


def largest_errors(name, w):
    """Returns the largest error that a format may make in each value of w."""
    magnitude = np.abs(w)
    largest = magnitude.max(axis=1, keepdims=True)
    if name == "int8":  # half a step
        return largest / 127 / 2
    if name == "fp8":  # three bits of mantissa; below 2**-6, steps of 2**-9
        return np.maximum(magnitude * 2**-4, largest / 448 * 2**-10)
    if name == "mxfp4":  # values above 6 become 6, and fit below 8
        blocks = magnitude.reshape(len(w), -1, 32)
        exponent = np.floor(np.log2(blocks.max(axis=2, keepdims=True) + 1e-30)) - 2
        return np.broadcast_to(2 * 2.0**exponent, blocks.shape).reshape(w.shape)
    # Half of the widest gap in the codebook, and absmax errs by half of its gap.
    absmax = magnitude.reshape(len(w), -1, 64).max(axis=2, keepdims=True)
    nested = np.abs(absmax - absmax.mean()).max() * 0.9 / 64 / 2
    return np.broadcast_to(absmax * 0.152 + nested, (*absmax.shape[:2], 64)).reshape(
        w.shape
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_errors_are_bounded(name, dtype):
    w = random_weight(dtype=dtype)
    w = w.at[5].set(w[6]) if name == "nf4" else w  # its nested blocks share a range
    weight = quantized(name, w)
    got, w = np.asarray(dequantized(weight)), np.asarray(w, np.float32)
    assert got.shape == w.shape
    error, allowed = np.abs(got - w), largest_errors(name, w)
    assert (error <= allowed * (1 + 1e-5) + 1e-30).all()
    assert error.max() > allowed.max() / 4, "the bound says nothing"
    assert not got[3].any(), "a feature of zeros is not zero"


@pytest.mark.parametrize("name", FORMATS)
def test_dequantizing_rounds_once(name):
    weight = quantized(name, random_weight())
    exact = dequantized(weight)
    for dtype in (jnp.bfloat16, jnp.float16):
        got = jax.jit(lambda w, d=dtype: w.dequantize(d))(weight)
        np.testing.assert_array_equal(
            np.asarray(got, np.float32), np.asarray(exact.astype(dtype), np.float32)
        )


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_quantizing_again_changes_nothing(name):
    """So a dequantized checkpoint is loaded without a further error."""
    once = quantized(name, random_weight())
    twice = quantized(name, dequantized(once))
    assert (once.scale > 0).all()
    np.testing.assert_allclose(twice.scale, once.scale, rtol=1e-6)
    np.testing.assert_array_equal(values_of(twice)["values"], values_of(once)["values"])


def test_scales_of_zero_features_can_divide_b():
    scale = quantized("fp8", random_weight()).scale
    assert jnp.isfinite((jnp.bfloat16(1e4) / scale).astype(jnp.bfloat16)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_sharded_weights_are_quantized_on_their_devices(name):
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    w = random_weight(n=64, k=256, seed=1)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    quantize = jax.jit(FORMATS[name].quantize)
    wanted, got = values_of(quantize(w)), quantize(jax.device_put(w, rows))
    assert got.values.sharding.is_equivalent_to(rows, 2)
    for field, value in values_of(got).items():
        if field == "nested_offset":  # a mean over all devices
            np.testing.assert_allclose(value, wanted[field], rtol=1e-6)
        elif field == "nested_absmax":
            np.testing.assert_allclose(value, wanted[field], rtol=1e-5)
        else:
            np.testing.assert_array_equal(value, wanted[field])
    wanted = dequantized(quantize(w))
    np.testing.assert_allclose(dequantized(got), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_feature_is_quantized_alone(name):
    w = random_weight()
    one, other = (values_of(quantized(name, x)) for x in (w, w.at[7].set(jnp.nan)))
    rest = np.arange(len(w)) != 7
    for field in one:
        np.testing.assert_array_equal(one[field][rest], other[field][rest])


def test_arrays_that_do_not_match_are_refused():
    weight = quantized("fp8", random_weight())
    for bad, message in (
        ({"scale": weight.scale[:3]}, r"'scale': \(\(3,\), 'float32'\)"),
        ({"values": weight.values.astype(jnp.bfloat16)}, "bfloat16"),
        ({"transposed": weight.values}, r"wanted .*'transposed': \(\(192, 48\)"),
        ({"scale": None}, "wanted .*'scale'"),
    ):
        with pytest.raises(ValueError, match=f"arrays of Fp8Weight.*{message}"):
            dataclasses.replace(weight, **bad).check()
    nf4 = quantized("nf4", random_weight())
    with pytest.raises(ValueError, match=r"wanted .*nested_absmax"):
        dataclasses.replace(nf4, nested_absmax=None).check()


def test_nf4_needs_whole_blocks():
    for make in (
        lambda: Nf4Weight.shapes(8, 100),
        lambda: Nf4Weight.quantize(jnp.ones((8, 100))),
    ):
        with pytest.raises(ValueError, match=r"K=100 is not a multiple.*int8"):
            make()
