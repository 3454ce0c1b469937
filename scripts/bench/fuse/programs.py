"""Programs with LoRA that know nothing of jaxlora: a linear, adapters, a layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TOKENS, SEQUENCE = 8192, 512
WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, HIDDEN = 4096, 32, 8, 128, 14336
RANK, RATE = 16, 0.1
_BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function to be fused, and how to call it.

    Attributes:
        name: Its name in tables.
        function: Takes the trained arrays, then all others.
        trained: The arrays that are trained, as a pytree.
        others: The other arguments; the first is x.
    """

    name: str
    function: Callable[..., Any]
    trained: Any
    others: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments of the function."""
        return self.trained, *self.others

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward and backward pass of `function`, fused or not.

        It takes the gradient of the result, then the function's arguments, and returns
        the result with the gradients of the trained arrays and of x.
        """

        def run(dy, trained, x, *frozen):
            y, pullback = jax.vjp(lambda *t: function(*t, *frozen), trained, x)
            return y, pullback(dy)

        return run

    def step_arguments(self) -> tuple[Any, ...]:
        """Returns the arguments of `step`, with a random gradient of the result."""
        y = jax.eval_shape(self.function, *self.arguments)
        return jax.random.normal(jax.random.key(1), y.shape, y.dtype), *self.arguments


def _dropout(x, key, rate: float):
    if rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def _lora(x, w, a, b, key, rate: float):
    return x @ w + 2.0 * (_dropout(x, key, rate) @ a) @ b


def _normal(seed: int, *shape: int):
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(_BF16)


def linear(name: str, *, rate: float, tokens: int = TOKENS, width: int = WIDTH):
    """One linear with one adapter."""
    trained = {"a": _normal(0, width, RANK), "b": _normal(1, RANK, width)}

    def run(trained, x, w, key):
        return _lora(x, w, trained["a"], trained["b"], key, rate)

    x, w = _normal(2, tokens, width), _normal(3, width, width)
    others = x, w, jax.random.key(4)
    return Program(name=name, function=run, trained=trained, others=others)


def adapters(name: str, *, rate: float, tokens: int = TOKENS, width: int = WIDTH):
    """One linear with four adapters, by `vmap` over adapters and their rows."""
    trained = {"a": _normal(0, 4, width, RANK), "b": _normal(1, 4, RANK, width)}

    def run(trained, x, w, key):
        keys = jax.random.split(key, 4)
        each = lambda x, a, b, key: _lora(x, w, a, b, key, rate)
        return jax.vmap(each)(x, trained["a"], trained["b"], keys)

    x, w = _normal(2, 4, tokens // 4, width), _normal(3, width, width)
    others = x, w, jax.random.key(4)
    return Program(name=name, function=run, trained=trained, others=others)


def _rms_norm(x, gain):
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * gain


def _rotate(x):
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    rates = 5e5 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (positions[:, None] * rates)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def layer(name: str, *, rate: float) -> Program:
    """A decoder layer of Llama-3.1-8B with adapters on its seven linears."""
    width, hidden = WIDTH, HIDDEN
    q, kv = HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH
    sizes = {
        "q": (width, q),
        "k": (width, kv),
        "v": (width, kv),
        "o": (q, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }

    def run(trained, x, frozen, key):
        def project(name, x):
            a, b = trained[name]
            number = jax.random.fold_in(key, list(sizes).index(name))
            return _lora(x, frozen[name], a, b, number, rate)

        def split(x, num_heads):
            return x.reshape(*x.shape[:2], num_heads, HEAD_WIDTH)

        normed = _rms_norm(x, frozen["norm"])
        found = jax.nn.dot_product_attention(
            _rotate(split(project("q", normed), HEADS)),
            _rotate(split(project("k", normed), KV_HEADS)),
            split(project("v", normed), KV_HEADS),
            is_causal=True,
            implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
        )
        x = x + project("o", found.reshape(*x.shape[:2], q))
        normed = _rms_norm(x, frozen["norm"])
        gated = jax.nn.silu(project("gate", normed)) * project("up", normed)
        return x + project("down", gated)

    pairs = enumerate(sizes.items())
    trained = {
        n: (_normal(2 * i, k, RANK), _normal(2 * i + 1, RANK, m))
        for i, (n, (k, m)) in pairs
    }
    frozen = {n: _normal(20 + i, *s) for i, (n, s) in enumerate(sizes.items())}
    frozen["norm"] = jnp.ones(width, _BF16)
    x = _normal(40, TOKENS // SEQUENCE, SEQUENCE, width)
    others = x, frozen, jax.random.key(41)
    return Program(name=name, function=run, trained=trained, others=others)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "linear": lambda: linear("8192 x 4096 x 4096, dropout", rate=RATE),
    "plain": lambda: linear("8192 x 4096 x 4096, no dropout", rate=0.0),
    "adapters": lambda: adapters("4 adapters by vmap, dropout", rate=RATE),
    "layer": lambda: layer("a layer of Llama-3.1-8B, dropout", rate=RATE),
}
