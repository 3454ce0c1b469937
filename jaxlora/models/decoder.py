"""One decoder for the Llama family: a list of layers that can be cut into stages."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.models.config import LayerLinear, ModelConfig
from jaxlora.models.stacks import stacked_shapes
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
    """A Llama-family decoder over packed rows, with slots for adapters.

    Attributes:
        config: The model's mathematics.
        options: How it runs.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        slots: SlotShape | None = None,
        adapted: frozenset[str] = frozenset(),
    ):
        """Makes the modules; weights are placeholders until `DecoderSpec.bind`.

        Args:
            config: The model's mathematics.
            options: How it runs.
            slots: Shape of the slot tables of every adapted linear.
            adapted: Paths of the linears that get slots (`layers.0.self_attn.q_proj`).
        """
        self.config, self.options = config, options
        dtype = options.dtype
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype
        )
        layers = []
        for i in range(config.num_layers):
            linear = functools.partial(_linear, i, options, slots, adapted)
            layers.append(
                DecoderLayer(
                    config, i, linear, dtype=dtype, attention=options.attention
                )
            )
        self.layers = nnx.List(layers)
        self.norm = RmsNorm(config.hidden_size, eps=config.rms_eps, dtype=dtype)
        head = functools.partial(Head, config.hidden_size, config.vocab_size)
        self.lm_head = None if config.tie_embeddings else head(dtype=dtype)

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        segment_ids: Int[Array, " T"],
        routing: Routing,
    ) -> Float[Array, "T D"]:
        """Hidden states after the last norm; `head_kernel` turns them into logits.

        Args:
            token_ids: Packed tokens.
            positions: Each token's position in its own sample.
            segment_ids: Which sample each row belongs to; negative: padding.
            routing: Slot of each row, and the keys of dropout masks.
        """
        h = self.embed_tokens.embedding[...][token_ids]
        rope = rope_table(
            positions, rope_frequencies(self.config.rope, self.config.head_dim)
        )
        rows = PackedRows(rope, segment_ids, self.options.lengths)
        routing = with_shared_inputs(self._linears(), routing)
        for layer in self.layers:
            h = self._apply(layer, h, rows, routing)
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


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSettings:
    """Settings of the slots in every adapted linear, in the order of `adapted`.

    There is one array per setting, because hundreds of small arrays would cost host
    time in each step.

    Attributes:
        scaling: `lora_alpha / rank`.
        dropout: Dropout rate.
        rank: Rank of the slot's adapter there; 0 where it does not adapt.
    """

    scaling: Float[Array | np.ndarray, "M G"]
    dropout: Float[Array | np.ndarray, "M G"]
    rank: Int[Array | np.ndarray, "M G"]


class DecoderSpec:
    """A decoder's structure without its arrays: binds arrays to modules.

    Base weights and adapters are passed as flat dicts from dotted path to array, so a
    step is a plain function of them. Specs of equal structure compare equal.

    Attributes:
        config: The model's mathematics.
        options: How it runs.
        slots: Shape of the slot tables; None: there are none.
        adapted: Paths of the linears that have slots, in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        slots: SlotShape | None = None,
        adapted: frozenset[str] = frozenset(),
    ):
        self.config, self.options, self.slots = config, options, slots
        self.adapted = tuple(sorted(adapted))
        self._key = config, options, slots, self.adapted
        make = functools.partial(Decoder, config, options, slots, adapted)
        self._graph, self._state = nnx.split(nnx.eval_shape(make))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecoderSpec) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def bind(
        self, *arrays: Mapping[str, Array], settings: SlotSettings | None = None
    ) -> Decoder:
        """The decoder with these variables.

        Args:
            *arrays: Base weights and adapters; together they name each once.
            settings: Settings of the slots, if there are any.

        Raises:
            ValueError: A variable has no array, or an array has no variable.
        """
        given: dict[str, Array] = {}
        for group in (*arrays, self._by_path(settings)):
            given |= group
        variables = {
            ".".join(str(part) for part in path): (path, variable)
            for path, variable in nnx.to_flat_state(self._state)
        }
        if given.keys() != variables.keys():
            raise ValueError(
                "the arrays are not those of this decoder: missing "
                f"{sorted(variables.keys() - given.keys())}, unknown "
                f"{sorted(given.keys() - variables.keys())}."
            )
        flat = {
            path: variable.replace(given[name])
            for name, (path, variable) in variables.items()
        }
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def _by_path(self, settings: SlotSettings | None) -> dict[str, Array]:
        """The variable of each setting of each adapted linear."""
        if settings is None:
            return {}
        return {
            f"{path}.{field.name}": getattr(settings, field.name)[i]
            for i, path in enumerate(self.adapted)
            for field in dataclasses.fields(settings)
        }

    def shapes(self, kind: type[nnx.Variable]) -> dict[str, jax.ShapeDtypeStruct]:
        """Path -> shape and dtype of every variable of one kind."""
        return {
            ".".join(str(part) for part in path): jax.ShapeDtypeStruct(
                variable.shape, variable.dtype
            )
            for path, variable in nnx.to_flat_state(self._state)
            if isinstance(variable, kind)
        }

    def base_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Path -> shape of the frozen weights."""
        return self.shapes(BaseParam)

    def adapter_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape of the stacks of slot tables A and B."""
        return stacked_shapes(self.shapes(nnx.LoRAParam))
