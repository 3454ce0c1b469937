"""Two microbatches side by side, so that each hides the exchanges of the other.

Devices along `tensor` exchange hidden states before and after each half of a layer, and
the chain of one microbatch has nothing to run meanwhile. So a device runs two: while
the rows of one travel, the other is in the middle of a half layer. Both are in one
program, and share no samples.

XLA orders the instructions of a program by what they need, and does not know how long a
kernel takes. It would run both microbatches in step, with half of the exchanges bare.
Optimization barriers tie each exchange to the middle of the other microbatch's half
layer: the gather of one waits until the other's first linears are done, and the other's
last linear waits until the gather may start. The transpose of a barrier is a barrier,
so the backward pass has the same order in reverse.

On Hopper, the kernels of this library have one program on each multiprocessor, and wait
for those that NCCL occupies. So these exchanges are copies, which the copy engines do
(`jaxlora.sharding.layerwise.use_copy_engines`); a sum is a copy of all terms and an
addition.

References:
    DeepSpeed-Domino, arXiv 2409.15241, which divides the rows of a batch, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.layer import DecoderLayer, Remat, keep_results, rematerialized
from jaxlora.modules.attention import PackedRows
from jaxlora.modules.routing import Routing

Pair = tuple[Float[Array, "U D"], Float[Array, "U D"]]


def run_halves(
    layers: Mapping[int, DecoderLayer],
    remat: Remat,
    hs: Pair,
    rows: Sequence[PackedRows],
    routings: Sequence[Routing],
) -> tuple[Pair, Pair]:
    """Runs layers over two microbatches; see `jaxlora.models.layer.run_whole_layers`.

    Args:
        layers: The layers, by their numbers in the whole model.
        remat: Part of each layer that the backward pass recomputes.
        hs: Hidden states of each microbatch before the first of the layers.
        rows: Attention inputs of each.
        routings: Slot of each row, and the keys of dropout masks, of each.

    Returns:
        Hidden states of each after the last layer, and before it.
    """
    # Lengths are sizes of the program, not values; as inputs they would be traced.
    lengths = rows[0].lengths
    arrays = [(one.ropes, one.segment_ids) for one in rows]

    def run(graph, state, hs, arrays, routings):
        own = [PackedRows(ropes, ids, lengths) for ropes, ids in arrays]
        return _Layer(nnx.merge(graph, state), own, routings).run(remat, hs)

    run = jax.jit(run, static_argnums=0, inline=True)
    before = hs
    for number, layer in layers.items():
        graph, state = nnx.split(layer)
        own = [routing.for_layer(number) for routing in routings]
        before, hs = hs, run(graph, state, hs, arrays, own)
    return hs, before


class _Layer:
    """A layer that runs over two microbatches."""

    def __init__(
        self,
        layer: DecoderLayer,
        rows: Sequence[PackedRows],
        routings: Sequence[Routing],
    ):
        self._layer, self._rows, self._routings = layer, rows, routings

    def run(self, remat: Remat, hs: Pair) -> Pair:
        """Runs the layer, of which the backward pass recomputes a part."""
        match remat:
            case "none":
                return self._whole(self._layer, hs)
            case "elementwise":
                policy = keep_results
                return rematerialized(self._whole, self._layer, hs, policy=policy)
            case "mlp":
                hs = self._attend(self._layer, hs)
                return rematerialized(self._feed_forward, self._layer, hs)
            case "layer":
                return rematerialized(self._whole, self._layer, hs)

    def _whole(self, layer: DecoderLayer, hs: Pair) -> Pair:
        return self._feed_forward(layer, self._attend(layer, hs))

    def _attend(self, layer: DecoderLayer, hs: Pair) -> Pair:
        inputs = [*zip(self._rows, self._routings, strict=True)]
        return _side_by_side(
            lambda i, h: layer.start_attention(h, *inputs[i]),
            lambda i, h, heads: layer.end_attention(h, heads, *inputs[i]),
            hs,
        )

    def _feed_forward(self, layer: DecoderLayer, hs: Pair) -> Pair:
        routings = self._routings
        return _side_by_side(
            lambda i, h: layer.start_mlp(h, routings[i]),
            lambda i, h, gated: layer.end_mlp(h, gated, routings[i]),
            hs,
        )


def _side_by_side(
    start: Callable[[int, Any], tuple[Any, Any]],
    end: Callable[[int, Any, Any], Any],
    hs: Pair,
) -> Pair:
    """Runs half a layer over two microbatches.

    Args:
        start: Gathers the rows of a microbatch, and runs the first linears. It also
            returns the rows, for `end`.
        end: Runs the last linear, and scatters the rows.
        hs: Hidden states of each.
    """
    tie = jax.lax.optimization_barrier
    first, second = hs
    first, middle = start(0, first)
    middle, second = tie((middle, second))  # the second is scattered beside `start`
    second, other = start(1, second)  # gathered beside `end` of the first
    first = end(0, first, middle)
    first, other = tie((first, other))  # the first is scattered beside `start`
    return first, end(1, second, other)
