"""Settings of the attention scores of a layer, the soft cap, and sinks."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlora.models.config import ModelConfig

# This names the output of fused attention, and what it keeps beside q, k and v. A
# policy of `jax.checkpoint` that saves the name computes no scores again.
ATTENTION_RESULTS = "attention_results"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Settings of attention scores.

    Attributes:
        window: How many rows back a row sees, itself included; None: all.
        scale: Factor of the products of queries and keys; None: `head_dim ** -0.5`.
        softcap: Bound of the scaled scores, see `softcap`; None: there is none.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def scale_of(self, head_dim: int) -> float:
        """Returns the factor of the products for heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = Scoring()  # a row sees all earlier rows of its segment


def layer_scoring(config: ModelConfig, layer: int) -> Scoring:
    """Returns the settings of a layer of a model."""
    return Scoring(
        window=config.layer_windows[layer],
        scale=config.score_scale,
        softcap=config.score_softcap,
    )


def softcap(x: Float[Array, "*B"], cap: float | None) -> Float[Array, "*B"]:
    """`cap * tanh(x / cap)`, which lies between -cap and cap; x if there is no cap.

    Gemma 2 (arXiv 2408.00118, section 2) caps attention scores and logits like this.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


def with_sinks(
    out: Float[Array, "T H E"], lse: Float[Array, "T H"], sinks: Float[Array, " H"]
) -> tuple[Float[Array, "T H E"], Float[Array, "T H"]]:
    """Adds a key to attention whose score is the sink of its head, and its value zero.

    The backward pass of fused attention computes weights from the sum, and from the
    output what all of them lose to the softmax. So it is exact for the other keys if it
    gets both as they are returned here.

    Args:
        out: Output of attention without sinks.
        lse: Logarithm of the softmax's sum; -infinity where a row sees nothing.
        sinks: The sinks.
    """
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    share = jnp.exp(lse - total)[:, :, None]
    return (out.astype(jnp.float32) * share).astype(out.dtype), total
