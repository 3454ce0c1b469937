"""`fuse` keeps a function's values and gradients, and says what it cannot do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlora.errors import ConfigError, FuseError
from jaxlora.fuse.api import fuse
from tests.drawn import normal
from tests.oracle import relative_error

T, K, N, R = 24, 32, 40, 4


def linear(x, w, a, b):
    return x @ w + 0.5 * (x @ a) @ b


def arguments():
    shapes = {"x": (T, K), "w": (K, N), "a": (K, R), "b": (R, N)}
    return [normal(i, shape) for i, shape in enumerate(shapes.values())]


def gradients(loss, args, argnums=0):
    """Returns the gradients, by one program."""
    return jax.jit(jax.grad(loss, argnums))(*args)


def primitives(fn, *args):
    """Returns the text of a function's jaxpr, in which the kernels can be seen."""
    return str(jax.make_jaxpr(fn)(*args))


def test_values_and_all_gradients_are_those_of_the_function():
    args = arguments()
    loss = lambda f: lambda *args: (f(*args) ** 2).sum()
    both = fuse(linear), linear
    got, want = (gradients(loss(f), args, range(4)) for f in both)
    assert relative_error(fuse(linear)(*args), linear(*args)) < 1e-6
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 1e-6


def test_the_weight_has_a_gradient_only_where_it_is_asked_for():
    """The product x^T dy is as large as the whole forward pass."""
    args = arguments()
    loss = lambda *args: fuse(linear)(*args).sum()
    shape = f"f32[{K},{N}] = dot_general"
    assert shape not in primitives(jax.grad(loss, (0, 2, 3)), *args)
    assert shape in primitives(jax.grad(loss, 1), *args)


@pytest.mark.parametrize("frozen", [[1], 1, "w", ["w", "x"]])
def test_a_frozen_argument_has_no_gradient(frozen):
    args = arguments()
    loss = lambda *args: fuse(linear, frozen=frozen)(*args).sum()
    of_w, of_a = gradients(loss, args, (1, 2))
    assert not np.any(of_w) and np.any(of_a)


@pytest.mark.parametrize("frozen", ["weight", 4, -1, ["w", "weight"]])
def test_frozen_arguments_that_do_not_exist_are_refused(frozen):
    with pytest.raises(ConfigError, match=r"no such argument.*x, w, a, b"):
        fuse(linear, frozen=frozen)


def test_variable_arguments_can_be_frozen():
    args = arguments()
    fused = fuse(lambda *args: linear(*args), frozen=1)
    assert not np.any(gradients(lambda *args: fused(*args).sum(), args, 1))


def test_a_function_without_sites_is_called_as_it_is():
    calls = []

    def plain(x):
        calls.append(isinstance(x, jax.core.Tracer))
        return jnp.tanh(x)

    x = arguments()[0]
    assert np.array_equal(fuse(plain)(x), jnp.tanh(x))
    assert calls == [True, False]


def test_a_function_is_traced_once_for_each_signature():
    calls = []

    def counted(x, w, a, b, scale=1.0):
        calls.append(x.shape)
        return x @ w + scale * (x @ a) @ b

    fused, args = fuse(counted), arguments()
    for _ in range(3):
        fused(*args)
    fused(*args, scale=2.0)
    assert len(calls) == 2


def test_strict_says_why_nothing_was_found():
    x, w, *_ = arguments()
    wide = jnp.ones((K, K)), jnp.ones((K, N))
    with pytest.raises(FuseError, match="rank 32 is not small"):
        fuse(linear, strict=True)(x, w, *wide)


def test_strict_complains_of_an_adapter_that_is_not_fused():
    def two(x, w, a, b):
        return linear(x, w, a, b), (jnp.sin(x) @ a) @ b + x @ w

    x, w, a, b = arguments()
    assert fuse(two)(x, w, a, b)[0].shape == (T, N)
    with pytest.raises(FuseError, match="have different x"):
        fuse(two, strict=True)(x, w, a, b)


def test_side_effects_are_named():
    def printing(x, w, a, b):
        jax.debug.print("{}", x.sum())
        return linear(x, w, a, b)

    with pytest.raises(FuseError, match="side effects"):
        fuse(printing)(*arguments())


class WithDropout(nnx.Module):
    def __init__(self):
        base = nnx.Linear(K, N, rngs=nnx.Rngs(0))
        self.linear = nnx.LoRA(K, R, N, base_module=base, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))

    def __call__(self, x, key=None):
        return self.linear(self.dropout(x, rngs=key))


def test_a_module_that_would_draw_the_same_mask_again_is_refused():
    x, module = arguments()[0], WithDropout()
    fused = fuse(lambda module, x, key=None: module(x, key))
    with pytest.raises(FuseError, match=r"dropout\.rngs\.count"):
        fused(module, x)
    key = jax.random.key(0)
    assert relative_error(fused(module, x, key), module(x, key)) < 1e-6


def test_strict_says_where_to_look_if_nothing_comes_near():
    with pytest.raises(FuseError, match=r"docs/reference/fuse\.md"):
        fuse(jnp.tanh, strict=True)(arguments()[0])


def test_unknown_implementation():
    with pytest.raises(ConfigError, match="implementation='fast' is unknown"):
        fuse(linear, implementation="fast")


def test_both_passes_of_a_custom_gradient_are_rewritten():
    run = jax.custom_vjp(linear)
    run.defvjp(
        lambda *args: (linear(*args), args),
        lambda args, dy: jax.vjp(linear, *args)[1](dy),
    )
    loss = lambda f: lambda *args: (f(*args) ** 2).sum()
    args = arguments()
    assert "custom_vjp_call[" in primitives(fuse(run), *args)
    assert "name=call" in primitives(jax.grad(loss(fuse(run))), *args)
    got, want = (gradients(loss(f), args) for f in (fuse(run), run))
    assert relative_error(got, want) < 1e-6


def test_a_function_that_is_a_gradient_has_both_passes_rewritten():
    args = arguments()
    gradient = jax.grad(lambda *args: (linear(*args) ** 2).sum())
    assert primitives(fuse(gradient), *args).count("name=call") == 2
    got, want = (jax.jit(f)(*args) for f in (fuse(gradient), gradient))
    assert relative_error(got, want) < 1e-6


def test_a_result_may_be_a_constant():
    fused = fuse(lambda *args: (1.5, linear(*args)), strict=True)
    assert float(jax.jit(fused)(*arguments())[0]) == 1.5
