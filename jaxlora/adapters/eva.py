"""EVA: A starts from the principal components of what the linears get as inputs.

Each linear's components are found by incremental SVD over batches of the job's own
tokens, and the ranks go to the linears whose components explain most of the variance of
their inputs. B is zero, so the adapter starts as the base.

A linear may get up to rho times its rank, and has so many ranks in its slot. Those that
it does not get are zero in A and in B, have no gradient, and stay zero; they are left
out when the adapter is exported.

References:
    Explained Variance Adaptation, arXiv 2410.07170.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

_POWER_ITERATIONS = 4  # as PEFT has them


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Components:
    """Principal components of rows, which come batch by batch.

    Attributes:
        vectors: Orthonormal components as rows, C K; the first explains most.
        sizes: Their singular values, C.
        mean: Mean of the rows, K.
        count: Number of rows.
        variance: Sum over all rows of their squared distance from the mean.
    """

    vectors: Float[Array, "C K"]
    sizes: Float[Array, " C"]
    mean: Float[Array, " K"]
    count: Float[Array, ""]
    variance: Float[Array, ""]

    @staticmethod
    def none(num: int, features: int) -> "Components":
        """Returns those of no rows."""
        return Components(
            vectors=jnp.zeros((num, features)),
            sizes=jnp.zeros(num),
            mean=jnp.zeros(features),
            count=jnp.zeros(()),
            variance=jnp.zeros(()),
        )

    @property
    def shares(self) -> Float[Array, " C"]:
        """Share of the variance that each component explains."""
        return self.sizes**2 / self.variance


@jax.jit
def update(
    found: Components,
    x: Float[Array, "T K"],
    is_included: Bool[Array, " T"],
    probe: Float[Array, "K Q"],
) -> Components:
    """Returns the components of the rows before and some more.

    Args:
        found: The components of the rows before.
        x: Further rows.
        is_included: Which of them count.
        probe: Random matrix from which the subspace iteration starts.

    References:
        Ross et al., Incremental learning for robust visual tracking, 2008, section 3.
    """
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    x = jnp.where(is_included[:, None], x.astype(jnp.float32), 0)
    num = is_included.sum().astype(jnp.float32)
    total = found.count + num
    mean = x.sum(axis=0) / num
    centered = jnp.where(is_included[:, None], x - mean, 0)
    shift = jnp.sqrt(found.count * num / total) * (found.mean - mean)
    rows = jnp.concatenate(
        [found.sizes[:, None] * found.vectors, centered, shift[None]]
    )
    q = jnp.linalg.qr(product(rows, probe))[0]
    for _ in range(_POWER_ITERATIONS):
        q = jnp.linalg.qr(product(rows.T, q))[0]
        q = jnp.linalg.qr(product(rows, q))[0]
    _, sizes, vectors = jnp.linalg.svd(product(q.T, rows), full_matrices=False)
    num_kept = len(found.sizes)
    sizes, vectors = sizes[:num_kept], vectors[:num_kept]
    largest = jnp.abs(vectors).argmax(axis=1)
    signs = jnp.sign(jnp.take_along_axis(vectors, largest[:, None], axis=1))
    return Components(
        vectors=vectors * jnp.where(signs == 0, 1, signs),
        sizes=sizes,
        mean=(found.count * found.mean + num * mean) / total,
        count=total,
        variance=found.variance + (centered**2).sum() + (shift**2).sum(),
    )


def num_ranks(
    shares: Mapping[str, Float[np.ndarray, " C"]],
    groups: Sequence[Sequence[str]],
    budget: int,
) -> dict[str, int]:
    """Distributes ranks over linears, as PEFT does.

    The components of all linears that explain the largest shares get a rank each. Of
    equal shares, which linears with one input have, the first linear of each input is
    first.

    Args:
        shares: Shares of the variance that the components of each linear explain, as
            many as it may get, in descending order.
        groups: The linears by their input.
        budget: Number of ranks.
    """
    names = [group[0] for group in groups]
    names += [name for group in groups for name in group[1:]]
    owners = np.repeat(np.arange(len(names)), [len(shares[name]) for name in names])
    values = np.concatenate([shares[name] for name in names])
    chosen = owners[np.argsort(-values, kind="stable")[:budget]]
    counts = np.bincount(chosen, minlength=len(names)).tolist()
    return dict(zip(names, counts, strict=True))


def first_matrix(
    found: Components, rank: int, num: int, *, whiten: bool
) -> Float[np.ndarray, "K R"]:
    """Returns the A of a linear, with zeros in the ranks that it does not get.

    Args:
        found: The components of its input.
        rank: Number of ranks that it gets.
        num: Number of ranks that it has in its slot.
        whiten: Whether components are divided by the root of their singular values.
    """
    vectors = np.asarray(found.vectors)[:rank]
    if whiten:
        vectors = vectors / np.sqrt(np.asarray(found.sizes)[:rank, None])
    a = np.zeros((vectors.shape[1], num), np.float32)
    a[:, :rank] = vectors.T
    return a
