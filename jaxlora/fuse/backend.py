"""Chooses the kernels of a site."""

import dataclasses

import numpy as np

from jaxlora.errors import ConfigError
from jaxlora.pallas_kernels import BACKENDS, Backend, LinearShape, get_backend
from jaxlora.pallas_kernels.dropout import TILE_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A back end that can run a linear.

    Attributes:
        name: Its name in `BACKENDS`.
        block_tokens: Rows of each adapter, padded as the back end needs them.
    """

    name: str
    block_tokens: int


def check_implementation(name: str) -> None:
    """Raises ConfigError if a name is neither `auto` nor that of a back end."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(
            f"implementation={name!r} is unknown. Use auto or one of: "
            f"{', '.join(BACKENDS)}."
        )


def choose_backend(
    asked: str, *, dtype: np.dtype, shape: tuple[int, int, int], rank: int
) -> Chosen | str:
    """Returns the first back end that can run a linear, or why none can.

    Args:
        asked: Name of a back end, or `auto`.
        dtype: Dtype of x and w.
        shape: Rows of each adapter, in features and out features.
        rank: Sum of the branches' ranks.
    """
    backends = BACKENDS.values() if asked == "auto" else [get_backend(asked)]
    reasons = []
    for backend in backends:
        rows = shape[0]
        for block in (rows, -(-rows // TILE_TOKENS) * TILE_TOKENS):
            reason = _unsupported(backend, dtype, (block, *shape[1:]), rank)
            if reason is None:
                return Chosen(name=backend.name, block_tokens=block)
        reasons.append(f"{backend.name} cannot run it: {reason}")
    return "; ".join(reasons)


def _unsupported(
    backend: Backend, dtype: np.dtype, shape: tuple[int, int, int], rank: int
) -> str | None:
    block, in_features, out_features = shape
    return backend.unsupported(
        LinearShape(
            dtype=dtype,
            in_features=in_features,
            out_features=out_features,
            rank=rank,
            block_tokens=block,
        )
    )
