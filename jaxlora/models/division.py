"""How the weights and slot tables of a decoder are divided over a mesh.

Weights are divided over the axes `fsdp` and `tensor`, and slot tables over `tensor`, by
the layouts of the weights and the roles of the linears; see
`jaxlora.models.tensor_parallel`.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxlora.models.build import LayerLinear
from jaxlora.models.sharded import layer_bytes
from jaxlora.models.spec import DecoderSpec, Shapes
from jaxlora.modules.trained_tensors import tensor_of
from jaxlora.sharding.layerwise import compiler_options
from jaxlora.sharding.rules import shard_dim, weight_spec
from jaxlora.sharding.tensor import own_slice


def weight_specs(spec: DecoderSpec) -> dict[str, PartitionSpec]:
    """Path -> how a frozen weight is divided over `fsdp` and `tensor`.

    Args:
        spec: A decoder, divided by its options; see `DecoderSpec.divided`.

    Raises:
        ValueError: A weight cannot be divided by `options.fsdp`.
    """
    dims, specs = _tensor_dims(spec), {}
    for path, layout in spec.layouts().items():
        own, part = dims[path], list(layout.shape)
        if own is not None:
            part[own] //= spec.options.tensor
        dim = shard_dim(path, part, spec.options.fsdp, dims=layout.gathered)
        specs[path] = weight_spec(dim, own)
    return specs


def table_axes(spec: DecoderSpec) -> dict[str, int]:
    """Name -> axis along which a stack of slot tables is divided over `tensor`.

    Stacks that are whole on each device are absent.

    Args:
        spec: A decoder, divided by its options; see `DecoderSpec.divided`.
    """
    axes = {}
    for stack in spec.stacks:
        if stack.name not in spec.linears_of_stacks:
            continue
        linear = spec.linear(stack.modules[0].rpartition(".")[0])
        axis = _table_axis(spec, linear, tensor_of(stack.name).dimensions)
        if axis is not None:
            axes[stack.name] = 2 + axis  # after slots and layers
    return axes


def own_heads(spec: DecoderSpec, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns frozen weights, or tables, with the key-value heads of this device.

    Args:
        spec: The decoder that this device runs.
        arrays: Frozen weights or slot tables G P Q, by path. With more devices along
            `tensor` than key-value heads, those of k and v are whole.
    """
    found, options = dict(arrays), spec.options
    if _divides(spec, by_heads=True) or options.tensor == 1:
        return found
    layouts = spec.layouts()
    for path, array in arrays.items():
        if path in layouts:
            axis = layouts[path].tensor_dim if layouts[path].by_heads else None
        else:
            axis = _head_axis(spec, path)
        if axis is not None:
            found[path] = own_slice(array, axis, options.kv_parts, options.tensor)
    return found


def part_shapes(spec: DecoderSpec, tensor: int) -> tuple[Shapes, Shapes]:
    """Shapes of weights and slot tables on each of `tensor` devices, by name."""
    return _part_shapes(spec.plain.divided(tensor=tensor))


def gather_options(spec: DecoderSpec) -> dict[str, int]:
    """Compiler options for programs that gather weights; empty if none does."""
    if spec.options.fsdp == 1:
        return {}
    own = spec.part(spec.options.tensor)
    return compiler_options(layer_bytes(own.base_shapes()))


def _divides(spec: DecoderSpec, *, by_heads: bool) -> bool:
    """Whether `tensor` divides what can be divided, by key-value heads or not.

    Several devices use the same head if there are fewer key-value heads than devices.
    The weights are whole on each of them then.
    """
    tensor, kv_parts = spec.options.tensor, spec.options.kv_parts
    return tensor > 1 and not (by_heads and kv_parts < tensor)


def _tensor_dims(spec: DecoderSpec) -> dict[str, int | None]:
    """Path -> the dimension of a frozen weight that `tensor` divides, if it does."""
    return {
        path: layout.tensor_dim if _divides(spec, by_heads=layout.by_heads) else None
        for path, layout in spec.layouts().items()
    }


def _table_axis(
    spec: DecoderSpec, linear: LayerLinear, dimensions: Sequence[str]
) -> int | None:
    if not _divides(spec, by_heads=linear.role == "heads"):
        return None
    divided = linear.divides
    return dimensions.index(divided) if divided in dimensions else None


def _head_axis(spec: DecoderSpec, table: str) -> int | None:
    """Returns the axis of key-value heads in a slot table; None: it has none."""
    path, dimensions = table.rpartition(".")[0], tensor_of(table).dimensions
    if path not in spec.adapted or spec.linear(path).role != "heads":
        return None
    return 1 + dimensions.index("N") if "N" in dimensions else None


@functools.lru_cache(maxsize=64)  # a choice of a mesh asks hundreds of times
def _part_shapes(spec: DecoderSpec) -> tuple[Shapes, Shapes]:
    tensor = spec.options.tensor
    tables = _divided_shapes(spec.adapter_shapes(), table_axes(spec), tensor)
    weights = _divided_shapes(spec.base_shapes(), _tensor_dims(spec), tensor)
    return weights, tables


def _divided_shapes(
    shapes: Shapes, axes: Mapping[str, int | None], tensor: int
) -> Shapes:
    def part(shape: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        sizes = list(shape.shape)
        if axis is not None:
            sizes[axis] //= tensor
        return jax.ShapeDtypeStruct(tuple(sizes), shape.dtype)

    return {name: part(shape, axes.get(name)) for name, shape in shapes.items()}
