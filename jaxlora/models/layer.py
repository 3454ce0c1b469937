"""One layer of the decoder."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxlora.models.blocks.attention import Attention
from jaxlora.models.build import LayerBuilder
from jaxlora.models.options import Remat
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.norm import RmsNorm
from jaxlora.modules.producers import normed_input
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rows import Cache, PackedRows, Rows
from jaxlora.modules.scoring import ATTENTION_RESULTS
from jaxlora.pallas_kernels import LINEAR_RESULTS
from jaxlora.sharding.tensor import gather_rows, scatter_rows

keep_results = jax.checkpoint_policies.save_only_these_names(
    LINEAR_RESULTS, ATTENTION_RESULTS
)


@runtime_checkable
class Block(Protocol):
    """A part of a layer, such as attention, which reads and writes hidden states."""

    @property
    def input_linears(self) -> tuple[MultiLoraLinear, ...]:
        """The linears that read its input and nothing else does; else empty."""

    def __call__(self, x: LinearInput, rows: Rows) -> Float[Array, "T D"]:
        """Returns what the block adds to the hidden states.

        Args:
            x: Rows; and s, the product of rows and A, of its input linears, if the
                norm before has computed it.
            rows: What rows know of each other.
        """


@runtime_checkable
class Mixer(Block, Protocol):
    """A block in which rows see other rows, such as attention."""

    def empty_cache(self, num_sequences: int, num_tokens: int) -> Cache:
        """Returns the cache of generation before its first tokens."""


class DecoderLayer(nnx.Module):
    """The base of the layers of all families: attention, then a feed-forward block.

    A family makes the modules; norms that it does not make are left out. One with a
    block in the place of attention names it by `mixer`. If devices share the layer, h
    has the rows of one of them.

    Attributes:
        multiplier: Factor of what each block adds to the hidden states.
    """

    self_attn: Attention
    mlp: Block
    attention_norm: RmsNorm | None = None
    attention_output_norm: RmsNorm | None = None
    mlp_norm: RmsNorm | None = None
    mlp_output_norm: RmsNorm | None = None
    multiplier: float = 1.0

    def __init__(self, make: LayerBuilder):
        self.tensor = make.options.tensor

    @property
    def mixer(self) -> Mixer:
        """The block in which rows see other rows, with which the layer begins."""
        return self.self_attn

    def attend(self, h: Float[Array, "T D"], rows: Rows) -> Float[Array, "T D"]:
        """Applies the first half of the layer, attention or what is in its place."""
        norms = {"before": self.attention_norm, "after": self.attention_output_norm}
        return self._add(self.mixer, h, rows, **norms)

    def feed_forward(self, h: Float[Array, "T D"], rows: Rows) -> Float[Array, "T D"]:
        """Applies the second half of the layer."""
        norms = {"before": self.mlp_norm, "after": self.mlp_output_norm}
        return self._add(self.mlp, h, rows, **norms)

    def __call__(self, h: Float[Array, "T D"], rows: Rows) -> Float[Array, "T D"]:
        return self.feed_forward(self.attend(h, rows), rows)

    def empty_cache(self, num_sequences: int, num_tokens: int) -> Cache:
        """Returns the cache of generation before its first tokens.

        Args:
            num_sequences: Number of sequences.
            num_tokens: Tokens of each sequence that it holds.
        """
        return self.mixer.empty_cache(num_sequences, num_tokens)

    def _add(
        self,
        block: Block,
        h: Float[Array, "T D"],
        rows: Rows,
        *,
        before: RmsNorm | None,
        after: RmsNorm | None,
    ) -> Float[Array, "T D"]:
        """Returns `h + multiplier * after(block(before(h)))`.

        Args:
            block: A part of the layer.
            h: Hidden states.
            rows: What rows know of each other.
            before: Norm of the block's input; None: there is none.
            after: Norm of its output; None: there is none.
        """
        h, x = self._input(before, h, block.input_linears, rows.routing)
        y = self._sum(block(x, rows))
        if after is not None:
            y = after(y)
        return h + (y if self.multiplier == 1 else y * self.multiplier)

    def _input(
        self,
        norm: RmsNorm | None,
        h: Float[Array, "T D"],
        linears: Sequence[MultiLoraLinear],
        routing: Routing,
    ) -> tuple[Float[Array, "T D"], LinearInput]:
        """Returns h, and all rows of a block's input on each device of the layer."""
        if norm is None or not linears:
            x = h if norm is None else norm(h)
        elif self.tensor == 1:
            return normed_input(norm, h, linears, routing)
        else:
            h, x = norm.of_residual(h, linears[0].implementation, linears[0].weight)
        if self.tensor > 1:
            x = gather_rows(x, self.tensor)
        return h, LinearInput.of(x)

    def _sum(self, y: Float[Array, "T D"]) -> Float[Array, "U D"]:
        """Adds the outputs of all devices that share the layer, in the own rows."""
        if self.tensor == 1:
            return y
        # A policy that saves the results of linears sums nothing again.
        return checkpoint_name(scatter_rows(y, self.tensor), LINEAR_RESULTS)


def run_layer(
    layer: DecoderLayer, remat: Remat, h: Float[Array, "T D"], rows: PackedRows
) -> Float[Array, "T D"]:
    """Runs a layer, of which the backward pass recomputes a part."""
    match remat:
        case "none":
            return layer(h, rows)
        case "elementwise":
            whole = lambda x, h: x(h, rows)
            return rematerialized(whole, layer, h, policy=keep_results)
        case "mlp":
            h = layer.attend(h, rows)
            return rematerialized(lambda x, h: x.feed_forward(h, rows), layer, h)
        case "layer":
            return rematerialized(lambda x, h: x(h, rows), layer, h)


def run_whole_layers(
    layers: Mapping[int, DecoderLayer],
    remat: Remat,
    h: Float[Array, "U D"],
    rows: PackedRows,
) -> tuple[Float[Array, "U D"], Float[Array, "U D"]]:
    """Runs layers whose weights are here, not shards of them.

    Layers that differ only in the values of their arrays are traced, differentiated and
    lowered once. XLA inlines the function that they share.

    Args:
        layers: The layers, by their numbers in the whole model.
        remat: Part of each layer that the backward pass recomputes.
        h: Hidden states before the first of the layers.
        rows: The rows, for all layers.

    Returns:
        The output and the input of the last layer.
    """

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def run(graph, state, h, rows):
        return run_layer(nnx.merge(graph, state), remat, h, rows)

    before = h
    for number, layer in layers.items():
        graph, state = nnx.split(layer)
        before, h = h, run(graph, state, h, rows.for_layer(number))
    return h, before


def rematerialized(
    run: Callable, layer: DecoderLayer, h, *, policy: Callable | None = None
):
    """Runs `run(layer, h)`; rematerializes all values that the policy does not save.

    Args:
        run: The function.
        layer: The layer.
        h: Hidden states.
        policy: Says what is saved; None: nothing is.
    """
    graph, state = nnx.split(layer)

    def pure(state, h):
        return run(nnx.merge(graph, state), h)

    return jax.checkpoint(pure, policy=policy)(state, h)
