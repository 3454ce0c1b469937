"""The gated delta net, a block of decoder layers in the place of attention."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import DeltaShape, ModelConfig
from jaxlora.modules.gated_delta import (
    DeltaCache,
    DeltaInputs,
    DeltaWeights,
    empty_delta_cache,
    gated_norm,
)
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rows import Rows
from jaxlora.modules.shared_input import apply_together
from jaxlora.pallas_kernels import LINEAR_RESULTS

# Kernels have no tiles for the few outputs of the gates.
_FEW: dict[str, Any] = {"role": "column", "in_xla": True}
_keep_results = jax.checkpoint_policies.save_only_these_names(LINEAR_RESULTS)


class DeltaNet(nnx.Module):
    """Linear attention by the gated delta rule; its linears take LoRA.

    The convolution, the biases of the gates and the norm are frozen.
    """

    def __init__(self, config: ModelConfig, make: LayerBuilder, shape: DeltaShape):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            shape: Sizes of the rule.
        """
        heads = shape.num_value_heads
        name = "linear_attn.{}".format
        self.shape, self.eps = shape, config.rms_eps
        self.dtype = make.options.dtype
        self._make_inputs(config.hidden_size, make)
        self.conv = make.weight(
            (shape.mixed_features, 1, shape.conv_width),
            name("conv1d.weight"),
            ("N", "1", "W"),
            divided="N",
            sections=_sections(shape),
        )
        self.a_log = make.weight((heads,), name("A_log"), ("H",), divided="H")
        self.dt_bias = make.weight((heads,), name("dt_bias"), ("H",), divided="H")
        self.norm = make.weight((shape.value_dim,), name("norm.weight"), ("E",))
        self.out_proj = make.linear(
            name("out_proj"), shape.value_features, config.hidden_size, role="row"
        )

    def _make_inputs(self, width: int, make: LayerBuilder) -> None:
        """Makes the linears that read the rows, of D = `width` features."""
        shape, name = self.shape, "linear_attn.in_proj_{}".format
        values, heads = shape.value_features, shape.num_value_heads
        mixed: dict[str, Any] = {"role": "column", "sections": _sections(shape)}
        self.in_proj_qkv = make.linear(
            name("qkv"), width, shape.mixed_features, **mixed
        )
        self.in_proj_z = make.linear(name("z"), width, values, role="column")
        self.in_proj_b = make.linear(name("b"), width, heads, **_FEW)
        self.in_proj_a = make.linear(name("a"), width, heads, **_FEW)

    @property
    def input_linears(self) -> tuple[()]:
        """None: the linears of the gates read the rows, too, in another back end."""
        return ()

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        mixed, z = self._mixed(x, rows.routing)
        # Without this, XLA would keep the rows with dropout for the backward pass.
        gates = jax.checkpoint(
            functools.partial(self._gates, routing=rows.routing), policy=_keep_results
        )
        b, a = gates(LinearInput.of(x).x)
        weights = DeltaWeights(self.conv[...][:, 0], self.a_log[...], self.dt_bias[...])
        out = rows.mix(DeltaInputs(mixed, a, b), weights, self.shape)
        out = gated_norm(out, z.reshape(out.shape), self.norm[...], self.eps)
        return self.out_proj(out.reshape(len(out), -1), rows.routing)

    def _mixed(
        self, x: Float[Array, "T D"] | LinearInput, routing: Routing
    ) -> tuple[Float[Array, "T C"], Float[Array, "T HE"]]:
        """Returns the queries, keys and values of all heads; and z."""
        mixed, z = apply_together((self.in_proj_qkv, self.in_proj_z), x, routing)
        return mixed, z

    def _gates(
        self, x: Float[Array, "T D"], routing: Routing
    ) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
        """Returns b and a."""
        b, a = apply_together((self.in_proj_b, self.in_proj_a), x, routing)
        return b, a

    def empty_cache(self, num_sequences: int, num_tokens: int) -> DeltaCache:
        """Returns the cache of generation before its first tokens.

        Args:
            num_sequences: Number of sequences.
            num_tokens: Tokens of each sequence; the cache has the same size for all.
        """
        del num_tokens
        return empty_delta_cache(self.shape, num_sequences, self.dtype)


class FusedDeltaNet(DeltaNet):
    """A gated delta net with two linears that read the rows, both fused.

    Each key head has its outputs beside each other: a query, a key, the values and z of
    its value heads from one linear, and their b and a from the other.
    """

    def _make_inputs(self, width: int, make: LayerBuilder) -> None:
        shape, name = self.shape, "linear_attn.in_proj_{}".format
        features = shape.mixed_features + shape.value_features
        self.in_proj_qkvz = make.linear(name("qkvz"), width, features, role="column")
        self.in_proj_ba = make.linear(
            name("ba"), width, 2 * shape.num_value_heads, **_FEW
        )

    def _mixed(
        self, x: Float[Array, "T D"] | LinearInput, routing: Routing
    ) -> tuple[Float[Array, "T C"], Float[Array, "T HE"]]:
        (read,) = apply_together((self.in_proj_qkvz,), x, routing)
        key, heads = self.shape.key_dim, self.shape.num_key_heads
        values = self.shape.value_features // heads
        *mixed, z = _of_heads(read, heads, (key, key, values, values))
        return jnp.concatenate(mixed, axis=-1), z

    def _gates(
        self, x: Float[Array, "T D"], routing: Routing
    ) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
        (read,) = apply_together((self.in_proj_ba,), x, routing)
        heads = self.shape.num_key_heads
        b, a = _of_heads(read, heads, (self.shape.num_value_heads // heads,) * 2)
        return b, a


def _sections(shape: DeltaShape) -> tuple[int, ...]:
    """Returns the proportions of queries, keys and values."""
    sizes = shape.key_features, shape.key_features, shape.value_features
    return tuple(size // math.gcd(*sizes) for size in sizes)


def _of_heads(
    x: Float[Array, "T N"], num_heads: int, sizes: Sequence[int]
) -> list[Float[Array, "T _"]]:
    """Divides the features of each head, and returns each part of all heads.

    Args:
        x: Rows, one head after the other.
        num_heads: Number of heads.
        sizes: Features of each part of a head.
    """
    heads = x.reshape(len(x), num_heads, -1)
    ends = list(itertools.accumulate(sizes))[:-1]
    return [part.reshape(len(x), -1) for part in jnp.split(heads, ends, axis=-1)]
