"""Tiles of the Triton kernels to be timed on the present device."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels import MaskWords, dropout_keys, kernel_settings, mask_words
from jaxlora.pallas_kernels.operands import Term, make_blocks
from jaxlora.pallas_kernels.projection import KernelSettings
from jaxlora.pallas_kernels.triton.launch import to_tile
from jaxlora.pallas_kernels.triton.target import Target, present_target
from scripts.bench.shapes import LARGE, products

SLOTS, BLOCK = 4, 128
RANKS = (16, 32, 64)
SHAPES = products(LARGE)  # (K, N)
KERNELS = ("expand", "shrink", "outer", "dual")
CHOICE = "tile"  # what a row's value is
Entry = dict[str, int]


class Problem(NamedTuple):
    """A key of a tuning table, and the choices to time for it."""

    key: str
    choice: str  # what the values are
    values: Sequence[Any]
    calls: Callable[[Any], list[Callable]]  # takes a value; returns functions of arrays
    arrays: tuple[Any, ...]


def _entries(
    names: str, *options: tuple[tuple[int, ...], int, Sequence[int]]
) -> list[Entry]:
    """Makes entries of (sizes, num_warps, all num_stages to try)."""
    return [
        dict(zip(names.split(), sizes, strict=True))
        | {"num_warps": num_warps, "num_stages": num_stages}
        for sizes, num_warps, all_stages in options
        for num_stages in all_stages
    ]


CANDIDATES: dict[str, list[Entry]] = {
    "expand": _entries(
        "BM BN BK BAND",
        ((128, 256, 64, 8), 8, (3, 4)),
        ((128, 256, 32, 8), 8, (3, 4)),
        ((128, 128, 64, 8), 8, (3, 4)),
        ((128, 128, 64, 8), 4, (3,)),
        ((128, 128, 32, 8), 4, (3, 4)),
        ((64, 256, 32, 8), 4, (3, 4)),
    ),
    "shrink": _entries(
        "BM BK",
        *(((m, 128), 4, (3, 4)) for m in (16, 32, 64)),
        ((32, 128), 4, (6,)),
        ((16, 256), 4, (4,)),
        ((32, 256), 4, (3, 4)),
        ((32, 256), 8, (4,)),  # more warps for the arithmetic of the mask
    ),
    "outer": _entries(
        "BK",
        ((64,), 4, (5,)),
        ((128,), 4, (3, 4, 5)),
        ((128,), 8, (3, 4)),
        ((256,), 8, (3, 4)),
    ),
    "dual": _entries(
        "BN",
        ((128,), 4, (2, 3, 4, 5)),
        ((128,), 8, (2, 3)),
        ((256,), 4, (2, 3)),
        ((256,), 8, (2, 3, 4)),
    ),
}


class Inputs(NamedTuple):
    """Operands of the kernels in bfloat16, with four equal adapters and dropout."""

    x: jax.Array  # [T, K]
    s: jax.Array  # [T, R]
    w: tuple[jax.Array, jax.Array]  # stored [1, K, N] and [1, N, K]
    a: jax.Array  # [G, K, R]
    a_transposed: jax.Array  # [G, R, K]
    b: tuple[jax.Array, jax.Array]  # stored [G, R, N] and [G, N, R]
    settings: KernelSettings
    words: tuple[MaskWords, MaskWords]  # of the masks of K, and of N features


def _inputs(t: int, k: int, n: int, r: int) -> Inputs:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    key = dropout_keys(jnp.arange(SLOTS), jnp.zeros(SLOTS, jnp.int32), 0, 0)[None]
    one, index = jnp.ones((1, SLOTS)), jnp.arange(t, dtype=jnp.int32)
    (settings,) = kernel_settings(one, jnp.full((1, SLOTS), r, jnp.int32), 0.1 * one)
    words_of = lambda m: mask_words(key, _block_adapter(t), index, m)[0]
    return Inputs(
        x=normal(t, k),
        s=normal(t, r),
        w=(normal(1, k, n), normal(1, n, k)),
        a=normal(SLOTS, k, r),
        a_transposed=normal(SLOTS, r, k),
        b=(normal(SLOTS, r, n), normal(SLOTS, n, r)),
        settings=settings,
        words=(words_of(k), words_of(n)),
    )


def _block_adapter(t: int) -> jax.Array:
    return jnp.repeat(jnp.arange(SLOTS, dtype=jnp.int32), t // BLOCK // SLOTS)


def _calls(kernel: str, tile: Any, target: Target) -> list[Callable[[Inputs], Any]]:
    """Returns functions that call a kernel in each of its roles in a training step."""
    # Triton is optional, and the other back ends are tuned without it.
    from jaxlora.pallas_kernels.triton.dual import dual
    from jaxlora.pallas_kernels.triton.expand import expand
    from jaxlora.pallas_kernels.triton.outer import outer
    from jaxlora.pallas_kernels.triton.shrink import shrink

    options = {"target": target, "tile": tile}

    def blocks(given):
        rows = given.x.shape[0]
        return make_blocks(_block_adapter(rows), SLOTS, rows)

    def product(given, transposed, words=None):
        term = Term(
            x=given.x,
            w=given.w[transposed],
            s=given.s,
            b=given.b[transposed],
            settings=given.settings,
            mask=words,
        )
        return expand(
            [term],
            jnp.zeros(1, jnp.int32),
            blocks(given),
            transposed=transposed,
            rank_last=transposed,
            **options,
        )

    def masked(given, kernel, other, **more):
        shared = [given.settings], [given.words[0]], blocks(given)
        return kernel(given.x, [other], *shared, **more, **options)

    def both(given):
        operands = given.x, given.s, given.a_transposed, given.settings
        return dual(*operands, blocks(given), **options)

    calls: dict[str, list[Callable[[Inputs], Any]]] = {
        "expand": [  # y and dx
            lambda given: product(given, False),
            lambda given: product(given, True, given.words[1]),
        ],
        "shrink": [lambda given: masked(given, shrink, given.a, rank_first=False)],
        "outer": [lambda given: masked(given, outer, given.s)],
        "dual": [both],
    }
    return calls[kernel]


def problems(tokens: Sequence[int], kernels: Sequence[str]) -> Iterator[Problem]:
    """Yields the products that decide tiles, with the candidates.

    Args:
        tokens: Numbers of token rows. The other kernels than expand take the last.
        kernels: Some of `KERNELS`.
    """
    for kernel in kernels:
        for key, sizes in _sizes(kernel, tokens):
            yield Problem(
                key=key,
                choice=CHOICE,
                values=[json.dumps(entry) for entry in CANDIDATES[kernel]],
                calls=lambda value, kernel=kernel: _calls(
                    kernel, to_tile(json.loads(value)), present_target()
                ),
                arrays=(_inputs(*sizes),),
            )


def _sizes(
    kernel: str, tokens: Sequence[int]
) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yields keys of the table, and T, K, N and R of a product that decides them."""
    if kernel == "expand":
        for t in tokens:
            for k, n in SHAPES:
                yield f"expand {t} {k} {n}", (t, k, n, RANKS[0])
        return
    k, n = SHAPES[0]
    for r in RANKS:
        yield f"{kernel} {r}", (tokens[-1], k, n, r)
