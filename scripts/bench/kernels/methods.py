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
    dropout_keys,
    multi_lora_linears,
)
from scripts.bench.shapes import KernelCase

BLOCK = 128  # token rows of a block, or those of an adapter if they are fewer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Group:
    """Linears that share an input, as a pytree.

    Attributes:
        x: The input, T K.
        projections: The linears.
        dy: The gradient of each linear's output, T N.
    """

    x: jax.Array
    projections: list[Projection]
    dy: list[jax.Array]


def operands(case: KernelCase) -> tuple[list[Group], jax.Array]:
    """Makes a case's random operands in bfloat16, and the adapter of each block."""
    g, t, r = len(case.ranks), case.tokens, max(case.ranks)
    keys = iter(jax.random.split(jax.random.key(0), 64))
    bf16, zeros = jnp.bfloat16, jnp.zeros(g, jnp.int32)
    is_used = jnp.arange(r) < jnp.array(case.ranks)[:, None]
    token_index = jnp.arange(t, dtype=jnp.int32) % (t // g)

    def projection(number, k, n):
        w = jax.random.normal(next(keys), (k, n)) * k**-0.5
        a = jax.random.normal(next(keys), (g, k, r)) * is_used[:, None] * k**-0.5
        b = jax.random.normal(next(keys), (g, r, n)) * is_used[:, :, None]
        key = dropout_keys(jnp.arange(g), zeros, layer=0, projection=number)
        dropout = Dropout(key, jnp.full(g, case.rate), token_index)
        return Projection(
            w=w.astype(bf16),
            a=a.astype(bf16),
            b=b.astype(bf16),
            scaling=jnp.full(g, 2.0),
            rank=jnp.array(case.ranks, jnp.int32),
            dropout=dropout if case.rate else None,
        )

    groups = [
        Group(
            x=jax.random.normal(next(keys), (t, k), bf16),
            projections=[projection(i, k, n) for i, n in enumerate(widths)],
            dy=[jax.random.normal(next(keys), (t, n), bf16) for n in widths],
        )
        for k, widths in case.groups
    ]
    num_blocks = t // g // min(BLOCK, t // g)
    return groups, jnp.repeat(jnp.arange(g), num_blocks).astype(jnp.int32)


def frozen(x, projections, block_adapter):
    """Runs the frozen layers alone."""
    del block_adapter
    return [x @ p.w for p in projections]


def ours(implementation, x, projections, block_adapter):
    """Runs `multi_lora_linears` with one of its implementations."""
    return multi_lora_linears(
        x, projections, block_adapter, implementation=implementation
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


def passes(method, groups, block_adapter, *, with_gradient: bool):
    """Computes outputs of every group, and optionally gradients of x, A and B."""
    out = []
    for group in groups:
        adapters = [(p.a, p.b) for p in group.projections]

        def forward(x, adapters, group=group):
            pairs = zip(group.projections, adapters, strict=True)
            given = [dataclasses.replace(p, a=a, b=b) for p, (a, b) in pairs]
            return tuple(method(x, given, block_adapter))

        if not with_gradient:
            out.append(forward(group.x, adapters))
            continue
        y, vjp = jax.vjp(forward, group.x, adapters)
        gradients = vjp(tuple(group.dy))
        out.append((y, gradients[0] if method is frozen else gradients))
    return out


def prepared(method: str, groups: Sequence[Group]) -> list[Group]:
    """Returns a case's groups with the weights in the format that a method reads."""
    if method not in _QUANTIZED:
        return list(groups)
    name, options = _QUANTIZED[method]
    quantize = jax.jit(lambda w: FORMATS[name].quantize(w.T, **options))
    quantized = lambda p: dataclasses.replace(p, w=quantize(p.w))
    return [
        dataclasses.replace(group, projections=[*map(quantized, group.projections)])
        for group in groups
    ]


def call(method: str, *, with_gradient: bool) -> Callable:
    """Returns a function that applies a method, by name, to what `operands` makes.

    Those must be arguments of the compiled program. XLA would compute what follows from
    constants while it compiles, for minutes, and no model's operands are constants.
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
            block_tokens=min(BLOCK, case.tokens // len(case.ranks)),
            weight_format=_QUANTIZED[method][0] if method in _QUANTIZED else None,
        )
        for k, widths in case.groups
        for n in widths
    )
    return next(filter(None, map(BACKENDS[backend].unsupported, shapes)), None)
