"""Gemma 2, and Gemma 3, of which those with images have their text model trained."""

from typing import Annotated, Any, ClassVar

from jaxlora.errors import ModelError
from jaxlora.models.blocks.attention import Attention
from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Composite, Family, ModelConfig, Rope
from jaxlora.models.hf_config import (
    Count,
    Flag,
    HeadDim,
    Heads,
    HfConfig,
    InnerWidth,
    Layers,
    Theta,
    VocabSize,
    Width,
    Windows,
    number,
    only,
)
from jaxlora.models.layer import DecoderLayer

Scale = Annotated[float, number(1e9)]


class Gemma2Layer(DecoderLayer):
    """Attention and an MLP, with a norm before and after each."""

    def __init__(self, config: ModelConfig, make: LayerBuilder, **attention: Any):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            **attention: Options of `Attention`.
        """
        super().__init__(make)
        self.attention_norm = make.norm("input_layernorm")
        self.self_attn = Attention(config, make, **attention)
        self.attention_output_norm = make.norm("post_attention_layernorm")
        self.mlp_norm = make.norm("pre_feedforward_layernorm")
        self.mlp = Mlp(config, make, activation="gelu_tanh")
        self.mlp_output_norm = make.norm("post_feedforward_layernorm")


class Gemma3Layer(Gemma2Layer):
    """A layer that also normalizes each head of the queries and keys."""

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        super().__init__(config, make, norms="head")


class _Gemma(HfConfig):
    """All layers but each `period`-th have a window."""

    DIVIDES_WIDTH: ClassVar[bool] = True
    # `hidden_activation` says it for all layers.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"hidden_act", "mlp_bias"})

    num_key_value_heads: Heads | None = 4
    head_dim: HeadDim | None = 256
    tie_word_embeddings: Flag = True
    attention_bias: Flag = False
    hidden_activation: Annotated[Any, only("gelu_pytorch_tanh")] = "gelu_pytorch_tanh"
    sliding_window: Count | None = 4096
    query_pre_attn_scalar: Scale = 256.0
    final_logit_softcapping: Scale | None = None

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(
            score_scale=self.query_pre_attn_scalar**-0.5,
            logit_softcap=self.final_logit_softcapping,
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            **fields,
        )

    def period(self) -> int:
        """Returns the n of which each n-th layer has no window."""
        return 2

    def layer_windows(self) -> Windows:
        window = self.sliding_window
        if window is None and self.layer_types is None:
            raise ModelError(
                "config.json has sliding_window=null, and some layers of a "
                f"{self.model_type} model have a window. Set it, or list layer_types "
                "that are all full_attention."
            )
        numbers, period = range(1, self.num_hidden_layers + 1), self.period()
        has_window = [number % period != 0 for number in numbers]
        return self.typed_windows(window, has_window, may_differ=True)


class Gemma2(_Gemma):
    """The config.json of a Gemma 2."""

    FAMILY: ClassVar[Family] = Family(
        model_type="gemma2",
        models="Gemma 2",
        layer=Gemma2Layer,
        norm_offset=True,
        scales_embedding=True,
    )

    max_position_embeddings: Count = 8192
    attn_logit_softcapping: Scale | None = 50.0
    final_logit_softcapping: Scale | None = 30.0

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(score_softcap=self.attn_logit_softcapping, **fields)


class Gemma3(_Gemma):
    """The config.json of a text model of Gemma 3.

    In transformers its attention ignores attn_logit_softcapping. Here it is refused.
    """

    FAMILY: ClassVar[Family] = Family(
        model_type="gemma3_text",
        models="Gemma 3 text models",
        layer=Gemma3Layer,
        norm_offset=True,
        scales_embedding=True,
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"_sliding_window_pattern", *_Gemma.IGNORED}
    )

    # Files of the models with images leave out what has these values.
    vocab_size: VocabSize = 262208
    hidden_size: Width = 2304
    intermediate_size: InnerWidth = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Heads = 8
    max_position_embeddings: Count = 131072
    rope_local_base_freq: Theta | None = None
    sliding_window_pattern: Count | None = None

    def period(self) -> int:
        return self.sliding_window_pattern or 6

    def ropes(self) -> tuple[Rope, Rope]:
        theta, local_theta = self.rope_theta or 1e6, self.rope_local_base_freq or 1e4
        return self.ropes_by_type(theta, local_theta)


GEMMA3 = Composite(
    model_type="gemma3",
    models="Gemma 3 with images",
    texts=(Gemma3.FAMILY.model_type,),
    keys=frozenset(
        {
            "boi_token_index",
            "eoi_token_index",
            "image_token_index",
            "mm_tokens_per_image",
            "vision_config",
        }
    ),
)
