"""A mixture of experts, a block of decoder layers."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.models.blocks.mlp import Mlp, geglu, swiglu
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
    """MLPs, the experts; their linears, which take LoRA, have the names of one MLP.

    A row is copied to its experts, so no other row has a part in its result.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: LayerBuilder,
        shape: ExpertShape,
        *,
        name: str = "mlp.experts",
        activation: Literal["silu", "gelu_tanh"] = "silu",
    ):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            shape: The mixture.
            name: Path inside the layer.
            activation: Activation of the gate.
        """
        d, f = config.hidden_size, shape.features
        self.num_experts, self.activation = shape.number, activation
        self.implementation = make.options.implementation
        self.gate_proj = make.expert_linear(
            f"{name}.gate_proj", d, f, shape, role="column"
        )
        self.up_proj = make.expert_linear(f"{name}.up_proj", d, f, shape, role="column")
        self.down_proj = make.expert_linear(
            f"{name}.down_proj", f, d, shape, role="row"
        )

    def __call__(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T C"],
        chosen: Int[Array, "T C"],
        routing: Routing,
    ) -> Float[Array, "T D"]:
        """Returns the weighted outputs of the experts that rows have chosen.

        Args:
            x: The rows.
            weights: Weights of a row's experts.
            chosen: Numbers of a row's experts.
            routing: Slot of each row.
        """
        first, last = (self.gate_proj, self.up_proj), self.down_proj
        slots = [one.slots.num_slots for one in (*first, last) if one.slots is not None]
        blocks, num_adapters = routing.block_adapter, slots[0] if slots else 1
        if not slots:  # the blocks of an expert then need not tell adapters apart
            blocks = jnp.minimum(blocks, 0)
        plan = route_rows(chosen, blocks, self.num_experts, num_adapters)
        before = _all_drop([one.for_kernels(routing, num_adapters) for one in first])
        after = last.for_kernels(routing, num_adapters)
        kernels = {"implementation": self.implementation}
        gate, up = expert_linears(gather_rows(x, plan), before, plan, **kernels)
        h = (swiglu if self.activation == "silu" else geglu)(gate, up)
        return expert_output(h, after, weights, plan, **kernels)


class Experts(nnx.Module):
    """The weighted outputs of the experts that a router chooses for each row.

    The router and the gate of a shared expert take no LoRA.
    """

    def __init__(self, config: ModelConfig, make: LayerBuilder, shape: ExpertShape):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            shape: The mixture.
        """
        self.shape = shape
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
        y = self.experts(x, weights, chosen, rows.routing)
        if self.shape.shared_features is None:
            return y
        share = jax.nn.sigmoid(x @ self.shared_expert_gate[...])
        return y + share * self.shared_expert(x, rows)


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
