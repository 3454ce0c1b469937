"""The search of a run whose decoder, bounds and samples are given, without files."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from jaxlora.config import RunConfig
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.mesh.candidates import Search
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.run_plan import RunPlan, laid_out
from jaxlora.scheduler.stream.state import Position


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MadeUp(Search):
    """The choice of what is `auto` in a run of jobs that are alike.

    Attributes:
        spec: The decoder.
        bounds: Bounds of the capacity on every mesh.
    """

    spec: DecoderSpec
    bounds: Bounds

    @property
    def positions(self) -> list[Position]:  # pyrefly: ignore[bad-override]
        return [
            Position(
                job=number,
                owner=number,
                batch=0,
                num_batches=20,
                batch_tokens=sum(job.lengths(0)),
            )
            for number, job in enumerate(self.jobs)
        ]

    def laid_out(self, config: RunConfig, *, stores_more: bool = False) -> RunPlan:
        spec = self.spec.with_remat(config.weakest_remat)
        if (base := spec.options.base_format) is not None:
            stored = base.options.storage_choices()[-1 if stores_more else 0]
            base = dataclasses.replace(base, options=stored)
            options = dataclasses.replace(spec.options, base_format=base)
            spec = dataclasses.replace(spec, options=options)
        bounds = self.bounds
        if config.microbatch_tokens != "auto":
            bounds = dataclasses.replace(bounds, fixed=config.microbatch_tokens)
        config = config.replace(microbatch_tokens=bounds.max_tokens)
        rates = self.machine.rates(spec, config.network_gbits)
        return laid_out(config, self.model, spec, [], bounds, rates)


def search_of(
    config: RunConfig,
    spec: DecoderSpec,
    bounds: Bounds,
    machine: Machine,
    *,
    num_jobs: int = 1,
    samples: Sequence[int] = (400,) * 16,
) -> MadeUp:
    """Returns the search of a run whose batches have samples of these lengths."""
    job: Any = SimpleNamespace(lengths=lambda step: samples)
    base = spec.options.base_format
    model = PlannedModel(
        config=spec.config, dtype=jnp.dtype(spec.options.dtype), base_format=base
    )
    return MadeUp(
        config=config,
        model=model,
        jobs=[job] * num_jobs,
        machine=machine,
        spec=spec,
        bounds=bounds,
    )
