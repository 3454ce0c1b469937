"""The reason of a refusal is the one thing that keeps a LoRA linear from being fused.

Each obstacle is planted in linears that are fused without it.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxlora
from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, G, K, N, R, random_array
from tests.jaxlora.fuse.generator.check import settings

Arrays = dict[str, Any]
Plant = Mapping[str, Callable[..., Any]]
KEY, KEEP = jax.random.key(3), 0.75
ROWS = (BATCH, TOKENS)


@functools.cache
def arguments(host: str, dtype: Any) -> Arrays:
    table = (G,) if host == "gather" else ()
    shapes = {"a": (*table, K, R), "b": (*table, R, N), "bias": (N,), "m": (N,)}
    shapes |= {"x": (*ROWS, K), "w": (K, N), "gate": (*ROWS, 1)}
    arrays = {name: random_array(name, shape, dtype) for name, shape in shapes.items()}
    return arrays | {"ids": jnp.array([2, 0, 1])}


def linear(host: str, plant: Plant, p: Arrays) -> tuple[Any, ...]:
    """A linear with an adapter, in which each value goes through a plant's function."""
    extra: list[Any] = []

    def at(name: str, value: Any) -> Any:
        return plant[name](value, p, extra) if name in plant else value

    def dot(name: str, x: Any, w: Any) -> Any:
        return plant.get(f"dot {name}", jnp.matmul)(x, w)

    x = p["x"]
    w, a, b = (at(name, entry(plant, host, name, p)) for name in ("w", "a", "b"))
    dropped = x
    if host == "dropout":
        kept = jax.random.bernoulli(KEY, KEEP, x.shape)
        dropped = jnp.where(kept, x / KEEP, 0)
    s = at("s", dot("s", at("branch x", at("dropped", dropped)), a))
    branch = at("branch", 1.5 * dot("branch", s, b))
    base = at("base", dot("base", x, w))
    if host == "DoRA":
        base, branch = base + (p["m"] - 1) * base, p["m"] * branch
    elif host == "scaled weight":
        base = base * p["m"]
    y = base + branch if "bias" not in host else base + p["bias"] + branch
    return at("sum", y), *extra


def entry(plant: Plant, host: str, name: str, p: Arrays) -> Any:
    if host != "gather" or name == "w":
        return p[name]
    return plant.get("entry", lambda table, ids: table[ids])(p[name], p["ids"])


HOSTS = ("plain", "bias", "dropout", "gather", "DoRA", "scaled weight")


def rounded(value, p, extra):
    return value.astype(jnp.bfloat16).astype(value.dtype)


def returned(value, p, extra):
    extra.append(value)
    return value


def by_row(value, p, extra):
    return value * p["gate"]


def dropped(value, p, extra):
    kept = jax.random.bernoulli(jax.random.key(8), KEEP, value.shape)
    return jnp.where(kept, value / KEEP, 0)


def apply(function):
    return lambda value, p, extra: function(value)


def highest(x, w):
    return jnp.matmul(x, w, precision=lax.Precision.HIGHEST)


def of_another_algorithm(x, w):
    return jnp.matmul(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32)


def one_hot_of_floats(table, ids):
    chosen = ids.astype(jnp.float32)[:, None] == jnp.arange(G, dtype=jnp.float32)
    return jnp.einsum("tg,gkr->tkr", chosen.astype(table.dtype), table)


OTHER_X, USED = "different x", "is also used elsewhere"
# The obstacle, what it does, the reason, and the hosts if they are not all.
OBSTACLES: dict[str, tuple[Plant, str, tuple[str, ...]]] = {
    "x in reverse": (
        {"branch x": apply(lambda x: jnp.flip(x, 0))},
        OTHER_X,
        HOSTS,
    ),
    "x shifted": ({"branch x": apply(lambda x: jnp.roll(x, 1, 1))}, OTHER_X, HOSTS),
    "tanh of x": ({"branch x": apply(jnp.tanh)}, OTHER_X, HOSTS),
    "x rounded": ({"branch x": rounded}, OTHER_X, HOSTS),
    "x by feature": (
        {"branch x": apply(lambda x: x * jnp.arange(1.0, K + 1).astype(x.dtype))},
        OTHER_X,
        HOSTS,
    ),
    "stop_gradient of x": ({"branch x": apply(lax.stop_gradient)}, OTHER_X, HOSTS),
    "s used": ({"s": returned}, USED, HOSTS),
    "base used": ({"base": returned}, USED, HOSTS),
    "branch used": ({"branch": returned}, USED, HOSTS),
    "dropped x used": ({"dropped": returned}, USED, ("dropout",)),
    "precision of s": ({"dot s": highest}, "different precisions", HOSTS),
    "precision of base": ({"dot base": highest}, "different precisions", HOSTS),
    "algorithm": ({"dot branch": of_another_algorithm}, "BF16_BF16_F32", HOSTS),
    "float ids": ({"entry": one_hot_of_floats}, "integers", ("gather",)),
    "s rounded": ({"s": rounded}, "rounded to bfloat16", HOSTS),
    "base rounded": ({"base": rounded}, "rounded to bfloat16", HOSTS),
    "branch rounded": ({"branch": rounded}, "rounded to bfloat16", HOSTS),
    "tanh of s": ({"s": apply(jnp.tanh)}, "tanh is applied between A and B", HOSTS),
    "relu of s": ({"s": apply(jax.nn.relu)}, "relu is applied between", HOSTS),
    "softmax of s": ({"s": apply(jax.nn.softmax)}, "exp is applied between", HOSTS),
    "gelu of s": ({"s": apply(jax.nn.gelu)}, "is applied between A and B", HOSTS),
    "clipped s": (
        {"s": apply(lambda s: jnp.clip(s, -1, 1))},
        "is applied between A and B",
        HOSTS,
    ),
    "s in float8": (
        {"s": apply(lambda s: s.astype(jnp.float8_e4m3fn).astype(s.dtype))},
        "float8_e4m3fn",
        HOSTS,
    ),
    "stop_gradient of s": (
        {"s": apply(lax.stop_gradient)},
        "stop_gradient is applied between A and B",
        HOSTS,
    ),
    "tanh of branch": ({"branch": apply(jnp.tanh)}, "tanh is applied to its b", HOSTS),
    "tanh of base": ({"base": apply(jnp.tanh)}, "tanh is applied to its f", HOSTS),
    "s by row": ({"s": by_row}, "branch's scale differs by row", HOSTS),
    "branch by row": ({"branch": by_row}, "branch's scale differs by row", HOSTS),
    "base by row": ({"base": by_row}, "frozen product.*differs by row", HOSTS),
    "dropout of s": ({"s": dropped}, "mask is on its result or inside it", HOSTS),
    "dropout of branch": ({"branch": dropped}, "mask is on its result", HOSTS),
    "dropout of base": ({"base": dropped}, "mask is on its frozen", HOSTS),
    "two masks": ({"branch x": dropped}, "several masks", ("dropout",)),
    "w of x": (
        {"w": lambda w, p, _: w * jnp.tanh(jnp.mean(p["x"]))},
        "computed from its input",
        HOSTS,
    ),
    "w by sequence": (
        {"w": apply(lambda w: w * jnp.arange(1.0, BATCH + 1)[:, None, None])},
        "differs by sequence",
        HOSTS,
    ),
    "one column": (
        {"b": apply(lambda b: b[..., :1])},
        "repeated over output features",
        HOSTS,
    ),
    "mean of rows": (
        {"branch x": apply(lambda x: jnp.mean(x, 1, keepdims=True))},
        "another axis|different x",
        HOSTS,
    ),
    "rank": (
        {
            "a": apply(lambda a: jnp.concatenate([a] * 4, -1)),
            "b": apply(lambda b: jnp.concatenate([b] * 4, -2)),
        },
        "rank 16 is not small",
        HOSTS,
    ),
}


def reasons(host: str, plant: Plant, dtype: Any = jnp.float32) -> list[str]:
    with settings(x64=dtype == np.float64), jax.default_matmul_precision("default"):
        p = arguments(host, dtype)
        explained = jaxlora.explain(lambda p: linear(host, plant, p), p)
    assert bool(explained.sites) == (not plant and dtype == jnp.float32)
    return [refusal.reason for refusal in explained.refusals]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_is_fused_without_an_obstacle(host):
    assert not reasons(host, {})


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_the_reason_is_the_obstacle(obstacle):
    plant, words, hosts = OBSTACLES[obstacle]
    wrong = {h: found for h in hosts if not is_named(words, found := reasons(h, plant))}
    assert not wrong


def is_named(words: str, found: list[str]) -> bool:
    return len(found) == 1 and re.search(words, found[0]) is not None


@pytest.mark.parametrize("host", HOSTS)
def test_float64_is_named(host):
    (reason,) = reasons(host, {}, np.float64)
    assert "float64" in reason


def test_a_gather_that_fills_in_numbers_is_named():
    ids = jnp.arange(TOKENS) % (G + 2)
    entry = lambda table: table.at[ids].get(mode="fill", fill_value=1)

    def chosen(x, w, a, b):
        s = jnp.einsum("tk,tkr->tr", x, entry(a))
        return x @ w + jnp.einsum("tr,trn->tn", s, entry(b))

    p = arguments("gather", jnp.float32)
    explained = jaxlora.explain(chosen, p["x"][0], p["w"], p["a"], p["b"])
    (refusal,) = explained.refusals
    assert "filled in with 1" in refusal.reason


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dora_that_is_rounded_in_two_ways_is_named(dtype):
    """The base is added in its dtype, and scaled in float32."""

    def dora(x, w, a, b, m):
        base = x @ w
        scaled = (m - 1) * base.astype(jnp.float32) + m * ((x @ a) @ b)
        return base + scaled.astype(dtype)

    p = arguments("plain", dtype)
    weights = [p[name] for name in ("w", "a", "b")]
    m = p["m"].astype(jnp.float32)
    (refusal,) = jaxlora.explain(dora, p["x"], *weights, m).refusals
    assert "rounded in different ways" in refusal.reason
