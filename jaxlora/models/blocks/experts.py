"""A mixture of experts, a block of decoder layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ModelConfig
from jaxlora.modules.routing import LinearInput
from jaxlora.modules.rows import Rows


class Experts(nnx.Module):
    """The weighted outputs of the MLPs that a router chooses for each row.

    Every expert runs all rows, and those that did not choose it get a weight of 0. Each
    linear of an expert takes LoRA; the router does not.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: LayerBuilder,
        *,
        number: int,
        chosen: int,
        features: int,
        normalizes: bool,
    ):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            number: X, number of experts.
            chosen: How many of them a row chooses.
            features: F, width of an expert.
            normalizes: Whether the weights of a row's experts are divided by their sum.
        """
        self.chosen, self.normalizes = chosen, normalizes
        self.gate = make.weight(
            (config.hidden_size, number),
            "mlp.gate.weight",
            ("D", "X"),
            transpose=True,
        )
        name = "mlp.experts.{}".format
        self.experts = nnx.Dict(
            {
                str(i): Mlp(config, make, name=name(i), features=features)
                for i in range(number)
            }
        )

    @property
    def input_linears(self) -> tuple[()]:
        """None: the router reads the rows, too."""
        return ()

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        x = LinearInput.of(x).x
        weights = self._weights(x).astype(x.dtype)
        y = jnp.zeros_like(x)
        for i, expert in self.experts.items():
            y += weights[:, int(i), None] * expert(x, rows)
        return y

    def _weights(self, x: Float[Array, "T D"]) -> Float[Array, "T X"]:
        """Returns the weight of each expert, 0 for those that are not chosen."""
        shares = jax.nn.softmax((x @ self.gate[...]).astype(jnp.float32))
        most, chosen = jax.lax.top_k(shares, self.chosen)
        if self.normalizes:
            most /= most.sum(axis=-1, keepdims=True)
        rows = jnp.arange(len(x))[:, None]
        return jnp.zeros_like(shares).at[rows, chosen].set(most)
