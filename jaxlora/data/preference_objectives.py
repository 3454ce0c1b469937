"""Objectives over pairs of a chosen and a rejected completion of one prompt.

Each completion has a score v: the sum of the log-probabilities of its tokens, or their
mean. In DPO, those by the reference, such as the base alone, are subtracted from
the sum. The loss of a pair is

    win softplus(-x) + lose softplus(x) + hinge max(0, 1 - x) + square x^2,
    x = beta (f(v_chosen) - f(v_rejected)) - shift,

where f is the identity, or the log odds in ORPO. The factors are data, so jobs with
other settings run the same program. CPO, SimPO and ORPO add the mean negative log
likelihood of tokens of the chosen sequences. All means are over the job's global batch.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.errors import ConfigError

# Inputs of all rows: 1 and -1 in those that predict the chosen and the rejected
# completion, and the weight of the negative log likelihood. The others are in the first
# row of a pair; 0 in other rows.
_OF_ROWS = ("side", "nll")
_OF_PAIRS = (
    *("weight", "chosen_scale", "rejected_scale", "beta", "shift"),
    *("win", "lose", "hinge", "square", "reward"),
)
# A difference of rewards is a tie if float32 may have made it: if it is at most so many
# times its relative precision, 2^-23, of the numbers that it is made of. Where samples
# are packed in another way, sums over a few hundred tokens differ by about one.
_ROUNDINGS = 8
# As TRL names them.
_METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)
# `runs_reference` is 1 if the reference runs with the microbatch; else the others are
# the log-probabilities that were computed before.
_OF_REFERENCE = ("chosen_reference", "rejected_reference", "runs_reference")


class PairLoss(NamedTuple):
    """The factors of a pair's loss; see the module.

    Attributes:
        beta: Scale of the difference of the scores.
        shift: What is subtracted from it.
        win: Factor of softplus(-x).
        lose: Factor of softplus(x).
        hinge: Factor of max(0, 1 - x).
        square: Factor of x^2.
        is_mean: Whether scores are means over tokens, not sums.
        reward: Reward of a score of 1, which is reported; None: beta.
    """

    beta: float
    shift: float = 0.0
    win: float = 0.0
    lose: float = 0.0
    hinge: float = 0.0
    square: float = 0.0
    is_mean: bool = False
    reward: float | None = None


def group_sums(
    values: Float[Array, " T"], groups: Int[Array, " T"]
) -> Float[Array, " T"]:
    """Sums over each row and the later rows of its group; the first row has them all.

    The rows of a group are adjacent. The order of the additions depends only on the
    position in the group, so that the sum has the same bits anywhere in a microbatch,
    and each time: a scatter on a GPU would add in any order.
    """
    step = 1
    while step < len(values):
        is_same = groups[step:] == groups[:-step]
        later = jnp.where(is_same, values[step:], 0.0)
        values = values + jnp.concatenate([later, jnp.zeros(step, values.dtype)])
        step *= 2
    return values


def is_preferred(
    chosen: Float[Array, " T"], rejected: Float[Array, " T"], size: Float[Array, " T"]
) -> Float[Array, " T"]:
    """Whether the chosen answer has the higher reward: 1 or 0, which a tie has.

    Args:
        chosen: Its reward.
        rejected: Reward of the other one.
        size: Sum of the magnitudes of the numbers whose differences are rewards.
    """
    rounding = _ROUNDINGS * jnp.finfo(size.dtype).eps * size
    return jnp.where(chosen - rejected > rounding, 1.0, 0.0)


def _num_pairs(samples: Sequence[TokenizedSample]) -> int:
    return len(samples) // 2


def _num_chosen_targets(samples: Sequence[TokenizedSample]) -> tuple[int]:
    return (sum(int(sample.is_target.sum()) for sample in samples[::2]),)


def _num_chosen_tokens(samples: Sequence[TokenizedSample]) -> tuple[int]:
    """Tokens of the chosen sequences, prompts included, that have one before them."""
    return (sum(len(sample.token_ids) - 1 for sample in samples[::2]),)


def _is_target(inputs: RowInputs) -> Bool[Array, " T"]:
    return (inputs["side"] != 0) | (inputs["nll"] > 0)


def _pair_inputs(
    pair: Sequence[TokenizedSample],
    terms: Terms,
    factors: Callable[[Mapping[str, Any]], PairLoss],
    nll_weight: Callable[[Mapping[str, Any]], float],
    *,
    trains_prompt: bool = False,
    has_reference: bool = False,
) -> dict[str, np.ndarray]:
    chosen, rejected = map(next_token_targets, pair)
    loss = factors(terms.settings)
    num_rows = len(chosen) + len(rejected)
    out = {name: np.zeros(num_rows) for name in (*_OF_ROWS, *_OF_PAIRS)}
    out["side"][:] = np.concatenate([chosen * 1.0, rejected * -1.0])
    likely = chosen
    if trains_prompt:
        likely = np.arange(len(chosen)) < len(chosen) - 1
    token_weight = terms.part_weights[0] if terms.part_weights else 0.0
    out["nll"][: len(chosen)] = likely * token_weight * nll_weight(terms.settings)
    scales = [1 / one.sum() if loss.is_mean else 1.0 for one in (chosen, rejected)]
    reward = loss.beta if loss.reward is None else loss.reward
    of_pair = {
        "weight": terms.weight,
        "chosen_scale": scales[0],
        "rejected_scale": scales[1],
        "reward": 0.0 if terms.is_reference else reward,  # only metrics read it
    }
    for name in ("beta", "shift", "win", "lose", "hinge", "square"):
        of_pair[name] = getattr(loss, name)
    if has_reference:
        given = [sample.reference_logp for sample in pair]
        runs = any(logp is None for logp in given)
        values = *((0.0, 0.0) if runs else given), float(runs)
        for name, value in zip(_OF_REFERENCE, values, strict=True):
            out[name] = np.zeros(num_rows)
            of_pair[name] = value
    for name, value in of_pair.items():
        out[name][0] = value
    return out


class _OfPair(NamedTuple):
    """Values of both completions of the pair that begins in each row; else 0."""

    chosen: Float[Array, " T"]
    rejected: Float[Array, " T"]


def _sums(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> _OfPair:
    """Sums of log-probabilities."""
    assert groups is not None, "an objective of the run has groups"
    side = inputs["side"]
    sums = (group_sums(jnp.where(side == s, -nll, 0.0), groups) for s in (1, -1))
    is_pair = inputs["weight"] > 0
    return _OfPair(*(jnp.where(is_pair, one, 0.0) for one in sums))


def _ratios(
    sums: _OfPair, inputs: RowInputs, groups: Int[Array, " T"] | None
) -> _OfPair:
    """Log-ratios to the reference, if there is one."""
    if "chosen_reference" not in inputs:
        return sums
    runs = inputs["runs_reference"] > 0
    found = _sums(inputs["reference_nll"], inputs, groups)
    return _OfPair(
        sums.chosen - jnp.where(runs, found.chosen, inputs["chosen_reference"]),
        sums.rejected - jnp.where(runs, found.rejected, inputs["rejected_reference"]),
    )


def _scaled(sums: _OfPair, inputs: RowInputs) -> _OfPair:
    return _OfPair(
        sums.chosen * inputs["chosen_scale"], sums.rejected * inputs["rejected_scale"]
    )


def _metrics(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> dict[str, Float[Array, " T"]]:
    """TRL's metrics, as parts of means over pairs.

    Rewards in DPO are of sums of log-ratios, and otherwise of scores.
    """
    logps = _sums(nll, inputs, groups)
    ratios = _ratios(logps, inputs, groups)
    if ratios is logps:
        logps = ratios = _scaled(logps, inputs)
    chosen, rejected = (inputs["reward"] * one for one in ratios)
    pairs = zip(logps, ratios, strict=True)
    size = sum(abs(logp) + abs(logp - ratio) for logp, ratio in pairs)
    size = inputs["reward"] * size
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": is_preferred(chosen, rejected, size),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps.chosen,
        "logps/rejected": logps.rejected,
    }
    weight = inputs["weight"]
    return {k: jnp.where(weight > 0, weight * x, 0.0) for k, x in values.items()}


def _losses(
    nll: Float[Array, " T"],
    inputs: RowInputs,
    groups: Int[Array, " T"] | None,
    *,
    f: Callable[[Float[Array, " T"]], Float[Array, " T"]] = lambda score: score,
) -> Float[Array, " T"]:
    sums = _sums(nll, inputs, groups)
    scores = _scaled(_ratios(sums, inputs, groups), inputs)
    x = inputs["beta"] * (f(scores.chosen) - f(scores.rejected)) - inputs["shift"]
    loss = (
        inputs["win"] * jax.nn.softplus(-x)
        + inputs["lose"] * jax.nn.softplus(x)
        + inputs["hinge"] * jax.nn.relu(1 - x)
        + inputs["square"] * x * x
    )
    of_pairs = jnp.where(inputs["weight"] > 0, inputs["weight"] * loss, 0.0)
    return of_pairs + jnp.where(inputs["nll"] > 0, inputs["nll"] * nll, 0.0)


def _log_odds(mean: Float[Array, " T"]) -> Float[Array, " T"]:
    """log(p / (1 - p)) of p = exp(mean); rows without a score have mean 0."""
    is_score = mean < 0
    mean = jnp.where(is_score, mean, -1.0)  # 1 - p is 0 at mean 0, also in a gradient
    return jnp.where(is_score, mean - jnp.log(-jnp.expm1(mean)), 0.0)


def _smoothed(settings: Mapping[str, Any], **others: Any) -> PairLoss:
    e = settings["label_smoothing"]
    return PairLoss(settings["beta"], win=1 - e, lose=e, **others)


def _simpo(settings: Mapping[str, Any]) -> PairLoss:
    return _smoothed(settings, shift=settings["simpo_gamma"], is_mean=True)


def _by_loss_type(settings: Mapping[str, Any]) -> PairLoss:
    beta, loss_type = settings["beta"], settings["loss_type"]
    if loss_type == "hinge":
        return PairLoss(beta, hinge=1.0)
    if loss_type == "robust":  # arXiv 2403.00409
        e = settings["label_smoothing"]
        return PairLoss(beta, win=(1 - e) / (1 - 2 * e), lose=-e / (1 - 2 * e))
    if loss_type == "ipo":
        # (d - 1 / (2 beta))^2, with the difference of the scores d.
        return PairLoss(beta, shift=0.5, square=1 / beta**2, is_mean=True)
    return _smoothed(settings, is_mean=loss_type == "sigmoid_norm")


def _orpo(settings: Mapping[str, Any]) -> PairLoss:
    # The odds have no factor beta; it is the weight of their loss.
    return PairLoss(1.0, win=settings["beta"], is_mean=True, reward=settings["beta"])


def _beta(default: float) -> ObjectiveSetting:
    return ObjectiveSetting(default=default, above=0.0)


def _cpo_alpha(settings: Mapping[str, Any]) -> float:
    return settings["cpo_alpha"]


def _check_smoothing(settings: Mapping[str, Any]) -> None:
    loss_type = settings["loss_type"]
    if settings["label_smoothing"] and loss_type in ("hinge", "ipo"):
        raise ConfigError(
            f"objective_args: label_smoothing={settings['label_smoothing']:g} has no "
            f"effect with loss_type {loss_type}. Leave one of them out."
        )


_SMOOTHING = ObjectiveSetting(default=0.0, below=0.5)
_of_pairs = functools.partial(
    Objective,
    kinds=("preference",),
    group_size=2,
    input_names=(*_OF_ROWS, *_OF_PAIRS),
    num_terms=_num_pairs,
    is_target=_is_target,
    metric_names=_METRICS,
    metrics=_metrics,
)
SIMPO = _of_pairs(  # arXiv 2405.14734
    name="simpo",
    settings={
        "beta": _beta(2.0),
        "simpo_gamma": ObjectiveSetting(default=0.5),
        "label_smoothing": _SMOOTHING,
        "cpo_alpha": ObjectiveSetting(default=0.0),
    },
    part_sizes=_num_chosen_targets,
    row_inputs=functools.partial(_pair_inputs, factors=_simpo, nll_weight=_cpo_alpha),
    losses=_losses,
)
CPO = _of_pairs(  # arXiv 2401.08417
    name="cpo",
    settings={
        "beta": _beta(0.1),
        "loss_type": ObjectiveSetting(
            default="sigmoid", choices=("sigmoid", "hinge", "ipo")
        ),
        "label_smoothing": _SMOOTHING,
        "cpo_alpha": ObjectiveSetting(default=1.0),
    },
    check=_check_smoothing,
    part_sizes=_num_chosen_targets,
    row_inputs=functools.partial(
        _pair_inputs, factors=_by_loss_type, nll_weight=_cpo_alpha
    ),
    losses=_losses,
)
DPO = _of_pairs(  # arXiv 2305.18290; the other losses are 2305.10425 and 2310.12036
    name="dpo",
    needs_reference=True,
    input_names=(*_OF_ROWS, *_OF_PAIRS, *_OF_REFERENCE),
    settings={
        "beta": _beta(0.1),
        "loss_type": ObjectiveSetting(
            default="sigmoid",
            choices=("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"),
        ),
        "label_smoothing": _SMOOTHING,
        **REFERENCE_SETTINGS,
    },
    check=_check_smoothing,
    row_inputs=functools.partial(
        _pair_inputs,
        factors=_by_loss_type,
        nll_weight=lambda settings: 0.0,
        has_reference=True,
    ),
    losses=_losses,
)
ORPO = _of_pairs(  # arXiv 2403.07691
    name="orpo",
    settings={"beta": _beta(0.1)},
    part_sizes=_num_chosen_tokens,
    row_inputs=functools.partial(
        _pair_inputs,
        factors=_orpo,
        nll_weight=lambda settings: 1.0,
        trains_prompt=True,
    ),
    losses=functools.partial(_losses, f=_log_odds),
)
