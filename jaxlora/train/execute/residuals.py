"""The backward pass of a stage as a value that one program makes and another runs.

`jax.vjp` returns a pytree of arrays. Among them are the frozen weights and the
adapters, which the backward pass gets again as its own arguments. They are left out
here, so only activations are kept between the two programs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("arrays",),
    meta_fields=("structure", "places"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """The arrays that a forward pass keeps for its backward pass.

    Attributes:
        arrays: The arrays that are kept, without the arguments.
        structure: Structure of the pytree that `jax.vjp` returned.
        places: For each of its arrays the number of the argument that it is; None: it
            is the next of `arrays`.
    """

    arrays: tuple[Any, ...]
    structure: Any
    places: tuple[int | None, ...]


def split(pullback: Any, arguments: Any) -> Residuals:
    """Takes the arguments out of what `jax.vjp` returned.

    Args:
        pullback: The second result of `jax.vjp`, in the trace that called it.
        arguments: A pytree of arguments that need not be kept.
    """
    numbers = {id(one): i for i, one in enumerate(jax.tree.leaves(arguments))}
    leaves, structure = jax.tree.flatten(pullback)
    # A residual that is an argument is the same object, not only an equal one.
    places = tuple(numbers.get(id(leaf)) for leaf in leaves)
    kept = (leaf for leaf, place in zip(leaves, places, strict=True) if place is None)
    return Residuals(arrays=tuple(kept), structure=structure, places=places)


def join(residuals: Residuals, arguments: Any) -> Callable[..., Any]:
    """Returns the backward pass again.

    Args:
        residuals: What `split` returned.
        arguments: The arguments, in the same pytree.
    """
    given, kept = jax.tree.leaves(arguments), iter(residuals.arrays)
    leaves = [next(kept) if p is None else given[p] for p in residuals.places]
    return jax.tree.unflatten(residuals.structure, leaves)
