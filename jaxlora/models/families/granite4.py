"""Granite 4, of which the models without experts and without Mamba layers are read."""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.blocks.attention import Attention
from jaxlora.models.blocks.mlp import swiglu
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.families.granite import Granite, GraniteModel
from jaxlora.models.hf_config import FULL, Whole, Windows, count, only
from jaxlora.models.layer import DecoderLayer
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.routing import LinearInput
from jaxlora.modules.rows import Rows
from jaxlora.modules.shared_input import apply_together

_INSTEAD = (
    "Of Granite 4, only the dense models are supported, such as granite-4.0-micro, "
    "granite-4.0-1b and granite-4.0-350m."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Granite4Model(GraniteModel):
    """The mathematics of a Granite 4.

    Attributes:
        rotates: Whether queries and keys are rotated by their positions.
    """

    rotates: bool


class SharedMlp(nnx.Module):
    """The MLP, as Granite names its linears; the first makes gate and up."""

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        width, inner = config.hidden_size, config.intermediate_size
        self.input_linear = make.linear(
            "shared_mlp.input_linear", width, 2 * inner, role="column"
        )
        self.output_linear = make.linear(
            "shared_mlp.output_linear", inner, width, role="row"
        )

    @property
    def input_linears(self) -> tuple[MultiLoraLinear, ...]:
        """The linear that reads the input."""
        return (self.input_linear,)

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        (read,) = apply_together(self.input_linears, x, rows.routing)
        gate, up = jnp.split(read, 2, axis=-1)
        return self.output_linear(swiglu(gate, up), rows.routing)


class Granite4Layer(DecoderLayer):
    """The layer of a Granite, with other names in its MLP."""

    def __init__(self, config: Granite4Model, make: LayerBuilder):
        super().__init__(make)
        self.attention_norm = make.norm("input_layernorm")
        self.self_attn = Attention(config, make, rotates=config.rotates)
        self.mlp_norm = make.norm("post_attention_layernorm")
        self.shared_mlp = SharedMlp(config, make)
        self.multiplier = config.of_residuals

    def feed_forward(self, h: Float[Array, "T D"], rows: Rows) -> Float[Array, "T D"]:
        """Applies the second half of the layer."""
        return self._add(self.shared_mlp, h, rows, before=self.mlp_norm, after=None)


class Granite4(Granite):
    """The config.json of a Granite 4."""

    FAMILY: ClassVar[Family] = Family(
        model_type="granitemoehybrid",
        models="dense Granite 4",
        layer=Granite4Layer,
        undivided="fused linears cannot be cut into equal parts",
    )
    MODEL: ClassVar[type[ModelConfig]] = Granite4Model
    # Keys of Mamba layers, of experts, and of how weights were drawn.
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "init_method",
            "mamba_chunk_size",
            "mamba_conv_bias",
            "mamba_d_conv",
            "mamba_d_head",
            "mamba_d_state",
            "mamba_expand",
            "mamba_n_groups",
            "mamba_n_heads",
            "mamba_proj_bias",
            "mlp_bias",
            "num_experts_per_tok",
            "router_aux_loss_coef",
            "time_step_limit",
        }
    )

    num_local_experts: Whole = 8
    output_router_logits: Annotated[Any, only(False)] = False
    shared_intermediate_size: Annotated[int, count(2**20)] = 1024
    normalization_function: Annotated[Any, only("rmsnorm")] = "rmsnorm"
    position_embedding_type: Any = None

    def build(self, **fields: Any) -> ModelConfig:
        if self.num_local_experts:
            raise ModelError(
                f"config.json has num_local_experts={self.num_local_experts}: Granite "
                f"models with experts are not supported. {_INSTEAD}"
            )
        if self.position_embedding_type not in (None, "nope", "rope"):
            raise ModelError(
                "config.json has position_embedding_type="
                f"{shown(self.position_embedding_type)}; wanted rope, nope or null."
            )
        rotates = self.position_embedding_type == "rope"
        model = super().build(rotates=rotates, **fields)
        inner = self.shared_intermediate_size
        return dataclasses.replace(model, intermediate_size=inner)

    def layer_windows(self) -> Windows:
        kinds, number = self.layer_types, self.num_hidden_layers
        names = "attention", FULL
        is_list = isinstance(kinds, list) and len(kinds) == number
        if not is_list or any(kind not in names for kind in kinds):
            raise ModelError(
                f"config.json has layer_types={shown(kinds)}; wanted attention for "
                f"each of the {number} layers. Mamba layers, which a missing "
                f"layer_types stands for, are not supported. {_INSTEAD}"
            )
        return (None,) * number
