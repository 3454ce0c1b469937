"""Llama, and SmolLM2, which is a Llama; the layer of most families."""

from typing import Annotated, Any, ClassVar

from jaxlora.models.blocks.attention import Attention
from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.hf_config import Count, Flag, HfConfig, only
from jaxlora.models.layer import Block, DecoderLayer


class LlamaLayer(DecoderLayer):
    """`h += attention(norm(h)); h += mlp(norm(h))`."""

    def __init__(self, config: ModelConfig, make: LayerBuilder, **attention: Any):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            **attention: Options of `Attention`.
        """
        super().__init__(make)
        self.attention_norm = make.norm("input_layernorm")
        self.self_attn = Attention(config, make, **attention)
        self.mlp_norm = make.norm("post_attention_layernorm")
        self.mlp = self.make_mlp(config, make)

    def make_mlp(self, config: Any, make: LayerBuilder) -> Block:
        """Makes the block that follows attention."""
        return Mlp(config, make)


class Llama(HfConfig):
    """The config.json of a Llama."""

    FAMILY: ClassVar[Family] = Family(
        model_type="llama", models="Llama 2 and 3, SmolLM2", layer=LlamaLayer
    )
    DIVIDES_WIDTH: ClassVar[bool] = True

    max_position_embeddings: Count = 2048
    hidden_act: Annotated[Any, only("silu")] = "silu"
    attention_bias: Flag = False
    mlp_bias: Flag = False

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            **fields,
        )
