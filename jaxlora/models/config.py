"""The configuration of a decoder, as a frozen value, and what its family is made of."""

import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Self

_EXPERT = re.compile(r"\.experts\.\d+\.")


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
class LongRopeScaling:
    """Wavelengths stretched one by one (`rope_type: longrope`, arXiv 2402.13753).

    Attributes:
        factors: Factor of each wavelength, in sequences up to the original maximum.
        magnitude: Factor of the rotated queries and keys.
    """

    factors: tuple[float, ...]
    magnitude: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """Long waves stretched, short ones kept (`rope_type: yarn`, arXiv 2309.00071).

    Attributes:
        factor: Factor of the long wavelengths.
        fast: Waves with more turns in `original_max_positions` are kept.
        slow: Waves with fewer turns are stretched; those between are blended.
        original_max_positions: Longest sequence before the context was extended.
        magnitude: Factor of the rotated queries and keys.
    """

    factor: float
    fast: float
    slow: float
    original_max_positions: int
    magnitude: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnroundedYarnScaling(YarnScaling):
    """The same, blended from the exact ends of the ramp, not from whole pairs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProportionalScaling:
    """Short waves alone (`rope_type: proportional`): the other features never turn.

    Attributes:
        share: Share of the features that turn, the first ones of each half of a head.
    """

    share: float


RopeScaling = (
    Llama3RopeScaling
    | LinearRopeScaling
    | LongRopeScaling
    | YarnScaling
    | ProportionalScaling
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding of a layer.

    Attributes:
        theta: Base of the frequencies.
        scaling: How the frequencies are stretched for long contexts, if at all.
    """

    theta: float
    scaling: RopeScaling | None = None

    def num_rotated(self, head_dim: int) -> int:
        """Returns how many of a head's features rotate, the first ones."""
        return head_dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialRope(Rope):
    """Rotary position embedding that leaves some features of a head as they are.

    Attributes:
        share: Share of the features that rotate.
    """

    share: float

    def num_rotated(self, head_dim: int) -> int:
        """Returns how many of a head's features rotate, the first ones."""
        return int(head_dim * self.share)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GrowingRope(Rope):
    """Rotary position embedding whose rotated queries grow with their positions.

    A query is multiplied by `1 + growth * log(1 + floor(position / period))`.

    Attributes:
        growth: How much a query grows.
        period: Positions after which it grows.
    """

    growth: float
    period: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Composite:
    """A model of several parts, such as text and images, of which one is used here.

    Its config.json has that of the text model as `text_config`. The default names of
    tensors are those of a LLaVA, which several models of text and images share.

    Attributes:
        model_type: Hugging Face's name of the whole.
        models: Names of the models, for error messages.
        texts: The `model_type` of text models that it may have; the first one is that
            of a `text_config` without any.
        keys: Keys of its config.json that are of other parts.
        prefix: Start of the names of the text model's modules in transformers.
        starts: Starts of names of tensors of the text model, in checkpoints and in a
            checkpoint of the text model alone.
        others: Starts of names of tensors of other parts, in checkpoints.
    """

    model_type: str
    models: str
    texts: tuple[str, ...]
    keys: frozenset[str]
    prefix: str = "model.language_model."
    starts: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    )
    others: tuple[str, ...] = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )

    def text_name(self, name: str) -> str | None:
        """Returns the name of a tensor in a checkpoint of the text model alone.

        Args:
            name: Its name in a checkpoint of the whole.

        Returns:
            None for a tensor of another part.
        """
        if name.startswith(self.others):
            return None
        for start, alone in self.starts:
            if name.startswith(start):
                return alone + name.removeprefix(start)
        return name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Sizes of the gated delta rule of a layer.

    Attributes:
        num_key_heads: HK, heads of queries and keys.
        num_value_heads: H, heads of values and gates; a multiple of HK.
        key_dim: K, features of a query or key.
        value_dim: E, features of a value.
        conv_width: W, rows that the convolution sees, the own one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def divided(self, tensor: int) -> "DeltaShape":
        """Returns the sizes on each of `tensor` devices, which divide the heads."""
        return dataclasses.replace(
            self,
            num_key_heads=self.num_key_heads // tensor,
            num_value_heads=self.num_value_heads // tensor,
        )

    @property
    def key_features(self) -> int:
        """Features of the queries of all heads, and of the keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_features(self) -> int:
        """Features of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed_features(self) -> int:
        """C, features of queries, keys and values together."""
        return 2 * self.key_features + self.value_features


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """The mixture of experts of a layer.

    Attributes:
        number: X, number of experts.
        chosen: How many of them a token chooses.
        features: F, width of an expert.
        normalizes: Whether the weights of a token's experts are divided by their sum.
        rounds: Whether these weights are rounded to the dtype of the hidden states.
        shared_features: Width of a further MLP that all tokens pass; None: there is
            none.
    """

    number: int
    chosen: int
    features: int
    normalizes: bool
    rounds: bool = True
    shared_features: int | None = None

    def divided(self, tensor: int) -> "ExpertShape":
        """Returns the sizes on each of `tensor` devices, which divide the widths."""
        shared = self.shared_features
        return dataclasses.replace(
            self,
            features=self.features // tensor,
            shared_features=None if shared is None else shared // tensor,
        )


def is_of_expert(name: str) -> bool:
    """Returns whether a linear of this module name, or path, is one of an expert."""
    return _EXPERT.search(name) is not None


def shared_path(path: str) -> str:
    """Returns the path of the module that computes a linear, from the linear's path.

    The same linear of all experts of a layer, such as `layers.0.mlp.experts.3.up_proj`,
    is one module, `layers.0.mlp.experts.up_proj`.
    """
    return _EXPERT.sub(".experts.", path, count=1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Properties that all models of one `model_type` share.

    Attributes:
        model_type: Hugging Face's name of the family.
        models: Names of the models, for error messages.
        layer: Makes a layer, a `DecoderLayer`, of a `ModelConfig` with a
            `LayerBuilder`.
        norm_offset: Whether norms multiply by 1 + weight, in float32, instead of by the
            weight.
        scales_embedding: Whether embeddings are multiplied by sqrt(hidden_size).
        undivided: Why a layer cannot be divided along the axis `tensor` of a mesh;
            None: it can.
        composite: The model of which it is the text part; None: it is by itself.
        others: Starts of names of tensors in checkpoints that are of other parts.
        has_fused_experts: Whether checkpoints have one tensor X K N of each linear of
            all experts, or the two of MXFP4, which are X N K.
        renamed: Regular expressions for parts of names of tensors in checkpoints, and
            what stands here in their place; the first that is found counts.
    """

    model_type: str
    models: str
    layer: Callable[[Any, Any], Any]
    norm_offset: bool = False
    scales_embedding: bool = False
    undivided: str | None = None
    composite: Composite | None = None
    others: tuple[str, ...] = ()
    has_fused_experts: bool = False
    renamed: tuple[tuple[str, str], ...] = ()

    def text_name(self, name: str) -> str | None:
        """Returns the name of a tensor of a checkpoint here; None: it is not read."""
        if name.startswith(self.others):
            return None
        for part, own in self.renamed:
            name, is_renamed = re.subn(part, own, name, count=1)
            if is_renamed:
                break
        return name if self.composite is None else self.composite.text_name(name)

    @property
    def prefix(self) -> str:
        """Start of the names of the modules of transformers, except for the head."""
        return "model." if self.composite is None else self.composite.prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The mathematics of one decoder.

    A family whose layers need more values has a subclass. One with a value for each
    layer names it in `LAYERWISE`.

    Attributes:
        family: What the model shares with its family. It is not in the `repr`, which
            names the model in checkpoints.
        model_type: Hugging Face's name of the family.
        vocab_size: V, rows of the embedding.
        hidden_size: D, model width.
        intermediate_size: F, MLP width.
        num_layers: L, decoder layers.
        num_heads: H, query heads.
        num_kv_heads: HK, key and value heads; divides H.
        head_dim: E, features of one head; need not be D / H.
        max_positions: Longest sequence the model was made for, in tokens.
        rms_eps: Added to the mean square in every RMS norm.
        rope: Rotary positions; with `local_rope`, of layers without a window.
        local_rope: Rotary positions of layers with a window; None: those of `rope`.
        score_scale: Factor of attention's scores; None: `head_dim ** -0.5`.
        score_softcap: Bound of attention's scores; None: there is none.
        logit_softcap: Bound of the logits; None: there is none.
        qkv_bias: Whether the q, k and v projections add a bias.
        o_bias: Whether the attention output projection adds a bias.
        mlp_bias: Whether the MLP projections add a bias.
        tie_embeddings: Whether the head is the transposed embedding.
        layer_windows: For each layer, how many tokens back a token sees, itself
            included; None sees all of its segment.
        expert_parts: Number of devices among which the experts of each layer are
            divided; this is the model of one of them. It is not in the `repr`, either.

    Raises:
        ValueError: The sizes contradict each other.
    """

    LAYERWISE: ClassVar[tuple[str, ...]] = ("layer_windows",)

    family: Family = dataclasses.field(repr=False)
    model_type: str = dataclasses.field(init=False)
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: Rope
    local_rope: Rope | None = None
    score_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    layer_windows: tuple[int | None, ...]
    expert_parts: int = dataclasses.field(default=1, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "model_type", self.family.model_type)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries; wanted "
                f"num_layers={self.num_layers}, one for each layer."
            )

    @property
    def query_features(self) -> int:
        """Out features of the q projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Out features of the k projection, and of the v projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_multiplier(self) -> float:
        """Factor of the embeddings."""
        return self.hidden_size**0.5 if self.family.scales_embedding else 1.0

    @property
    def logit_multiplier(self) -> float:
        """Factor of the logits."""
        return 1.0

    def at_layer(self, layer: int) -> Self:
        """Returns the model with the heads of one layer, where layers differ in them.

        `head_dim` and `num_kv_heads` are those of layers with a window otherwise.
        """
        del layer
        return self

    def divided(self, tensor: int) -> Self:
        """Returns the part of the model that each of `tensor` devices runs."""
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // tensor,
            num_kv_heads=max(1, self.num_kv_heads // tensor),
            intermediate_size=self.intermediate_size // tensor,
            vocab_size=self.vocab_size // tensor,
        )

    def layer_kind(self, layer: int) -> Hashable:
        """Returns a value that layers with weights of the same shapes share."""
        del layer
        return None

    def delta_shape(self, layer: int) -> DeltaShape | None:
        """Returns the sizes of a layer's gated delta net; None: it has attention."""
        del layer
        return None

    def expert_shape(self, layer: int) -> ExpertShape | None:
        """Returns the mixture of experts of a layer; None: it has none."""
        del layer
        return None

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Returns the model that consists of some layers, by their numbers."""
        values = {
            name: tuple(getattr(self, name)[i] for i in layers)
            for name in self.LAYERWISE
        }
        return dataclasses.replace(self, num_layers=len(layers), **values)
