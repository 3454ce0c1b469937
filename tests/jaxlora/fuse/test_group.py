"""Linears that read the same x are computed by one call of the kernels."""

import jax
import jax.extend
import jax.numpy as jnp

from jaxlora.fuse.rewrite import rewrite
from tests.oracle import relative_error

T, K, R = 16, 24, 2


def arguments(count):
    keys = jax.random.split(jax.random.key(0), 1 + 3 * count)
    x, *rest = (
        jax.random.normal(key, shape)
        for key, shape in zip(
            keys, [(T, K), *[(K, K), (K, R), (R, K)] * count], strict=True
        )
    )
    return x, [rest[i : i + 3] for i in range(0, len(rest), 3)]


def linear(x, parameters):
    w, a, b = parameters
    return x @ w + 2.0 * (x @ a) @ b


def groups(function, *args):
    """Returns the number of linears in each call, and checks the values."""
    traced = jax.make_jaxpr(function)(*args)
    rewritten = rewrite(traced, "xla")
    leaves = jax.tree.leaves(args)
    got = jax.extend.core.jaxpr_as_fun(rewritten.jaxpr)(*leaves)
    wanted = jax.tree.leaves(function(*args))
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) < 1e-6
    return sorted(len(site.linears) for site in rewritten.sites)


def test_linears_of_the_same_input_are_joined():
    x, parameters = arguments(3)
    assert groups(lambda x, p: [linear(x, q) for q in p], x, parameters) == [3]


def test_linears_of_different_precisions_stay_apart():
    x, parameters = arguments(2)

    def function(x, parameters):
        results = []
        for precision, some in zip(("float32", "default"), parameters, strict=True):
            with jax.default_matmul_precision(precision):
                results.append(linear(x, some))
        return results

    assert groups(function, x, parameters) == [1, 1]


def test_a_linear_whose_weights_need_the_result_of_another_stays_apart():
    x, (first, (w, a, b)) = arguments(2)

    def function(x, first, w, a, b):
        y = linear(x, first)
        return y, linear(x, (w, a * y.max(), b))

    assert groups(function, x, first, w, a, b) == [1, 1]


def test_groups_that_depend_on_each_other_are_taken_apart():
    """p1 feeds q1 and q2 feeds p2, so that neither pair can run at once."""
    x, ((w, a, b), two, (w3, a3, b3), four) = arguments(4)
    z = x + 1

    def function(x, z, p1, p2, q1, q2):
        first, last = linear(x, p1), linear(z, q2)
        w, a, b = q1
        second = linear(z, (w, a * first.max(), b))
        w, a, b = p2
        third = linear(x, (w, a * last.max(), b))
        return first, last, second, third

    parameters = (w, a, b), two, (w3, a3, b3), four
    assert groups(function, x, z, *parameters) == [1, 1, 1, 1]


def test_a_joined_linear_runs_after_the_mask_that_it_needs():
    x, parameters = arguments(2)

    def function(x, parameters):
        results = []
        for number, (w, a, b) in enumerate(parameters):
            kept = jax.random.bernoulli(jax.random.key(number), 0.5, x.shape)
            results.append(x @ w + jnp.where(kept, 2 * x, 0) @ a @ b)
        return results

    assert groups(function, x, parameters) == [2]
