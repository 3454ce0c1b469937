"""Makes the modules of a decoder layer, and says how their weights are stored."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from jaxlora.models.config import ExpertShape, ModelConfig
from jaxlora.models.options import DecoderOptions
from jaxlora.modules.base_param import BaseParam, WeightLayout, with_layout
from jaxlora.modules.expert_linear import ExpertLinear
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.norm import RmsNorm
from jaxlora.modules.quantized_kernel import QuantizedKernel
from jaxlora.modules.slot_shape import SlotShape

# Tensor parallelism divides a linear by its role: `column` reads the hidden states, and
# its outputs are divided; those of `heads` are key-value heads that devices may share;
# `row` writes the hidden states, and its inputs are divided; `whole` is not divided.
Role = Literal["column", "heads", "row", "whole"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerLinear:
    """One linear of a layer, or of each of its experts; LoRA can adapt each of them.

    Attributes:
        name: Path inside the layer.
        in_features: K.
        out_features: N.
        use_bias: Whether it adds a bias.
        projection: Its number, which keys its dropout masks.
        role: How devices divide it.
        in_xla: Whether plain XLA runs it, whichever kernels run the others.
        sections: Proportions of sections of the outputs, of each of which a device has
            a part.
        experts: The mixture of experts, each of which has such a linear; None: it is
            one linear.
    """

    name: str
    in_features: int
    out_features: int
    use_bias: bool
    projection: int
    role: Role
    in_xla: bool = False
    sections: tuple[int, ...] = (1,)
    experts: ExpertShape | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Paths inside the layer of the linears, of which each expert has its own."""
        if self.experts is None:
            return (self.name,)
        return tuple(
            f"{experts}.{i}.{name}"
            for experts, _, name in [self.name.rpartition(".")]
            for i in range(self.experts.number)
        )

    @property
    def divides(self) -> Literal["K", "N"] | None:
        """The features that devices divide, if they do."""
        if self.role == "whole":
            return None
        return "K" if self.role == "row" else "N"


class LayerBuilder:
    """Makes the modules of one layer, with its options.

    Attributes:
        config: The model's mathematics.
        number: Number of the layer in the model.
        options: How the decoder runs.
        linears: The linears that were made. Their order keys dropout masks: if it
            changed, resumed runs would draw other masks.
        layouts: Layouts of the weights that were made.
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        options: DecoderOptions,
        slots: SlotShape | None = None,
        adapted: Collection[str] = (),
    ):
        """Makes a builder.

        Args:
            config: The model's mathematics.
            number: Number of the layer in the model.
            options: How the decoder runs.
            slots: Shape of the slot tables of every adapted linear.
            adapted: Paths of the linears of the decoder that get slots.
        """
        self.config, self.number, self.options = config, number, options
        self._slots, self._adapted = slots, adapted
        self.linears: list[LayerLinear] = []
        self.layouts: list[WeightLayout] = []

    def linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        role: Role,
        hf_name: str | None = None,
        in_xla: bool = False,
        sections: tuple[int, ...] = (1,),
    ) -> MultiLoraLinear:
        """Makes a frozen linear, with slots if it is adapted.

        Args:
            name: Path inside the layer.
            in_features: K, of the part of one device.
            out_features: N, of the part of one device.
            use_bias: Whether it adds a bias.
            role: How devices divide it.
            hf_name: Its path inside a layer of a checkpoint; None: `name`.
            in_xla: Whether plain XLA runs it, whichever kernels run the others.
            sections: Proportions of sections of the outputs, of each of which a device
                has a part.
        """
        linear = LayerLinear(
            name=name,
            in_features=in_features,
            out_features=out_features,
            use_bias=use_bias,
            projection=len(self.linears),
            role=role,
            in_xla=in_xla,
            sections=sections,
        )
        self.linears.append(linear)
        options, path = self.options, f"layers.{self.number}.{name}"
        base_format, kernel = options.base_format, None
        if base_format is not None and base_format.quantizes(path):
            kernel = base_format.empty(out_features, in_features)
        parts = {"column": options.tensor, "heads": options.kv_parts}
        module = MultiLoraLinear(
            in_features,
            out_features,
            slots=self._slots if path in self._adapted else None,
            use_bias=use_bias,
            dtype=options.dtype,
            layer=None,
            projection=linear.projection,
            implementation="xla" if in_xla else options.implementation,
            kernel=kernel,
            input_parts=options.tensor if role == "row" else 1,
            output_parts=parts.get(role, 1),
            output_sections=sections,
            rngs=nnx.Rngs(0),
        )
        names = {"hf_name": f"{hf_name or name}.weight"}
        division = {
            "divided": linear.divides,
            "by_heads": role == "heads",
            "sections": sections,
        }
        for weight, letters in _weights(module.kernel):
            layout = {**names, **division, "transpose": True}
            # A device cuts its own outputs out of a weight that is whole on each.
            is_shared = role == "heads" and options.kv_parts < options.tensor
            if len(sections) > 1 or is_shared:
                inputs = [i for i, letter in enumerate(letters) if letter == "K"]
                layout["gathered"] = tuple(inputs)
            self._laid_out(weight, dimensions=letters, **layout)
        if module.bias is not None:
            names["hf_name"] = f"{hf_name or name}.bias"
            self._laid_out(module.bias, dimensions=("N",), **names, **division)
        return module

    def expert_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        experts: ExpertShape,
        *,
        role: Role,
        use_bias: bool = False,
        is_one_tensor: bool = False,
    ) -> ExpertLinear:
        """Makes a frozen linear of each expert, with slots if they are adapted.

        Args:
            name: Path inside the layer, such as `mlp.experts.up_proj`. That of the
                first expert's linear is `mlp.experts.0.up_proj`, in checkpoints, too.
            in_features: K.
            out_features: N.
            experts: The mixture.
            role: How the devices along `tensor` divide it; those along `expert` divide
                the experts.
            use_bias: Whether it adds a bias.
            is_one_tensor: Whether checkpoints have one tensor X K N of all experts,
                which is read as one K N for each, and one of their biases.
        """
        held = experts.number // self.config.expert_parts
        experts = dataclasses.replace(experts, number=held)
        linear = LayerLinear(
            name=name,
            in_features=in_features,
            out_features=out_features,
            use_bias=use_bias,
            projection=len(self.linears),
            role=role,
            experts=experts,
        )
        self.linears.append(linear)
        path = f"layers.{self.number}.{name}"
        base_format, kernel = self.options.base_format, None
        if base_format is not None and base_format.quantizes(path):
            kernel = base_format.empty(out_features, in_features, experts.number)
        module = ExpertLinear(
            in_features,
            out_features,
            num_experts=experts.number,
            slots=self._slots if path in self._adapted else None,
            use_bias=use_bias,
            dtype=self.options.dtype,
            projection=linear.projection,
            kernel=kernel,
            input_parts=self.options.tensor if role == "row" else 1,
        )
        block, _, last = name.rpartition(".")
        hf_name = f"{block}.{{}}.{last}.weight"
        divided: dict[str, Any] = {"divided": linear.divides}
        for weight, letters in _weights(module.kernel):
            layout = {"dimensions": ("X", *letters), "transpose": not is_one_tensor}
            layout |= divided
            self._laid_out(weight, hf_name=hf_name, expert_dim=0, **layout)
        if module.bias is not None:
            layout = {"hf_name": f"{name}_bias", "dimensions": ("X", "N"), **divided}
            self._laid_out(module.bias, expert_dim=0, **layout)
        return module

    def _laid_out(self, weight: BaseParam, **layout: Any) -> BaseParam:
        self.layouts.append(with_layout(weight, **layout).layout)
        return weight

    def norm(self, hf_name: str, features: int | None = None) -> RmsNorm:
        """Makes a norm.

        Args:
            hf_name: Its path inside a layer of a checkpoint.
            features: Size of its weight; None: `hidden_size`.
        """
        options, config = self.options, self.config
        norm = make_norm(
            config, features or config.hidden_size, hf_name, dtype=options.dtype
        )
        self.layouts.append(norm.scale.layout)
        return norm

    def weight(
        self,
        shape: tuple[int, ...],
        hf_name: str,
        dimensions: tuple[str, ...],
        *,
        transpose: bool = False,
        divided: str | None = None,
        sections: tuple[int, ...] = (1,),
    ) -> BaseParam:
        """Makes a frozen weight that belongs to no linear and no norm.

        Args:
            shape: Its shape on one device.
            hf_name: Its name inside a layer of a checkpoint.
            dimensions: Letter of each of its dimensions.
            transpose: Whether the checkpoint holds the transpose.
            divided: The dimension that tensor parallelism divides, if any.
            sections: Proportions of its sections, of each of which a device has a part.
                With several, the axis `fsdp` does not divide the weight.
        """
        return self._laid_out(
            BaseParam(jnp.zeros(shape, self.options.dtype)),
            hf_name=hf_name,
            dimensions=dimensions,
            transpose=transpose,
            divided=divided,
            sections=sections,
            gathered=(0, 1) if len(sections) == 1 else (),
        )


def _weights(
    kernel: BaseParam | QuantizedKernel,
) -> list[tuple[BaseParam, tuple[str, ...]]]:
    """Returns the arrays of a linear's frozen weight, and the letters of each."""
    if isinstance(kernel, BaseParam):
        return [(kernel, ("K", "N"))]
    fields = kernel.weight.dimensions.items()
    arrays = [(getattr(kernel, name), letters) for name, letters in fields]
    return [(x, letters) for x, letters in arrays if isinstance(x, BaseParam)]


def make_norm(
    config: ModelConfig, features: int, hf_name: str, *, dtype: jnp.dtype
) -> RmsNorm:
    """Makes a norm of a model.

    Args:
        config: The model.
        features: Size of its weight.
        hf_name: Its path in a checkpoint, or in a layer of it.
        dtype: Dtype of its weight.
    """
    offset = config.family.norm_offset
    norm = RmsNorm(features, eps=config.rms_eps, offset=offset, dtype=dtype)
    with_layout(norm.scale, hf_name=f"{hf_name}.weight", dimensions=("D",))
    return norm
