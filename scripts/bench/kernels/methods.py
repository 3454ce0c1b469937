"""Random operands and JAX methods for the kernel benchmarks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels import (
    BACKENDS,
    FORMATS,
    Dropout,
    LinearShape,
    Projection,
    QuantizedWeight,
    dropout_keys,
    multi_lora_linears,
)
from scripts.bench.shapes import KernelCase

BLOCK = 128  # token rows of a block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Group:
    """Linears that share an input, as a pytree.

    Attributes:
        x: The input, T K.
        matrices: w (K N, or quantized), a (G K R) and b (G R N) of each linear.
        dy: The gradient of each linear's output, T N.
    """

    x: jax.Array
    matrices: list[tuple[jax.Array | QuantizedWeight, jax.Array, jax.Array]]
    dy: list[jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Inputs that all linears of a case share, as a pytree.

    Attributes:
        scaling: Scaling of each adapter, float32 G.
        rank: Rank of each adapter, int32 G.
        block_adapter: Adapter of each token block, int32 NB.
        rate: Dropout rate of all adapters; 0 means no dropout.
        token_index: Each token's index in its adapter's batch, int32 T.
    """

    scaling: jax.Array
    rank: jax.Array
    block_adapter: jax.Array
    rate: float = dataclasses.field(metadata={"static": True})
    token_index: jax.Array

    def dropout(self, projection: int) -> Dropout | None:
        """Makes the dropout of one projection."""
        if self.rate == 0:
            return None
        g = self.rank.shape[0]
        seed, step = jnp.arange(g), jnp.zeros(g, jnp.int32)
        key = dropout_keys(seed, step, layer=0, projection=projection)
        return Dropout(key, jnp.full(g, self.rate), self.token_index)


def operands(case: KernelCase) -> tuple[list[Group], Routing]:
    """Makes a case's random operands in bfloat16, and its routing."""
    g, t = len(case.ranks), case.tokens
    keys = iter(jax.random.split(jax.random.key(0), 64))
    bf16 = jnp.bfloat16
    is_used = jnp.arange(max(case.ranks)) < jnp.array(case.ranks)[:, None]

    def matrices(k, n):
        r = max(case.ranks)
        w = jax.random.normal(next(keys), (k, n)) * k**-0.5
        a = jax.random.normal(next(keys), (g, k, r)) * is_used[:, None] * k**-0.5
        b = jax.random.normal(next(keys), (g, r, n)) * is_used[:, :, None]
        return w.astype(bf16), a.astype(bf16), b.astype(bf16)

    groups = [
        Group(
            x=jax.random.normal(next(keys), (t, k), bf16),
            matrices=[matrices(k, n) for n in widths],
            dy=[jax.random.normal(next(keys), (t, n), bf16) for n in widths],
        )
        for k, widths in case.groups
    ]
    blocks = jnp.repeat(jnp.arange(g), t // BLOCK // g).astype(jnp.int32)
    routing = Routing(
        scaling=jnp.full(g, 2.0),
        rank=jnp.array(case.ranks, jnp.int32),
        block_adapter=blocks,
        rate=case.rate,
        token_index=jnp.arange(t, dtype=jnp.int32) % (t // g),
    )
    return groups, routing


def frozen(x, matrices, routing):
    """Runs the frozen layers alone."""
    del routing
    return [x @ w for w, _, _ in matrices]


def ours(implementation, x, matrices, routing):
    """Runs `multi_lora_linears` with one of its implementations."""
    projections = [
        Projection(
            w=w,
            a=a,
            b=b,
            scaling=routing.scaling,
            rank=routing.rank,
            dropout=routing.dropout(i),
        )
        for i, (w, a, b) in enumerate(matrices)
    ]
    return multi_lora_linears(
        x, projections, routing.block_adapter, implementation=implementation
    )


FROZEN = "frozen"  # through cuBLAS; the denominator of ratios
_OURS = {f"jaxlora {name}": name for name in BACKENDS}
# Methods on a quantized base: the format, and the options with which it is made.
_QUANTIZED: dict[str, tuple[str, dict[str, bool]]] = {
    "jaxlora mosaic, fp8": ("fp8", {"transposed": True}),
    "jaxlora mosaic, fp8, one copy": ("fp8", {}),
    "jaxlora mosaic, fp8 forward": ("fp8", {"fp8_backward": False}),
    "jaxlora mosaic, int8": ("int8", {}),
    "jaxlora mosaic, nf4": ("nf4", {}),
}
_OURS |= dict.fromkeys(_QUANTIZED, "mosaic")
METHODS: dict[str, Callable] = {
    FROZEN: frozen,
    **{name: functools.partial(ours, backend) for name, backend in _OURS.items()},
}


def passes(method, groups, routing, *, with_gradient: bool):
    """Computes outputs of every group, and optionally gradients of x, A and B."""
    out, is_frozen = [], method is frozen
    for group in groups:
        weights = [w for w, _, _ in group.matrices]
        adapters = [(a, b) for _, a, b in group.matrices]

        def forward(x, adapters, weights=weights):
            matrices = [(w, *ab) for w, ab in zip(weights, adapters, strict=True)]
            return tuple(method(x, matrices, routing))

        if not with_gradient:
            out.append(forward(group.x, adapters))
            continue
        y, vjp = jax.vjp(forward, group.x, adapters)
        gradients = vjp(tuple(group.dy))
        out.append((y, gradients[0] if is_frozen else gradients))
    return out


def prepared(method: str, groups: Sequence[Group]) -> list[Group]:
    """Returns a case's groups with the weights in the format that a method reads."""
    if method not in _QUANTIZED:
        return list(groups)
    name, options = _QUANTIZED[method]
    quantize = jax.jit(lambda w: FORMATS[name].quantize(w.T, **options))
    return [
        dataclasses.replace(
            group, matrices=[(quantize(w), a, b) for w, a, b in group.matrices]
        )
        for group in groups
    ]


def call(method: str, *, with_gradient: bool) -> Callable:
    """Returns a function that applies a method, by name, to (groups, routing).

    They must be arguments of the compiled program. XLA computes in advance what follows
    from constants, which took minutes, and which no model's operands are.
    """
    return functools.partial(passes, METHODS[method], with_gradient=with_gradient)


def unsupported(method: str, case: KernelCase) -> str | None:
    """Returns why a method cannot run a case on this device, or None if it can."""
    backend = _OURS.get(method)
    if backend is None:
        return None
    shapes = (
        LinearShape(
            dtype=jnp.bfloat16,
            in_features=k,
            out_features=n,
            rank=max(case.ranks),
            block_tokens=BLOCK,
            weight_format=_QUANTIZED[method][0] if method in _QUANTIZED else None,
        )
        for k, widths in case.groups
        for n in widths
    )
    return next(filter(None, map(BACKENDS[backend].unsupported, shapes)), None)
