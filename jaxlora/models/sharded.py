"""Divides the frozen weights of a decoder among devices, and gathers them.

`BaseDivision` is the rule. The functions that gather run inside `jax.shard_map`; see
`jaxlora.sharding.layerwise`.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxlora.families.model_config import ModelConfig
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.layer import DecoderLayer, Remat, run_layer
from jaxlora.models.tensor_parallel import EMBEDDING, HEAD, weight_dim
from jaxlora.modules.base_param import BaseParam
from jaxlora.modules.rows import PackedRows
from jaxlora.sharding.layerwise import end_layers, gather, run_gathered
from jaxlora.sharding.rules import shard_dim, weight_spec


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BaseDivision:
    """How the frozen weights of a decoder are divided among the devices of a stage.

    Attributes:
        config: The whole model.
        base_format: How linears are quantized; None: they are not.
        fsdp: Devices among which large weights are divided, and gathered for a layer.
        tensor: Devices among which heads, features and vocabulary are divided.
    """

    config: ModelConfig
    base_format: BaseFormat | None = None
    fsdp: int = 1
    tensor: int = 1

    def spec(self, path: str, shape: Sequence[int]) -> PartitionSpec:
        """Returns the placement of a weight.

        Along `fsdp`, the embedding, V D, is divided along D: a device can then look up
        its columns for the tokens of all devices. For the other weights see
        `shard_dim`.

        Args:
            path: Its path.
            shape: Shape of the whole weight.

        Raises:
            ValueError: It cannot be divided by `fsdp`.
        """
        own, part = self.tensor_dim(path), list(shape)
        if own is not None:
            part[own] //= self.tensor
        return weight_spec(_dim(path, part, self.fsdp), own)

    def tensor_dim(self, path: str) -> int | None:
        """Returns the dimension that `tensor` divides; None: the weight is whole."""
        return weight_dim(path, self.config, self.tensor, self.base_format)


def head_dim(config: ModelConfig, fsdp: int) -> int | None:
    """Returns the dimension along which the stored head is divided, if it is."""
    shape = config.vocab_size, config.hidden_size
    if config.tie_embeddings:
        return _dim(EMBEDDING, shape, fsdp)
    return _dim(HEAD, shape[::-1], fsdp)


def _dim(path: str, shape: Sequence[int], fsdp: int) -> int | None:
    dims = (1,) if path == EMBEDDING else (0, 1)
    return shard_dim(path, shape, fsdp, dims=dims)


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
    config: ModelConfig,
    remat: Remat,
    fsdp: int,
    base_format: BaseFormat | None,
    h: Float[Array, "T D"],
    rows: PackedRows,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Runs layers whose linears hold shards; each is gathered one layer ahead.

    The model's last layer keeps its gathered weights for its backward pass, because
    that follows in the same program, right after the loss. No other layer does: the
    backward pass of a pipeline stage without the head is a program of its own.

    Args:
        layers: The layers, by their numbers in the whole model.
        config: The model.
        remat: Part of each layer that the backward pass recomputes.
        fsdp: Number of devices among which weights are divided.
        base_format: How linears are quantized; None: they are not.
        h: Hidden states before the first of the layers.
        rows: The rows, for all layers.

    Returns:
        Hidden states after the last layer, and before it.
    """
    before = token = jax.lax.stop_gradient(h)
    for i, layer in layers.items():
        graph, tables, shards, rest = nnx.split(layer, nnx.LoRAParam, _is_large, ...)
        leaves, tree = jax.tree.flatten(shards)
        paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(shards)]
        dims = tuple(_linear_dim(path, config, base_format, fsdp) for path in paths)
        run = functools.partial(_run_whole, remat, graph, tree)
        inputs = rest, rows.for_layer(i)
        before = h
        if i == config.num_layers - 1:
            weights = gather(leaves, dims, jax.lax.stop_gradient(token))
            h = run(h, tables, weights, inputs)
        else:
            h, token = run_gathered(run, dims, h, tables, leaves, inputs, token)
    return end_layers(h, token), jax.lax.stop_gradient(before)


def _run_whole(remat, graph, tree, h, tables, weights, inputs):
    """Runs a layer whose weights were gathered."""
    rest, rows = inputs
    layer = nnx.merge(graph, tables, tree.unflatten(weights), rest)
    return run_layer(layer, remat, h, rows)


def _is_large(path: tuple, variable: nnx.Variable) -> bool:
    return isinstance(variable, BaseParam) and variable.ndim > 1


def _linear_dim(
    path: str, config: ModelConfig, base_format: BaseFormat | None, fsdp: int
) -> int:
    """Returns the dimension along which an array of a linear's weight is divided.

    Args:
        path: Path of the array inside a layer, such as `mlp.up_proj.kernel.values`.
        config: The model.
        base_format: How linears are quantized; None: they are not.
        fsdp: Number of devices among which weights are divided.
    """
    name, _, field = path.partition(".kernel")
    linear = config.linears()[name]
    shape = linear.in_features, linear.out_features
    if field:
        assert base_format is not None
        shape = base_format.shapes(*shape[::-1])[field.removeprefix(".")].shape
    dim = _dim(path, shape, fsdp)
    assert dim is not None
    return dim
