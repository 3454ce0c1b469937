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
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlora.data.objective import (
    REFERENCE_SETTINGS,
    Objective,
    ObjectiveSetting,
    RowInputs,
    Terms,
    next_token_targets,
)
from jaxlora.data.preference_objectives import group_sums
from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.errors import ConfigError

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


def _num_of_label(samples: Sequence[TokenizedSample]) -> tuple[int, int]:
    num_desirable = sum(sample.value > 0 for sample in samples)
    return num_desirable, len(samples) - num_desirable


def _zeros(group: Sequence[TokenizedSample]) -> dict[str, np.ndarray]:
    """Returns the inputs of the rows of a sample without a loss."""
    (sample,) = group
    out = {name: np.zeros(len(sample.token_ids)) for name in _INPUTS}
    out["target"][:] = next_token_targets(sample)
    out["sample"][0] = 1.0
    logp = sample.reference_logp
    out["reference"][0] = 0.0 if logp is None else logp
    out["runs_reference"][0] = logp is None
    return out


def _labelled_inputs(
    group: Sequence[TokenizedSample], terms: Terms
) -> dict[str, np.ndarray]:
    out, settings = _zeros(group), terms.settings
    is_desirable = group[0].value > 0
    label = "desirable" if is_desirable else "undesirable"
    values = {
        "weight": terms.weight,
        "mean": terms.part_weights[0 if is_desirable else 1],
        "sign": 1.0 if is_desirable else -1.0,
        "factor": settings[f"{label}_weight"],
        "beta": settings["beta"],
        "baseline_factor": float(_has_baseline(settings)),
    }
    for name, value in values.items():
        out[name][0] = value
    return out


def _recombined_inputs(
    group: Sequence[TokenizedSample], terms: Terms
) -> dict[str, np.ndarray]:
    out = _zeros(group)
    out["share"][0] = terms.weight * _has_baseline(terms.settings)
    return out


def _has_baseline(settings: Mapping[str, Any]) -> bool:
    return settings["loss_type"] == "kto"


def _is_target(inputs: RowInputs) -> Bool[Array, " T"]:
    return inputs["target"] > 0


def _log_probabilities(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> Float[Array, " T"]:
    """Sums of the log-probabilities of completions, in the first row of a sample."""
    assert groups is not None, "the objective reads groups"
    logps = group_sums(jnp.where(_is_target(inputs), -nll, 0.0), groups)
    return jnp.where(inputs["sample"] > 0, logps, 0.0)


def _losses(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> Float[Array, " T"]:
    ratio = _log_probabilities(nll, inputs, groups) - _reference(inputs, groups)
    x = inputs["sign"] * inputs["beta"] * (ratio - _baseline(inputs))
    loss = inputs["factor"] * jax.nn.sigmoid(-x)
    labelled = jnp.where(inputs["weight"] > 0, inputs["weight"] * loss, 0.0)
    return labelled + jnp.where(inputs["share"] > 0, inputs["share"] * ratio, 0.0)


def _reference(
    inputs: RowInputs, groups: Int[Array, " T"] | None
) -> Float[Array, " T"]:
    """Log-probabilities of completions by the reference."""
    found = _log_probabilities(inputs["reference_nll"], inputs, groups)
    return jnp.where(inputs["runs_reference"] > 0, found, inputs["reference"])


def _baseline(inputs: RowInputs) -> Float[Array, " T"]:
    baseline = jax.nn.relu(inputs["baseline"])
    return jnp.where(inputs["baseline_factor"] > 0, baseline, 0.0)


def _metrics(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> dict[str, Float[Array, " T"]]:
    """TRL's metrics; rewards and log-probabilities are means over a label's samples."""
    logps = _log_probabilities(nll, inputs, groups)
    reward = inputs["beta"] * (logps - _reference(inputs, groups))
    mean, sign, weight = inputs["mean"], inputs["sign"], inputs["weight"]

    def of_label(label: float, values: Float[Array, " T"]) -> Float[Array, " T"]:
        return jnp.where((mean > 0) & (sign == label), mean * values, 0.0)

    chosen, rejected = of_label(1.0, reward), of_label(-1.0, reward)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": of_label(1.0, logps),
        "logps/rejected": of_label(-1.0, logps),
        "kl": jnp.where(weight > 0, weight * _baseline(inputs), 0.0),
    }


def _weight() -> ObjectiveSetting:
    return ObjectiveSetting(default=1.0)


def _check(settings: Mapping[str, Any]) -> None:
    if not settings["desirable_weight"] and not settings["undesirable_weight"]:
        raise ConfigError(
            "objective_args: desirable_weight and undesirable_weight are 0, so nothing "
            "is learned. Leave one of them out."
        )


_LABELLED = Objective(
    name="kto",
    kinds=("unpaired", "preference"),
    needs_reference=True,
    settings={
        "beta": ObjectiveSetting(default=0.1, above=0.0),
        "loss_type": ObjectiveSetting(
            default="kto", choices=("kto", "apo_zero_unpaired")
        ),
        "desirable_weight": _weight(),
        "undesirable_weight": _weight(),
        **REFERENCE_SETTINGS,
    },
    check=_check,
    input_names=_INPUTS,
    num_terms=len,
    part_sizes=_num_of_label,
    row_inputs=_labelled_inputs,
    is_target=_is_target,
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
    needs_baseline=_has_baseline,
)
