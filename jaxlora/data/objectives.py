"""Objectives: what the loss of a job is.

An entry of `OBJECTIVES` is all that packing, training and evaluation know of one. The
model gives the negative log likelihood of the next token of every row that an objective
asks for; the objective turns them into losses. Jobs of several objectives share
microbatches: each row belongs to one job, and so to one objective.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlora.data.distill_objective import DISTILL
from jaxlora.data.kto_objective import KTO
from jaxlora.data.objective import (
    Objective,
    RowInputs,
    Terms,
    target_weight,
    token_weights,
)
from jaxlora.data.preference_objectives import CPO, DPO, ORPO, SIMPO
from jaxlora.data.reward_objective import REWARD
from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.errors import ConfigError


def _weights(group: Sequence[TokenizedSample], terms: Terms) -> dict[str, np.ndarray]:
    (sample,) = group
    return {"weight": token_weights(sample, terms.weight)}


def _has_weight(inputs: RowInputs) -> Bool[Array, " T"]:
    return inputs["weight"] > 0


def _weighted_nll(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> Float[Array, " T"]:
    return jnp.where(_has_weight(inputs), nll * inputs["weight"], 0.0)


NEXT_TOKEN = Objective(
    name="next_token",
    input_names=("weight",),
    num_terms=target_weight,
    row_inputs=_weights,
    is_target=_has_weight,
    losses=_weighted_nll,
)
_ALL = (NEXT_TOKEN, DPO, SIMPO, CPO, ORPO, KTO, REWARD, DISTILL)
OBJECTIVES: dict[str, Objective] = {one.name: one for one in _ALL}


def has_baseline(objectives: Sequence[str]) -> bool:
    """Whether a run with some objectives has baselines of global batches."""
    return any(OBJECTIVES[name].baseline is not None for name in objectives)


def has_reference(objectives: Sequence[str]) -> bool:
    """Whether an objective of a run compares with a reference."""
    return any(OBJECTIVES[name].needs_reference for name in objectives)


def find_objective(name: str) -> Objective:
    """Returns an objective by its name.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective={name!r} must be one of {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def smallest_batch(objective: str, args: Mapping[str, float | str]) -> int:
    """Returns the fewest groups of samples that a global batch may have.

    A baseline is made from the prompts of a batch with the answers of its other
    samples. With a single sample, it would be the sample's own log-ratio.

    Args:
        objective: Name of the objective.
        args: Values of some of its settings.

    Raises:
        ConfigError: There is no such objective, or it has no such settings.
    """
    found = find_objective(objective)
    settings = found.settings_of(args)
    has_baseline = found.baseline is not None and found.needs_baseline(settings)
    return 2 if has_baseline else 1
