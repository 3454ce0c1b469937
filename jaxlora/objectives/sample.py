"""A sample, as objectives read it."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32


class TopLogprobs(NamedTuple):
    """The most likely tokens in the place of some tokens, by a teacher.

    Attributes:
        ids: These tokens, n k.
        logprobs: Their log-probabilities in nats, n k; -inf: there is none here.
    """

    ids: Int32[np.ndarray, "N K"]
    logprobs: Float32[np.ndarray, "N K"]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenizedSample:
    """One sample.

    Attributes:
        token_ids: The sample's tokens.
        is_target: Whether each token is a target of the loss. The first token is never
            one, because there is no token before it to predict it.
        value: The number that came with the record: whether a labelled completion is
            desirable, 1 or 0; or the margin of a pair. 0: there is none.
        reference_logp: Log-probability of the targets, in nats, by the reference, for
            objectives that need it. None: it is computed with the sample's microbatch.
        weights: Weight of each token's loss as a target; None: all are 1.
        top: A teacher's most likely tokens in the place of each target; None: there is
            no teacher.
        labels: The token that each row should predict; None: the next one.
        inputs: Inputs of the rows by name, of a sample that comes with them; None: the
            objective makes them.
    """

    token_ids: Int32[np.ndarray, " T"]
    is_target: Bool[np.ndarray, " T"]
    value: float = 0.0
    reference_logp: float | None = None
    weights: Float32[np.ndarray, " T"] | None = None
    top: TopLogprobs | None = None
    labels: Int32[np.ndarray, " T"] | None = None
    inputs: Mapping[str, np.ndarray] | None = None

    @property
    def target_weights(self) -> Float32[np.ndarray, " _"] | None:
        """Weights of the targets; None: all are 1, or there are none."""
        if self.weights is None or not self.is_target.any():
            return None
        return self.weights[self.is_target]

    @property
    def sum_of_weights(self) -> float:
        """Sum of the weights of the targets; without weights, their number."""
        if (weights := self.target_weights) is None:
            return int(self.is_target.sum())
        return float(weights.sum(dtype=np.float64))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first target."""
        return int(self.is_target.argmax())
