"""One layer of the decoder."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxlora.families.model_config import ModelConfig
from jaxlora.models.build import LayerBuilder
from jaxlora.models.options import Remat
from jaxlora.modules.attention import Attention, PackedRows
from jaxlora.modules.mlp import Mlp
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.norm import RmsNorm
from jaxlora.modules.producers import normed_input
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.scoring import ATTENTION_RESULTS
from jaxlora.pallas_kernels import LINEAR_RESULTS
from jaxlora.sharding.tensor import gather_rows, scatter_rows

keep_results = jax.checkpoint_policies.save_only_these_names(
    LINEAR_RESULTS, ATTENTION_RESULTS
)


class DecoderLayer(nnx.Module):
    """`h += attention(norm(h)); h += mlp(norm(h))`.

    Some families normalize the outputs of attention and MLP before they are added. If
    devices share the layer, h has the rows of one of them.
    """

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        self.tensor = make.options.tensor
        self.attention_norm = _present(make.optional_norm("attention_norm"))
        self.self_attn = Attention(config, make)
        self.attention_output_norm = make.optional_norm("attention_output_norm")
        self.mlp_norm = _present(make.optional_norm("mlp_norm"))
        self.mlp = Mlp(config, make)
        self.mlp_output_norm = make.optional_norm("mlp_output_norm")

    def attend(
        self, h: Float[Array, "T D"], rows: PackedRows, routing: Routing
    ) -> Float[Array, "T D"]:
        """Applies the first half of the layer, attention."""
        linears = self.self_attn.input_linears
        h, x = self._normed(self.attention_norm, h, linears, routing)
        heads = self.self_attn.project(x, rows.ropes, routing)
        y = self.self_attn.attend(*heads, rows, routing)
        return self.add_attention(h, self._sum(y))

    def add_attention(
        self, h: Float[Array, "T D"], y: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """Adds the output of attention to the hidden states before it."""
        return h + (self.attention_output_norm or _identity)(y)

    def feed_forward(
        self, h: Float[Array, "T D"], routing: Routing
    ) -> Float[Array, "T D"]:
        """Applies the second half of the layer, the MLP."""
        h, x = self._normed(self.mlp_norm, h, self.mlp.input_linears, routing)
        gated = self.mlp.gated(x, routing)
        y = self._sum(self.mlp.down_proj(gated, routing))
        return h + (self.mlp_output_norm or _identity)(y)

    def _normed(
        self,
        norm: RmsNorm,
        h: Float[Array, "T D"],
        linears: Sequence[MultiLoraLinear],
        routing: Routing,
    ) -> tuple[Float[Array, "T D"], LinearInput]:
        """Returns h, and all normalized rows on each device that shares the layer."""
        if self.tensor == 1:
            return normed_input(norm, h, linears, routing)
        h, x = norm.of_residual(h, linears[0].implementation, linears[0].weight)
        return h, LinearInput.of(gather_rows(x, self.tensor))

    def _sum(self, y: Float[Array, "T D"]) -> Float[Array, "U D"]:
        """Adds the outputs of all devices that share the layer, in the own rows."""
        if self.tensor == 1:
            return y
        # A policy that saves the results of linears sums nothing again.
        return checkpoint_name(scatter_rows(y, self.tensor), LINEAR_RESULTS)

    def __call__(
        self, h: Float[Array, "T D"], rows: PackedRows, routing: Routing
    ) -> Float[Array, "T D"]:
        return self.feed_forward(self.attend(h, rows, routing), routing)


def _present(norm: RmsNorm | None) -> RmsNorm:
    assert norm is not None
    return norm


def _identity(x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x


def run_layer(
    layer: DecoderLayer,
    remat: Remat,
    h: Float[Array, "T D"],
    rows: PackedRows,
    routing: Routing,
) -> Float[Array, "T D"]:
    """Runs a layer, of which the backward pass recomputes a part."""
    match remat:
        case "none":
            return layer(h, rows, routing)
        case "elementwise":
            whole = lambda x, h: x(h, rows, routing)
            return rematerialized(whole, layer, h, policy=keep_results)
        case "mlp":
            h = layer.attend(h, rows, routing)
            return rematerialized(lambda x, h: x.feed_forward(h, routing), layer, h)
        case "layer":
            return rematerialized(lambda x, h: x(h, rows, routing), layer, h)


def run_whole_layers(
    layers: Mapping[int, DecoderLayer],
    remat: Remat,
    h: Float[Array, "U D"],
    rows: PackedRows,
    routing: Routing,
) -> tuple[Float[Array, "U D"], Float[Array, "U D"]]:
    """Runs layers whose weights are here, not shards of them.

    Layers that differ only in the values of their arrays are traced, differentiated and
    lowered once. XLA inlines the function that they share.

    Args:
        layers: The layers, by their numbers in the whole model.
        remat: Part of each layer that the backward pass recomputes.
        h: Hidden states before the first of the layers.
        rows: Attention inputs that all layers share.
        routing: Slot of each row, and the keys of dropout masks.

    Returns:
        Hidden states after the last layer, and before it.
    """
    # Lengths are sizes of the program, not values; as inputs they would be traced.
    *arrays, lengths = rows

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def run(graph, state, h, arrays, routing):
        ropes, segment_ids = arrays
        rows = PackedRows(ropes, segment_ids, lengths)
        return run_layer(nnx.merge(graph, state), remat, h, rows, routing)

    before = h
    for number, layer in layers.items():
        graph, state = nnx.split(layer)
        before, h = h, run(graph, state, h, arrays, routing.for_layer(number))
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
