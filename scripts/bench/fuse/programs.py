"""Programs with LoRA that know nothing of jaxlora: a linear, a layer, a whole step."""

import dataclasses
import importlib.util
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
        others: The other arguments; the first is x, or the tokens.
        gradients: Numbers of the arguments with a gradient.
        is_loss: Whether the result is a number. If not, `step` takes its gradient.
    """

    name: str
    function: Callable[..., Any]
    trained: Any
    others: tuple[Any, ...]
    gradients: tuple[int, ...] = (0, 1)
    is_loss: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments of the function."""
        return self.trained, *self.others

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward and backward pass of `function`, fused or not."""
        if self.is_loss:
            return jax.value_and_grad(function, self.gradients)

        def run(dy, *arguments):
            inputs = [arguments[i] for i in self.gradients]

            def of(*values):
                replaced = dict(zip(self.gradients, values, strict=True))
                return function(*(replaced.get(i, v) for i, v in enumerate(arguments)))

            y, pullback = jax.vjp(of, *inputs)
            return y, pullback(dy)

        return run

    def step_arguments(self) -> tuple[Any, ...]:
        """Returns the arguments of `step`, with random gradients of the result."""
        if self.is_loss:
            return self.arguments
        y = jax.eval_shape(self.function, *self.arguments)
        leaves, tree = jax.tree.flatten(y)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        made = [
            jax.random.normal(k, v.shape, v.dtype)
            for k, v in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, made), *self.arguments


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


def layer(name: str, *, rate: float, shrunk: int = 1) -> Program:
    """A decoder layer of Llama-3.1-8B with adapters on its seven linears.

    Args:
        name: Its name.
        rate: Rate of dropout.
        shrunk: Divides tokens and widths, for tests.
    """
    width, hidden, sequence = WIDTH // shrunk, HIDDEN // shrunk, SEQUENCE // shrunk
    heads, kv_heads = HEADS // shrunk, max(KV_HEADS // shrunk, 1)
    q, kv = heads * HEAD_WIDTH, kv_heads * HEAD_WIDTH
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
            _rotate(split(project("q", normed), heads)),
            _rotate(split(project("k", normed), kv_heads)),
            split(project("v", normed), kv_heads),
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
    rows = TOKENS // shrunk // sequence
    x = _normal(40, rows, sequence, width)
    others = x, frozen, jax.random.key(41)
    return Program(name=name, function=run, trained=trained, others=others)


def unavailable() -> str | None:
    """Returns why the foreign decoder cannot run, or None if it can."""
    missing = [n for n in ("tunix", "qwix") if importlib.util.find_spec(n) is None]
    return f"{' and '.join(missing)} are not installed" if missing else None


def foreign_decoder(
    name: str,
    *,
    rate: float,
    num_layers: int = 4,
    shrunk: int = 1,
    vocab_size: int = 32000,
) -> Program:
    """The loss of tunix's Llama 3 with qwix's LoRA, both unchanged from their packages.

    Args:
        name: Its name.
        rate: Rate of dropout.
        num_layers: Number of layers of Llama-3.1-8B.
        shrunk: Divides tokens and widths, for tests.
        vocab_size: Number of tokens of the vocabulary.
    """
    import qwix
    from flax import nnx
    from tunix.models.llama3 import model

    sequence = SEQUENCE // shrunk
    config = model.ModelConfig(
        num_layers=num_layers,
        vocab_size=vocab_size,
        embed_dim=WIDTH // shrunk,
        hidden_dim=HIDDEN // shrunk,
        num_heads=HEADS // shrunk,
        head_dim=HEAD_WIDTH,
        num_kv_heads=max(KV_HEADS // shrunk, 1),
        rope_theta=500_000,
        norm_eps=1e-5,
    )

    @nnx.jit
    def make():
        base = model.Llama3(config, rngs=nnx.Rngs(0))
        provider = qwix.LoraProvider(
            module_path=".*_proj", rank=RANK, alpha=2.0 * RANK, dropout=rate
        )
        rngs = nnx.Rngs(params=0, dropout=1)
        adapted = qwix.apply_lora_to_model(
            base, provider, rngs=rngs, **base.get_model_input()
        )
        to_bf16 = lambda v: v.astype(_BF16) if v.dtype == jnp.float32 else v
        nnx.update(adapted, jax.tree.map(to_bf16, nnx.state(adapted, nnx.Param)))
        return adapted

    definition, trained, frozen = nnx.split(make(), nnx.LoRAParam, ...)

    def loss(trained, tokens, frozen, key):
        decoder = nnx.merge(definition, trained, frozen)
        rngs = nnx.Rngs(dropout=key)
        decoder.set_attributes(qwix_rngs=rngs, raise_if_not_found=False)
        length = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        logits, _ = decoder(tokens, positions, None, mask)
        logs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        return -jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1).mean()

    shape = TOKENS // shrunk // sequence, sequence
    tokens = jax.random.randint(jax.random.key(5), shape, 0, vocab_size)
    others = tokens, frozen, jax.random.key(6)
    return Program(
        name=name,
        function=loss,
        trained=trained,
        others=others,
        gradients=(0,),
        is_loss=True,
    )


PROGRAMS: dict[str, Callable[[], Program]] = {
    "linear": lambda: linear("8192 x 4096 x 4096, dropout", rate=RATE),
    "plain": lambda: linear("8192 x 4096 x 4096, no dropout", rate=0.0),
    "adapters": lambda: adapters("4 adapters by vmap, dropout", rate=RATE),
    "layer": lambda: layer("a layer of Llama-3.1-8B, dropout", rate=RATE),
    "decoder": lambda: foreign_decoder("tunix and qwix, 4 layers, dropout", rate=RATE),
    "decoder-plain": lambda: foreign_decoder(
        "tunix and qwix, 4 layers, no dropout", rate=0.0
    ),
}
