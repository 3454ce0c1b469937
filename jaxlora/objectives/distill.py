"""Distillation: learning from the log-probabilities that a teacher gave to tokens.

Of each target token, the records have the most likely k tokens and their probabilities
by the teacher. The loss of a target token is

    kd_alpha KL(p | q) + kd_ce_alpha (-log q_1(token)),

where q is the softmax of the logits over T, T the temperature, and q_1 that of the
logits. p are the teacher's probabilities to the power of 1 / T, divided by their sum
over the k tokens, so that what it gave to other tokens does not count. The divergence
is not multiplied by T^2. These are the definitions of Axolotl. The mean is over the
target tokens of the job's global batch.

References:
    Hinton et al., arXiv 1503.02531.
"""

import numpy as np

from jaxlora.config.strict import NonNegativeFloat, PositiveFloat, Wrong
from jaxlora.objectives.base import (
    Objective,
    ObjectiveSettings,
    Samples,
    Terms,
    has_weight,
    next_token_targets,
    target_weight,
    token_weights,
    weighted,
)

MOST_TOP = 64  # log-probabilities of a token that a record may have
_WIDTH = MOST_TOP + 1  # the teacher's, and the token itself


def _check_alphas(settings: "DistillSettings", wrong: Wrong) -> None:
    if settings.kd_ce_alpha and settings.temperature != 1:
        wrong["kd_ce_alpha"] = (
            "needs a temperature of 1, as both losses come from one softmax. Leave one "
            "out."
        )
    if not settings.kd_alpha and not settings.kd_ce_alpha:
        wrong["kd_alpha"] = (
            "kd_alpha and kd_ce_alpha are 0, so nothing is learned. Leave one of them "
            "out."
        )


class DistillSettings(ObjectiveSettings):
    """Settings of distillation, as Axolotl defines them."""

    rules = (_check_alphas,)

    temperature: PositiveFloat = 1.0
    kd_alpha: NonNegativeFloat = 1.0
    kd_ce_alpha: NonNegativeFloat = 0.0


def _row_inputs(group: Samples, terms: Terms) -> dict[str, np.ndarray]:
    (sample,) = group
    num_rows, settings = len(sample.token_ids), terms.settings
    out = {
        "weight": token_weights(sample, terms.weight),
        "offset": np.zeros(num_rows),
        "scale": np.full(num_rows, 1 / settings.temperature),
        "ids": np.zeros((num_rows, _WIDTH)),
        "shares": np.zeros((num_rows, _WIDTH)),
    }
    assert sample.top is not None, "records of this kind have them"
    rows = np.flatnonzero(next_token_targets(sample))
    ids = sample.top.ids
    logits = sample.top.logprobs.astype(np.float64) / settings.temperature
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    log_p = np.log(np.where(p > 0, p, 1))
    out["offset"][rows] = settings.kd_alpha * (p * log_p).sum(axis=1)
    shares = settings.kd_alpha * p
    # The token itself is one of the teacher's, or comes after them.
    label = sample.token_ids[rows + 1]
    is_label = (ids == label[:, None]) & (p > 0)
    shares += settings.kd_ce_alpha * is_label
    k = ids.shape[1]
    out["ids"][rows, :k], out["shares"][rows, :k] = ids, shares
    out["ids"][rows, k] = label
    out["shares"][rows, k] = settings.kd_ce_alpha * ~is_label.any(axis=1)
    return out


DISTILL = Objective(
    name="distill",
    kinds=("distill",),
    settings=DistillSettings,
    input_names=("weight", "offset", "scale", "ids", "shares"),
    widths={"ids": _WIDTH, "shares": _WIDTH},
    num_terms=target_weight,
    row_inputs=_row_inputs,
    is_target=has_weight,
    soft_labels=("ids", "shares", "scale"),
    losses=lambda nll, inputs, groups: weighted(nll + inputs["offset"], inputs),
)
