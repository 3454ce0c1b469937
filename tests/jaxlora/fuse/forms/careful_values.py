"""Functions of numbers that are not finite, or are large or small."""

import jax.numpy as jnp
import numpy as np

from tests.jaxlora.fuse.forms.careful import careful
from tests.jaxlora.fuse.forms.form import K, N, R, T, random_array

Z = random_array("z", (T, N)).at[0, 0].set(np.nan).at[1, 1].set(np.inf)
LARGE_X = 1e25 * random_array("x", (T, K))


@careful(z=Z)
def zero_times_an_array(x, w, a, b, z):
    return x @ w + (x @ a) @ b + 0.0 * z


@careful(z=Z)
def zero_times_an_array_before_the_branch(x, w, a, b, z):
    return x @ w + 0.0 * z + (x @ a) @ b


@careful(z=Z)
def an_array_minus_itself(x, w, a, b, z):
    return x @ w + (z - z) + (x @ a) @ b


@careful(z=Z[:, :K], v=(K, N))
def zero_times_a_product(x, w, a, b, z, v):
    return x @ w + 0.0 * (z @ v) + (x @ a) @ b


@careful(z=Z[:, :K], v=(K, N))
def a_product_minus_itself(x, w, a, b, z, v):
    return x @ w + (z @ v - z @ v) + (x @ a) @ b


@careful(bias=random_array("bias", (N,)).at[3].set(np.inf))
def a_bias_minus_itself(x, w, a, b, bias):
    return x @ w + bias + (x @ a) @ b - bias


@careful(a=random_array("a", (K, R)).at[0, 0].set(np.nan))
def zero_times_the_branch(x, w, a, b):
    return x @ w + 0.0 * ((x @ a) @ b)


@careful(w=random_array("w", (K, N)).at[0, 0].set(np.nan))
def zero_times_the_base(x, w, a, b):
    return 0.0 * (x @ w) + (x @ a) @ b


@careful(x=LARGE_X)
def large_x_scaled_before_the_branch(x, w, a, b):
    return (x @ w + ((x * 1e-20) @ a) @ b) * 1e-25


@careful(x=LARGE_X)
def large_x_scaled_behind_the_base(x, w, a, b):
    return (x @ w) * 1e-25 + ((x * 1e-20) @ a) @ b


@careful(x=1e-30 * random_array("x", (T, K)), a=1e-9 * random_array("a", (K, R)))
def small_x_scaled_before_the_branch(x, w, a, b):
    return x @ w + ((x * 1e30) @ a) @ b


@careful(a=1e-25 * random_array("a", (K, R)), b=1e-25 * random_array("b", (R, N)))
def small_factors(x, w, a, b):
    return x @ w + (((x @ a) * 1e25) @ b) * 1e25


@careful(a=1e25 * random_array("a", (K, R)), b=1e25 * random_array("b", (R, N)))
def large_factors(x, w, a, b):
    return x @ w + (((x @ a) * 1e-25) @ b) * 1e-25


@careful(w=1e30 * random_array("w", (K, N)))
def large_weight_scaled_behind_the_product(x, w, a, b):
    return (x @ w) * 1e-30 + (x @ a) @ b


@careful(dtype=jnp.float16, x=200 * random_array("x", (T, K), jnp.float16))
def large_x_in_float16(x, w, a, b):
    return x @ w + ((x * 0.001) @ (a * 500)) @ b
