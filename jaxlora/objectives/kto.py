"""KTO: learning from single completions that are labelled desirable or undesirable.

With the log-ratio u of a completion's policy and reference probabilities, its loss is

    factor (1 - sigmoid(sign beta (u - z))),

where sign is 1 for a desirable completion and -1 for an undesirable one. The baseline
z = max(0, mean of u over recombined samples) estimates the KL divergence of the policy
from the reference: a recombined sample has the prompt of one sample and the completion
of another one. All means are over the job's global batch (arXiv 2402.01306), which has
two samples or more, as the baseline of a single one would be its own ratio. The loss
`apo_zero_unpaired` is without the baseline (arXiv 2408.06266).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.config.strict import NonNegativeFloat, PositiveFloat, Wrong
from jaxlora.objectives.base import (
    Groups,
    Objective,
    ReferenceSettings,
    RowInputs,
    Rows,
    Samples,
    Terms,
    group_sums,
    next_token_targets,
    weighted,
)
from jaxlora.objectives.sample import TokenizedSample

# Input of the rows that predict a completion: 1. The others are in the first row of a
# sample, and 0 in other rows; `sample` is 1 there, `share` the weight of a recombined
# sample in the baseline, and `mean` the weight of a sample in the mean of its label.
_INPUTS = (
    *("target", "sample", "share", "reference", "runs_reference", "weight", "mean"),
    *("sign", "factor", "beta", "baseline_factor"),
)
_DESIRABLE = ("rewards/chosen", "logps/chosen")
_UNDESIRABLE = ("rewards/rejected", "logps/rejected")
_METRICS = (*_DESIRABLE, *_UNDESIRABLE, "rewards/margins", "kl")


def _check_weights(settings: "KtoSettings", wrong: Wrong) -> None:
    if not settings.desirable_weight and not settings.undesirable_weight:
        wrong["desirable_weight"] = (
            "desirable_weight and undesirable_weight are 0, so nothing is learned. "
            "Leave one of them out."
        )


class KtoSettings(ReferenceSettings):
    """Settings of KTO, as TRL names them."""

    rules = (_check_weights,)

    beta: PositiveFloat = 0.1
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0

    @property
    def has_baseline(self) -> bool:
        """Whether the loss subtracts the baseline."""
        return self.loss_type == "kto"


def recombined(
    sample: TokenizedSample, other: TokenizedSample, max_length: int
) -> TokenizedSample:
    """Returns the prompt of a sample with the completion of another one.

    Args:
        sample: The sample.
        other: The other one.
        max_length: Number of tokens after which the result is cut.
    """
    prompt, start = sample.prompt_length, other.prompt_length
    ids = [sample.token_ids[:prompt], other.token_ids[start:]]
    is_target = [np.zeros(prompt, bool), other.is_target[start:]]
    return TokenizedSample(
        np.concatenate(ids)[:max_length], np.concatenate(is_target)[:max_length]
    )


def _num_of_label(samples: Samples) -> tuple[int, int]:
    num_desirable = sum(sample.value > 0 for sample in samples)
    return num_desirable, len(samples) - num_desirable


def _zeros(group: Samples) -> dict[str, np.ndarray]:
    """Returns the inputs of the rows of a sample without a loss."""
    (sample,) = group
    out = {name: np.zeros(len(sample.token_ids)) for name in _INPUTS}
    out["target"][:] = next_token_targets(sample)
    out["sample"][0] = 1.0
    logp = sample.reference_logp
    out["reference"][0] = 0.0 if logp is None else logp
    out["runs_reference"][0] = logp is None
    return out


def _labelled_inputs(group: Samples, terms: Terms) -> dict[str, np.ndarray]:
    out, settings = _zeros(group), terms.settings
    is_desirable = group[0].value > 0
    factors = settings.undesirable_weight, settings.desirable_weight
    values = {
        "weight": terms.weight,
        "mean": terms.part_weights[0 if is_desirable else 1],
        "sign": 1.0 if is_desirable else -1.0,
        "factor": factors[is_desirable],
        "beta": settings.beta,
        "baseline_factor": float(settings.has_baseline),
    }
    for name, value in values.items():
        out[name][0] = value
    return out


def _recombined_inputs(group: Samples, terms: Terms) -> dict[str, np.ndarray]:
    out = _zeros(group)
    out["share"][0] = terms.weight * terms.settings.has_baseline
    return out


def _log_probabilities(nll: Rows, inputs: RowInputs, groups: Groups) -> Rows:
    """Sums of the log-probabilities of completions, in the first row of a sample."""
    is_target = inputs["target"] > 0
    logps = group_sums(jnp.where(is_target, -nll, 0.0), groups)
    return jnp.where(inputs["sample"] > 0, logps, 0.0)


def _losses(nll: Rows, inputs: RowInputs, groups: Groups) -> Rows:
    ratio = _log_probabilities(nll, inputs, groups) - _reference(inputs, groups)
    x = inputs["sign"] * inputs["beta"] * (ratio - _baseline(inputs))
    loss = inputs["factor"] * jax.nn.sigmoid(-x)
    shared = jnp.where(inputs["share"] > 0, inputs["share"] * ratio, 0.0)
    return weighted(loss, inputs) + shared


def _reference(inputs: RowInputs, groups: Groups) -> Rows:
    """Log-probabilities of completions by the reference."""
    found = _log_probabilities(inputs["reference_nll"], inputs, groups)
    return jnp.where(inputs["runs_reference"] > 0, found, inputs["reference"])


def _baseline(inputs: RowInputs) -> Rows:
    baseline = jax.nn.relu(inputs["baseline"])
    return jnp.where(inputs["baseline_factor"] > 0, baseline, 0.0)


def _metrics(nll: Rows, inputs: RowInputs, groups: Groups) -> dict[str, Rows]:
    """TRL's metrics; rewards and log-probabilities are means over a label's samples."""
    logps = _log_probabilities(nll, inputs, groups)
    reward = inputs["beta"] * (logps - _reference(inputs, groups))
    mean, sign = inputs["mean"], inputs["sign"]

    def of_label(label: float, values: Rows) -> Rows:
        return jnp.where((mean > 0) & (sign == label), mean * values, 0.0)

    chosen, rejected = of_label(1.0, reward), of_label(-1.0, reward)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": of_label(1.0, logps),
        "logps/rejected": of_label(-1.0, logps),
        "kl": weighted(_baseline(inputs), inputs),
    }


_LABELLED = Objective(
    name="kto",
    kinds=("unpaired", "preference"),
    settings=KtoSettings,
    input_names=_INPUTS,
    num_terms=len,
    part_sizes=_num_of_label,
    row_inputs=_labelled_inputs,
    is_target=lambda inputs: inputs["target"] > 0,
    losses=_losses,
    metric_names=_METRICS,
    metrics=_metrics,
    metric_parts={
        **dict.fromkeys(_DESIRABLE, (0,)),
        **dict.fromkeys(_UNDESIRABLE, (1,)),
        "rewards/margins": (0, 1),
    },
    sums_groups=True,
)
KTO = dataclasses.replace(
    _LABELLED,
    baseline=dataclasses.replace(_LABELLED, row_inputs=_recombined_inputs),
    needs_baseline=lambda settings: settings.has_baseline,
)
