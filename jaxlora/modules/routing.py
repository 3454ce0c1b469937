"""The inputs of linears: rows of tokens, and the slot of each row."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxlora.pallas_kernels import KernelSettings, MaskWords

# Layer and projection of a linear, which key its dropout masks. A decoder's linears do
# not know their layer: all layers share a trace.
Place = tuple[int | None, int]


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Slot of each row of tokens, and the keys of the dropout masks.

    Attributes:
        block_adapter: Slot of each token block; -1 for padding, whose rows are zero.
        token_index: The token's index in its job's global batch; None: no dropout.
        seed: Each slot's job seed; None: no dropout.
        step: Each slot's optimizer step; None: no dropout.
        first_layer: What is added to the numbers of layers that key the masks; None:
            nothing.
        words: Random words of the masks, by place; see `with_shared_inputs`.
        settings: Slot settings for the fused kernels, by place.
        keys: Words of each slot that key the masks of experts, by place.
    """

    block_adapter: Int[Array, " NB"]
    token_index: Int[Array, " T"] | None = None
    seed: Int[Array, " G"] | None = None
    step: Int[Array, " G"] | None = None
    first_layer: Int[Array | np.ndarray, ""] | None = None
    words: Mapping[Place, MaskWords] = dataclasses.field(default_factory=dict)
    settings: Mapping[Place, KernelSettings] = dataclasses.field(default_factory=dict)
    keys: Mapping[Place, UInt[Array, "G 2"]] = dataclasses.field(default_factory=dict)

    def for_layer(self, layer: int) -> "Routing":
        """Returns the routing with what a decoder's layer alone reads.

        Their places name no layer, as those of its linears.
        """

        def own(inputs: Mapping[Place, Any]) -> dict[Place, Any]:
            return {(None, p): value for (i, p), value in inputs.items() if i == layer}

        return dataclasses.replace(
            self,
            first_layer=None,
            words=own(self.words),
            settings=own(self.settings),
            keys=own(self.keys),
        )

    def seed_and_step(self) -> tuple[Int[Array, " G"], Int[Array, " G"]]:
        """Each slot's job seed and optimizer step, for dropout.

        Raises:
            ValueError: One of them is missing.
        """
        if self.seed is None or self.step is None:
            raise ValueError(
                "the routing has token_index, but not both seed and step: dropout "
                "takes all three, and without token_index nothing is dropped."
            )
        return self.seed, self.step


def live_scaling(
    scaling: Float[Array, "*P G"], rank: Int[Array, "*P G"]
) -> Float[Array, "*P G"]:
    """Returns the scaling of slots as kernels take it: a rank of 0 switches one off."""
    return jnp.where(rank > 0, scaling, 0.0)


class LinearInput(typing.NamedTuple):
    """Rows that linears share, and what was computed beside them.

    Attributes:
        x: The rows.
        s: s of linears that take them, by place; empty: the linears compute it. See
            `jaxlora.pallas_kernels.produce`.
    """

    x: Float[Array, "T K"]
    s: Mapping[Place, Float[Array, "T R"]]

    @classmethod
    def of(cls, x: "Float[Array, 'T K'] | LinearInput") -> "LinearInput":
        """Returns rows as an input."""
        return x if isinstance(x, LinearInput) else cls(x, {})
