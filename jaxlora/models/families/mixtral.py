"""Mixtral, a Mistral with experts."""

import dataclasses
from typing import Annotated, Any, ClassVar

from jaxlora.models.config import ExpertShape, Family
from jaxlora.models.families.mixture import Mixture, MixtureLayer, NumExperts
from jaxlora.models.hf_config import Count, Heads, Windows, number, only

_EXPERT = r"\.block_sparse_moe\.experts\.(\d+)\."


class Mixtral(Mixture):
    """The config.json of a Mixtral, of which all layers have the same window."""

    FAMILY: ClassVar[Family] = Family(
        model_type="mixtral",
        models="Mixtral",
        layer=MixtureLayer,
        # Transformers 5 has these names, and still writes the others.
        renamed=(
            (_EXPERT + r"w1\.", r".mlp.experts.\1.gate_proj."),
            (_EXPERT + r"w3\.", r".mlp.experts.\1.up_proj."),
            (_EXPERT + r"w2\.", r".mlp.experts.\1.down_proj."),
            (r"\.block_sparse_moe\.gate\.", ".mlp.gate."),
        ),
    )

    max_position_embeddings: Count = 131072
    num_key_value_heads: Heads | None = 8
    rms_norm_eps: Annotated[float, number(1.0)] | None = 1e-5
    sliding_window: Count | None = None
    num_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2
    router_jitter_noise: Annotated[Any, only(0)] = 0.0

    def expert_shape(self) -> ExpertShape:
        shape = super().expert_shape()
        return dataclasses.replace(shape, normalizes=True, rounds=False)

    def layer_windows(self) -> Windows:
        return self.typed_windows(self.sliding_window, [True] * self.num_hidden_layers)
