"""A mixture of experts, a block of decoder layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxlora.models.blocks.mlp import Mlp, swiglu
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ExpertShape, ModelConfig
from jaxlora.modules.expert_linear import ExpertLinear
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rows import Rows
from jaxlora.pallas_kernels import (
    LINEAR_RESULTS,
    Dropout,
    Projection,
    block_rows_for,
    expert_input,
    expert_linears,
    expert_output,
    route_rows,
)
from jaxlora.sharding.expert import all_rows, first_expert, from_experts, to_experts

CHOSEN = "chosen experts"  # name of each layer's choices in a trace, for reports


class ExpertLinears(nnx.Module):
    """MLPs, the experts; their linears, which take LoRA, have the names of one MLP.

    A row is copied to its experts, so no other row has a part in its result. If devices
    share the experts, each runs its own for the rows of all.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: LayerBuilder,
        shape: ExpertShape,
        *,
        name: str = "mlp.experts",
        activation: Callable[..., Any] = swiglu,
        fused: bool = False,
    ):
        """Makes the modules.

        Args:
            config: The model. With `mlp_bias`, the linears have biases.
            make: Makes them.
            shape: The mixture.
            name: Path inside the layer.
            activation: Makes what `down` takes of gate and up, or of what is both.
            fused: Whether one linear, `gate_up_proj`, makes gate and up, and
                checkpoints have one tensor of all experts.
        """
        d, f = config.hidden_size, shape.features
        self.num_held = shape.number // config.expert_parts
        self.parts, self.activation = config.expert_parts, activation
        self.implementation, self.fused = make.options.implementation, fused
        # Those of the microbatches of all devices that share the experts.
        most = make.options.most_adapters
        self.most_adapters = None if most is None else most * self.parts
        given: dict[str, Any] = {"use_bias": config.mlp_bias, "is_one_tensor": fused}
        read: dict[str, Any] = {"role": "column", **given}
        if fused:
            self.gate_up_proj = make.expert_linear(
                f"{name}.gate_up_proj", d, 2 * f, shape, **read
            )
        else:
            self.gate_proj = make.expert_linear(
                f"{name}.gate_proj", d, f, shape, **read
            )
            self.up_proj = make.expert_linear(f"{name}.up_proj", d, f, shape, **read)
        self.down_proj = make.expert_linear(
            f"{name}.down_proj", f, d, shape, role="row", **given
        )

    @property
    def input_linears(self) -> tuple[ExpertLinear, ...]:
        """The linears that share the input."""
        return (self.gate_up_proj,) if self.fused else (self.gate_proj, self.up_proj)

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
        first_one = 0
        if self.parts > 1:
            x, weights, routing = to_experts(x), to_experts(weights), _of_all(routing)
            first_one = first_expert(self.num_held)
            chosen = all_rows(chosen) - first_one
        first, last = self.input_linears, self.down_proj
        slots = [one.slots.num_slots for one in (*first, last) if one.slots is not None]
        blocks, num_adapters = routing.block_adapter, slots[0] if slots else 1
        if not slots:  # the blocks of an expert then need not tell adapters apart
            blocks = jnp.minimum(blocks, 0)
        before = _all_drop([one.for_kernels(routing, num_adapters) for one in first])
        after = last.for_kernels(routing, num_adapters)
        kernels, linears = {"implementation": self.implementation}, [*before, after]
        most = num_adapters
        if self.most_adapters is not None:
            most = min(self.most_adapters, num_adapters)
        slot_rows = chosen.size / (self.parts * self.num_held * most)
        plan = route_rows(
            chosen,
            blocks,
            self.num_held,
            num_adapters,
            block_rows=block_rows_for(
                self.implementation, linears, num_adapters, slot_rows
            ),
            most_adapters=most,
            num_parts=self.parts,
            first_expert=first_one,
        )
        copies, s = expert_input(x, before, plan, **kernels)
        is_alike = len({p.weight_format for p in before}) == 1
        calls = [slice(None)] if is_alike else [slice(i, i + 1) for i in range(2)]
        read = [
            y
            for i in calls
            for y in expert_linears(copies, before[i], plan, s=s and s[i], **kernels)
        ]
        y = expert_output(self.activation(*read), after, weights, plan, **kernels)
        if self.parts == 1:
            return y
        # A policy that saves the results of linears exchanges nothing again.
        return checkpoint_name(from_experts(y), LINEAR_RESULTS)


class Experts(nnx.Module):
    """The weighted outputs of the experts that a router chooses for each row.

    The router and the gate of a shared expert take no LoRA.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: LayerBuilder,
        shape: ExpertShape,
        *,
        router: str = "mlp.gate",
        **experts: Any,
    ):
        """Makes the modules.

        Args:
            config: The model. With `mlp_bias`, the router has a bias.
            make: Makes them.
            shape: The mixture.
            router: Path of the router inside a layer of a checkpoint.
            **experts: Options of `ExpertLinears`.
        """
        self.shape = shape
        self.gate = make.weight(
            (config.hidden_size, shape.number),
            f"{router}.weight",
            ("D", "X"),
            transpose=True,
        )
        bias = (shape.number,), f"{router}.bias", ("N",)  # each device has the router
        self.gate_bias = make.weight(*bias) if config.mlp_bias else None
        self.experts = ExpertLinears(config, make, shape, **experts)
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
        if self.gate_bias is not None:
            logits += self.gate_bias[...].astype(jnp.float32)
        weights, chosen = choose_experts(logits, self.shape)
        if self.shape.rounds:
            weights = weights.astype(x.dtype)
        y = self.experts(x, weights, chosen, rows.routing)
        if self.shape.shared_features is None:
            return y
        share = jax.nn.sigmoid(x @ self.shared_expert_gate[...])
        return y + share * self.shared_expert(x, rows)


def _of_all(routing: Routing) -> Routing:
    """Returns the routing of the rows of all devices that share the experts."""
    index = routing.token_index
    return dataclasses.replace(
        routing,
        block_adapter=all_rows(routing.block_adapter),
        token_index=None if index is None else all_rows(index),
    )


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
    return weights, checkpoint_name(chosen, CHOSEN)
