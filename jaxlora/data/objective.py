"""The parts of an objective, which defines a job's loss.

The table of objectives is `OBJECTIVES` in `jaxlora.data.objectives`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.errors import ConfigError

# Inputs of the rows of a microbatch, by name; 0 in rows of other objectives. Some have
# several values for each row, T C.
RowInputs = dict[str, Float[Array, "T ..."]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSetting:
    """A setting of an objective: a number, one of several words, or a folder.

    Attributes:
        default: Its value where a job does not give it.
        above: Numbers are greater than this; None: at least 0.
        below: Numbers are less than this.
        choices: The words; empty: it is a number.
        takes_folder: Whether other texts than the words name a folder.
    """

    default: float | str
    above: float | None = None
    below: float = math.inf
    choices: tuple[str, ...] = ()
    takes_folder: bool = False

    def check(self, name: str, value: float | str) -> None:
        """Checks a value.

        Raises:
            ConfigError: The setting has no such value.
        """
        if self.choices:
            is_folder = self.takes_folder and isinstance(value, str) and value
            if not is_folder and value not in self.choices:
                folder = " or a folder" if self.takes_folder else ""
                raise ConfigError(
                    f"objective_args: {name}={value!r} must be one of "
                    f"{', '.join(self.choices)}{folder}."
                )
            return
        lowest = "at least 0" if self.above is None else f"above {self.above:g}"
        is_number = not isinstance(value, str) and math.isfinite(value)
        fits = is_number and (value >= 0 if self.above is None else value > self.above)
        if not fits or value >= self.below:
            bound = "" if math.isinf(self.below) else f" and below {self.below:g}"
            raise ConfigError(
                f"objective_args: {name}={value!r} must be a number {lowest}{bound}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Weights of the terms of a global batch's loss.

    Attributes:
        weight: Weight of a term: the reciprocal of the number of terms of the global
            batch, or 1 for a sum.
        part_weights: For each part of the loss or of metrics that is a mean over
            something else than terms, the weight of an element: 1 divided by the number
            of elements, or by their mean number in a term for a sum.
        settings: Values of the objective's settings.
        is_reference: Whether the adapter gives the probabilities of the reference, but
            for rounding, as before its first step.
    """

    weight: float
    part_weights: tuple[float, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_reference: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The definition of a job's loss.

    The loss of a global batch is the mean of its terms, for instance of its target
    tokens. Every term is in one microbatch, and which one does not change it.

    Attributes:
        name: Value of the setting `objective` of a job.
        settings: Its settings, by name; a job gives them in `objective_args`.
        check: Raises a ConfigError if the values of all settings do not go together.
        kinds: Kinds of the records that it learns from; empty: all that hold no
            preferences.
        needs_reference: Whether samples need their `reference_logp`. If one has none,
            `losses` and `metrics` find it in the input `reference_nll`: the negative
            log likelihoods of the rows by the reference, which are 0 if no sample of
            the microbatch lacks it.
        group_size: Number of consecutive samples that a term may depend on. They make a
            group, such as a chosen and a rejected answer: the unit of a job's batch
            size, of its order, and of packing.
        input_names: Names of the inputs of a row.
        widths: Number of values of the inputs that have several for each row.
        num_terms: Number of terms of the loss of samples, which are whole groups; of
            weighted terms, the sum of their weights.
        part_sizes: For each part of the loss or of metrics that is a mean over
            something else than terms, the number of elements in samples.
        row_inputs: Makes the inputs of the rows of a group, float32, one sample after
            another.
        is_target: Which rows need the likelihood of their next token.
        soft_labels: Names of the inputs that say what its target rows predict: several
            tokens, their shares, and a factor of the logits. The likelihood of a row is
            then that of `jaxlora.modules.loss.SoftLabels`. None: the next token.
        losses: The loss of each row, of which the sum is taken: from the negative log
            likelihoods in nats (0 in rows that are no targets), the inputs, and the
            number of each row's group in the microbatch (less than the number of rows;
            -1 in padding), which is None if no objective of the run has groups of
            several samples. It is differentiated.
        metric_names: Names of metrics that are reported beside the loss.
        metrics: By name, values of each row, of which sums are taken as of the losses;
            from the same arguments.
        metric_parts: Numbers of the parts that a metric is a mean over, by its name; it
            is not reported if one of them is empty.
        is_scored: Which rows need their score: the product of the last hidden state
            with the score head that its jobs train. `losses` and `metrics` read it as
            the input `score`. None: its jobs have no score head.
        sums_groups: Whether `losses` reads the groups although they are single samples.
        baseline: Defines a number that the losses and metrics of a global batch read as
            the input `baseline` of each row. It is the sum of this objective's losses
            over recombined samples, of the prompt of one sample and the completion of
            another, with the weights before the optimizer step, without dropout and
            without a gradient. The name and the other inputs are those of the
            objective.
        needs_baseline: Whether it is needed with some values of the settings.
    """

    name: str
    settings: Mapping[str, ObjectiveSetting] = dataclasses.field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], None] = lambda settings: None
    kinds: tuple[str, ...] = ()
    needs_reference: bool = False
    group_size: int = 1
    input_names: tuple[str, ...]
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    num_terms: Callable[[Sequence[TokenizedSample]], float]
    part_sizes: Callable[[Sequence[TokenizedSample]], tuple[int, ...]] = (
        lambda samples: ()
    )
    row_inputs: Callable[[Sequence[TokenizedSample], Terms], dict[str, np.ndarray]]
    is_target: Callable[[RowInputs], Bool[Array, " T"]]
    soft_labels: tuple[str, str, str] | None = None
    losses: Callable[
        [Float[Array, " T"], RowInputs, Int[Array, " T"] | None], Float[Array, " T"]
    ]
    metric_names: tuple[str, ...] = ()
    metrics: Callable[
        [Float[Array, " T"], RowInputs, Int[Array, " T"] | None],
        dict[str, Float[Array, " T"]],
    ] = lambda nll, inputs, groups: {}
    metric_parts: Mapping[str, tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )
    is_scored: Callable[[RowInputs], Bool[Array, " T"]] | None = None
    sums_groups: bool = False
    baseline: "Objective | None" = None
    needs_baseline: Callable[[Mapping[str, Any]], bool] = lambda settings: True

    @property
    def has_score(self) -> bool:
        """Whether its jobs train a score head."""
        return self.is_scored is not None

    def settings_of(self, args: Mapping[str, float | str]) -> dict[str, float | str]:
        """Returns the values of all settings, of which a job gives some.

        Raises:
            ConfigError: There is no such setting, it has no such value, or two do not
                go together.
        """
        for name, value in args.items():
            if name not in self.settings:
                known = ", ".join(self.settings)
                has = f"which has {known}" if known else "which has none"
                raise ConfigError(
                    f"objective_args: {name!r} is no setting of {self.name}, {has}."
                )
            self.settings[name].check(name, value)
        defaults = {name: one.default for name, one in self.settings.items()}
        self.check(defaults | dict(args))
        return defaults | dict(args)


# Settings of an objective that compares with a reference: what it is, and whether its
# log-probabilities are computed once and kept, or in each step.
REFERENCE_SETTINGS: Mapping[str, ObjectiveSetting] = {
    "reference": ObjectiveSetting(
        default="base", choices=("base", "start"), takes_folder=True
    ),
    "reference_logps": ObjectiveSetting(
        default="auto", choices=("auto", "kept", "in_step")
    ),
}


def next_token_targets(sample: TokenizedSample) -> Bool[np.ndarray, " T"]:
    """Whether the token after each token is a target; false for the last one."""
    following = np.zeros_like(sample.is_target)
    following[:-1] = sample.is_target[1:]
    return following


def target_weight(samples: Sequence[TokenizedSample]) -> float:
    """Returns the sum of the weights of the target tokens of samples."""
    return sum(sample.sum_of_weights for sample in samples)


def token_weights(sample: TokenizedSample, weight: float) -> np.ndarray:
    """Returns the weight of each row's loss; that of a plain token is given."""
    weights = next_token_targets(sample) * np.float32(weight)
    if sample.weights is not None:
        weights *= np.append(sample.weights[1:], np.float32(0))
    return weights
