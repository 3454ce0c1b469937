"""Programs with LoRA that know nothing of jaxlora: linears, and layers of a decoder."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

RANK, RATE = 16, 0.1
_BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder; by default those of Llama-3.1-8B.

    Attributes:
        tokens: Number of tokens of a call.
        sequence: Length of each sequence.
        width: Features of hidden states.
        heads: Number of heads.
        kv_heads: Number of key-value heads.
        head_width: Features of a head.
        hidden: Features between the linears of an MLP.
    """

    tokens: int = 8192
    sequence: int = 512
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_width: int = 128
    hidden: int = 14336

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """K and N of the linears of a layer, by name."""
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "q": (self.width, q),
            "k": (self.width, kv),
            "v": (self.width, kv),
            "o": (q, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }


LLAMA_8B = Sizes()
SMOLLM2 = Sizes(width=576, heads=9, kv_heads=3, head_width=64, hidden=1536)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function to be fused, and how to call it.

    Attributes:
        name: Its name in tables.
        function: Takes the trained arrays, then all others.
        trained: The arrays that are trained, as a pytree.
        others: The other arguments; the first is x.
        options: Options with which XLA compiles it.
    """

    name: str
    function: Callable[..., Any]
    trained: Any
    others: tuple[Any, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments of the function."""
        return self.trained, *self.others

    def with_function(self, function: Callable[..., Any]) -> "Program":
        """Returns the program with another function of the same arguments."""
        return dataclasses.replace(self, function=function)

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


def abstract(make: Callable[[], Program]) -> Program:
    """Returns a program whose arrays have shapes and no values."""
    made: list[Program] = []

    def arguments():
        made.append(make())
        return made[0].arguments

    trained, *others = jax.eval_shape(arguments)
    return dataclasses.replace(made[0], trained=trained, others=tuple(others))


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


def linear(name: str, *, rate: float, tokens: int = 8192, width: int = 4096):
    """One linear with one adapter."""
    trained = {"a": _normal(0, width, RANK), "b": _normal(1, RANK, width)}

    def run(trained, x, w, key):
        return _lora(x, w, trained["a"], trained["b"], key, rate)

    x, w = _normal(2, tokens, width), _normal(3, width, width)
    others = x, w, jax.random.key(4)
    return Program(name=name, function=run, trained=trained, others=others)


def adapters(name: str, *, rate: float, tokens: int = 8192, width: int = 4096):
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


def decoder(
    name: str, *, rate: float, layers: int = 1, sizes: Sizes = LLAMA_8B
) -> Program:
    """Layers of a decoder, one after the other, with adapters on their linears.

    They have no head: hidden states come in, and hidden states go out.
    """
    names = list(sizes.linears)

    def layer(trained, x, frozen, key):
        def project(name, x):
            a, b = trained[name]
            number = jax.random.fold_in(key, names.index(name))
            return _lora(x, frozen[name], a, b, number, rate)

        def split(x, num_heads):
            return x.reshape(*x.shape[:2], num_heads, sizes.head_width)

        normed = _rms_norm(x, frozen["norm"])
        found = jax.nn.dot_product_attention(
            _rotate(split(project("q", normed), sizes.heads)),
            _rotate(split(project("k", normed), sizes.kv_heads)),
            split(project("v", normed), sizes.kv_heads),
            is_causal=True,
            implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
        )
        x = x + project("o", found.reshape(*x.shape[:2], -1))
        normed = _rms_norm(x, frozen["norm"])
        gated = jax.nn.silu(project("gate", normed)) * project("up", normed)
        return x + project("down", gated)

    def run(trained, x, frozen, key):
        for number, (lora, weights) in enumerate(zip(trained, frozen, strict=True)):
            x = layer(lora, x, weights, jax.random.fold_in(key, number))
        return x

    made = [_weights(sizes, 100 * number) for number in range(layers)]
    trained, frozen = zip(*made, strict=True)
    rows = sizes.tokens // sizes.sequence
    x = _normal(40, rows, sizes.sequence, sizes.width)
    others = x, frozen, jax.random.key(41)
    return Program(name=name, function=run, trained=trained, others=others)


def _weights(sizes: Sizes, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the adapters and the frozen weights of a layer."""
    pairs = [(seed + 2 * i, n, s) for i, (n, s) in enumerate(sizes.linears.items())]
    trained = {
        name: (_normal(number, k, RANK), _normal(number + 1, RANK, n))
        for number, name, (k, n) in pairs
    }
    frozen = {name: _normal(50 + number, *size) for number, name, size in pairs}
    frozen["norm"] = jnp.ones(sizes.width, _BF16)
    return trained, frozen


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder among the programs; the library's own one has the same.

    Attributes:
        name: Its name in tables.
        rate: Rate of dropout.
        layers: Number of layers.
        sizes: Sizes of a layer.
    """

    name: str
    rate: float = 0.0
    layers: int = 1
    sizes: Sizes = LLAMA_8B

    def __call__(self) -> Program:
        """Makes the program in plain JAX."""
        return decoder(self.name, rate=self.rate, layers=self.layers, sizes=self.sizes)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "linear": lambda: linear("8192 x 4096 x 4096, dropout", rate=RATE),
    "plain": lambda: linear("8192 x 4096 x 4096, no dropout", rate=0.0),
    "adapters": lambda: adapters("4 adapters by vmap, dropout", rate=RATE),
    "layer": Shape("a layer of Llama-3.1-8B, dropout", RATE),
    "layer-plain": Shape("a layer of Llama-3.1-8B, no dropout"),
    "decoder": Shape("4 layers of Llama-3.1-8B, dropout", RATE, 4),
    "decoder-plain": Shape("4 layers of Llama-3.1-8B, no dropout", layers=4),
    "small": Shape("4 layers of SmolLM2-135M, dropout", RATE, 4, SMOLLM2),
}
