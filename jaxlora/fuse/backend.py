"""Chooses the kernels of a site."""

from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxlora.errors import ConfigError
from jaxlora.pallas_kernels import BACKENDS, LinearShape, get_backend
from jaxlora.pallas_kernels.backends import is_partitioned


def check_implementation(name: str) -> None:
    """Raises ConfigError if a name is neither `auto` nor that of a back end."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(
            f"implementation={name!r} is unknown. Use auto or one of: "
            f"{', '.join(BACKENDS)}."
        )


def choose_backend(
    asked: str, shapes: Sequence[LinearShape], precision: lax.Precision, mesh: Any
) -> tuple[str, int] | str:
    """Returns the first back end to take for a linear, or why none is taken.

    Args:
        asked: Name of a back end, or `auto`, which passes over back ends that are slow
            on the device.
        shapes: The linear with each size of token blocks, in order of preference.
        precision: What the products are asked for.
        mesh: The abstract mesh around the linear.

    Returns:
        The back end's name and the rows of a token block, or the reason.
    """
    is_auto = asked == "auto"
    reasons = []
    for backend in BACKENDS.values() if is_auto else [get_backend(asked)]:
        reason = None
        if is_partitioned(mesh) and not backend.partitionable:
            reasons.append(
                f"{backend.name} has kernels that cannot be partitioned over the mesh: "
                "call jaxlora.fuse inside jax.shard_map"
            )
            continue
        if precision != lax.Precision.DEFAULT and not backend.is_plain:
            reasons.append(
                f"{backend.name} computes products at default precision, and "
                f"precision={precision.name} is asked for"
            )
            continue
        for shape in shapes:
            reason = backend.why_not(backend.unsupported(shape), is_auto=is_auto)
            if reason is None:
                return backend.name, shape.block_tokens
        reasons.append(f"{backend.name} {reason}")
    return "; ".join(reasons)
