"""Proposes a capacity and a number of stages: profile, then plan and simulate each."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from jaxlora.scheduler import calibrate, joint
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.plan import Packer, plan
from jaxlora.scheduler.types import Limits, Pipeline, Sample, check_fits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A measured step of the whole model on one device."""

    forward_seconds: float
    backward_seconds: float
    peak_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What the measured steps say of steps that were not measured."""

    forward: calibrate.TimeFit
    backward: calibrate.TimeFit
    memory: calibrate.MemoryFit

    def cost(self, num_stages: int, *, last_stage: float = 1.0) -> CostModel:
        """The model cut into equal stages, but for a dearer last one."""
        return CostModel.uniform(
            num_stages,
            forward=self.forward.cost * (1 / num_stages),
            backward=self.backward.cost * (1 / num_stages),
            last_stage=last_stage,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One capacity on one number of stages.

    Attributes:
        capacity: Tokens of a microbatch.
        num_stages: Pipeline stages, a device each.
        makespan: Simulated seconds of all samples.
        bubble: Share of the devices' time in which they wait.
        peak_bytes: Estimated memory of the fullest device.
        fits: Whether that is within the limit.
    """

    capacity: int
    num_stages: int
    makespan: float
    bubble: float
    peak_bytes: float
    fits: bool

    @property
    def device_seconds(self) -> float:
        """What is made small: devices beyond the stages run further copies."""
        return self.makespan * self.num_stages


def profile(
    run: Callable[[int, int], Step],
    *,
    capacities: Sequence[int],
    lengths: Sequence[int],
) -> Profile:
    """Measures steps of fixed-length samples and fits time and memory to them.

    Args:
        run: Given a number of samples and their length, runs one step and says what
            it took: a real step, a simulator, or a table.
        capacities: Tokens of a step; as many samples of each length as fit.
        lengths: Sample lengths.

    Raises:
        ValueError: Too few different shapes.
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
    """Plans and simulates every capacity on every number of stages, best first.

    Capacities under the longest sample are left out. What does not fit in memory stands
    last: LoRAFusion's Figure 8 with all candidates in place of a search.

    Args:
        samples: What is to run, or a part of it that stands for the rest.
        measured: Costs and memory.
        capacities: Candidates, in tokens.
        num_stages: Candidates.
        block_tokens: Block size of the limits.
        memory_bytes: Of a device.
        last_stage: Time of the last stage over that of another one.
        executor: Makes the pipeline of a number of stages.
        packer: Makes the schedules.

    Raises:
        ValueError: No candidate holds the longest sample and fits in memory.
    """
    usable = [c for c in capacities if _holds(samples, c, block_tokens)]
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
        least = min((t.peak_bytes for t in trials), default=None)
        longest = max((s.num_tokens for s in samples), default=0)
        raise ValueError(
            f"no capacity of {list(capacities)} on {list(num_stages)} stages holds the "
            f"longest sample, {longest} tokens, and fits in {memory_bytes:.3g} bytes "
            f"(the least need is {least}). Add smaller capacities, more stages, or "
            "shorten samples."
        )
    return sorted(
        trials,
        key=lambda t: (not t.fits, t.device_seconds, t.num_stages, t.capacity),
    )


def _holds(samples: Sequence[Sample], capacity: int, block_tokens: int) -> bool:
    try:
        check_fits(samples, Limits(capacity=capacity, block_tokens=block_tokens))
    except ValueError:
        return False
    return True


def _peak_bytes(
    measured: Profile, peak_tokens: tuple[int, ...], samples: Sequence[Sample]
) -> float:
    """Of the fullest device: its share of the model, and what it has in flight."""
    memory = measured.memory.model
    # Squares in flight, as for tokens of mean samples.
    tokens = sum(s.num_tokens for s in samples)
    squares = sum(s.num_tokens**2 for s in samples)
    a_token = memory.per_token + memory.per_square * squares / max(1, tokens)
    return (memory.base + a_token * max(peak_tokens, default=0)) / len(peak_tokens)
