"""The frozen product alone in Triton, with the tile and loop of the fused kernel.

The difference between the fused kernels and this is what adapters cost. cuBLAS may be
faster than both, above all on a newer GPU than they are compiled for.
"""

import typing

import jax
import triton
import triton.language as tl

from jaxlora.pallas_kernels.triton.expand import add_product, tile_place
from jaxlora.pallas_kernels.triton.launch import launch, tile_for
from jaxlora.pallas_kernels.triton.target import present_target


@triton.jit
@typing.no_type_check
def product_kernel(
    x,
    w,
    y,
    T: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """Computes a tile of y = x W, or x W^T if TRANSPOSED; all sizes are multiples."""
    m, n = tile_place(tl.program_id(0), T // BM, N // BN, BAND)
    rows, columns = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    total = add_product(total, x, w, m, n, T, N, K, TRANSPOSED, BM, BN, BK)
    y_at = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty))


def _multiply(x: jax.Array, w: jax.Array, *, transposed: bool) -> jax.Array:
    (t, k), n = x.shape, w.shape[0 if transposed else 1]
    target = present_target()
    tile = tile_for("expand", target, shape=(t, k, n))
    sizes = tile.sizes
    if t % sizes["BM"] or k % sizes["BK"] or n % sizes["BN"]:
        raise ValueError(f"{t} x {k} x {n} are not multiples of the tile {sizes}.")
    (y,) = launch(
        product_kernel,
        [x, w],
        [jax.ShapeDtypeStruct((t, n), x.dtype)],
        grid=(t // sizes["BM"] * (n // sizes["BN"]),),
        tile=tile,
        target=target,
        constants={"T": t, "K": k, "N": n, "TRANSPOSED": transposed},
    )
    return y


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x W, whose gradient of x is also a Triton kernel; w has no gradient.

    Args:
        x: [T, K].
        w: [K, N].

    Raises:
        ValueError: A size is not a multiple of the tile.
    """
    return _multiply(x, w, transposed=False)


product.defvjp(
    lambda x, w: (_multiply(x, w, transposed=False), w),
    lambda w, dy: (_multiply(dy, w, transposed=True), None),
)
