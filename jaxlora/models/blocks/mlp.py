"""The gated MLP, a block of decoder layers."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ModelConfig
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.producers import gated_input
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rows import Rows
from jaxlora.modules.rowwise import swiglu_gradient_rows, swiglu_rows
from jaxlora.modules.shared_input import apply_together
from jaxlora.pallas_kernels import Gate


class Mlp(nnx.Module):
    """`down(activation(gate(x)) * up(x))`; its linears take LoRA."""

    def __init__(
        self,
        config: ModelConfig,
        make: LayerBuilder,
        *,
        name: str = "mlp",
        features: int | None = None,
        activation: Literal["silu", "gelu_tanh"] = "silu",
        fused: bool = False,
    ):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            name: Path inside the layer.
            features: F, its width; None: `intermediate_size`.
            activation: Activation of the gate.
            fused: Whether one linear, `gate_up_proj`, makes gate and up.
        """
        width, inner = config.hidden_size, features or config.intermediate_size
        bias = {"use_bias": config.mlp_bias}
        read: dict[str, Any] = {"role": "column", **bias}
        self.fused, self.activation = fused, activation
        if fused:
            self.gate_up_proj = make.linear(
                f"{name}.gate_up_proj", width, 2 * inner, **read
            )
        else:
            self.gate_proj = make.linear(f"{name}.gate_proj", width, inner, **read)
            self.up_proj = make.linear(f"{name}.up_proj", width, inner, **read)
        self.down_proj = make.linear(
            f"{name}.down_proj", inner, width, role="row", **bias
        )

    @property
    def input_linears(self) -> tuple[MultiLoraLinear, ...]:
        """The linears that share the input."""
        if self.fused:
            return (self.gate_up_proj,)
        return self.gate_proj, self.up_proj

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        return self.down_proj(self._gated(x, rows.routing), rows.routing)

    def _gated(
        self, x: Float[Array, "T D"] | LinearInput, routing: Routing
    ) -> Float[Array, "T F"] | LinearInput:
        """Computes the rows that `down` takes."""
        if self.activation == "silu" and not self.fused:
            gate = Gate(swiglu_rows, swiglu_gradient_rows)
            h = gated_input(self.input_linears, gate, self.down_proj, x, routing)
            if h is not None:
                return h
        read = apply_together(self.input_linears, x, routing)
        if self.fused:
            read = jnp.split(read[0], 2, axis=-1)
        return (swiglu if self.activation == "silu" else geglu)(*read)


@jax.custom_vjp
def swiglu(gate: Float[Array, "T F"], up: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """`silu(gate) * up` (arXiv 2002.05202), in float32, rounded once.

    The backward pass keeps gate and up and no more.
    """
    return swiglu_rows(gate, up)[0]


def _swiglu_forward(gate, up):
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(residuals, dy):
    gate, up = residuals
    return swiglu_gradient_rows(gate, up, dy)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@jax.custom_vjp
def geglu(gate: Float[Array, "T F"], up: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """`gelu(gate) * up` (arXiv 2002.05202), in float32, rounded once.

    The gelu is the tanh approximation (arXiv 1606.08415, section 2). The backward pass
    keeps gate and up and no more.
    """
    wide = gate.astype(jnp.float32)
    return (_gelu_tanh(wide) * up.astype(jnp.float32)).astype(gate.dtype)


def _gelu_tanh(x):
    return jax.nn.gelu(x, approximate=True)


def _geglu_forward(gate, up):
    return geglu(gate, up), (gate, up)


def _geglu_backward(residuals, dy):
    gate, up = residuals
    activated, vjp = jax.vjp(_gelu_tanh, gate.astype(jnp.float32))
    dy = dy.astype(jnp.float32)
    (dgate,) = vjp(dy * up.astype(jnp.float32))
    return dgate.astype(gate.dtype), (dy * activated).astype(up.dtype)


geglu.defvjp(_geglu_forward, _geglu_backward)
