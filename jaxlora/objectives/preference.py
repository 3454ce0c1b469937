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
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from pydantic import Field

from jaxlora.config.strict import NonNegativeFloat, Number, PositiveFloat, Wrong
from jaxlora.objectives.base import (
    Groups,
    Objective,
    ObjectiveSettings,
    ReferenceSettings,
    RowInputs,
    Rows,
    Samples,
    Terms,
    group_sums,
    is_preferred,
    next_token_targets,
    weighted,
)

# Inputs of all rows: 1 and -1 in those that predict the chosen and the rejected
# completion, and the weight of the negative log likelihood. The others are in the first
# row of a pair; 0 in other rows.
_OF_ROWS = ("side", "nll")
_FACTORS = ("beta", "shift", "win", "lose", "hinge", "square")
_OF_PAIRS = ("weight", "chosen_scale", "rejected_scale", *_FACTORS, "reward")
# `runs_reference` is 1 if the reference runs with the microbatch; else the others are
# the log-probabilities that were computed before.
_OF_REFERENCE = ("chosen_reference", "rejected_reference", "runs_reference")
# As TRL names them.
_METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)


# ---- settings ------------------------------------------------------------------------


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
        nll: Factor of the mean negative log likelihood.
        trains_prompt: Whether that is of the prompt, too.
    """

    beta: float
    shift: float = 0.0
    win: float = 0.0
    lose: float = 0.0
    hinge: float = 0.0
    square: float = 0.0
    is_mean: bool = False
    reward: float | None = None
    nll: float = 0.0
    trains_prompt: bool = False


_Smoothing = Annotated[float, Field(ge=0.0, lt=0.5), Number]


class SimpoSettings(ObjectiveSettings):
    """Settings of SimPO, as TRL names them."""

    beta: PositiveFloat = 2.0
    simpo_gamma: NonNegativeFloat = 0.5
    label_smoothing: _Smoothing = 0.0
    cpo_alpha: NonNegativeFloat = 0.0

    def pair_loss(self) -> PairLoss:
        """Returns the factors of the loss."""
        e = self.label_smoothing
        more = {"shift": self.simpo_gamma, "is_mean": True, "nll": self.cpo_alpha}
        return PairLoss(self.beta, win=1 - e, lose=e, **more)


def _check_smoothing(settings: "CpoSettings | DpoSettings", wrong: Wrong) -> None:
    if settings.label_smoothing and settings.loss_type in ("hinge", "ipo"):
        wrong["label_smoothing"] = (
            f"has no effect with loss_type {settings.loss_type}. Leave one of them out."
        )


def _pair_loss(settings: "CpoSettings | DpoSettings") -> PairLoss:
    beta, e = settings.beta, settings.label_smoothing
    match settings.loss_type:
        case "hinge":
            return PairLoss(beta, hinge=1.0)
        case "robust":  # arXiv 2403.00409
            win, lose = (1 - e) / (1 - 2 * e), -e / (1 - 2 * e)
            return PairLoss(beta, win=win, lose=lose)
        case "ipo":  # (d - 1 / (2 beta))^2, with the difference of the scores d
            square = 1 / beta**2
            return PairLoss(beta, shift=0.5, square=square, is_mean=True)
        case loss_type:
            is_mean = loss_type == "sigmoid_norm"
            return PairLoss(beta, win=1 - e, lose=e, is_mean=is_mean)


class CpoSettings(ObjectiveSettings):
    """Settings of CPO, as TRL names them."""

    rules = (_check_smoothing,)

    beta: PositiveFloat = 0.1
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    label_smoothing: _Smoothing = 0.0
    cpo_alpha: NonNegativeFloat = 1.0

    def pair_loss(self) -> PairLoss:
        """Returns the factors of the loss."""
        return _pair_loss(self)._replace(nll=self.cpo_alpha)


class DpoSettings(ReferenceSettings):
    """Settings of DPO, as TRL names them."""

    rules = (_check_smoothing,)

    beta: PositiveFloat = 0.1
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"] = "sigmoid"
    label_smoothing: _Smoothing = 0.0

    def pair_loss(self) -> PairLoss:
        """Returns the factors of the loss."""
        return _pair_loss(self)


class OrpoSettings(ObjectiveSettings):
    """Settings of ORPO, as TRL names them."""

    beta: PositiveFloat = 0.1

    def pair_loss(self) -> PairLoss:
        """Returns the factors of the loss.

        The odds have no factor beta; it is the weight of their loss.
        """
        more = {"reward": self.beta, "nll": 1.0, "trains_prompt": True}
        return PairLoss(1.0, win=self.beta, is_mean=True, **more)


# ---- inputs of rows ------------------------------------------------------------------


def _num_chosen_targets(samples: Samples) -> tuple[int]:
    return (sum(int(sample.is_target.sum()) for sample in samples[::2]),)


def _num_chosen_tokens(samples: Samples) -> tuple[int]:
    """Tokens of the chosen sequences, prompts included, that have one before them."""
    return (sum(len(sample.token_ids) - 1 for sample in samples[::2]),)


def _row_inputs(pair: Samples, terms: Terms) -> dict[str, np.ndarray]:
    chosen, rejected = map(next_token_targets, pair)
    loss, num_rows = terms.settings.pair_loss(), len(chosen) + len(rejected)
    has_reference = isinstance(terms.settings, ReferenceSettings)
    names = *_OF_ROWS, *_OF_PAIRS, *(_OF_REFERENCE if has_reference else ())
    out = {name: np.zeros(num_rows) for name in names}
    out["side"][:] = np.concatenate([chosen * 1.0, rejected * -1.0])
    likely = chosen
    if loss.trains_prompt:
        likely = np.arange(len(chosen)) < len(chosen) - 1
    token_weight = terms.part_weights[0] if terms.part_weights else 0.0
    out["nll"][: len(chosen)] = likely * token_weight * loss.nll
    scales = [1 / one.sum() if loss.is_mean else 1.0 for one in (chosen, rejected)]
    reward = loss.beta if loss.reward is None else loss.reward
    of_pair = {
        "weight": terms.weight,
        "chosen_scale": scales[0],
        "rejected_scale": scales[1],
        "reward": 0.0 if terms.is_reference else reward,  # only metrics read it
        **{name: getattr(loss, name) for name in _FACTORS},
    }
    if has_reference:
        given = [sample.reference_logp for sample in pair]
        runs = any(logp is None for logp in given)
        values = *((0.0, 0.0) if runs else given), float(runs)
        of_pair |= dict(zip(_OF_REFERENCE, values, strict=True))
    for name, value in of_pair.items():
        out[name][0] = value
    return out


# ---- losses --------------------------------------------------------------------------


def _is_target(inputs: RowInputs) -> Bool[Array, " T"]:
    return (inputs["side"] != 0) | (inputs["nll"] > 0)


class _OfPair(NamedTuple):
    """Values of both completions of the pair that begins in each row; else 0."""

    chosen: Rows
    rejected: Rows


def _sums(nll: Rows, inputs: RowInputs, groups: Groups) -> _OfPair:
    """Sums of log-probabilities."""
    side = inputs["side"]
    sums = (group_sums(jnp.where(side == s, -nll, 0.0), groups) for s in (1, -1))
    is_pair = inputs["weight"] > 0
    return _OfPair(*(jnp.where(is_pair, one, 0.0) for one in sums))


def _ratios(sums: _OfPair, inputs: RowInputs, groups: Groups) -> _OfPair:
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


def _metrics(nll: Rows, inputs: RowInputs, groups: Groups) -> dict[str, Rows]:
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
    return {name: weighted(value, inputs) for name, value in values.items()}


def _losses(
    nll: Rows,
    inputs: RowInputs,
    groups: Groups,
    *,
    f: Callable[[Rows], Rows] = lambda score: score,
) -> Rows:
    sums = _sums(nll, inputs, groups)
    scores = _scaled(_ratios(sums, inputs, groups), inputs)
    x = inputs["beta"] * (f(scores.chosen) - f(scores.rejected)) - inputs["shift"]
    loss = (
        inputs["win"] * jax.nn.softplus(-x)
        + inputs["lose"] * jax.nn.softplus(x)
        + inputs["hinge"] * jax.nn.relu(1 - x)
        + inputs["square"] * x * x
    )
    likelihood = jnp.where(inputs["nll"] > 0, inputs["nll"] * nll, 0.0)
    return weighted(loss, inputs) + likelihood


def _log_odds(mean: Rows) -> Rows:
    """log(p / (1 - p)) of p = exp(mean); rows without a score have mean 0."""
    is_score = mean < 0
    mean = jnp.where(is_score, mean, -1.0)  # 1 - p is 0 at mean 0, also in a gradient
    return jnp.where(is_score, mean - jnp.log(-jnp.expm1(mean)), 0.0)


# ---- objectives ----------------------------------------------------------------------

_of_pairs = functools.partial(
    Objective,
    kinds=("preference",),
    group_size=2,
    input_names=(*_OF_ROWS, *_OF_PAIRS),
    num_terms=lambda samples: len(samples) // 2,
    row_inputs=_row_inputs,
    is_target=_is_target,
    losses=_losses,
    metric_names=_METRICS,
    metrics=_metrics,
)
# arXiv 2405.14734
SIMPO = _of_pairs(name="simpo", settings=SimpoSettings, part_sizes=_num_chosen_targets)
# arXiv 2401.08417
CPO = _of_pairs(name="cpo", settings=CpoSettings, part_sizes=_num_chosen_targets)
DPO = _of_pairs(  # arXiv 2305.18290; the other losses are 2305.10425 and 2310.12036
    name="dpo",
    settings=DpoSettings,
    input_names=(*_OF_ROWS, *_OF_PAIRS, *_OF_REFERENCE),
)
ORPO = _of_pairs(  # arXiv 2403.07691
    name="orpo",
    settings=OrpoSettings,
    part_sizes=_num_chosen_tokens,
    losses=functools.partial(_losses, f=_log_odds),
)
