"""Gathers the frozen weights of a decoder that are divided among devices.

The functions that gather run inside `jax.shard_map`; see `jaxlora.sharding.layerwise`.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.layer import DecoderLayer, run_layer
from jaxlora.models.options import Remat
from jaxlora.modules.base_param import BaseParam, WeightLayout
from jaxlora.modules.rows import PackedRows
from jaxlora.sharding.layerwise import end_layers, gather, run_gathered
from jaxlora.sharding.rules import shard_dim


def gathered_dim(weight: BaseParam, fsdp: int) -> int | None:
    """Returns the dimension along which a weight is divided, and gathered; or None.

    Args:
        weight: A weight of a decoder, which may hold the shard of a device.
        fsdp: Number of devices among which weights are divided.
    """
    layout: WeightLayout = weight.layout
    return shard_dim(layout.hf_name, layout.shape, fsdp, dims=layout.gathered)


def layer_bytes(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of the weights that are gathered for the largest layer, if any.

    Args:
        shapes: Shape of each whole weight of a decoder, by path.
    """
    layers: dict[str, int] = defaultdict(int)
    for path, shape in shapes.items():
        if path.startswith("layers.") and len(shape.shape) > 1:
            number = path.split(".")[1]
            layers[number] += math.prod(shape.shape) * shape.dtype.itemsize
    return max(layers.values(), default=0)


def run_sharded_layers(
    layers: Mapping[int, DecoderLayer],
    num_layers: int,
    remat: Remat,
    fsdp: int,
    h: Float[Array, "T D"],
    rows: PackedRows,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Runs layers whose linears hold shards; each is gathered one layer ahead.

    Alike layers are traced, differentiated and lowered once; see `run_whole_layers`.

    The model's last layer keeps its gathered weights for its backward pass, because
    that follows in the same program, right after the loss. No other layer does: the
    backward pass of a pipeline stage without the head is a program of its own.

    Args:
        layers: The layers, by their numbers in the whole model.
        num_layers: Number of layers of the whole model.
        remat: Part of each layer that the backward pass recomputes.
        fsdp: Number of devices among which weights are divided.
        h: Hidden states before the first of the layers.
        rows: The rows, for all layers.

    Returns:
        The output and the input of the last layer.
    """

    @functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
    def run_whole(graph, tree, h, tables, weights, inputs):
        """Runs a layer whose weights were gathered."""
        rest, rows = inputs
        layer = nnx.merge(graph, tables, tree.unflatten(weights), rest)
        return run_layer(layer, remat, h, rows)

    before = token = jax.lax.stop_gradient(h)
    for i, layer in layers.items():
        graph, tables, shards, rest = nnx.split(layer, nnx.LoRAParam, _is_large, ...)
        leaves, tree = jax.tree.flatten(shards)
        found = (gathered_dim(x, fsdp) for _, x in nnx.to_flat_state(shards))
        dims = tuple(dim for dim in found if dim is not None)
        assert len(dims) == len(leaves), "a large weight is not divided"
        run = functools.partial(run_whole, graph, tree)
        inputs = rest, rows.for_layer(i)
        before = h
        if i == num_layers - 1:
            weights = gather(leaves, dims, jax.lax.stop_gradient(token))
            h = run(h, tables, weights, inputs)
        else:
            h, token = run_gathered(run, dims, h, tables, leaves, inputs, token)
    return end_layers(h, token), jax.lax.stop_gradient(before)


def _is_large(path: tuple, variable: nnx.Variable) -> bool:
    is_matrix = isinstance(variable, BaseParam) and variable.ndim > 1
    return is_matrix and bool(variable.layout.gathered)
