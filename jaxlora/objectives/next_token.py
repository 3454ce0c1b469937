"""The likelihood of the next token: the mean over a global batch's target tokens."""

import numpy as np

from jaxlora.objectives.base import (
    Objective,
    Samples,
    Terms,
    has_weight,
    target_weight,
    token_weights,
    weighted,
)


def _weights(group: Samples, terms: Terms) -> dict[str, np.ndarray]:
    (sample,) = group
    return {"weight": token_weights(sample, terms.weight)}


NEXT_TOKEN = Objective(
    name="next_token",
    input_names=("weight",),
    num_terms=target_weight,
    row_inputs=_weights,
    is_target=has_weight,
    losses=lambda nll, inputs, groups: weighted(nll, inputs),
)
