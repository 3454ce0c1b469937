"""Modules of Flax, NNX and linen."""

import functools

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.jaxlora.fuse.forms.form import (
    BATCH,
    HEADS,
    TOKENS,
    K,
    N,
    R,
    form,
    near_miss,
    without_zeros,
)

X = (BATCH, TOKENS, K)


def split(module: nnx.Module):
    """Returns (definition, trained state, frozen state) of a module."""
    definition, lora, frozen = nnx.split(module, nnx.LoRAParam, ...)
    return definition, without_zeros(lora), without_zeros(frozen)


@functools.cache
def wrapped_linear():
    base = nnx.Linear(K, N, rngs=nnx.Rngs(0))
    return split(nnx.LoRA(K, R, N, base_module=base, rngs=nnx.Rngs(1)))


@form(
    trained="x lora frozen",
    x=X,
    lora=lambda: wrapped_linear()[1],
    frozen=lambda: wrapped_linear()[2],
)
def nnx_lora(x, lora, frozen):
    return nnx.merge(wrapped_linear()[0], lora, frozen)(x)


@functools.cache
def lora_linear(**dtypes):
    return split(nnx.LoRALinear(K, N, lora_rank=R, rngs=nnx.Rngs(0), **dtypes))


BASE = {"dtype": jnp.bfloat16}
BOTH = {"dtype": jnp.bfloat16, "lora_dtype": jnp.bfloat16}


def linear_state(index):
    for dtypes in (BASE, BOTH):  # modules must be made while nothing is traced
        lora_linear(**dtypes)
    return lora_linear()[index]


LINEAR = {
    "trained": "x lora",
    "x": X,
    "lora": lambda: linear_state(1),
    "frozen": lambda: linear_state(2),
}


@form(**LINEAR)
def nnx_lora_linear(x, lora, frozen):
    return nnx.merge(lora_linear()[0], lora, frozen)(x)


@form(**LINEAR, exact=nnx_lora_linear)
def nnx_lora_linear_in_bfloat16(x, lora, frozen):
    return nnx.merge(lora_linear(**BOTH)[0], lora, frozen)(x)


@near_miss("summed in float32", **LINEAR)
def nnx_lora_linear_with_base_in_bfloat16(x, lora, frozen):
    """Only the base is cast: the branch takes x as it is, and is float32."""
    return nnx.merge(lora_linear(**BASE)[0], lora, frozen)(x)


class Stack(nnx.Module):
    """Two adapted linears with a norm and an activation between them."""

    def __init__(self, rngs):
        self.first = nnx.LoRALinear(K, N, lora_rank=R, rngs=rngs)
        self.norm = nnx.LayerNorm(N, rngs=rngs)
        self.second = nnx.LoRALinear(N, K, lora_rank=R, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.second(nnx.gelu(self.norm(self.first(x))))


@functools.cache
def stack():
    return split(Stack(nnx.Rngs(2)))


@form(
    sites=2,
    trained="x lora",
    x=X,
    lora=lambda: stack()[1],
    frozen=lambda: stack()[2],
)
def nnx_modules_in_a_row(x, lora, frozen):
    return nnx.merge(stack()[0], lora, frozen)(x)


class LinenLora(linen.Module):
    """A linear with a branch and dropout, as a user of linen writes it."""

    features: int

    @linen.compact
    def __call__(self, x):
        base = linen.Dense(self.features, name="base")(x)
        x = linen.Dropout(0.2, deterministic=False)(x)
        x = linen.Dense(R, use_bias=False, name="a")(x)
        return base + 2.0 * linen.Dense(self.features, use_bias=False, name="b")(x)


class LinenHeads(linen.Module):
    """Queries by DenseGeneral, with heads in the output of base and branch."""

    @linen.compact
    def __call__(self, x):
        heads = (HEADS, N // HEADS)
        base = linen.DenseGeneral(heads, name="base")(x)
        s = linen.DenseGeneral(R, use_bias=False, name="a")(x)
        return base + linen.DenseGeneral(heads, use_bias=False, name="b")(s) * 0.5


def key():
    return jax.random.key(4)


def linen_params(module):
    """Returns a function that makes random parameters of a module."""

    def make():
        made = module.init({"params": key(), "dropout": key()}, jnp.ones(X))
        return without_zeros(made["params"])

    return make


@form(trained="x params", x=X, params=linen_params(LinenLora(N)), key=key)
def linen_dense_with_dropout(x, params, key):
    return LinenLora(N).apply({"params": params}, x, rngs={"dropout": key})


@form(trained="x params", x=X, params=linen_params(LinenHeads()))
def linen_dense_general(x, params):
    return LinenHeads().apply({"params": params}, x)
