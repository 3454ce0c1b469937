"""Predicts what a planned run needs: memory, and time alone and together."""

import dataclasses
from collections.abc import Sequence

from jaxlora.config import RunConfig
from jaxlora.costs.device_speed import UNKNOWN_DEVICE
from jaxlora.memory.device import device_memory
from jaxlora.memory.fitting import estimate_at
from jaxlora.memory.mesh import MeshStages
from jaxlora.memory.need import MemoryNeed
from jaxlora.memory.refusal import refusal
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import Lanes, Schedule
from jaxlora.train.auto_mesh.machine import this_machine
from jaxlora.train.auto_mesh.predict import window_seconds
from jaxlora.train.settle_run import SettledRun


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTime:
    """Predicted time of training, without start-up, evaluations and checkpoints.

    Attributes:
        together: Seconds of the run.
        apart: Seconds of its jobs one after the other, each alone on the same mesh.
    """

    together: float
    apart: float

    @property
    def hours(self) -> float:
        """Hours of the run."""
        return self.together / 3600


def memory_need(settled: SettledRun, lanes: Lanes) -> MemoryNeed:
    """Estimates the memory of a run.

    Args:
        settled: The run.
        lanes: Its lanes.
    """
    config = settled.config
    stages = _stages(config, settled.spec, lanes)
    tokens = config.limits.capacity
    found = estimate_at(stages, config.block_tokens, tokens)
    available = device_memory(0, stages.sizes.num_devices)
    return MemoryNeed.of(stages, found, tokens, available)


def check_fits(settled: SettledRun, lanes: Lanes) -> None:
    """Refuses a run that is estimated not to fit.

    Raises:
        DoesNotFitError: It does not.
    """
    need = memory_need(settled, lanes)
    if need.fits:
        return
    config, available = settled.config, need.available
    assert available is not None
    stages = _stages(config, settled.spec, lanes)
    found = estimate_at(stages, config.block_tokens, config.limits.capacity)
    raise refusal(config, stages, settled.bounds, found, available)


def run_seconds(
    config: RunConfig, spec: DecoderSpec, lanes: Lanes, schedules: Sequence[Schedule]
) -> float | None:
    """Predicts the time of windows one after the other; None on an unknown device.

    Args:
        config: The run, with a mesh, a capacity and a `remat`.
        spec: The whole decoder.
        lanes: Lanes of the run.
        schedules: The windows.
    """
    machine = this_machine()
    if machine.speed is UNKNOWN_DEVICE:
        return None
    stages, links = _stages(config, spec, lanes), machine.links(config.network_gbits)
    return sum(window_seconds(stages, lanes, s, links) for s in schedules)


def _stages(config: RunConfig, spec: DecoderSpec, lanes: Lanes) -> MeshStages:
    spec = spec.with_remat(config.least_remat)
    return MeshStages.of(config, spec, is_pinned=lanes.pinned)
