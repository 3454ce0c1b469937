"""One decoder for the Llama family, whole or one pipeline stage of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.models.config import LayerLinear, ModelConfig
from jaxlora.modules.attention import (
    Attention,
    AttentionImplementation,
    PackedRows,
    SegmentLengths,
)
from jaxlora.modules.mlp import Mlp
from jaxlora.modules.multi_lora_linear import (
    BaseParam,
    MultiLoraLinear,
    Routing,
    SlotShape,
    with_shared_inputs,
)
from jaxlora.modules.norm import RmsNorm, make_norm
from jaxlora.modules.rope import rope_frequencies, rope_table

# The part of each layer that the backward pass recomputes instead of keeping it.
Remat = Literal["none", "mlp", "layer"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """How a decoder runs; none of it changes what it computes beyond rounding.

    Attributes:
        dtype: Dtype of weights and activations.
        remat: Part of each layer that the backward pass recomputes instead of keeping
            it: nothing, the MLP with its norm, or the whole layer.
        implementation: Name of the LoRA kernels' back end.
        attention: Implementation of attention.
        max_segment_tokens: Upper bound on the length of packed samples.
        mean_segment_tokens: Mean length of the samples of the job with the shortest
            samples, or less. cuDNN attention has room for one and a half times the
            number of samples that this gives for a microbatch.
    """

    dtype: jnp.dtype
    remat: Remat = "none"
    implementation: str = "xla"
    attention: AttentionImplementation = "xla"
    max_segment_tokens: int
    mean_segment_tokens: int = 64

    @property
    def lengths(self) -> SegmentLengths:
        """Lengths of the packed samples."""
        return SegmentLengths(self.max_segment_tokens, self.mean_segment_tokens)


class DecoderLayer(nnx.Module):
    """`h += attention(norm(h)); h += mlp(norm(h))`."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        linear,
        *,
        dtype,
        attention: AttentionImplementation = "xla",
    ):
        self.attention_norm = make_norm(config, "attention_norm", dtype=dtype)
        self.self_attn = Attention(
            config, linear, layer, dtype=dtype, implementation=attention
        )
        self.mlp_norm = make_norm(config, "mlp_norm", dtype=dtype)
        self.mlp = Mlp(config, linear)

    def attend(
        self, h: Float[Array, "T D"], rows: PackedRows, routing: Routing
    ) -> Float[Array, "T D"]:
        """Applies the first half of the layer, attention."""
        return h + self.self_attn(self.attention_norm(h), rows, routing)

    def feed_forward(
        self, h: Float[Array, "T D"], routing: Routing
    ) -> Float[Array, "T D"]:
        """Applies the second half of the layer, the MLP."""
        return h + self.mlp(self.mlp_norm(h), routing)

    def __call__(
        self, h: Float[Array, "T D"], rows: PackedRows, routing: Routing
    ) -> Float[Array, "T D"]:
        return self.feed_forward(self.attend(h, rows, routing), routing)


class Embedding(nnx.Module):
    """The frozen token embedding, V D."""

    def __init__(self, vocab_size: int, features: int, *, dtype):
        self.embedding = BaseParam(jnp.zeros((vocab_size, features), dtype))


class Head(nnx.Module):
    """The frozen output projection, D V."""

    def __init__(self, features: int, vocab_size: int, *, dtype):
        self.kernel = BaseParam(jnp.zeros((features, vocab_size), dtype))


class Decoder(nnx.Module):
    """A Llama-family decoder over packed rows, or one pipeline stage of it.

    A forward pass is `embed`, `run_layers`, and `norm` with the head. A stage has only
    its own layers, under their numbers in the whole model.

    Attributes:
        config: The model's mathematics.
        options: How it runs.
        slots: Shape of the slot tables; None: there are none.
        embed_tokens: The embedding: on the first stage, and on the last if tied.
        layers: The layers of this stage, by number.
        norm: The final norm; None except on the last stage.
        lm_head: The head; None except on the last stage, or if it is tied.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        slots: SlotShape | None,
        adapted: frozenset[str],
        *,
        layers: range,
    ):
        """Makes the modules; weights are placeholders until `DecoderSpec.bind`.

        Args:
            config: The model's mathematics.
            options: How it runs.
            slots: Shape of the slot tables of every adapted linear.
            adapted: Paths of the linears that get slots (`layers.0.self_attn.q_proj`).
            layers: Numbers of the layers to make.
        """
        self.config, self.options, self.slots = config, options, slots
        dtype, width = options.dtype, config.hidden_size
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        is_tied = config.tie_embeddings
        embedding = functools.partial(Embedding, config.vocab_size, width, dtype=dtype)
        self.embed_tokens = embedding() if is_first or (is_last and is_tied) else None
        self.layers = nnx.Dict(
            {
                str(i): DecoderLayer(
                    config,
                    i,
                    functools.partial(_linear, i, options, slots, adapted),
                    dtype=dtype,
                    attention=options.attention,
                )
                for i in layers
            }
        )
        self._numbers = layers
        norm = functools.partial(RmsNorm, width, eps=config.rms_eps, dtype=dtype)
        self.norm = norm() if is_last else None
        head = functools.partial(Head, width, config.vocab_size, dtype=dtype)
        self.lm_head = head() if is_last and not is_tied else None

    def embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Hidden states before the first layer; only on the first stage."""
        assert self.embed_tokens is not None
        return self.embed_tokens.embedding[...][token_ids]

    def run_layers(
        self,
        h: Float[Array, "T D"],
        positions: Int[Array, " T"],
        segment_ids: Int[Array, " T"],
        routing: Routing,
    ) -> Float[Array, "T D"]:
        """Hidden states after the last layer of this stage.

        Args:
            h: Hidden states before the first layer of this stage.
            positions: Each token's position in its own sample.
            segment_ids: Which sample each row belongs to; negative: padding.
            routing: Slot of each row, and the keys of dropout masks.
        """
        rope = rope_table(
            positions, rope_frequencies(self.config.rope, self.config.head_dim)
        )
        rows = PackedRows(rope, segment_ids, self.options.lengths)
        routing = with_shared_inputs(self._linears(), routing)
        for i in self._numbers:
            h = self._apply(self.layers[str(i)], h, rows, routing)
        return h

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        segment_ids: Int[Array, " T"],
        routing: Routing,
    ) -> Float[Array, "T D"]:
        """Hidden states after the final norm; `head_kernel` turns them into logits.

        Args:
            token_ids: Packed tokens.
            positions: Each token's position in its own sample.
            segment_ids: Which sample each row belongs to; negative: padding.
            routing: Slot of each row, and the keys of dropout masks.
        """
        h = self.run_layers(self.embed(token_ids), positions, segment_ids, routing)
        return self.final_norm(h)

    def final_norm(self, h: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Normalized hidden states, as the head takes them; only on the last stage."""
        assert self.norm is not None
        return self.norm(h)

    def _linears(self) -> list[MultiLoraLinear]:
        """All linears, by path, which is the order of `SlotSettings`.

        In that order, XLA sees that stacking their settings gives `SlotSettings` back.
        """
        linears = {
            ".".join(map(str, path)): module
            for path, module in nnx.iter_modules(self)
            if isinstance(module, MultiLoraLinear)
        }
        return [linears[path] for path in sorted(linears)]

    def _apply(self, layer: DecoderLayer, h, rows: PackedRows, routing: Routing):
        match self.options.remat:
            case "none":
                return layer(h, rows, routing)
            case "mlp":
                h = layer.attend(h, rows, routing)
                return _rematerialized(
                    lambda x, h: x.feed_forward(h, routing), layer, h
                )
            case "layer":
                return _rematerialized(lambda x, h: x(h, rows, routing), layer, h)

    def head_kernel(self) -> Float[Array, "D V"]:
        """The output projection; the transposed embedding where they are tied."""
        head, transposed = self.stored_head()
        return head.T if transposed else head

    def stored_head(self) -> tuple[Array, bool]:
        """The output projection in its stored layout, without a copy; whether V D."""
        if self.lm_head is None:
            assert self.embed_tokens is not None
            return self.embed_tokens.embedding[...], True
        return self.lm_head.kernel[...], False


def _rematerialized(run: Callable, layer: DecoderLayer, h):
    """Runs `run(layer, h)`, keeps only h, and recomputes the rest in backward."""
    graph, state = nnx.split(layer)

    def pure(state, h):
        return run(nnx.merge(graph, state), h)

    return jax.checkpoint(pure)(state, h)


def _linear(layer, options, slots, adapted, linear: LayerLinear) -> MultiLoraLinear:
    has_slots = f"layers.{layer}.{linear.name}" in adapted
    return MultiLoraLinear(
        linear.in_features,
        linear.out_features,
        slots=slots if has_slots else None,
        use_bias=linear.use_bias,
        dtype=options.dtype,
        layer=layer,
        projection=linear.projection,
        implementation=options.implementation,
        rngs=nnx.Rngs(0),
    )
