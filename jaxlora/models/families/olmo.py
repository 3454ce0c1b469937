"""OLMo 2 and 3, with norms after attention and the MLP, and none before them."""

from typing import Annotated, Any, ClassVar

from jaxlora.models.blocks.attention import Attention
from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig, Rope
from jaxlora.models.hf_config import (
    Count,
    Flag,
    HfConfig,
    Windows,
    number,
    only,
)
from jaxlora.models.layer import DecoderLayer

_UNDIVIDED = "the norms of queries and keys run over all heads"


class OlmoLayer(DecoderLayer):
    """`h += norm(attention(h)); h += norm(mlp(h))`."""

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        super().__init__(make)
        self.self_attn = Attention(config, make, norms="all")
        self.attention_output_norm = make.norm("post_attention_layernorm")
        self.mlp = Mlp(config, make)
        self.mlp_output_norm = make.norm("post_feedforward_layernorm")


class Olmo2(HfConfig):
    """The config.json of an OLMo 2."""

    FAMILY: ClassVar[Family] = Family(
        model_type="olmo2", models="OLMo 2", layer=OlmoLayer, undivided=_UNDIVIDED
    )

    max_position_embeddings: Count = 2048
    rms_norm_eps: Annotated[float, number(1.0)] | None = 1e-5
    hidden_act: Annotated[Any, only("silu")] = "silu"
    attention_bias: Flag = False

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(
            qkv_bias=self.attention_bias, o_bias=self.attention_bias, **fields
        )


class Olmo3(Olmo2):
    """The config.json of an OLMo 3, of which each fourth layer has no window."""

    FAMILY: ClassVar[Family] = Family(
        model_type="olmo3", models="OLMo 3", layer=OlmoLayer, undivided=_UNDIVIDED
    )

    sliding_window: Count = 4096

    def ropes(self) -> tuple[Rope, Rope]:
        theta = self.rope_theta or 5e5
        return self.ropes_by_type(theta, theta)

    def layer_windows(self) -> Windows:
        numbers = range(1, self.num_hidden_layers + 1)
        has_window = [i % 4 != 0 for i in numbers]
        return self.typed_windows(self.sliding_window, has_window, may_differ=True)
