"""What a layer may ask of its surroundings: rows in training, and in generation.

A block computes with the tokens of all samples as rows. Where a row must know of other
rows, or of its position, it asks `Rows`. So the same layer trains and generates.
"""

import dataclasses
import typing

import jax
from jaxtyping import Array, Float, Int

from jaxlora.models.config import ModelConfig, Rope
from jaxlora.modules.attention import AttentionImplementation, packed_attention
from jaxlora.modules.cached_attention import LayerCache, cached_attention
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.rope import RopeTable, rope_frequencies, rope_table
from jaxlora.modules.routing import Routing
from jaxlora.modules.scoring import Scoring


class LayerRopes(typing.NamedTuple):
    """Rotary tables of the positions of rows, for all layers.

    Attributes:
        rope: Rotary table of the rows' positions.
        local_rope: Rotary table of layers with a window; None: they use `rope`.
    """

    rope: RopeTable
    local_rope: RopeTable | None

    def of(self, scoring: Scoring) -> RopeTable:
        """Returns the rotary table of layers with these settings."""
        if scoring.window is None or self.local_rope is None:
            return self.rope
        return self.local_rope


def layer_ropes(config: ModelConfig, positions: Int[Array, " T"]) -> LayerRopes:
    """Makes the rotary tables of all layers.

    Args:
        config: The model.
        positions: Position of each row in its own sequence.
    """

    def table(rope: Rope) -> RopeTable:
        return rope_table(positions, rope_frequencies(rope, config.head_dim))

    local = None if config.local_rope is None else table(config.local_rope)
    return LayerRopes(table(config.rope), local)


@typing.runtime_checkable
class Rows(typing.Protocol):
    """The rows that a layer runs, as its blocks see them."""

    @property
    def routing(self) -> Routing:
        """Slot of each row, and the keys of dropout masks."""

    def rope(self, scoring: Scoring) -> RopeTable:
        """Returns the rotary table of layers with these settings."""

    def attend(
        self,
        q: Float[Array, "T H E"],
        k: Float[Array, "T HK E"],
        v: Float[Array, "T HK E"],
        scoring: Scoring,
        implementation: AttentionImplementation,
    ) -> Float[Array, "T H E"]:
        """Lets each row attend to itself and to the rows before it in its sequence.

        Args:
            q: Queries; H is a multiple of HK (grouped-query attention).
            k: Keys.
            v: Values.
            scoring: Settings of the scores.
            implementation: Implementation of attention in training.
        """


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The rows of training: packed samples.

    Attributes:
        ropes: Rotary tables of the rows' positions.
        segment_ids: Segment of each row; negative for padding.
        routing: Slot of each row, and the keys of dropout masks.
        lengths: Lengths of the segments. They are sizes of the program, not values.
    """

    ropes: LayerRopes
    segment_ids: Int[Array, " T"]
    routing: Routing
    lengths: SegmentLengths = dataclasses.field(metadata={"static": True})

    def for_layer(self, layer: int) -> "PackedRows":
        """Returns the rows as a decoder's layer sees them; see `Routing.for_layer`."""
        return dataclasses.replace(self, routing=self.routing.for_layer(layer))

    def rope(self, scoring: Scoring) -> RopeTable:
        """Returns the rotary table of layers with these settings."""
        return self.ropes.of(scoring)

    def attend(self, q, k, v, scoring, implementation):
        """Runs `packed_attention`."""
        return packed_attention(
            q,
            k,
            v,
            self.segment_ids,
            lengths=self.lengths,
            scoring=scoring,
            implementation=implementation,
        )


@dataclasses.dataclass(kw_only=True)
class CachedRows:
    """The rows of generation, for one layer: the next tokens of B sequences.

    They lie one sequence after the other, the same number of each.

    Attributes:
        ropes: Rotary tables of the rows' positions.
        routing: Slot of each sequence.
        place: Place in the cache of the first new token, the same for all sequences.
        starts: Place in the cache of each sequence's first token. Places before it are
            padding.
        cache: Keys and values of the tokens before; once the layer has run, of the new
            tokens, too.
    """

    ropes: LayerRopes
    routing: Routing
    place: Int[Array, ""]
    starts: Int[Array, " B"]
    cache: LayerCache

    def rope(self, scoring: Scoring) -> RopeTable:
        """Returns the rotary table of layers with these settings."""
        return self.ropes.of(scoring)

    def attend(self, q, k, v, scoring, implementation):
        """Adds the rows to the cache, and runs `cached_attention`."""
        del implementation
        num = len(self.starts)
        new_q, new_k, new_v = (x.reshape(num, -1, *x.shape[1:]) for x in (q, k, v))
        out, self.cache = cached_attention(
            new_q, new_k, new_v, self.cache, self.place, self.starts, scoring
        )
        return out.reshape(q.shape)
