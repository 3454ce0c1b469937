"""How the weights and slot tables of a decoder are divided over a mesh.

Weights are divided over the axes `fsdp`, `expert` and `tensor`, and slot tables over
`expert` or `tensor`, by the layouts of the weights and the roles of the linears; see
`jaxlora.models.tensor_parallel`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxlora.models.build import LayerLinear
from jaxlora.models.sharded import layer_bytes
from jaxlora.models.spec import DecoderSpec, Shapes
from jaxlora.modules.base_param import WeightLayout
from jaxlora.modules.trained_tensors import tensor_of
from jaxlora.sharding.layerwise import compiler_options
from jaxlora.sharding.rules import shard_dim, weight_spec
from jaxlora.sharding.tensor import own_sections


def weight_specs(spec: DecoderSpec) -> dict[str, PartitionSpec]:
    """Path -> how a frozen weight is divided over `fsdp`, `expert` and `tensor`.

    Args:
        spec: A decoder, divided by its options; see `DecoderSpec.divided`.

    Raises:
        ValueError: A weight cannot be divided by `options.fsdp`.
    """
    dims, expert_dims, specs = _tensor_dims(spec), _expert_dims(spec), {}
    for path, layout in spec.layouts().items():
        own, part, gathered = dims[path], list(layout.shape), layout.gathered
        expert = expert_dims[path]
        if expert is not None:
            part[expert] //= spec.options.expert
        if own is not None:
            part[own] //= spec.options.tensor
        elif spec.options.tensor > 1:
            # `own_heads` cuts this dimension of a shard, which must hold all of it.
            gathered = tuple(dim for dim in gathered if dim != layout.tensor_dim)
        dim = shard_dim(path, part, spec.options.fsdp, dims=gathered)
        specs[path] = weight_spec(dim, own, expert)
    return specs


def table_axes(spec: DecoderSpec) -> dict[str, int]:
    """Name -> axis along which a stack of slot tables is divided over devices.

    They are those along `tensor`, or along `expert`; no mesh has both. Stacks that are
    whole on each device are absent.

    Args:
        spec: A decoder, divided by its options; see `DecoderSpec.divided`.
    """
    if spec.options.expert > 1:
        return {s.name: 1 for s in spec.stacks if s.num_experts is not None}
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
    """Returns frozen weights, or tables, with the heads of this device.

    Args:
        spec: The decoder that this device runs.
        arrays: Frozen weights or slot tables G P Q, by path. Some are whole; see
            `jaxlora.models.tensor_parallel`.
    """
    found, options = dict(arrays), spec.options
    if options.tensor == 1:
        return found
    layouts = spec.layouts()
    for path, array in arrays.items():
        if (layout := layouts.get(path)) is not None:
            kind, axis = _Kind.of(layout), layout.tensor_dim
        else:
            kind, axis = _kind_and_axis(spec, path)
        if axis is None or kind == _Kind() or _divides(spec, kind):
            continue
        parts = options.kv_parts if kind.by_heads else options.tensor
        found[path] = own_sections(array, axis, kind.sections, parts, options.tensor)
    return found


def copied_shapes(spec: DecoderSpec, tensor: int) -> Shapes:
    """Shapes of the parts of whole weights that `own_heads` takes, by path."""
    if tensor == 1:
        return {}
    divided = spec.plain.divided(tensor=tensor)
    dims, parts = _tensor_dims(divided), spec.part(tensor).base_shapes()
    return {
        path: parts[path]
        for path, layout in divided.layouts().items()
        if layout.tensor_dim is not None and dims[path] is None
    }


def part_shapes(
    spec: DecoderSpec, tensor: int, expert: int = 1
) -> tuple[Shapes, Shapes]:
    """Shapes of weights and slot tables on each device along these axes, by name."""
    return _part_shapes(spec.plain.divided(tensor=tensor, expert=expert))


def gather_options(spec: DecoderSpec) -> dict[str, int]:
    """Compiler options for programs that gather weights; empty if none does."""
    if spec.options.fsdp == 1:
        return {}
    return compiler_options(layer_bytes(spec.own_part.base_shapes()))


class _Kind(NamedTuple):
    """How the outputs of a linear are divided; see `WeightLayout`."""

    by_heads: bool = False
    sections: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, layout: WeightLayout) -> "_Kind":
        return cls(layout.by_heads, layout.sections)

    @classmethod
    def of_linear(cls, linear: LayerLinear) -> "_Kind":
        return cls(linear.role == "heads", linear.sections)


def _divides(spec: DecoderSpec, kind: _Kind) -> bool:
    """Whether `tensor` divides what can be divided.

    Several devices use the same head if there are fewer key-value heads than devices.
    The weights are whole on each of them then, and where there are several sections.
    """
    tensor, kv_parts = spec.options.tensor, spec.options.kv_parts
    is_whole = len(kind.sections) > 1 or (kind.by_heads and kv_parts < tensor)
    return tensor > 1 and not is_whole


def _tensor_dims(spec: DecoderSpec) -> dict[str, int | None]:
    """Path -> the dimension of a frozen weight that `tensor` divides, if it does."""
    return {
        path: layout.tensor_dim if _divides(spec, _Kind.of(layout)) else None
        for path, layout in spec.layouts().items()
    }


def _expert_dims(spec: DecoderSpec) -> dict[str, int | None]:
    """Path -> the dimension of a frozen weight that `expert` divides, if it does."""
    is_divided = spec.options.expert > 1
    return {
        path: layout.expert_dim if is_divided else None
        for path, layout in spec.layouts().items()
    }


def _table_axis(
    spec: DecoderSpec, linear: LayerLinear, dimensions: Sequence[str]
) -> int | None:
    if not _divides(spec, _Kind.of_linear(linear)):
        return None
    divided = linear.divides
    return dimensions.index(divided) if divided in dimensions else None


def _kind_and_axis(spec: DecoderSpec, table: str) -> tuple[_Kind, int | None]:
    """Returns what divides a slot table, and its axis of outputs, if it has one."""
    path, dimensions = table.rpartition(".")[0], tensor_of(table).dimensions
    if path not in spec.adapted or "N" not in dimensions:
        return _Kind(), None
    return _Kind.of_linear(spec.linear(path)), 1 + dimensions.index("N")


@functools.lru_cache(maxsize=64)  # a choice of a mesh asks hundreds of times
def _part_shapes(spec: DecoderSpec) -> tuple[Shapes, Shapes]:
    tensor, expert = spec.options.tensor, spec.options.expert
    tables = _divided_shapes(spec.adapter_shapes(), table_axes(spec), tensor * expert)
    weights = _divided_shapes(spec.base_shapes(), _tensor_dims(spec), tensor)
    return _divided_shapes(weights, _expert_dims(spec), expert), tables


def _divided_shapes(
    shapes: Shapes, axes: Mapping[str, int | None], num_parts: int
) -> Shapes:
    def part(shape: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        sizes = list(shape.shape)
        if axis is not None:
            sizes[axis] //= num_parts
        return jax.ShapeDtypeStruct(tuple(sizes), shape.dtype)

    return {name: part(shape, axes.get(name)) for name, shape in shapes.items()}
