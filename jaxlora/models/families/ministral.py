"""Ministral 3, and the text models of Mistral 3."""

from typing import Annotated, Any, ClassVar

from jaxlora.models.config import Composite, Family, GrowingRope, Rope
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.families.mistral import Mistral
from jaxlora.models.hf_config import (
    Count,
    HeadDim,
    Heads,
    YarnRope,
    number,
    read_rope,
)

_DEFAULT = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class _GrowingRope(YarnRope):
    llama_4_scaling_beta: Annotated[float, number(1e6, or_zero=True)]
    max_position_embeddings: Any = None  # it has no effect in transformers

    def build(self) -> Rope:
        return GrowingRope(
            theta=self.rope_theta,
            scaling=self.scaling(),
            growth=self.llama_4_scaling_beta,
            period=self.original_max_position_embeddings,
        )


class Ministral3(Mistral):
    """The config.json of a text model of Ministral 3, whose queries grow."""

    FAMILY: ClassVar[Family] = Family(
        model_type="ministral3", models="Ministral 3", layer=LlamaLayer
    )

    head_dim: HeadDim | None = 128
    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Count = 262144
    rms_norm_eps: Annotated[float, number(1.0)] | None = 1e-5
    sliding_window: Count | None = None

    def ropes(self) -> tuple[Rope, None]:
        given = {**self.rope_scaling, **self.rope_parameters}
        theta = self.rope_theta or 10000.0
        own = {"rope_theta": theta, **given} if given else dict(_DEFAULT)
        return read_rope(own, {"yarn": _GrowingRope}), None


MISTRAL3 = Composite(
    model_type="mistral3",
    models="text models of Mistral 3",
    texts=("mistral", "ministral3"),
    keys=frozenset(
        {
            "image_token_id",
            "image_token_index",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_config",
            "vision_feature_layer",
        }
    ),
)
