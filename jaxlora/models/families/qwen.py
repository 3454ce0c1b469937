"""Qwen2, Qwen2.5 and Qwen3."""

from typing import Annotated, Any, ClassVar

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.hf_config import (
    Count,
    Flag,
    HeadDim,
    Heads,
    HfConfig,
    Whole,
    Windows,
    only,
)


class _Qwen(HfConfig):
    """Layers from `max_window_layers` on have a window, if windows are used at all."""

    max_position_embeddings: Count = 32768
    num_key_value_heads: Heads | None = 32
    hidden_act: Annotated[Any, only("silu")] = "silu"
    sliding_window: Count | None = 4096
    use_sliding_window: Flag = False
    max_window_layers: Whole | None = None

    def layer_windows(self) -> Windows:
        first = 28 if self.max_window_layers is None else self.max_window_layers
        return self.typed_windows(
            self.sliding_window if self.use_sliding_window else None,
            [layer >= first for layer in range(self.num_hidden_layers)],
            may_differ=True,
        )


class Qwen2(_Qwen):
    """The config.json of a Qwen2 or Qwen2.5."""

    FAMILY: ClassVar[Family] = Family(
        model_type="qwen2", models="Qwen2, Qwen2.5", layer=LlamaLayer
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset({"attention_bias", "mlp_bias"})

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(qkv_bias=True, **fields)


class Qwen3Layer(LlamaLayer):
    """A layer that normalizes each head of the queries and keys."""

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        super().__init__(config, make, norms="head")


class Qwen3(_Qwen):
    """The config.json of a Qwen3."""

    FAMILY: ClassVar[Family] = Family(
        model_type="qwen3",
        models="Qwen3",
        layer=Qwen3Layer,
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset({"mlp_bias"})

    head_dim: HeadDim | None = 128
    attention_bias: Flag = False

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(
            qkv_bias=self.attention_bias, o_bias=self.attention_bias, **fields
        )
