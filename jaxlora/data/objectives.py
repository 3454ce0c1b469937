"""Objectives: what the loss of a job is.

An entry of `OBJECTIVES` is all that packing, training and evaluation know of one. The
model gives the negative log likelihood of the next token of every row that an objective
asks for; the objective turns them into losses. Jobs of several objectives share
microbatches: each row belongs to one job, and so to one objective.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.errors import ConfigError

# Inputs of the rows of a microbatch, by name; 0 in rows of other objectives.
RowInputs = dict[str, Float[Array, " T"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The definition of a job's loss.

    The loss of a global batch is the mean of its terms, for instance of its target
    tokens. Every term is in one microbatch, and which one does not change it.

    Attributes:
        name: Value of the setting `objective` of a job.
        group_size: Number of consecutive samples that a term may depend on. They make a
            group, such as a chosen and a rejected answer: the unit of a job's batch
            size, of its order, and of packing.
        input_names: Names of the inputs of a row.
        num_terms: Number of terms of the loss of samples, which are whole groups.
        row_inputs: Makes the inputs of the rows of a group, float32, one sample after
            another. Its second argument is the weight of a term: the reciprocal of the
            number of terms of the global batch, or 1 for a sum.
        is_target: Which rows need the likelihood of their next token.
        losses: The loss of each row, of which the sum is taken: from the negative log
            likelihoods in nats (0 in rows that are no targets), the inputs, and the
            number of each row's group in the microbatch (less than the number of rows;
            -1 in padding), which is None if no objective of the run has groups of
            several samples. It is differentiated.
    """

    name: str
    group_size: int = 1
    input_names: tuple[str, ...]
    num_terms: Callable[[Sequence[TokenizedSample]], int]
    row_inputs: Callable[[Sequence[TokenizedSample], float], dict[str, np.ndarray]]
    is_target: Callable[[RowInputs], Bool[Array, " T"]]
    losses: Callable[
        [Float[Array, " T"], RowInputs, Int[Array, " T"] | None], Float[Array, " T"]
    ]


def next_token_targets(sample: TokenizedSample) -> Bool[np.ndarray, " T"]:
    """Whether the token after each token is a target; false for the last one."""
    return np.append(sample.is_target[1:], False)


def _num_target_tokens(samples: Sequence[TokenizedSample]) -> int:
    return sum(int(sample.is_target.sum()) for sample in samples)


def _weights(group: Sequence[TokenizedSample], weight: float) -> dict[str, np.ndarray]:
    (sample,) = group
    return {"weight": next_token_targets(sample) * np.float32(weight)}


def _has_weight(inputs: RowInputs) -> Bool[Array, " T"]:
    return inputs["weight"] > 0


def _weighted_nll(
    nll: Float[Array, " T"], inputs: RowInputs, groups: Int[Array, " T"] | None
) -> Float[Array, " T"]:
    return jnp.where(_has_weight(inputs), nll * inputs["weight"], 0.0)


NEXT_TOKEN = Objective(
    name="next_token",
    input_names=("weight",),
    num_terms=_num_target_tokens,
    row_inputs=_weights,
    is_target=_has_weight,
    losses=_weighted_nll,
)
OBJECTIVES: dict[str, Objective] = {NEXT_TOKEN.name: NEXT_TOKEN}


def find_objective(name: str) -> Objective:
    """Returns an objective by its name.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective={name!r} must be one of {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]
