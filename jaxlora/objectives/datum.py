"""Losses of datums: rows that come with a call and not from a job's data.

The loss of a datum is the sum over its positions, and is never divided by their number.
With the log-probability lp of a position's target token, its weight w, and the
log-probability q and advantage A that came with it, it is with r = exp(lp - q)

    cross_entropy          -w lp
    importance_sampling    -w r A
    ppo                    -w min(r A, clip(r) A)
    cispo                  -w stop_gradient(clip(r)) lp A
    dro                    -w (lp A - beta / 2 (lp - q)^2).

Each row has the number of its loss, so one program serves them all in one microbatch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxlora.objectives.base import Groups, Objective, RowInputs, Rows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DatumLoss:
    """A loss of datums.

    Attributes:
        value: Its value at positions of weight 1, from `numpy` or `jax.numpy`, the
            log-probability lp, q, A, and the settings.
        settings: Its settings with their defaults, at most two; None: a caller gives
            the value.
        has_advantages: Whether it reads q and A.
        is_linear: Whether it is 0 where A is 0.
    """

    value: Callable[..., Any]
    settings: Mapping[str, float | None] = MappingProxyType({})
    has_advantages: bool = True
    is_linear: bool = True


def _ppo(xp: Any, lp: Any, q: Any, a: Any, low: Any, high: Any) -> Any:
    ratio = xp.exp(lp - q)
    return -xp.minimum(ratio * a, xp.clip(ratio, low, high) * a)


def _cispo(xp: Any, lp: Any, q: Any, a: Any, low: Any, high: Any) -> Any:
    ratio = xp.clip(xp.exp(lp - q), low, high)
    return -(jax.lax.stop_gradient(ratio) if xp is jnp else ratio) * lp * a


# Names of the least and the largest ratio.
CLIP = "clip_low_threshold", "clip_high_threshold"
LOSSES: dict[str, DatumLoss] = {
    "cross_entropy": DatumLoss(
        value=lambda xp, lp, q, a: -lp, has_advantages=False, is_linear=False
    ),
    "importance_sampling": DatumLoss(value=lambda xp, lp, q, a: -xp.exp(lp - q) * a),
    # arXiv 1707.06347
    "ppo": DatumLoss(value=_ppo, settings=dict(zip(CLIP, (0.8, 1.2), strict=True))),
    # arXiv 2506.13585
    "cispo": DatumLoss(value=_cispo, settings=dict(zip(CLIP, (0.0, 4.0), strict=True))),
    # arXiv 2405.19107
    "dro": DatumLoss(
        value=lambda xp, lp, q, a, beta: beta / 2 * (lp - q) ** 2 - lp * a,
        settings={"beta": None},
        is_linear=False,
    ),
}
_SETTINGS = "first", "second"  # inputs with the values of a loss's settings
_INPUTS = ("loss", "weight", "old_logprob", "advantage", *_SETTINGS)


def datum_inputs(
    name: str,
    settings: Mapping[str, float],
    weights: Float[np.ndarray, " T"],
    old_logprobs: Float[np.ndarray, " T"] | None,
    advantages: Float[np.ndarray, " T"] | None,
) -> dict[str, np.ndarray]:
    """Returns what the objective reads of the positions of a datum.

    Args:
        name: Name of its loss.
        settings: The values of all settings of the loss.
        weights: Weight of each position.
        old_logprobs: q of each position; None: the loss does not read it.
        advantages: A of each position; None: the loss does not read it.
    """
    number, loss = 1 + list(LOSSES).index(name), LOSSES[name]
    inputs = {key: np.zeros(len(weights), np.float32) for key in _INPUTS}
    inputs["loss"][:], inputs["weight"][:] = number, weights
    if old_logprobs is not None and advantages is not None:
        inputs["old_logprob"][:], inputs["advantage"][:] = old_logprobs, advantages
        if loss.is_linear:  # such rows then need no gradient of the head
            inputs["weight"][inputs["advantage"] == 0] = 0
    for key, setting in zip(_SETTINGS, loss.settings, strict=False):
        inputs[key][:] = settings[setting]
    return inputs


def datum_loss(
    inputs: Mapping[str, np.ndarray], logprobs: Float[np.ndarray, " T"]
) -> float:
    """Returns the loss of a datum, in float64 from the log-probabilities as reported.

    Args:
        inputs: What `datum_inputs` has returned.
        logprobs: Log-probability of each position's target token.
    """
    counts = inputs["weight"] != 0
    loss = list(LOSSES.values())[int(inputs["loss"][0]) - 1]
    read = "weight", "old_logprob", "advantage", *_SETTINGS[: len(loss.settings)]
    w, *given = (inputs[key][counts].astype(np.float64) for key in read)
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are reported
        values = loss.value(np, logprobs[counts].astype(np.float64), *given)
        return float((w * values).sum())


def _losses(nll: Rows, inputs: RowInputs, groups: Groups) -> Rows:
    weight, total = inputs["weight"], jnp.zeros_like(nll)
    for number, loss in enumerate(LOSSES.values(), start=1):
        is_own = (inputs["loss"] == number) & (weight != 0)
        keys = "old_logprob", "advantage", *_SETTINGS[: len(loss.settings)]
        # Other rows compute it from zeros: what they hold could make their gradient NaN
        # although it is not selected.
        read = -nll, *(inputs[key] for key in keys)
        given = (jnp.where(is_own, x, 0.0) for x in read)
        total = jnp.where(is_own, weight * loss.value(jnp, *given), total)
    return total


DATUM = Objective(
    name="datum",
    kinds=("datum",),
    input_names=_INPUTS,
    num_terms=len,
    row_inputs=lambda group, terms: dict(group[0].inputs or {}),
    is_target=lambda inputs: (inputs["loss"] > 0) & (inputs["weight"] != 0),
    is_read=lambda inputs: inputs["loss"] > 0,
    losses=_losses,
)
