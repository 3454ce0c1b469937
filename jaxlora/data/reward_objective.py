"""Reward modelling: a scalar head that scores the chosen answer above the rejected.

The reward h of a sequence is the product of a trained vector, the score head, with the
last hidden state of the sequence. The loss of a pair is

    softplus(-(h_chosen - h_rejected - margin)) + center (h_chosen + h_rejected)^2,

the Bradley-Terry loss with a margin (arXiv 2307.09288) and a term that centers rewards
(arXiv 2312.09244).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlora.data.objective import Objective, ObjectiveSetting, RowInputs, Terms
from jaxlora.data.preference_objectives import group_sums, is_preferred
from jaxlora.data.tokens.samples import TokenizedSample

# Input of the last rows of a pair's sequences: 1 of the chosen and -1 of the rejected
# one. The others are in the first row of a pair; 0 in other rows.
_INPUTS = ("side", "weight", "margin", "center")
_METRICS = ("accuracy", "margin", "mean_reward")


def _row_inputs(pair: Sequence[TokenizedSample], terms: Terms) -> dict[str, np.ndarray]:
    chosen, rejected = (len(sample.token_ids) for sample in pair)
    out = {name: np.zeros(chosen + rejected) for name in _INPUTS}
    out["side"][[chosen - 1, chosen + rejected - 1]] = 1.0, -1.0
    center = terms.settings["center_rewards_coefficient"]
    of_pair = {"weight": terms.weight, "margin": pair[0].value, "center": center}
    for name, value in of_pair.items():
        out[name][0] = value
    return out


def _is_target(inputs: RowInputs) -> Bool[Array, " T"]:
    return jnp.zeros(inputs["side"].shape, bool)  # no token is predicted


def _is_scored(inputs: RowInputs) -> Bool[Array, " T"]:
    return inputs["side"] != 0


def _rewards(
    inputs: RowInputs, groups: Int[Array, " T"] | None
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Rewards of both sequences of the pair that begins in each row; else 0."""
    assert groups is not None, "an objective of the run has groups"
    score, side, is_pair = inputs["score"], inputs["side"], inputs["weight"] > 0
    sums = (group_sums(jnp.where(side == s, score, 0.0), groups) for s in (1, -1))
    chosen, rejected = (jnp.where(is_pair, one, 0.0) for one in sums)
    return chosen, rejected


def _losses(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> Float[Array, " T"]:
    chosen, rejected = _rewards(inputs, groups)
    loss = jax.nn.softplus(rejected + inputs["margin"] - chosen)
    loss += inputs["center"] * (chosen + rejected) ** 2
    return jnp.where(inputs["weight"] > 0, inputs["weight"] * loss, 0.0)


def _metrics(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> dict[str, Float[Array, " T"]]:
    """TRL's metrics; the smallest and the largest reward of a batch are no sums."""
    chosen, rejected = _rewards(inputs, groups)
    weight, size = inputs["weight"], abs(chosen) + abs(rejected)
    values = {
        "accuracy": is_preferred(chosen, rejected, size),
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2,
    }
    return {k: jnp.where(weight > 0, weight * x, 0.0) for k, x in values.items()}


REWARD = Objective(
    name="reward",
    kinds=("preference",),
    is_scored=_is_scored,
    group_size=2,
    settings={"center_rewards_coefficient": ObjectiveSetting(default=0.0)},
    input_names=_INPUTS,
    num_terms=lambda samples: len(samples) // 2,
    row_inputs=_row_inputs,
    is_target=_is_target,
    losses=_losses,
    metric_names=_METRICS,
    metrics=_metrics,
)
