"""What of a Llama-family model changes its mathematics, as one frozen value."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearRopeScaling:
    """Position interpolation (`rope_type: linear`): positions divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family.

    Attributes:
        model_type: Hugging Face's name of the family (llama, mistral, qwen2, qwen3).
        vocab_size: V, rows of the embedding.
        hidden_size: D, model width.
        intermediate_size: F, MLP width.
        num_layers: L, decoder layers.
        num_heads: H, query heads.
        num_kv_heads: HK, key and value heads; divides H.
        head_dim: Features of one head; need not be D / H.
        max_positions: Longest sequence the model was made for, in tokens.
        rms_eps: Added to the mean square in every RMS norm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: How the frequencies are stretched for long contexts, if at all.
        qkv_bias: Whether the q, k and v projections add a bias.
        o_bias: Whether the attention output projection adds a bias.
        mlp_bias: Whether the MLP projections add a bias.
        qk_norm: Whether q and k are RMS-normalised per head (Qwen3).
        tie_embeddings: Whether the head is the transposed embedding.
        layer_windows: For each layer, how many tokens back a token sees, itself
            included; None sees all of its segment.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    layer_windows: tuple[int | None, ...]
