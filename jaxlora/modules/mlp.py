"""The gated MLP of the decoder."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.families.model_config import ModelConfig
from jaxlora.families.table import Activation
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.producers import gated_input
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rowwise import swiglu_gradient_rows, swiglu_rows
from jaxlora.modules.shared_input import apply_together
from jaxlora.pallas_kernels import Gate


class Mlp(nnx.Module):
    """`down(activation(gate(x)) * up(x))`; its linears take LoRA.

    `down_proj` takes what `gated` returns.
    """

    def __init__(self, config: ModelConfig, make: Any):
        width, inner = config.hidden_size, config.intermediate_size
        bias = {"use_bias": config.mlp_bias}
        read = {**bias, "role": "column"}
        self.gate_proj = make.linear("mlp.gate_proj", width, inner, **read)
        self.up_proj = make.linear("mlp.up_proj", width, inner, **read)
        self.down_proj = make.linear("mlp.down_proj", inner, width, **bias, role="row")
        self.activation: Activation = config.family.activation

    @property
    def input_linears(self) -> tuple[MultiLoraLinear, ...]:
        """The linears that share the input."""
        return self.gate_proj, self.up_proj

    def gated(
        self, x: Float[Array, "T D"] | LinearInput, routing: Routing
    ) -> Float[Array, "T F"] | LinearInput:
        """Computes the rows that `down` takes."""
        if self.activation == "silu":
            gate = Gate(swiglu_rows, swiglu_gradient_rows)
            h = gated_input(self.input_linears, gate, self.down_proj, x, routing)
            if h is not None:
                return h
        gated = swiglu if self.activation == "silu" else geglu
        return gated(*apply_together(self.input_linears, x, routing))


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
