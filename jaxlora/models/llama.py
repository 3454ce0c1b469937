"""Llama, and SmolLM2, which is a Llama."""

from typing import Annotated, Any, ClassVar

from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.hf_config import Count, Flag, HfConfig, only


class Llama(HfConfig):
    """The config.json of a Llama."""

    FAMILY: ClassVar[Family] = Family(
        model_type="llama", models="Llama 2 and 3, SmolLM2"
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
