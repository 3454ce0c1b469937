"""The loss of a job's samples from their log-probabilities, computed on the host.

The engine knows losses of single positions. An objective of jobs may combine positions,
such as those of a pair. Its loss is a function of the log-probabilities alone, so a
forward pass gives them, the derivative by each is computed here, and the negative of it
is the weight of that position in a cross entropy, which has the same gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.data.pack import JobBatch
from jaxlora.errors import ConfigError
from jaxlora.objectives.base import Objective
from jaxlora.objectives.next_token import NEXT_TOKEN
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.objectives.table import OBJECTIVES, has_baseline
from jaxlora.session.datum import Datum

Logprobs = Sequence[np.ndarray]  # of each datum

_FEWEST_ROWS = 64  # of a program; larger ones have twice as many, and so on


def check_objective(objective: Objective) -> None:
    """Checks that a loss follows from log-probabilities of given tokens.

    Raises:
        ConfigError: It does not.
    """
    reason = None
    if objective.has_score:
        reason = "trains a score head"
    elif objective.soft_labels is not None:
        reason = "compares with the probabilities of several tokens at a position"
    if reason is not None:
        raise ConfigError(
            f"objective={objective.name!r} {reason}, and a server trains from "
            "log-probabilities of the tokens of the data. Train it with jaxlora train."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BatchLoss:
    """The loss of some groups of a batch.

    Attributes:
        batch: The batch.
        groups: The groups.
        baseline: The batch's baseline, if its objective has one.
    """

    batch: JobBatch
    groups: range
    baseline: float = 0.0

    @staticmethod
    def of(batch: JobBatch, baseline: float = 0.0) -> "BatchLoss":
        """Returns the loss of a whole batch."""
        return BatchLoss(batch=batch, groups=range(batch.num_groups), baseline=baseline)

    def split(self, most_tokens: int) -> "list[BatchLoss]":
        """Returns the losses of parts with at most so many tokens, if a group has."""
        lengths = [
            sum(len(sample.token_ids) for sample in self.batch.group(i))
            for i in self.groups
        ]
        starts, total = [self.groups.start], 0
        for i, length in zip(self.groups, lengths, strict=True):
            if total and total + length > most_tokens:
                starts.append(i)
                total = 0
            total += length
        ends = [*starts[1:], self.groups.stop]
        return [
            dataclasses.replace(self, groups=range(start, end))
            for start, end in zip(starts, ends, strict=True)
        ]

    # ---- datums ----------------------------------------------------------------------

    @property
    def is_linear(self) -> bool:
        """Whether the weights of positions do not depend on log-probabilities."""
        return self.batch.objective.losses is NEXT_TOKEN.losses

    @property
    def data(self) -> tuple[Datum, ...]:
        """The samples as datums, whose positions all have the weight 0."""
        return self.weighted([np.zeros(len(s.token_ids) - 1) for s in self._samples])

    def weighted(self, weights: Sequence[np.ndarray]) -> tuple[Datum, ...]:
        """Returns the samples as datums with the weights of their positions."""
        return tuple(
            Datum(
                tokens=sample.token_ids[:-1],
                target_tokens=sample.token_ids[1:],
                weights=own,
            )
            for sample, own in zip(self._samples, weights, strict=True)
        )

    @functools.cached_property
    def _samples(self) -> list[TokenizedSample]:
        """The samples that predict a token."""
        every = [sample for i in self.groups for sample in self.batch.group(i)]
        return [sample for sample in every if len(sample.token_ids) > 1]

    # ---- values ----------------------------------------------------------------------

    def weights(self, logprobs: Logprobs | None = None) -> list[np.ndarray]:
        """Returns the weights of a cross entropy with the same gradient.

        Args:
            logprobs: The log-probabilities of each datum; None: none are needed.
        """
        if self.is_linear:
            return [
                self._inputs(i)["weight"][:-1]
                for i in self.groups
                if len(self.batch.group(i)[0].token_ids) > 1
            ]
        assert logprobs is not None
        gradient = self._run(logprobs)[1]
        return [gradient[place] for place in self._places]

    def values(self, logprobs: Logprobs) -> dict[str, float]:
        """Returns the sums of the loss, as `loss`, and of the objective's metrics."""
        return {k: float(x) for k, x in self._run(logprobs)[0].items()}

    def _inputs(self, number: int) -> dict[str, np.ndarray]:
        batch = self.batch
        return batch.objective.row_inputs(batch.group(number), batch.terms)

    @functools.cached_property
    def _places(self) -> list[slice]:
        """The rows of each datum; the last token of a sample has a row of its own."""
        samples = [sample for i in self.groups for sample in self.batch.group(i)]
        ends = np.cumsum([len(sample.token_ids) for sample in samples]).tolist()
        return [
            slice(end - len(sample.token_ids), end - 1)
            for end, sample in zip(ends, samples, strict=True)
            if len(sample.token_ids) > 1
        ]

    def _run(self, logprobs: Logprobs) -> tuple[dict[str, Any], np.ndarray]:
        """Returns sums of the loss and metrics, and the gradient by each row's NLL."""
        objective = self.batch.objective
        of_groups = [self._inputs(i) for i in self.groups]
        lengths = [len(next(iter(inputs.values()))) for inputs in of_groups]
        num_rows = _FEWEST_ROWS
        while num_rows < sum(lengths):
            num_rows *= 2

        def rows(parts: Sequence[np.ndarray], fill: float = 0) -> np.ndarray:
            values = np.concatenate(parts)
            out = np.full((num_rows, *values.shape[1:]), fill, np.float32)
            out[: len(values)] = values
            return out

        inputs = {
            name: rows([one[name] for one in of_groups])
            for name in objective.input_names
        }
        if objective.needs_reference:  # it is never computed with the microbatch
            inputs["reference_nll"] = np.zeros(num_rows, np.float32)
        if has_baseline((objective.name,)):  # or it is one
            inputs["baseline"] = np.full(num_rows, self.baseline, np.float32)
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        groups = rows([numbers], -1).astype(np.int32)
        nll = np.zeros(num_rows, np.float32)
        for place, own in zip(self._places, logprobs, strict=True):
            nll[place] = -own
        with jax.default_device(_host()):
            found = _program(objective.name)(nll, inputs, groups)
        return jax.device_get(found)


@functools.cache
def _host() -> jax.Device:
    """Returns the device for this, which is not the one that trains if it can be."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return jax.devices()[0]


@functools.lru_cache(maxsize=32)
def _program(name: str) -> Callable[..., Any]:
    """Returns a program of sums of the loss and metrics, and of the gradient."""
    objective = OBJECTIVES[name]  # a baseline has the losses of its objective

    def sums(nll: Any, inputs: Any, groups: Any) -> Any:
        loss = objective.losses(nll, inputs, groups).sum()
        metrics = objective.metrics(nll, inputs, groups)
        found = {name: values.sum() for name, values in metrics.items()}
        return loss, found | {"loss": loss}

    def run(nll: Any, inputs: Any, groups: Any) -> Any:
        differentiate = jax.value_and_grad(sums, has_aux=True)
        (_, found), gradient = differentiate(nll, inputs, groups)
        return found, gradient

    return jax.jit(run)


def total(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the sums of parts by name."""
    return {name: sum(part[name] for part in parts) for name in parts[0]}
