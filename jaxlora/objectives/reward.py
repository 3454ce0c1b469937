"""Reward modelling: a scalar head that scores the chosen answer above the rejected.

The reward h of a sequence is the product of a trained vector, the score head, with the
last hidden state of the sequence. The loss of a pair is

    softplus(-(h_chosen - h_rejected - margin)) + center (h_chosen + h_rejected)^2,

the Bradley-Terry loss with a margin (arXiv 2307.09288) and a term that centers rewards
(arXiv 2312.09244).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.config.strict import NonNegativeFloat
from jaxlora.objectives.base import (
    Groups,
    Objective,
    ObjectiveSettings,
    RowInputs,
    Rows,
    Samples,
    Terms,
    group_sums,
    is_preferred,
    weighted,
)

# Input of the last rows of a pair's sequences: 1 of the chosen and -1 of the rejected
# one. The others are in the first row of a pair; 0 in other rows.
_INPUTS = ("side", "weight", "margin", "center")
_METRICS = ("accuracy", "margin", "mean_reward")


class RewardSettings(ObjectiveSettings):
    """Settings of reward modelling, as TRL names them."""

    center_rewards_coefficient: NonNegativeFloat = 0.0


def _row_inputs(pair: Samples, terms: Terms) -> dict[str, np.ndarray]:
    chosen, rejected = (len(sample.token_ids) for sample in pair)
    out = {name: np.zeros(chosen + rejected) for name in _INPUTS}
    out["side"][[chosen - 1, chosen + rejected - 1]] = 1.0, -1.0
    center = terms.settings.center_rewards_coefficient
    of_pair = {"weight": terms.weight, "margin": pair[0].value, "center": center}
    for name, value in of_pair.items():
        out[name][0] = value
    return out


def _rewards(inputs: RowInputs, groups: Groups) -> tuple[Rows, Rows]:
    """Rewards of both sequences of the pair that begins in each row; else 0."""
    score, side, is_pair = inputs["score"], inputs["side"], inputs["weight"] > 0
    sums = (group_sums(jnp.where(side == s, score, 0.0), groups) for s in (1, -1))
    chosen, rejected = (jnp.where(is_pair, one, 0.0) for one in sums)
    return chosen, rejected


def _losses(nll: Rows, inputs: RowInputs, groups: Groups) -> Rows:
    chosen, rejected = _rewards(inputs, groups)
    loss = jax.nn.softplus(rejected + inputs["margin"] - chosen)
    loss += inputs["center"] * (chosen + rejected) ** 2
    return weighted(loss, inputs)


def _metrics(nll: Rows, inputs: RowInputs, groups: Groups) -> dict[str, Rows]:
    """TRL's metrics; the smallest and the largest reward of a batch are no sums."""
    chosen, rejected = _rewards(inputs, groups)
    size = abs(chosen) + abs(rejected)
    values = {
        "accuracy": is_preferred(chosen, rejected, size),
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2,
    }
    return {name: weighted(value, inputs) for name, value in values.items()}


REWARD = Objective(
    name="reward",
    kinds=("preference",),
    is_scored=lambda inputs: inputs["side"] != 0,
    group_size=2,
    settings=RewardSettings,
    reads_margin=True,
    input_names=_INPUTS,
    num_terms=lambda samples: len(samples) // 2,
    row_inputs=_row_inputs,
    # No token is predicted.
    is_target=lambda inputs: jnp.zeros(inputs["side"].shape, bool),
    losses=_losses,
    metric_names=_METRICS,
    metrics=_metrics,
)
