"""Divides a decoder along the axis `tensor` of a mesh: heads, features, vocabulary.

A device runs a decoder of the same kind with fewer heads, a narrower MLP and a smaller
vocabulary; see `part_config`. The linears that read the hidden states are divided along
their outputs N, and those that write them along their inputs K, with the same part of A
or B. The other half of an adapter is whole on each device, and its gradients are parts
of a sum over the devices, which waits for the optimizer step. So LoRA adds no exchange
to a pass: the kernels run unchanged on the parts.

With fewer key-value heads than devices, several devices use the same one. W, A and B of
k and v are then whole on all devices, which use the columns of their own head.

A trained bias follows its frozen one: it is divided with the outputs, or one device
adds it. Trained rows of tokens, and VeRA's matrices, are whole on each device. A device
looks up the rows of its own part of a microbatch, and replaces the logits of its own
part of the vocabulary.

References:
    Megatron-LM, arXiv 1909.08053, section 3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jaxlora.families.model_config import LayerLinear, ModelConfig
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.stacks import Stack
from jaxlora.modules.trained_tensors import trained_tensors
from jaxlora.modules.variants.variant import Dimension
from jaxlora.sharding.tensor import own_slice

EMBEDDING, HEAD = "embed_tokens.embedding", "lm_head.kernel"
_KEY_VALUE = ("self_attn.k_proj", "self_attn.v_proj")


def check_divides(
    config: ModelConfig, tensor: int, base_format: BaseFormat | None = None
) -> None:
    """Checks that a model can be divided along the axis `tensor`.

    Args:
        config: The model.
        tensor: Number of devices.
        base_format: How linears are quantized; None: they are not.

    Raises:
        ValueError: It cannot.
    """
    sizes = {
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(
                f"tensor={tensor} does not divide {name}={size} of the model. Choose a "
                "tensor that does, or divide the weights along fsdp."
            )
    if config.num_kv_heads % tensor and tensor % config.num_kv_heads:
        raise ValueError(
            f"tensor={tensor} and num_key_value_heads={config.num_kv_heads}: one must "
            "be a multiple of the other, so that each device has whole heads. Choose "
            "such a tensor, or divide the weights along fsdp."
        )
    if base_format is not None and tensor > 1:
        _check_blocks(config, tensor, base_format)


def _check_blocks(config: ModelConfig, tensor: int, base_format: BaseFormat) -> None:
    """Checks that a part of a quantized weight is one with blocks of its own."""
    dimensions = base_format.options.weight.dimensions
    some = next(iter(config.linears().values()))
    fields = base_format.shapes(some.out_features, some.in_features)
    if undivided := [name for name in fields if not dimensions[name]]:
        raise ValueError(
            f"tensor={tensor} would cut through the blocks of {undivided[0]} of "
            f"{base_format.name}, which run over a whole weight. Set double_quant: "
            "false in quantize_base_args, use int8 or fp8, or divide along fsdp."
        )
    for linear in part_config(config, tensor).linears().values():
        try:
            base_format.shapes(linear.out_features, linear.in_features)
        except ValueError as error:
            raise ValueError(
                f"tensor={tensor} leaves each device a part of {linear.name} with K="
                f"{linear.in_features}: {error}"
            ) from error


def part_config(config: ModelConfig, tensor: int) -> ModelConfig:
    """Returns the decoder that each device runs; see `check_divides`."""
    if tensor == 1:
        return config
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // tensor,
        num_kv_heads=max(1, config.num_kv_heads // tensor),
        intermediate_size=config.intermediate_size // tensor,
        vocab_size=config.vocab_size // tensor,
    )


def shares_heads(config: ModelConfig, linear: str, tensor: int) -> bool:
    """Whether several devices use the same columns of a linear, by its name."""
    return linear in _KEY_VALUE and tensor > config.num_kv_heads


def output_parts(linear: LayerLinear, tensor: int, kv_parts: int) -> int:
    """Returns into how many parts devices divide the output features of a linear.

    Args:
        linear: The linear.
        tensor: Number of devices.
        kv_parts: Number of them that use different key-value heads.
    """
    if linear.divides == "K":
        return 1
    return kv_parts if linear.name in _KEY_VALUE else tensor


def divided_dimension(
    config: ModelConfig, linear: LayerLinear, tensor: int
) -> Dimension | None:
    """Returns which features of a linear are divided; None: it is whole everywhere."""
    if tensor == 1 or shares_heads(config, linear.name, tensor):
        return None
    return linear.divides


def weight_dim(
    path: str, config: ModelConfig, tensor: int, base_format: BaseFormat | None
) -> int | None:
    """Returns the dimension along which a frozen array is divided; None: it is whole.

    Args:
        path: Path of the array, such as `layers.0.mlp.up_proj.kernel`.
        config: The whole model.
        tensor: Number of devices.
        base_format: How linears are quantized; None: they are not.
    """
    if tensor == 1:
        return None
    if path in (EMBEDDING, HEAD):
        return 0 if path == EMBEDDING else 1
    found = _linear_array(path, config, base_format)
    if found is None:
        return None
    linear, dimensions = found
    divided = divided_dimension(config, linear, tensor)
    return dimensions.index(divided) if divided in dimensions else None


def _linear_array(
    path: str, config: ModelConfig, base_format: BaseFormat | None
) -> tuple[LayerLinear, tuple[Dimension, ...]] | None:
    """Returns the linear of a frozen array and its dimensions; None for a norm."""
    if not path.startswith("layers."):
        return None
    inside = path.split(".", 2)[2]
    name, _, field = inside.partition(".kernel")
    if name == inside:
        name, _, field = inside.rpartition(".")
        if field != "bias":
            return None
        return config.linears()[name], ("N",)
    if not field:
        return config.linears()[name], ("K", "N")
    assert base_format is not None
    dimensions = base_format.options.weight.dimensions[field.removeprefix(".")]
    return config.linears()[name], dimensions


def table_axes(
    config: ModelConfig, tensor: int, stacks: tuple[Stack, ...]
) -> dict[str, int]:
    """Returns the axis along which stacks of slot tables are divided, by name.

    Stacks that are whole on each device are absent.
    """
    linears = config.linears()
    found = {}
    for stack in stacks:
        name, _, tensor_name = stack.name.rpartition(".")
        if name not in linears:  # the score head
            continue
        dimensions = _dimensions(tensor_name)
        divided = divided_dimension(config, linears[name], tensor)
        if divided in dimensions:
            found[stack.name] = 2 + dimensions.index(divided)  # after slots and layers
    return found


def _dimensions(name: str) -> tuple[Dimension, ...]:
    return next(t.dimensions for t in trained_tensors() if t.name == name)


def own_heads(
    arrays: Mapping[str, Array],
    config: ModelConfig,
    tensor: int,
    base_format: BaseFormat | None = None,
) -> dict[str, Any]:
    """Returns frozen arrays or slot tables with the key-value head of this device.

    Args:
        arrays: Arrays by path; tables of slots, or frozen ones.
        config: The whole model.
        tensor: Number of devices.
        base_format: How linears are quantized; None: they are not.
    """
    found = dict(arrays)
    if tensor <= config.num_kv_heads:
        return found
    for path, array in arrays.items():
        axis = _head_axis(path, config, base_format)
        if axis is not None:
            found[path] = own_slice(array, axis, config.num_kv_heads, tensor)
    return found


def _head_axis(
    path: str, config: ModelConfig, base_format: BaseFormat | None
) -> int | None:
    """Returns the axis of the columns of k or v; None: the array has none."""
    name = path.rpartition(".")[2]
    if not any(f".{part}." in path for part in _KEY_VALUE):
        return None
    if name in (tensor.name for tensor in trained_tensors()):
        dimensions = _dimensions(name)
        return 1 + dimensions.index("N") if "N" in dimensions else None
    found = _linear_array(path, config, base_format)
    assert found is not None, path
    return found[1].index("N") if "N" in found[1] else None
