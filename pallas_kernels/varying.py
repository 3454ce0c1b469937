"""Types of arrays inside `jax.shard_map(check_vma=True)`.

There, an array has the type of the mesh axes along which it may differ. Kernels return
arrays without such axes, and a function with a gradient of its own needs them to be the
same in both passes. So all arrays of a linear get the axes of any of them.
"""

from typing import Any

import jax


def varying_axes(tree: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array of a pytree may differ."""
    return frozenset().union(*map(_axes, jax.tree.leaves(tree)))


def vary[Tree](tree: Tree, axes: frozenset[str]) -> Tree:
    """Gives arrays the type of arrays that may differ along mesh axes."""

    def varied(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(varied, tree)


def _axes(leaf: Any) -> frozenset[str]:
    aval: Any = jax.typeof(leaf)
    return aval.mat.varying
