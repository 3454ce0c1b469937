"""Granite, which multiplies embeddings, residuals, scores and logits."""

import dataclasses
from typing import Annotated, Any, ClassVar

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.hf_config import Count, Flag, HfConfig, number, only

Multiplier = Annotated[float, number(1e6)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteModel(ModelConfig):
    """The mathematics of a Granite.

    Attributes:
        of_embeddings: Factor of the embeddings.
        of_residuals: Factor of what a block adds to the hidden states.
        logit_divisor: What the logits are divided by.
    """

    of_embeddings: float
    of_residuals: float
    logit_divisor: float

    @property
    def embedding_multiplier(self) -> float:
        """Factor of the embeddings."""
        return self.of_embeddings

    @property
    def logit_multiplier(self) -> float:
        """Factor of the logits."""
        return 1 / self.logit_divisor


class GraniteLayer(LlamaLayer):
    """A layer that multiplies what its blocks add."""

    def __init__(self, config: GraniteModel, make: LayerBuilder):
        super().__init__(config, make)
        self.multiplier = config.of_residuals


class Granite(HfConfig):
    """The config.json of a Granite."""

    FAMILY: ClassVar[Family] = Family(
        model_type="granite", models="Granite 3", layer=GraniteLayer
    )
    MODEL: ClassVar[type[ModelConfig]] = GraniteModel

    max_position_embeddings: Count = 2048
    hidden_act: Annotated[Any, only("silu")] = "silu"
    attention_bias: Flag = False
    mlp_bias: Flag = False
    attention_multiplier: Multiplier = 1.0
    embedding_multiplier: Multiplier = 1.0
    residual_multiplier: Multiplier = 1.0
    logits_scaling: Multiplier = 1.0

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(
            score_scale=self.attention_multiplier,
            of_embeddings=self.embedding_multiplier,
            of_residuals=self.residual_multiplier,
            logit_divisor=self.logits_scaling,
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            **fields,
        )
