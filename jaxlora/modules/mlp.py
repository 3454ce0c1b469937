"""The gated MLP of the decoder."""

import jax
from flax import nnx

from jaxlora.models.config import ModelConfig
from jaxlora.modules.multi_lora_linear import Routing, apply_together


class Mlp(nnx.Module):
    """`down(silu(gate(x)) * up(x))`; its linears take LoRA."""

    def __init__(self, config: ModelConfig, linear):
        width, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = linear("mlp.gate_proj", width, hidden, config.mlp_bias)
        self.up_proj = linear("mlp.up_proj", width, hidden, config.mlp_bias)
        self.down_proj = linear("mlp.down_proj", hidden, width, config.mlp_bias)

    def __call__(self, x, routing: Routing):
        gate, up = apply_together((self.gate_proj, self.up_proj), x, routing)
        return self.down_proj(jax.nn.silu(gate) * up, routing)
