"""Rows, which a layer asks about its surroundings in training and in generation.

A block computes with the tokens of all samples as rows. Where a row must know of other
rows, or of its position, it asks `Rows`. So the same layer trains and generates.
"""

import abc
import dataclasses
import typing

import jax
from jaxtyping import Array, Float, Int

from jaxlora.models.config import DeltaShape, GrowingRope, ModelConfig, Rope
from jaxlora.modules.attention import (
    AttentionImplementation,
    WideHeads,
    packed_attention,
)
from jaxlora.modules.cached_attention import LayerCache, cached_attention
from jaxlora.modules.gated_delta import (
    DeltaCache,
    DeltaInputs,
    DeltaWeights,
    cached_gated_delta,
    packed_gated_delta,
)
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.rope import RopeTable, query_table, rope_table
from jaxlora.modules.routing import Routing
from jaxlora.modules.scoring import Scoring
from jaxlora.modules.triton_gated_delta import delta_implementation

Cache = LayerCache | DeltaCache  # what a layer keeps in generation


class LayerRopes(typing.NamedTuple):
    """Rotary tables of the positions of rows, for all layers.

    Attributes:
        rope: Rotary table of the rows' positions.
        local_rope: Rotary table of layers with a window; None: they use `rope`.
        query_rope: Rotary table of queries; None: it is that of keys.
    """

    rope: RopeTable
    local_rope: RopeTable | None
    query_rope: RopeTable | None = None


def layer_ropes(config: ModelConfig, positions: Int[Array, " T"]) -> LayerRopes:
    """Makes the rotary tables of all layers.

    Args:
        config: The model.
        positions: Position of each row in its own sequence.
    """

    def table(rope: Rope, *, of_windows: bool) -> RopeTable:
        kinds = [window is not None for window in config.layer_windows]
        layer = kinds.index(of_windows) if of_windows in kinds else 0
        return rope_table(positions, rope, config.at_layer(layer).head_dim)

    local = config.local_rope
    local = None if local is None else table(local, of_windows=True)
    rope, queries = table(config.rope, of_windows=False), None
    if isinstance(config.rope, GrowingRope):
        queries = query_table(rope, positions, config.rope)
    return LayerRopes(rope, local, queries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(abc.ABC):
    """The rows that a layer runs, as its blocks see them.

    Attributes:
        ropes: Rotary tables of the rows' positions.
        routing: Slot of each row, and the keys of dropout masks.
    """

    ropes: LayerRopes
    routing: Routing

    def rope(self, scoring: Scoring) -> RopeTable:
        """Returns the rotary table of layers with these settings."""
        if scoring.window is None or self.ropes.local_rope is None:
            return self.ropes.rope
        return self.ropes.local_rope

    @abc.abstractmethod
    def attend(
        self,
        q: Float[Array, "T H E"],
        k: Float[Array, "T HK E"],
        v: Float[Array, "T HK E"],
        scoring: Scoring,
        sinks: Float[Array, " H"] | None = None,
    ) -> Float[Array, "T H E"]:
        """Lets each row attend to itself and to the rows before it in its sequence.

        Args:
            q: Queries; H is a multiple of HK (grouped-query attention).
            k: Keys.
            v: Values.
            scoring: Settings of the scores.
            sinks: See `packed_attention`.
        """

    @abc.abstractmethod
    def mix(
        self, given: DeltaInputs, weights: DeltaWeights, shape: DeltaShape
    ) -> Float[Array, "T H E"]:
        """Runs the gated delta rule over each row and those before it in its sequence.

        Args:
            given: The rows.
            weights: Frozen weights.
            shape: Sizes.
        """


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows(Rows):
    """The rows of training: packed samples.

    Attributes:
        segment_ids: Segment of each row; negative for padding.
        lengths: Lengths of the segments. They are sizes of the program, not values.
        implementation: Implementation of attention.
        wide_heads: Attention of layers with wider heads; None: `implementation`, too.
    """

    segment_ids: Int[Array, " T"]
    lengths: SegmentLengths = dataclasses.field(metadata={"static": True})
    implementation: AttentionImplementation = dataclasses.field(
        default="xla", metadata={"static": True}
    )
    wide_heads: WideHeads | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def for_layer(self, layer: int) -> "PackedRows":
        """Returns the rows as a decoder's layer sees them; see `Routing.for_layer`."""
        return dataclasses.replace(self, routing=self.routing.for_layer(layer))

    def attend(self, q, k, v, scoring, sinks=None):
        """Runs `packed_attention`."""
        implementation, wide = self.implementation, self.wide_heads
        if wide is not None and wide.features == q.shape[-1]:
            implementation = wide.implementation
        return packed_attention(
            q,
            k,
            v,
            self.segment_ids,
            lengths=self.lengths,
            scoring=scoring,
            sinks=sinks,
            implementation=implementation,
        )

    def mix(self, given, weights, shape):
        """Runs `packed_gated_delta`."""
        ids = self.segment_ids
        block_tokens = len(ids) // len(self.routing.block_adapter)
        return packed_gated_delta(
            given,
            weights,
            shape,
            ids,
            block_tokens=block_tokens,
            implementation=delta_implementation(given.mixed.dtype, shape),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows(Rows):
    """The rows of generation: the next tokens of B sequences.

    They lie one sequence after the other, the same number of each.

    Attributes:
        place: Number of tokens before of each sequence.
        num_new: Number of new tokens of each sequence, after which padding comes.
        caches: For each layer, what it keeps of the tokens before, such as keys and
            values. Once a layer has run, its own has the new tokens, too.
        layer: Number in `caches` of the layer that runs.
    """

    place: Int[Array, " B"]
    num_new: Int[Array, " B"]
    caches: list[Cache]
    layer: int = 0

    def for_layer(self, layer: int) -> "CachedRows":
        """Returns the rows as a layer sees them, which adds them to its own cache."""
        return dataclasses.replace(self, layer=layer)

    def attend(self, q, k, v, scoring, sinks=None):
        """Adds the rows to the cache of the layer, and runs `cached_attention`."""
        num, cache = len(self.place), self.caches[self.layer]
        assert isinstance(cache, LayerCache)
        new_q, new_k, new_v = (x.reshape(num, -1, *x.shape[1:]) for x in (q, k, v))
        out, self.caches[self.layer] = cached_attention(
            new_q, new_k, new_v, cache, self.place, scoring, sinks
        )
        return out.reshape(q.shape)

    def mix(self, given, weights, shape):
        """Runs `cached_gated_delta`, and replaces the cache of the layer."""
        cache = self.caches[self.layer]
        assert isinstance(cache, DeltaCache)
        out, self.caches[self.layer] = cached_gated_delta(
            given, weights, shape, cache, self.num_new
        )
        return out
