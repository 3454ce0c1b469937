"""Qwen2 and Qwen3 with experts."""

import dataclasses
from typing import Any, ClassVar

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ExpertShape, Family, ModelConfig
from jaxlora.models.families.mixture import (
    Features,
    Mixture,
    MixtureLayer,
    MixtureModel,
    NumExperts,
)
from jaxlora.models.hf_config import Count, Flag, Heads, Whole, Windows


class QwenMoe(Mixture):
    """Some layers may have an MLP, whose width is `intermediate_size`."""

    max_position_embeddings: Count = 32768
    sliding_window: Count | None = 4096
    use_sliding_window: Flag = False
    moe_intermediate_size: Features
    decoder_sparse_step: Count = 1
    mlp_only_layers: Any = None

    def expert_shape(self) -> ExpertShape:
        shape = super().expert_shape()
        return dataclasses.replace(shape, features=self.moe_intermediate_size)

    def has_experts(self) -> tuple[bool, ...]:
        """Returns whether each layer has experts."""
        dense, layers = self.mlp_only_layers or [], range(self.num_hidden_layers)
        if not isinstance(dense, list) or any(i not in layers for i in dense):
            raise ModelError(
                f"config.json has mlp_only_layers={shown(dense)}; wanted a list of "
                f"numbers of the {len(layers)} layers."
            )
        step = self.decoder_sparse_step
        return tuple(i not in dense and (i + 1) % step == 0 for i in layers)


class SharedMoe(QwenMoe):
    """One further expert is shared: all tokens pass it."""

    shared_expert_intermediate_size: Features

    def expert_shape(self) -> ExpertShape:
        shared = self.shared_expert_intermediate_size
        return dataclasses.replace(super().expert_shape(), shared_features=shared)


class Qwen2Moe(SharedMoe):
    """The config.json of a Qwen2 with experts."""

    FAMILY: ClassVar[Family] = Family(
        model_type="qwen2_moe",
        models="Qwen1.5 and Qwen2 with experts",
        layer=MixtureLayer,
    )

    num_key_value_heads: Heads | None = 16
    num_experts: NumExperts = 60
    num_experts_per_tok: NumExperts = 4
    moe_intermediate_size: Features = 1408
    shared_expert_intermediate_size: Features = 5632
    max_window_layers: Whole = 28
    qkv_bias: Flag = True

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(qkv_bias=self.qkv_bias, **fields)

    def layer_windows(self) -> Windows:
        layers = range(self.num_hidden_layers)
        return self.typed_windows(
            self.sliding_window if self.use_sliding_window else None,
            [i % 2 == 0 and i < self.max_window_layers for i in layers],
            may_differ=True,
        )


class Qwen3MoeLayer(MixtureLayer):
    """A layer that normalizes each head of the queries and keys."""

    def __init__(self, config: MixtureModel, make: LayerBuilder):
        super().__init__(config, make, norms="head")


class Qwen3Moe(QwenMoe):
    """The config.json of a Qwen3 with experts."""

    FAMILY: ClassVar[Family] = Family(
        model_type="qwen3_moe",
        models="Qwen3 with experts",
        layer=Qwen3MoeLayer,
    )

    num_key_value_heads: Heads | None = 4
    attention_bias: Flag = False
    num_experts: NumExperts = 128
    num_experts_per_tok: NumExperts = 8
    moe_intermediate_size: Features = 768

    def build(self, **fields: Any) -> ModelConfig:
        bias = self.attention_bias
        return super().build(qkv_bias=bias, o_bias=bias, **fields)

    def layer_windows(self) -> Windows:
        window = self.sliding_window if self.use_sliding_window else None
        return self.typed_windows(window, [True] * self.num_hidden_layers)
