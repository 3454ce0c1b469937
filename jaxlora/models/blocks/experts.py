"""A mixture of experts, a block of decoder layers."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.models.blocks.mlp import Mlp, swiglu
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ExpertShape, ModelConfig
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rows import Rows
from jaxlora.pallas_kernels import (
    Dropout,
    Projection,
    expert_linears,
    expert_output,
    gather_rows,
    route_rows,
)


class ExpertLinears(nnx.Module):
    """The linears of the experts, whose names are those of one MLP."""

    def __init__(self, config: ModelConfig, make: LayerBuilder, shape: ExpertShape):
        name, d, f = "mlp.experts.{}_proj".format, config.hidden_size, shape.features
        self.gate_proj = make.expert_linear(name("gate"), d, f, shape, role="column")
        self.up_proj = make.expert_linear(name("up"), d, f, shape, role="column")
        self.down_proj = make.expert_linear(name("down"), f, d, shape, role="row")


class Experts(nnx.Module):
    """The weighted outputs of the MLPs that a router chooses for each row.

    Each linear of an expert takes LoRA; the router and the gate of a shared expert do
    not. A row is copied to its experts, so no other row has a part in its result.
    """

    def __init__(self, config: ModelConfig, make: LayerBuilder, shape: ExpertShape):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            shape: The mixture.
        """
        self.shape, self.implementation = shape, make.options.implementation
        self.most_adapters = make.options.most_adapters
        self.gate = make.weight(
            (config.hidden_size, shape.number),
            "mlp.gate.weight",
            ("D", "X"),
            transpose=True,
        )
        self.experts = ExpertLinears(config, make, shape)
        if (shared := shape.shared_features) is not None:
            name = "mlp.shared_expert"
            self.shared_expert = Mlp(config, make, name=name, features=shared)
            self.shared_expert_gate = make.weight(
                (config.hidden_size, 1),
                "mlp.shared_expert_gate.weight",
                ("D", "X"),
                transpose=True,
            )

    @property
    def input_linears(self) -> tuple[()]:
        """None: the router reads the rows, too."""
        return ()

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        x = LinearInput.of(x).x
        logits = jnp.matmul(x, self.gate[...], preferred_element_type=jnp.float32)
        weights, chosen = choose_experts(logits, self.shape)
        if self.shape.rounds:
            weights = weights.astype(x.dtype)
        y = self._chosen(x, weights, chosen, rows.routing)
        if self.shape.shared_features is None:
            return y
        share = jax.nn.sigmoid(x @ self.shared_expert_gate[...])
        return y + share * self.shared_expert(x, rows)

    def _chosen(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T C"],
        chosen: Int[Array, "T C"],
        routing: Routing,
    ) -> Float[Array, "T D"]:
        """Returns the weighted outputs of the experts that rows have chosen."""
        own = self.experts
        first, last = (own.gate_proj, own.up_proj), own.down_proj
        slots = [one.slots.num_slots for one in (*first, last) if one.slots is not None]
        blocks, num_adapters = routing.block_adapter, slots[0] if slots else 1
        if not slots:  # the blocks of an expert then need not tell adapters apart
            blocks = jnp.minimum(blocks, 0)
        plan = route_rows(
            chosen,
            blocks,
            self.shape.number,
            num_adapters,
            most_adapters=min(num_adapters, self.most_adapters or num_adapters),
        )
        before = _all_drop([one.for_kernels(routing, num_adapters) for one in first])
        after = last.for_kernels(routing, num_adapters)
        kernels = {"implementation": self.implementation}
        copies, formats = gather_rows(x, plan), {p.weight_format for p in before}
        calls = [before] if len(formats) == 1 else [[p] for p in before]
        gate, up = (
            y for call in calls for y in expert_linears(copies, call, plan, **kernels)
        )
        return expert_output(swiglu(gate, up), after, weights, plan, **kernels)


def _all_drop(projections: Sequence[Projection]) -> list[Projection]:
    """Returns linears that share an input, all of which drop features or none.

    Where slots adapt some of them only, the others drop at a rate of zero.
    """
    drops = [one.dropout for one in projections if isinstance(one.dropout, Dropout)]
    if not drops:
        return list(projections)
    nothing = dataclasses.replace(drops[0], rate=jnp.zeros_like(drops[0].rate))
    return [
        dataclasses.replace(one, dropout=one.dropout or nothing) for one in projections
    ]


def choose_experts(
    logits: Float[Array, "T X"], shape: ExpertShape
) -> tuple[Float[Array, "T C"], Int[Array, "T C"]]:
    """Chooses the experts with the largest logits; returns their weights and numbers.

    Of equal logits, that of the lower number counts as larger. The gradient of a weight
    reaches its row only, without a scatter.

    Args:
        logits: The router's logits, in float32.
        shape: The mixture.
    """
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(logits), shape.chosen)
    is_chosen = chosen[:, :, None] == jnp.arange(shape.number)
    shares = jax.nn.softmax(logits)
    weights = jnp.where(is_chosen, shares[:, None], 0).sum(axis=-1)
    if shape.normalizes:
        weights /= weights.sum(axis=-1, keepdims=True)
    return weights, chosen
