"""A run on a mesh with random weights, like the one in the trainer."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxlora.bench.mesh.cases import Case, Window, make_jobs
from jaxlora.bench.scheduler.lengths import lengths
from jaxlora.costs.work import head_work, layer_work
from jaxlora.errors import JaxloraError
from jaxlora.models.spec import DecoderSpec
from jaxlora.profile.pass_times import Probe, make_probe
from jaxlora.profile.tokens import TARGET_SHARE, equal_shares, fill
from jaxlora.profile.training import Training
from jaxlora.train.execute.executor import Outcomes
from jaxlora.train.execute.run_programs import RunPrograms
from jaxlora.train.execute.staged_executor import StagedExecutor
from jaxlora.train.plan.stream_plan import FixedTicks


class MeshTraining(Training):
    """The weights, the slots and the programs of a case.

    Attributes:
        case: What is measured.
    """

    def __init__(self, case: Case):
        """Makes weights and adapters on the devices; nothing is compiled yet.

        Raises:
            ConfigError: The run cannot be trained here.
        """
        super().__init__(case.plan(), make_jobs(case, max(case.adapters), 1))
        self.case = case

    def compile(self) -> float:
        """Compiles the passes of all stages at the same time; returns the seconds."""
        began, limits = time.perf_counter(), self.case.limits
        args = self.layout, self.slots, limits
        RunPrograms.start(*args, evaluates=False).compiled_passes()
        return time.perf_counter() - began

    def step_memory(self) -> Any:
        """Returns the memory of the training step on each device, as XLA says."""
        (stage,), (table,) = self.layout.stages, self.slots.tables
        args = self.bases[0], table.state, table.settings, self.case.limits
        return stage.steps.prepare_passes(*args).compiled().last.memory_analysis()

    def probe(self, num_tokens: int, longest: int) -> Probe:
        """Makes a microbatch that all jobs share, with lengths like theirs.

        Args:
            num_tokens: Its tokens.
            longest: Largest length of a sample.
        """
        case = self.case

        def draw(slot: int, total: int, rng: np.random.Generator) -> list[int]:
            source = case.data_sets[slot]
            return fill(total, longest, lambda: lengths(source, 1, rng).item())

        totals = equal_shares(num_tokens, max(case.adapters), case.block_tokens)
        return make_probe(self, case.limits, totals, draw)

    def probes(self) -> list[Probe]:
        """Makes microbatches of different lengths and fills, which determine a fit."""
        case, longest = self.case, self.case.longest
        half = case.limits.padded(case.microbatch_tokens // 2)
        sizes = [(case.microbatch_tokens, longest // cut) for cut in (1, 2, 4)]
        return [self.probe(*size) for size in (*sizes, (half, longest))]

    def seconds(self, window: Window) -> float:
        """Runs a window; returns the time until all is done.

        The devices have nothing to do before and after. Everything that the trainer's
        host does in a window is included: packing, uploads, and reading results.

        Args:
            window: The window.

        Raises:
            JaxloraError: A gradient is not finite, so that times mean nothing.
        """
        args = self.layout, self.params, self.slots, self.case.limits
        executor = StagedExecutor(*args)
        executor.wait()
        began = time.perf_counter()
        num_lanes = self.layout.num_lanes
        ticks = FixedTicks(window.schedule, num_lanes)
        outcomes = list(executor.run(ticks, window.jobs))
        executor.wait()
        elapsed = time.perf_counter() - began
        _check_finite(outcomes)
        return elapsed


def flops_per_token(spec: DecoderSpec, mean_keys: float) -> float:
    """Counts the operations of products, forward and backward, for one token.

    What `remat` computes again is not counted.

    Args:
        spec: The decoder.
        mean_keys: Mean length of the sample that a token is in.
    """
    options = dataclasses.replace(spec.options, remat="none")
    spec = dataclasses.replace(spec, options=options)
    parts = [layer_work(spec, n, mean_keys) for n in range(spec.config.num_layers)]
    parts.append(head_work(spec, TARGET_SHARE))
    return sum(part.forward.flops + part.backward.flops for part in parts)


def _check_finite(items: Iterable[Outcomes]) -> None:
    for item in items:
        for slot, outcome in item.steps.items():
            if not outcome.is_finite:
                raise JaxloraError(
                    f"the gradients of slot {slot} are not finite, so that times mean "
                    "nothing. Use another model or dtype."
                )
