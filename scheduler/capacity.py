"""Proposes a capacity and a number of pipeline stages.

It profiles a few steps, then plans and simulates every candidate.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from jaxlora.scheduler import calibrate, joint
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.plan import Packer, plan
from jaxlora.scheduler.types import Limits, Pipeline, Sample, check_fits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A measured training step of the whole model on one device."""

    forward_seconds: float
    backward_seconds: float
    peak_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Time and memory models that are fitted to measured steps."""

    forward: calibrate.TimeFit
    backward: calibrate.TimeFit
    memory: calibrate.MemoryFit

    def cost(self, num_stages: int, *, last_stage: float = 1.0) -> CostModel:
        """Returns the costs of the model split into stages.

        Args:
            num_stages: Number of stages, which are equal except for the last one.
            last_stage: Time of the last stage relative to the others.
        """
        return CostModel.uniform(
            num_stages,
            forward=self.forward.cost * (1 / num_stages),
            backward=self.backward.cost * (1 / num_stages),
            last_stage=last_stage,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The simulated result of one candidate.

    Attributes:
        capacity: Tokens of a microbatch.
        num_stages: Number of pipeline stages, each on its own device.
        makespan: Simulated time of all samples in seconds.
        bubble: Fraction of the time of all devices in which they are idle.
        peak_bytes: Estimated memory of the device that needs the most.
        fits: Whether `peak_bytes` is within the limit.
    """

    capacity: int
    num_stages: int
    makespan: float
    bubble: float
    peak_bytes: float
    fits: bool

    @property
    def device_seconds(self) -> float:
        """Device time of the run, which is minimized.

        Makespans would not be comparable, because devices that a candidate does not use
        can run more copies of the pipeline.
        """
        return self.makespan * self.num_stages


def profile(
    run: Callable[[int, int], Step],
    *,
    capacities: Sequence[int],
    lengths: Sequence[int],
) -> Profile:
    """Measures steps of fixed-length samples and fits time and memory to them.

    Args:
        run: Runs one step with the given number of samples and their length, and
            returns the measurement. It may also be a simulator or a table.
        capacities: Tokens of a step. Each step has as many samples of a length as fit.
        lengths: Sample lengths.

    Raises:
        ValueError: There are too few different shapes to fit the models.
    """
    forward, backward, memory = [], [], []
    for tokens, length in itertools.product(capacities, lengths):
        num = tokens // length
        if not num:
            continue
        step = run(num, length)
        size = dict(tokens=num * length, squares=num * length**2)
        forward.append(calibrate.TimePoint(**size, seconds=step.forward_seconds))
        backward.append(calibrate.TimePoint(**size, seconds=step.backward_seconds))
        memory.append(
            calibrate.MemoryPoint(
                batch_size=num, length=length, num_bytes=step.peak_bytes
            )
        )
    return Profile(
        forward=calibrate.fit_time(forward),
        backward=calibrate.fit_time(backward),
        memory=calibrate.fit_memory(memory),
    )


def propose(
    samples: Sequence[Sample],
    measured: Profile,
    *,
    capacities: Sequence[int],
    num_stages: Sequence[int],
    block_tokens: int,
    memory_bytes: float,
    last_stage: float = 1.0,
    executor: Callable[[int], Pipeline] = Pipeline.one_f_one_b,
    packer: Packer = joint.pack,
) -> list[Trial]:
    """Plans and simulates every capacity with every number of stages.

    Capacities below the longest sample are left out. This is Figure 8 of LoRAFusion
    (https://arxiv.org/abs/2510.00206), with all candidates instead of a search.

    Args:
        samples: The samples to run, or a representative part of them.
        measured: Time and memory models.
        capacities: Candidate capacities, in tokens.
        num_stages: Candidate numbers of stages.
        block_tokens: Block size of the limits.
        memory_bytes: Memory of a device in bytes.
        last_stage: Time of the last stage relative to the others.
        executor: Makes the pipeline for a number of stages.
        packer: Makes the schedules.

    Returns:
        The candidates in order of device time; those that do not fit in memory come
        last.

    Raises:
        ValueError: No candidate holds the longest sample and fits in memory.
    """
    usable = [c for c in capacities if _all_fit(samples, c, block_tokens)]
    trials = []
    for capacity, stages in itertools.product(usable, num_stages):
        limits = Limits(capacity=capacity, block_tokens=block_tokens)
        cost = measured.cost(stages, last_stage=last_stage)
        ran = plan(samples, limits, executor(stages), cost, packer=packer)
        peak = _peak_bytes(measured, ran.simulation.peak_tokens, samples)
        trials.append(
            Trial(
                capacity=capacity,
                num_stages=stages,
                makespan=ran.simulation.makespan,
                bubble=ran.simulation.bubble,
                peak_bytes=peak,
                fits=peak <= memory_bytes,
            )
        )
    if not any(t.fits for t in trials):
        smallest = min((t.peak_bytes for t in trials), default=None)
        longest = max((s.num_tokens for s in samples), default=0)
        raise ValueError(
            f"none of the capacities {list(capacities)} on {list(num_stages)} stages "
            f"holds the longest sample, {longest} tokens, and fits in "
            f"{memory_bytes:.3g} bytes (the smallest estimate is {smallest}). Add "
            "smaller capacities or more stages, or shorten the samples."
        )
    return sorted(
        trials,
        key=lambda t: (not t.fits, t.device_seconds, t.num_stages, t.capacity),
    )


def _all_fit(samples: Sequence[Sample], capacity: int, block_tokens: int) -> bool:
    try:
        check_fits(samples, Limits(capacity=capacity, block_tokens=block_tokens))
    except ValueError:
        return False
    return True


def _peak_bytes(
    measured: Profile, peak_tokens: tuple[int, ...], samples: Sequence[Sample]
) -> float:
    """Estimates the memory of the device that needs the most.

    It holds its part of the model and the activations of its microbatches in flight.
    """
    memory = measured.memory.model
    # The squared lengths in flight are estimated from the mean over all samples.
    tokens = sum(s.num_tokens for s in samples)
    squares = sum(s.num_tokens**2 for s in samples)
    per_token = memory.per_token + memory.per_square * squares / max(1, tokens)
    return (memory.base + per_token * max(peak_tokens, default=0)) / len(peak_tokens)
