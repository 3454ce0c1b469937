"""The parts of an objective, which defines a job's loss, and what several use."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import pydantic
from jaxtyping import Array, Bool, Float, Int

from jaxlora.config.strict import StrictModel, check_number, types_of
from jaxlora.errors import ConfigError
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.problems import UNKNOWN, format_errors

# Inputs of the rows of a microbatch, by name; 0 in rows of other objectives. Some have
# several values for each row, T C.
RowInputs = dict[str, Float[Array, "T ..."]]
Rows = Float[Array, " T"]
Groups = Int[Array, " T"] | None
Samples = Sequence[TokenizedSample]

# A difference of rewards is a tie if float32 may have made it: if it is at most so many
# times its relative precision, 2^-23, of the numbers that it is made of. Where samples
# are packed in another way, sums over a few hundred tokens differ by about one.
_ROUNDINGS = 8


class ObjectiveSettings(StrictModel):
    """The settings of an objective: a subclass has a field for each, with a default.

    A job gives them in `objective_args`. Unknown names, and values that the annotation
    of a field does not allow, are refused.
    """

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any, info: Any) -> Any:
        """Refuses a number in quotes, which pydantic would convert."""
        types = types_of(cls.model_fields[info.field_name].annotation)
        is_number = types & {int, float} and str not in types
        return check_number(value) if is_number else value


def _check_reference(reference: str) -> str:
    if not reference:
        raise ValueError("must be one of base, start or a folder")
    return reference


class ReferenceSettings(ObjectiveSettings):
    """The settings of an objective that compares with a reference.

    Attributes:
        reference: `base`, `start`, or the folder of an adapter.
        reference_logps: Whether its log-probabilities are computed once and kept, or in
            each step.
    """

    reference: Annotated[str, pydantic.AfterValidator(_check_reference)] = "base"
    reference_logps: Literal["auto", "kept", "in_step"] = "auto"


def reference_of(settings: Any) -> str | None:
    """Returns what an objective compares with; None: with nothing."""
    return settings.reference if isinstance(settings, ReferenceSettings) else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Weights of the terms of a global batch's loss.

    Attributes:
        weight: Weight of a term: the reciprocal of the number of terms of the global
            batch, or 1 for a sum.
        part_weights: For each part of the loss or of metrics that is a mean over
            something else than terms, the weight of an element: 1 divided by the number
            of elements, or by their mean number in a term for a sum.
        settings: The objective's settings, of its own class; None: it has none.
        is_reference: Whether the adapter gives the probabilities of the reference, but
            for rounding, as before its first step.
    """

    weight: float
    part_weights: tuple[float, ...] = ()
    settings: Any = None
    is_reference: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The definition of a job's loss.

    The loss of a global batch is the mean of its terms, for instance of its target
    tokens. Every term is in one microbatch, and which one does not change it.

    Attributes:
        name: Value of the setting `objective` of a job.
        settings: The class of its settings, which a job gives in `objective_args`. With
            a subclass of `ReferenceSettings`, samples come with their `reference_logp`.
            If a sample has none, `losses` and `metrics` find it in the input
            `reference_nll`: the negative log likelihoods of the rows by the reference,
            which are 0 if no sample of the microbatch lacks it.
        kinds: Kinds of the records that it learns from; empty: all that hold no
            preferences.
        reads_margin: Whether records may have a margin, which is the `value` of the
            first sample of a group.
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
        is_read: Which rows have a likelihood that is a result beside the loss, in
            training, too. That of rows that are no targets has no gradient. None: only
            evaluations have such results, of their targets.
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
        fingerprint: Tells its code apart from that of others in the keys of programs
            that are kept; empty for the code of this package.
    """

    name: str
    settings: type[ObjectiveSettings] = ObjectiveSettings
    kinds: tuple[str, ...] = ()
    reads_margin: bool = False
    group_size: int = 1
    input_names: tuple[str, ...]
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    num_terms: Callable[[Samples], float]
    part_sizes: Callable[[Samples], tuple[int, ...]] = lambda samples: ()
    row_inputs: Callable[[Samples, Terms], dict[str, np.ndarray]]
    is_target: Callable[[RowInputs], Bool[Array, " T"]]
    is_read: Callable[[RowInputs], Bool[Array, " T"]] | None = None
    soft_labels: tuple[str, str, str] | None = None
    losses: Callable[[Rows, RowInputs, Groups], Rows]
    metric_names: tuple[str, ...] = ()
    metrics: Callable[[Rows, RowInputs, Groups], dict[str, Rows]] = (
        lambda nll, inputs, groups: {}
    )
    metric_parts: Mapping[str, tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )
    is_scored: Callable[[RowInputs], Bool[Array, " T"]] | None = None
    sums_groups: bool = False
    baseline: "Objective | None" = None
    needs_baseline: Callable[[Any], bool] = lambda settings: True
    fingerprint: str = ""

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with a reference."""
        return issubclass(self.settings, ReferenceSettings)

    @property
    def has_score(self) -> bool:
        """Whether its jobs train a score head."""
        return self.is_scored is not None

    def settings_of(self, args: Mapping[str, Any]) -> Any:
        """Returns the values of all settings, of which a job gives some.

        Args:
            args: Values by name, which are checked here.

        Raises:
            ConfigError: There is no such setting, it has no such value, or two do not
                go together.
        """
        try:
            return self.settings.model_validate(dict(args))
        except pydantic.ValidationError as error:
            lines = format_errors(error, "objective_args")
            lines = lines.replace("objective_args: ", "objective_args.")
            if any(one["type"] == UNKNOWN for one in error.errors()):
                known = ", ".join(self.settings.model_fields) or "none"
                lines += f"\nSettings of {self.name}: {known}."
            raise ConfigError(lines) from None

    def input_shapes(self, num_rows: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each input of so many rows, by name."""
        widths = {name: (self.widths[name],) for name in self.widths}
        return {name: (num_rows, *widths.get(name, ())) for name in self.input_names}


# ---- of samples, on the host ---------------------------------------------------------


def next_token_targets(sample: TokenizedSample) -> Bool[np.ndarray, " T"]:
    """Whether the token after each token is a target; false for the last one."""
    following = np.zeros_like(sample.is_target)
    following[:-1] = sample.is_target[1:]
    return following


def target_weight(samples: Samples) -> float:
    """Returns the sum of the weights of the target tokens of samples."""
    return sum(sample.sum_of_weights for sample in samples)


def token_weights(sample: TokenizedSample, weight: float) -> np.ndarray:
    """Returns the weight of each row's loss; that of a plain token is given."""
    weights = next_token_targets(sample) * np.float32(weight)
    if sample.weights is not None:
        weights *= np.append(sample.weights[1:], np.float32(0))
    return weights


# ---- of rows, on the devices ---------------------------------------------------------


def has_weight(inputs: RowInputs) -> Bool[Array, " T"]:
    """Which rows have an input `weight`; it is 0 in padding and in other jobs' rows."""
    return inputs["weight"] > 0


def weighted(values: Rows, inputs: RowInputs) -> Rows:
    """Multiplies values with the input `weight`; rows without one give exactly 0."""
    return jnp.where(has_weight(inputs), inputs["weight"] * values, 0.0)


def group_sums(values: Rows, groups: Groups) -> Rows:
    """Sums over each row and the later rows of its group; the first row has them all.

    The rows of a group are adjacent. The order of the additions depends only on the
    position in the group, so that the sum has the same bits anywhere in a microbatch,
    and each time: a scatter on a GPU would add in any order.
    """
    assert groups is not None, "an objective of the run has groups"
    step = 1
    while step < len(values):
        is_same = groups[step:] == groups[:-step]
        later = jnp.where(is_same, values[step:], 0.0)
        values = values + jnp.concatenate([later, jnp.zeros(step, values.dtype)])
        step *= 2
    return values


def is_preferred(chosen: Rows, rejected: Rows, size: Rows) -> Rows:
    """Whether the chosen answer has the higher reward: 1 or 0, which a tie has.

    Args:
        chosen: Its reward.
        rejected: Reward of the other one.
        size: Sum of the magnitudes of the numbers whose differences are rewards.
    """
    rounding = _ROUNDINGS * jnp.finfo(size.dtype).eps * size
    return jnp.where(chosen - rejected > rounding, 1.0, 0.0)
