"""Frozen weights in shards that are gathered for one layer at a time.

Each device holds a shard of every large weight. A layer gathers its weights in its
forward pass, again in its backward pass, and keeps none of them in between, as in ZeRO
(arXiv 1910.02054, section 5) and FSDP (arXiv 2304.11277, section 3). Only the last
layer may keep them (`gather` alone): nothing but the loss lies between its two passes.

The compiler starts a gather as early as its operands allow, and merges the second
gather of a weight with the first. So every gather is tied to an array, its token: an
optimization barrier makes the token an operand. Forward, the token is what goes into
the layer before; backward, it is the gradient that comes into the layer after. So the
gathers of a layer start when the neighbor's computation starts, in the order of the
pass, and overlap with it. At most two layers' gathered weights exist at any time.

`compiler_options` make XLA run the gathers of a layer as one collective. It would
otherwise start them one after the other, many of them too late to overlap.

NCCL gathers with the GPUs' copy engines, without multiprocessors, if its buffers are
symmetric (at the same offset of a memory that all devices map) and `use_copy_engines`
was called. Otherwise kernels that have one program on each multiprocessor wait for it.
XLA cannot place a program's arguments in such memory, so each gather first copies its
shards there. XLA can neither merge nor keep these copies; its own would hold the shards
of all layers at once.

All functions run inside `jax.shard_map`, which must be manual over the axis `fsdp`.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from jaxlora.sharding.rules import FSDP

_ZERO_CTA_POLICY = "2"  # of NCCL 2.28: no CTA, where the copy engines can do it


def gather(shards: Sequence[Array], dims: Sequence[int], token: Array) -> list[Array]:
    """Gathers weights as soon as the token is computed, and not earlier.

    Args:
        shards: This device's shard of each weight.
        dims: The dimension along which each weight is divided.
        token: Any array that is also used elsewhere: the compiler removes operands of
            a barrier that nothing else uses.
    """
    zero = jnp.zeros((), jnp.uint32)
    shards, zero, _ = jax.lax.optimization_barrier((list(shards), zero, token))
    if has_symmetric_buffers():
        shards = [_copy(shard, zero) for shard in shards]
    return [
        jax.lax.all_gather(shard, FSDP, axis=dim, tiled=True)
        for shard, dim in zip(shards, dims, strict=True)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_gathered(
    run: Callable[[Array, Any, list[Array], Any], Array],
    dims: tuple[int, ...],
    h: Float[Array, "T D"],
    trained: Any,
    shards: list[Array],
    inputs: Any,
    token: Float[Array, "T D"],
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Runs a layer of which each device has shards of the frozen weights.

    The backward pass gathers the weights again, because only the shards are kept. What
    it gets as the gradient of the token is the token of these gathers, and what it
    returns as one is the token of the layer before.

    Args:
        run: The layer, `h = run(h, trained, weights, inputs)`.
        dims: The dimension along which each weight is divided.
        h: Hidden states before the layer.
        trained: Arrays that get a gradient.
        shards: This device's shard of each frozen weight.
        inputs: Arrays that get no gradient.
        token: Token of the gathers, from the layer before.

    Returns:
        Hidden states after the layer, and the token for the next layer.
    """
    return run(h, trained, gather(shards, dims, token), inputs), h


def _run_forward(run, dims, h, trained, shards, inputs, token):
    out, pullback = jax.vjp(
        run,
        h,
        trained,
        gather(shards, dims, token),
        inputs,
        saveable_args=(True, True, False, True),
        in_nzs=(True, True, False, False),
    )
    return (out, h), (pullback, shards)


def _run_backward(run, dims, residuals, gradients):
    pullback, shards = residuals
    dout, token = gradients
    h, trained, _, inputs = pullback.args_res
    weights = gather(shards, dims, token)
    dh, dtrained, _, _ = pullback.replace(args_res=[h, trained, weights, inputs])(dout)
    return dh, dtrained, None, None, dout


run_gathered.defvjp(_run_forward, _run_backward)


@jax.custom_vjp
def end_layers(
    h: Float[Array, "T D"], token: Float[Array, "T D"]
) -> Float[Array, "T D"]:
    """Returns h; its gradient is the token of the backward pass of the last layer."""
    return h


end_layers.defvjp(lambda h, token: (h, None), lambda _, dh: (dh, dh))


def look_up(shard: Float[Array, "V E"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Looks up rows of a table that is divided along its columns.

    Each device looks up its columns for the tokens of all devices, and they exchange
    the results. So the table is never gathered.

    Args:
        shard: This device's columns of the table; E is D divided by the number of
            devices.
        ids: The rows that this device wants.
    """
    columns = shard[jax.lax.all_gather(ids, FSDP, tiled=True)]
    return jax.lax.all_to_all(columns, FSDP, split_axis=0, concat_axis=1, tiled=True)


def compiler_options(layer_bytes: int) -> dict[str, int]:
    """Returns the options with which programs with gathers must be compiled for GPUs.

    Args:
        layer_bytes: Bytes of the gathered weights of a layer.
    """
    options = {"xla_gpu_all_gather_combine_threshold_bytes": layer_bytes}
    if has_symmetric_buffers():
        options["xla_gpu_experimental_enable_nccl_symmetric_buffers"] = True
    return options


def use_copy_engines() -> None:
    """Makes NCCL gather with the GPUs' copy engines, where it can.

    Must be called before the first collective. A policy that the user set stays.
    """
    if has_symmetric_buffers():
        os.environ.setdefault("NCCL_CTA_POLICY", _ZERO_CTA_POLICY)


def has_symmetric_buffers() -> bool:
    """Returns whether NCCL may gather from symmetric buffers here.

    They need GPUs that can address each other's memory. Hopper and newer GPUs of one
    host are taken to be able to, as most are connected by NVLink.
    """
    if jax.default_backend() != "gpu" or jax.process_count() > 1:
        return False
    return all(map(_is_hopper_or_newer, jax.devices()))


def _is_hopper_or_newer(device: jax.Device) -> bool:
    return float(getattr(device, "compute_capability", 0)) >= 9


def _copy(shard: Array, zero: UInt[Array, ""]) -> Array:
    """Copies a shard, in a way that the compiler cannot remove.

    Args:
        shard: The shard.
        zero: Zero, which the compiler does not know to be so.
    """
    bits = jax.lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(bits ^ zero.astype(bits.dtype), shard.dtype)


def check_axis(fsdp: int) -> None:
    """Checks that this runs inside `jax.shard_map` over that many devices.

    Raises:
        ValueError: It does not.
    """
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape[FSDP] if FSDP in mesh.manual_axes else None
    if size != fsdp:
        found = "no such axis" if size is None else f"an axis of {size}"
        raise ValueError(
            f"the weights are divided among fsdp={fsdp} devices, but there is {found} "
            f"here. Call it inside jax.shard_map(check_vma=False) over a mesh whose "
            f"axis {FSDP!r} has {fsdp} devices."
        )
