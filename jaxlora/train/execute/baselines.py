"""Baselines: numbers of global batches that their losses need before a gradient."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxlora.adapters.optimizers.state import Tables
from jaxlora.data.pack import JobBatch
from jaxlora.models.forward import JobLosses
from jaxlora.plan.memory.inputs import baseline_shape
from jaxlora.sharding.global_arrays import put
from jaxlora.train.execute.layout import Stage


class Baselines:
    """Computes the baselines of `jaxlora.data.objective.Objective`.

    Baselines are never read by the host, which goes on queueing work.

    Attributes:
        none: Baselines of slots without any; None: no objective of the run has one.
    """

    def __init__(
        self,
        last: Stage,
        evaluate: Callable[
            [Mapping[int, JobBatch], jax.Array | None, Sequence[Tables]],
            Iterator[JobLosses],
        ],
    ):
        """Queues nothing.

        Args:
            last: The last stage.
            evaluate: Queues the evaluation of batches, given baselines and the weights
                of each stage; yields the losses of each tick.
        """
        self._add, self._evaluate = last.steps.add_baseline, evaluate
        self.none: jax.Array | None = None
        shape = baseline_shape(last.spec, last.placement)
        if shape is not None:
            self.none = put(np.zeros(shape.shape, shape.dtype), shape.sharding)

    def add(
        self,
        baseline: jax.Array | None,
        batches: Mapping[int, JobBatch],
        weights: Sequence[Tables],
    ) -> jax.Array | None:
        """Queues the computation of new baselines of some slots.

        Args:
            baseline: The baselines of all slots before.
            batches: The samples of each new baseline, by slot.
            weights: Weights of each stage.

        Returns:
            The baselines of all slots.
        """
        if not batches:
            return baseline
        assert baseline is not None, "an objective of the run has baselines"
        is_new = np.isin(np.arange(len(baseline)), list(batches))
        for losses in self._evaluate(batches, baseline, weights):
            baseline = self._add(baseline, losses.loss, is_new)
            is_new = np.zeros_like(is_new)
        return baseline
