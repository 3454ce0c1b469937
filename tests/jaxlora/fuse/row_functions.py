"""Random blocks with LoRA: a norm, linears, a gate, and a linear, in plain JAX."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.jaxlora.fuse.forms.form import random_array

_ONE = {
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "square": jnp.square,
    "cube": lambda x: x**3,
    "softsign": lambda x: x / (1 + jnp.abs(x)),
    "sigmoid": jax.nn.sigmoid,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "sin": jnp.sin,
    "clip": lambda x: jnp.clip(x, -1.5, 1.5),
    "leaky": lambda x: jnp.where(x > 0, x, x * 0.125),
    "negate": lambda x: -x,
    "narrow": lambda x: x.astype(jnp.bfloat16),
    "wide": lambda x: x.astype(jnp.float32),
}
_TWO = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - jnp.abs(y),
    "multiply": lambda x, y: x * y,
    "maximum": jnp.maximum,
    "choose": lambda x, y: jnp.where(x > y, x, y * 0.5),
}


def _rms(x):
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)


_ROWS: dict[str, Callable] = {
    "rms": _rms,
    "largest": lambda x: jnp.max(jnp.abs(x), -1, keepdims=True).astype(jnp.float32),
    "mean": lambda x: jnp.mean(x, -1)[..., None].astype(x.dtype),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A random block.

    Attributes:
        dtype: Dtype of the rows and weights.
        norm: Names of operations from the rows to the input of the linears.
        gate: Names of operations from their outputs to the input of the last linear.
        num_linears: Number of linears that share the norm.
        shape: Shape of the rows.
        inner: Number of features of the outputs.
        rank: Rank of all branches.
        keep: Probability of keeping an element; 1: there is no dropout.
    """

    dtype: Any
    norm: tuple[str, ...]
    gate: tuple[str, ...]
    num_linears: int
    shape: tuple[int, ...] = (2, 8, 32)
    inner: int = 48
    rank: int = 4
    keep: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """Returns random arguments of the block, by name."""
        k, n, dtype = self.shape[-1], self.inner, self.dtype
        sizes = {f"l{i}": (k, n) for i in range(self.num_linears)} | {"last": (n, k)}
        normal = lambda name, *shape: random_array(name, shape).astype(dtype)
        frozen = {name: normal(name, *s) / s[0] ** 0.5 for name, s in sizes.items()}
        frozen["gain"] = 1 + normal("gain", k) / 8
        lora = {
            name: {
                "a": normal(name + "a", size[0], self.rank) / size[0] ** 0.5,
                "b": normal(name + "b", self.rank, size[1]) / 4,
            }
            for name, size in sizes.items()
        }
        return {"lora": lora, "frozen": frozen, "x": normal("x", *self.shape)}

    def made(self, x, gain):
        """Returns the input of the first linears."""
        tile = x
        for name in self.norm:
            if name in _ROWS:
                tile = tile * _ROWS[name](x)
            elif name == "gain":
                tile = tile * gain
            else:
                tile = _ONE[name](tile)
        return tile.astype(self.dtype)

    def gated(self, *outputs):
        """Returns the input of the last linear."""
        value, *rest = outputs
        for name in self.gate:
            if name in _TWO:
                value = _TWO[name](value, rest.pop(0) if rest else outputs[0])
            else:
                value = _ONE[name](value)
        return value.astype(self.dtype)

    def __call__(self, lora, frozen, x):
        def linear(x, name):
            kept = x
            if self.keep < 1:
                key = jax.random.key(sum(map(ord, name)))
                mask = jax.random.bernoulli(key, self.keep, x.shape)
                kept = jnp.where(mask, x / self.keep, 0).astype(x.dtype)
            branch = (kept @ lora[name]["a"]) @ lora[name]["b"]
            return x @ frozen[name] + 2 * branch

        made = self.made(x, frozen["gain"])
        outputs = [linear(made, f"l{i}") for i in range(self.num_linears)]
        return x + linear(self.gated(*outputs), "last")


def draw(seed: int) -> Block:
    """Draws a block, whose norm and gate have arithmetic that kernels can compute."""
    rng = random.Random(seed)
    count = rng.choice((1, 2, 2, 3))
    some = lambda names, most: rng.sample(sorted(names), rng.randint(1, most))
    norm = ["wide", *some(_ROWS, 2), *some(_ONE, 2), "gain"]
    if rng.random() < 0.3:
        norm.remove("wide")
    binary = [rng.choice(sorted(_TWO)) for _ in range(count - 1)]
    gate = [*some(_ONE, 3), *binary, *some(_ONE, 1)]
    if not binary:
        gate.append(rng.choice(sorted(_TWO)))
    dtype = rng.choice((jnp.bfloat16, jnp.float32))
    if dtype == jnp.float32:  # kernels read tiles of one dtype
        gate = [name for name in gate if name != "narrow"]
    return Block(
        dtype=dtype,
        norm=tuple(norm),
        gate=tuple(gate),
        num_linears=count,
        keep=rng.choice((1.0, 0.75)),
    )


SWIGLU = Block(
    dtype=jnp.bfloat16,
    norm=("wide", "rms", "narrow", "gain"),
    gate=("silu", "multiply"),
    num_linears=2,
)
