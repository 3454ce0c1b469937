"""SmolLM3, some of whose layers have no positions."""

import dataclasses
from typing import Annotated, Any, ClassVar

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.hf_config import (
    Count,
    Flag,
    Heads,
    HfConfig,
    Theta,
    Windows,
    only,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Model(ModelConfig):
    """The mathematics of a SmolLM3.

    Attributes:
        rotates: Whether queries and keys are rotated, for each layer.
    """

    LAYERWISE: ClassVar[tuple[str, ...]] = (*ModelConfig.LAYERWISE, "rotates")

    rotates: tuple[bool, ...]


class SmolLM3Layer(LlamaLayer):
    """A layer with or without rotary positions."""

    def __init__(self, config: SmolLM3Model, make: LayerBuilder):
        super().__init__(config, make, rotates=config.rotates[make.number])


class SmolLM3(HfConfig):
    """The config.json of a SmolLM3."""

    FAMILY: ClassVar[Family] = Family(
        model_type="smollm3", models="SmolLM3", layer=SmolLM3Layer
    )
    MODEL: ClassVar[type[ModelConfig]] = SmolLM3Model

    max_position_embeddings: Count = 32768
    num_key_value_heads: Heads | None = 4
    rope_theta: Theta | None = 2e6
    tie_word_embeddings: Flag = True
    hidden_act: Annotated[Any, only("silu")] = "silu"
    attention_bias: Flag = False
    mlp_bias: Flag = False
    no_rope_layers: Any = None
    no_rope_layer_interval: Count = 4
    sliding_window: Count | None = None
    use_sliding_window: Flag = False

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(
            rotates=self.rotates(),
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            **fields,
        )

    def rotates(self) -> tuple[bool, ...]:
        """Returns whether each layer has rotary positions, as `no_rope_layers` says."""
        number, given = self.num_hidden_layers, self.no_rope_layers
        if given is None:
            numbers = range(1, number + 1)
            return tuple(i % self.no_rope_layer_interval != 0 for i in numbers)
        fits = isinstance(given, list) and len(given) >= number
        if not fits or any(value not in (0, 1) for value in given):
            raise ModelError(
                f"config.json has no_rope_layers={shown(given)}; wanted for each of "
                f"the {number} layers a 1 if it has rotary positions, else a 0."
            )
        return tuple(map(bool, given[:number]))

    def layer_windows(self) -> Windows:
        return self.typed_windows(
            self.sliding_window if self.use_sliding_window else None,
            [not rotates for rotates in self.rotates()],
            may_differ=True,
        )
