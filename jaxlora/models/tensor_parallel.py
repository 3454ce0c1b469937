"""Divides a decoder along the axis `tensor` of a mesh: heads, features, vocabulary.

A device runs a decoder of the same kind with fewer heads, a narrower MLP and a smaller
vocabulary; see `part_config`. The linears that read the hidden states are divided along
their outputs N, and those that write them along their inputs K, with the same part of A
or B. The other half of an adapter is whole on each device, and its gradients are parts
of a sum over the devices, which waits for the optimizer step. So LoRA adds no exchange
to a pass: the kernels run unchanged on the parts.

With fewer key-value heads than devices, several devices use the same one. W, A and B of
k and v are then whole on all devices, which use the columns of their own head. So are
those of a linear whose outputs have sections, such as the queries, keys and values of a
gated delta net: a device uses the columns of its own heads in each.

A trained bias follows its frozen one: it is divided with the outputs, or one device
adds it. Trained rows of tokens, and VeRA's matrices, are whole on each device. A device
looks up the rows of its own part of a microbatch, and replaces the logits of its own
part of the vocabulary.

References:
    Megatron-LM, arXiv 1909.08053, section 3.
"""

import dataclasses

from jaxlora.models.base_format import BaseFormat
from jaxlora.models.config import ModelConfig
from jaxlora.models.structure import kinds_of_linears


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
    if tensor > 1 and (reason := config.family.undivided) is not None:
        raise ValueError(
            f"tensor={tensor} and model_type={config.model_type!r}: {reason}. Leave "
            "out tensor, and divide the weights along fsdp."
        )
    sizes = {
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for shape in filter(None, map(config.delta_shape, range(config.num_layers))):
        sizes["linear_num_key_heads"] = shape.num_key_heads
    for shape in filter(None, map(config.expert_shape, range(config.num_layers))):
        sizes["moe_intermediate_size"] = shape.features
        sizes["shared_expert_intermediate_size"] = shape.shared_features or 0
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(
                f"tensor={tensor} does not divide {name}={size} of the model. Choose a "
                "tensor that does, or divide the weights along fsdp."
            )
    kv_heads = config.num_kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        raise ValueError(
            f"tensor={tensor} and num_key_value_heads={kv_heads}: one must be a "
            "multiple of the other, so that each device has whole heads. Choose such a "
            "tensor, or divide the weights along fsdp."
        )
    layers = map(config.at_layer, range(config.num_layers))
    numbers = sorted({layer.num_kv_heads for layer in layers})
    if len(numbers) > 1 and any(number % tensor for number in numbers):
        raise ValueError(
            f"tensor={tensor}, and layers of the model have {numbers} key-value heads: "
            "it must divide all of them. Choose such a tensor, or divide the weights "
            "along fsdp."
        )
    if base_format is not None and tensor > 1:
        _check_blocks(config, tensor, base_format)


def _check_blocks(config: ModelConfig, tensor: int, base_format: BaseFormat) -> None:
    """Checks that a part of a quantized weight is one with blocks of its own."""
    dimensions = base_format.options.weight.dimensions
    some = kinds_of_linears(config)[0]
    fields = base_format.shapes(some.out_features, some.in_features)
    if undivided := [name for name in fields if not dimensions[name]]:
        raise ValueError(
            f"tensor={tensor} would cut through the blocks of {undivided[0]} of "
            f"{base_format.name}, which run over a whole weight. Set double_quant: "
            "false in quantize_base_args, use int8 or fp8, or divide along fsdp."
        )
    for linear in kinds_of_linears(part_config(config, tensor)):
        each = linear.out_features // sum(linear.sections)
        try:
            for section in linear.sections:
                base_format.shapes(each * section, linear.in_features)
        except ValueError as error:
            raise ValueError(
                f"tensor={tensor} leaves each device a part of {linear.name} with K="
                f"{linear.in_features}: {error}"
            ) from error


def part_config(config: ModelConfig, tensor: int, expert: int = 1) -> ModelConfig:
    """Returns the decoder that each device runs; see `check_divides`."""
    part = config if tensor == 1 else config.divided(tensor)
    return part if expert == 1 else dataclasses.replace(part, expert_parts=expert)


def check_experts_divide(config: ModelConfig, expert: int) -> None:
    """Checks that the axis `expert` can divide the experts of each layer.

    Raises:
        ValueError: It cannot.
    """
    shapes = {config.expert_shape(layer) for layer in range(config.num_layers)} - {None}
    if expert > 1 and not shapes:
        raise ValueError(
            f"expert={expert} and model_type={config.model_type!r}: the model has no "
            "experts to divide. Leave out expert, and divide the weights along fsdp."
        )
    for number in sorted(shape.number for shape in shapes if shape is not None):
        if number % expert:
            raise ValueError(
                f"expert={expert} does not divide the {number} experts of a layer. "
                "Choose an expert that does, or divide the weights along fsdp."
            )


def divides_experts(config: ModelConfig, expert: int) -> bool:
    """Whether `check_experts_divide` passes."""
    try:
        check_experts_divide(config, expert)
    except ValueError:
        return False
    return True
