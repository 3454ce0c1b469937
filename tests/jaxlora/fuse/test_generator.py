"""The generator's rule finds what is wrong, and nothing where nothing is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxlora.fuse.forms.form import G, K, N, R, T, random_array
from tests.jaxlora.fuse.generator.around import with_gradients
from tests.jaxlora.fuse.generator.check import Verdict, compare, settings
from tests.jaxlora.fuse.generator.features import draw
from tests.jaxlora.fuse.generator.reference import bounds

BF16, F32 = jnp.bfloat16, jnp.float32
IDS = jnp.arange(T) % (G + 1)


def faults(actual, original, *, dtype=F32, x64=False) -> Verdict:
    """Compares two functions of x, w, a and b as if the first was the fused one."""
    shapes = {"x": (T, K), "w": (K, N), "a": (G, K, R), "b": (G, R, N)}
    with settings(x64=x64):
        p = {name: random_array(name, shape, dtype) for name, shape in shapes.items()}
        of = lambda function: with_gradients(lambda p: function(**p))
        return compare(fused=lambda: of(actual), original=of(original), p=p)


def linear(x, w, a, b):
    return x @ w + (x @ a[0]) @ b[0]


def in_another_order(x, w, a, b):
    return x @ (w + a[0] @ b[0])


def rounded(x, w, a, b):
    return x @ w + ((x @ a[0]).astype(BF16).astype(x.dtype)) @ b[0]


def product_in_bfloat16(x, w, a, b):
    return (x.astype(BF16) @ w.astype(BF16)).astype(x.dtype) + (x @ a[0]) @ b[0]


def in_float32(x, w, a, b):
    x, w, a, b = (v.astype(F32) for v in (x, w, a, b))
    return linear(x, w, a, b)


def filled(x, w, a, b):
    a, b = (v.at[IDS].get(mode="fill", fill_value=0) for v in (a, b))
    return x @ w + jnp.einsum("tr,trn->tn", jnp.einsum("tk,tkr->tr", x, a), b)


def clipped(x, w, a, b):
    a, b = (v.at[IDS].get(mode="clip") for v in (a, b))
    return x @ w + jnp.einsum("tr,trn->tn", jnp.einsum("tk,tkr->tr", x, a), b)


def filled_with_nan(x, w, a, b):
    a, b = (v.at[IDS].get(mode="fill") for v in (a, b))
    return x @ w + jnp.einsum("tr,trn->tn", jnp.einsum("tk,tkr->tr", x, a), b)


def without_the_gradient_of_a(x, w, a, b):
    return linear(x, w, jax.lax.stop_gradient(a), b)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_another_order_of_the_sums_is_no_fault(dtype):
    verdict = faults(in_another_order, linear, dtype=dtype)
    assert verdict.is_rewritten and not verdict.faults, verdict


def test_fewer_roundings_of_the_arithmetic_are_no_fault():
    narrow = lambda **p: in_float32(**p).astype(BF16)
    assert not faults(narrow, linear, dtype=BF16).faults


@pytest.mark.parametrize(
    ("actual", "original", "words"),
    [
        (linear, rounded, "error"),
        (rounded, linear, "error"),
        (product_in_bfloat16, linear, "error"),
        (clipped, filled, "error"),
        (filled_with_nan, filled, "nan in"),
        (filled, filled_with_nan, "nan in"),
        (without_the_gradient_of_a, linear, "gradient of a"),
        (lambda **p: linear(**p).astype(BF16), linear, "not float32"),
    ],
)
def test_what_is_lost_is_found(actual, original, words):
    assert words in "\n".join(faults(actual, original).faults)


def test_float32_in_the_place_of_float64_is_found():
    narrow = lambda **p: in_float32(**p).astype(np.float64)
    assert faults(narrow, linear, dtype=np.float64, x64=True).faults


def test_the_same_function_has_the_same_program():
    assert not faults(lambda **p: linear(**p), linear).is_rewritten


def test_the_reference_rounds_where_the_author_does():
    x = jnp.asarray([1 + 2**-9, 3.0], F32)
    with settings():
        closed = jax.make_jaxpr(lambda x: x.astype(BF16).astype(F32) + 2**-30)(x)
        ((exact, slack),) = bounds(closed, [x])
    assert np.array_equal(exact, [1 + 2**-30, 3 + 2**-30])
    assert not slack.any()


def test_a_value_between_two_numbers_may_be_rounded_to_both():
    x = jnp.asarray([1 + 2**-8, 1 + 2**-7], F32)
    with settings():
        ((exact, slack),) = bounds(jax.make_jaxpr(lambda x: x.astype(BF16))(x), [x])
    assert exact[0] in (1, 1 + 2**-7) and slack[0] == 2**-7 and slack[1] == 0


def test_draws_are_seeded_and_differ():
    assert draw(3) == draw(3)
    assert len({str(draw(seed)).split(", ", 1)[-1] for seed in range(320)}) > 300
