"""An adapter as a plain value on the host, at its real ranks."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """The LoRA of one linear: its update is `scaling * A B`.

    Attributes:
        a: Shrink matrix A, K r, float32.
        b: Expand matrix B, r N, float32.
        rank: r.
        lora_alpha: What the scaling is made of; see `Adapter.scaling`.
    """

    a: np.ndarray
    b: np.ndarray
    rank: int
    lora_alpha: float

    def __post_init__(self):
        if self.a.shape[1] != self.rank or self.b.shape[0] != self.rank:
            raise ValueError(
                f"A {self.a.shape} and B {self.b.shape} must have rank {self.rank}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        modules: The weights of each adapted linear, by Hugging Face's module name
            (`model.layers.0.self_attn.q_proj`).
        use_rslora: Whether the scaling divides by the root of the rank.
        dropout: Dropout rate that it is trained with.
    """

    modules: dict[str, LoraWeights]
    use_rslora: bool = False
    dropout: float = 0.0

    def scaling(self, weights: LoraWeights) -> float:
        """What A B is multiplied by in one of the adapter's linears."""
        return lora_scaling(weights.lora_alpha, weights.rank, self.use_rslora)


def lora_scaling(lora_alpha: float, rank: int, use_rslora: bool) -> float:
    """`lora_alpha / rank`, or `lora_alpha / sqrt(rank)` for rsLoRA (2312.03732)."""
    return lora_alpha / (math.sqrt(rank) if use_rslora else rank)
