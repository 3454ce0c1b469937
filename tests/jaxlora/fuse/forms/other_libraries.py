"""Modules of dm-haiku, qwix, equinox and quax."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import quax
import qwix
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from quax.examples import lora as quax_lora

from tests.jaxlora.fuse.forms.form import (
    BATCH,
    HEADS,
    TOKENS,
    K,
    N,
    R,
    form,
    without_zeros,
)

X = (BATCH, TOKENS, K)


def key():
    return jax.random.key(6)


@hk.transform
def haiku_linear(x):
    base = hk.Linear(N, name="base")(x)
    x = hk.dropout(hk.next_rng_key(), 0.1, x)
    s = hk.Linear(R, with_bias=False, name="a")(x)
    return base + 4.0 * hk.Linear(N, with_bias=False, name="b")(s)


def haiku_params():
    return without_zeros(haiku_linear.init(key(), jnp.ones(X)))


@form(trained="x params", x=X, params=haiku_params, key=key)
def haiku(x, params, key):
    return haiku_linear.apply(params, key, x)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(N)(x)


@functools.cache
def qwix_linen(**options):
    """Returns (module, lora, frozen) of a dense layer as qwix rewrites it."""
    provider = qwix.LoraProvider(module_path=".*", rank=R, alpha=6.0, **options)
    module = qwix.apply_lora_to_model(Dense(), provider)
    made = module.init({"params": key(), "dropout": key()}, jnp.ones(X))
    flat = flatten_dict(without_zeros(made["params"]))
    lora = {path: leaf for path, leaf in flat.items() if "lora" in path[-1]}
    return module, lora, {p: leaf for p, leaf in flat.items() if p not in lora}


def qwix_form(**options):
    """Registers a form with the parameters of `qwix_linen`."""
    return form(
        trained="x lora",
        x=X,
        lora=lambda: qwix_linen(**options)[1],
        frozen=lambda: qwix_linen(**options)[2],
        key=key,
    )


def apply_qwix(x, lora, frozen, rngs=None, **options):
    module = qwix_linen(**options)[0]
    return module.apply({"params": unflatten_dict(lora | frozen)}, x, rngs=rngs)


@qwix_form()
def qwix_dense(x, lora, frozen):
    return apply_qwix(x, lora, frozen)


@qwix_form(dropout=0.2)
def qwix_dropout(x, lora, frozen, key):
    return apply_qwix(x, lora, frozen, {"dropout": key}, dropout=0.2)


NF4 = {"weight_qtype": "nf4", "tile_size": 28}


@qwix_form(**NF4)
def qwix_nf4(x, lora, frozen):
    return apply_qwix(x, lora, frozen, **NF4)


@qwix_form(weight_qtype="int8")
def qwix_int8(x, lora, frozen):
    return apply_qwix(x, lora, frozen, weight_qtype="int8")


class Heads(nnx.Module):
    """Queries by an einsum, as in the Gemma of tunix."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.w = nnx.Param(init(rngs.params(), (HEADS, K, N // HEADS)))

    def __call__(self, x):
        return jnp.einsum("btd,hdk->bthk", x, self.w[...])


def linear(rngs):
    return nnx.Linear(K, N, rngs=rngs)


@functools.cache
def qwix_nnx(make):
    """Returns (definition, lora, frozen) of a module as qwix rewrites it."""
    provider = qwix.LoraProvider(module_path=".*", rank=R, alpha=6.0)
    model = make(nnx.Rngs(0))
    model = qwix.apply_lora_to_model(model, provider, jnp.ones(X), rngs=nnx.Rngs(1))
    definition, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    return definition, without_zeros(lora), without_zeros(frozen)


@form(
    trained="x lora",
    x=X,
    lora=lambda: qwix_nnx(linear)[1],
    frozen=lambda: qwix_nnx(linear)[2],
)
def qwix_nnx_linear(x, lora, frozen):
    return nnx.merge(qwix_nnx(linear)[0], lora, frozen)(x)


@form(
    trained="x lora",
    x=X,
    lora=lambda: qwix_nnx(Heads)[1],
    frozen=lambda: qwix_nnx(Heads)[2],
)
def qwix_einsum_with_heads(x, lora, frozen):
    return nnx.merge(qwix_nnx(Heads)[0], lora, frozen)(x)


class EquinoxLora(eqx.Module):
    """An equinox linear with a branch of two more, for one token."""

    base: eqx.nn.Linear
    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.base = eqx.nn.Linear(K, N, key=keys[0])
        self.a = eqx.nn.Linear(K, R, use_bias=False, key=keys[1])
        self.b = eqx.nn.Linear(R, N, use_bias=False, key=keys[2])

    def __call__(self, x):
        return self.base(x) + 2.0 * self.b(self.a(x))


@functools.cache
def equinox_parts():
    return eqx.partition(EquinoxLora(key()), eqx.is_array)


@form(trained="x params", x=X, params=lambda: equinox_parts()[0])
def equinox(x, params):
    return jax.vmap(jax.vmap(eqx.combine(params, equinox_parts()[1])))(x)


@functools.cache
def quax_parts():
    mlp = eqx.nn.MLP(K, K, N, depth=1, key=key())
    adapted = quax_lora.loraify(mlp, rank=R, scale=0.3, key=key())
    params, rest = eqx.partition(adapted, eqx.is_array)
    return without_zeros(params), rest


@form(sites=2, trained="x params", x=X, params=lambda: quax_parts()[0])
def quax_mlp(x, params):
    """The library stops the gradient of W itself, so it is zero."""
    return jax.vmap(jax.vmap(quax.quaxify(eqx.combine(params, quax_parts()[1]))))(x)
