"""A step of the base alone, without adapters."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.data.pack import PackedBatch
from jaxlora.memory.mesh import MeshStages
from jaxlora.models.forward import job_losses, training_options
from jaxlora.profile.training import Training
from jaxlora.train.plan.run_plan import RunPlan


class BaseAlone(Training):
    """Forward passes, and backward passes down to the first norm.

    The loss of all jobs goes to the only slot, which has no adapter. If jobs had
    gradients of zero, products would draw less power.
    """

    def __init__(self, plan: RunPlan):
        """Makes the weights of a run on one device."""
        assert plan.spec.slots is not None
        slots = dataclasses.replace(plan.spec.slots, num_slots=1)
        spec = dataclasses.replace(plan.spec, slots=slots, adapted=())
        stages = MeshStages.of(plan.config, spec)
        super().__init__(dataclasses.replace(plan, stages=stages), ())
        paths = (path for path in self.params if path.endswith("attention_norm.scale"))
        self._first = next(paths)
        # These are the options with which the training step is compiled.
        options = training_options(spec)
        self._gradient = jax.jit(self._gradient_of_norm, compiler_options=options)

    def _gradient_of_norm(
        self, base: Mapping[str, jax.Array], batch: PackedBatch
    ) -> jax.Array:
        owner = jnp.minimum(batch.block_adapter, 0)
        batch = dataclasses.replace(batch, block_adapter=owner)
        (table,) = self.slots.tables

        def loss(scale):
            own = {**base, self._first: scale}
            return job_losses(
                self.spec, own, {}, table.settings, batch, None
            ).loss.sum()

        return jax.grad(loss)(base[self._first])

    def start(self, batches: Sequence[PackedBatch]) -> Callable[[], Any]:
        """Queues the passes; returns a function that waits for their gradients."""
        made = [self._gradient(self.params, batch) for batch in batches]
        return functools.partial(jax.block_until_ready, made)

    def is_finite(self, made: Any) -> bool:
        """Whether the gradients of a step are."""
        return all(bool(jnp.isfinite(gradient).all()) for gradient in made)

    def lowered(self, batch: PackedBatch) -> dict[str, jax.stages.Lowered]:
        """Returns the program, not yet compiled."""
        return {"accumulate": self._gradient.lower(self.params, batch)}
