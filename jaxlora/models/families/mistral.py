"""Mistral."""

from typing import Annotated, Any, ClassVar

from jaxlora.models.config import Family
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.hf_config import Count, Heads, HfConfig, Windows, only


class Mistral(HfConfig):
    """The config.json of a Mistral, of which all layers have the same window."""

    FAMILY: ClassVar[Family] = Family(
        model_type="mistral", models="Mistral", layer=LlamaLayer
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset({"attention_bias", "mlp_bias"})

    max_position_embeddings: Count = 131072
    num_key_value_heads: Heads | None = 8
    hidden_act: Annotated[Any, only("silu")] = "silu"
    sliding_window: Count | None = 4096

    def layer_windows(self) -> Windows:
        return self.typed_windows(self.sliding_window, [True] * self.num_hidden_layers)
