"""Fused kernels refuse `jax.vmap`, and say what to do instead."""

from collections.abc import Callable

import jax


def without_vmap(kernel: Callable, *, implementation: str) -> Callable:
    """Makes a kernel raise an error under vmap that says what to do instead."""

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        return kernel(*arrays)

    @run.def_vmap
    def _(axis_size, in_batched, *arrays):
        raise NotImplementedError(
            f"vmap of multi_lora_linear(implementation={implementation!r}): lay the "
            "batch out as token rows and name each block's adapter in block_adapter "
            "instead."
        )

    return run
