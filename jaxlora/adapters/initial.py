"""The weights that A and B start from, by PEFT's names (`init_lora_weights`).

PiSSA and OLoRA start from a part `s A0 B0` of the frozen weight W, and PEFT trains A
and B on the rest: `(W - s A0 B0) + s A B`. Here, adapters share W, so it stays as it
is, and the adapter keeps its first weights: `W + s [A A0] [B; -B0]` has twice the rank,
and its second half is fixed. That is also what PEFT saves when it is given
`path_initial_model_for_weight_conversion`: an adapter of rank 2r on W itself.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlora.config.starts import num_power_iterations
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.sharding.global_arrays import everywhere

# A, K r; and B, r N.
Pair = tuple[Float[np.ndarray, "K R"], Float[np.ndarray, "R N"]]
# Draws them from a random generator for a weight (K, N), at a rank.
Draw = Callable[[np.random.Generator, tuple[int, int], int], Pair]


def _gaussian(rng: np.random.Generator, shape: tuple[int, int], rank: int) -> Pair:
    k, n = shape
    return rng.normal(0, 1 / rank, (k, rank)), np.zeros((rank, n))


def _orthogonal(rng: np.random.Generator, shape: tuple[int, int], rank: int) -> Pair:
    """Draws A and B from subspaces of the ranks that are orthogonal, so A B = 0."""
    k, n = shape
    q, _ = np.linalg.qr(rng.normal(size=(rank, rank)))
    a = rng.normal(size=(k, rank // 2)) @ q[0::2]
    b = q[1::2].T @ rng.normal(size=(rank // 2, n))
    return a / 10, b / 10


# Ways to draw A and B that leave the base as it is.
DRAWN: Mapping[object, Draw] = {"gaussian": _gaussian, "orthogonal": _orthogonal}


def kept_start(
    init: str,
    rng: np.random.Generator,
    kernel: Any,
    rank: int,
    scaling: float,
) -> dict[str, np.ndarray]:
    """Returns the weights of an adapter that keeps its start, by name: K 2r and 2r N.

    It runs programs on the devices of the frozen weight.

    Args:
        init: `pissa`, `pissa_niter_N` or `olora`.
        rng: Draws the subspace from which `pissa_niter_N` starts.
        kernel: Frozen weight, K N.
        rank: Number of ranks that are trained, r.
        scaling: Factor of A B.

    References:
        PiSSA, arXiv 2404.02948; OLoRA, arXiv 2406.01775.
    """
    if init == "olora":
        found = _olora(kernel, rank)
    elif (niter := num_power_iterations(init)) is None:
        found = _pissa(kernel, rank)
    else:
        probe = rng.normal(size=(kernel.shape[0], rank)).astype(np.float32)
        found = _pissa_of_subspace(kernel, probe, niter)
    a, b = (np.asarray(x) for x in everywhere(found))
    if init != "olora":
        a, b = a * np.float32(scaling**-0.5), b * np.float32(scaling**-0.5)
    a, b = _padded(a, b, rank)
    return {LORA_A.name: np.hstack([a, a]), LORA_B.name: np.vstack([b, -b])}


def _padded(a: np.ndarray, b: np.ndarray, rank: int) -> Pair:
    """Adds the ranks beyond those of the weight, which are of no use and stay zero."""
    more = rank - a.shape[1]
    return np.pad(a, ((0, 0), (0, more))), np.pad(b, ((0, more), (0, 0)))


@functools.partial(jax.jit, static_argnums=1)
def _pissa(w: Float[Array, "K N"], rank: int) -> tuple[Array, Array]:
    """Principal part of W, with the singular values shared by both factors."""
    u, s, vh = jnp.linalg.svd(w.astype(jnp.float32), full_matrices=False)
    return _factors(u, s, vh, rank)


def _factors(u: Array, s: Array, vh: Array, rank: int) -> tuple[Array, Array]:
    root = jnp.sqrt(s[:rank])
    return u[:, :rank] * root, root[:, None] * vh[:rank]


@functools.partial(jax.jit, static_argnums=2)
def _pissa_of_subspace(
    w: Float[Array, "K N"], probe: Float[Array, "K R"], niter: int
) -> tuple[Array, Array]:
    """The same by subspace iteration, as torch's `svd_lowrank`.

    References:
        Halko et al., arXiv 0909.4061, algorithms 4.4 and 5.1.
    """
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    w = w.astype(jnp.float32)
    q = jnp.linalg.qr(product(w.T, probe))[0]
    for _ in range(niter):
        q = jnp.linalg.qr(product(w, q))[0]
        q = jnp.linalg.qr(product(w.T, q))[0]
    u, s, vh = jnp.linalg.svd(product(w, q), full_matrices=False)
    return _factors(u, s, product(vh, q.T), probe.shape[1])


@functools.partial(jax.jit, static_argnums=1)
def _olora(w: Float[Array, "K N"], rank: int) -> tuple[Array, Array]:
    """Factors of the QR decomposition of W [N, K], as Hugging Face stores it."""
    q, r = jnp.linalg.qr(w.astype(jnp.float32).T)
    return r[:rank].T, q[:, :rank].T
