"""The settings of `remat` and `microbatch_tokens` that fit, and the fastest of them."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxlora.config import RunConfig
from jaxlora.costs.gpus import DeviceSpeed
from jaxlora.costs.stages import decoder_seconds
from jaxlora.models.layer import Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels import device
from jaxlora.plan import stages as mesh_stages
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.plan.stages import MeshFootprint, MeshStages
from jaxlora.sharding.mesh_sizes import MeshSizes

# A quarter of a mean sample is free at the end of a microbatch. It would be half of one
# if all samples were equally long, and nothing if lengths of all kinds were at hand.
_FREE_SAMPLES = 0.25

# Share of the memory that an automatic capacity leaves free on several devices. It is
# the error of the estimate, which is within 5 % of what XLA reports for the stages of
# a pipeline. Weights are read for the chosen mesh before its programs are compiled, so
# it cannot be changed if these need more.
_MARGIN = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """One choice of `remat`, with the largest microbatches that fit beside it.

    Attributes:
        stages: Stages of the run, with this `remat`.
        tokens: Capacity of its microbatches.
        found: Estimated memory of the run.
        fits: Whether that is there.
        seconds: Predicted time per token, in the unit of `decoder_seconds`.
    """

    stages: MeshStages
    tokens: int
    found: MeshFootprint
    fits: bool
    seconds: float

    @property
    def remat(self) -> Remat:
        """Part of each layer that is recomputed."""
        return self.stages.spec.options.remat

    def applied(self, config: RunConfig) -> RunConfig:
        """Returns the run with these settings."""
        return config.replace(remat=self.remat, microbatch_tokens=self.tokens)


def find_options(
    config: RunConfig,
    stages: MeshStages,
    bounds: Bounds,
    available: DeviceMemory,
    speed: DeviceSpeed,
) -> tuple[Option, ...]:
    """Estimates the memory and the time of the run for each choice of `remat`.

    A stronger `remat` is left out once a weaker one fits with the largest microbatches
    that can be filled, as it would only take longer.

    Args:
        config: The run.
        stages: Its stages, with any `remat`.
        bounds: Bounds of the capacity, and the choices of an automatic `remat`.
        available: Memory of each device.
        speed: Rates of each device.
    """
    out: list[Option] = []
    for remat in bounds.remats or (stages.spec.options.remat,):
        option = _option(config, stages.with_remat(remat), bounds, available, speed)
        out.append(option)
        if option.fits and option.tokens == bounds.max_tokens:
            break
    return tuple(out)


def _option(
    config: RunConfig,
    stages: MeshStages,
    bounds: Bounds,
    available: DeviceMemory,
    speed: DeviceSpeed,
) -> Option:
    estimate = functools.partial(
        mesh_stages.estimated_footprint, stages, config.block_tokens
    )
    tokens = bounds.fixed
    if tokens is None:
        room = estimated_room(available, stages.sizes)
        fitting = largest_fitting(bounds, estimate, room)
        tokens = fitting or bounds.smallest
    found = estimate(tokens)
    return Option(
        stages=stages,
        tokens=tokens,
        found=found,
        fits=found.total_bytes(tokens) <= available.num_bytes,
        seconds=seconds_per_token(
            stages.spec,
            speed,
            tokens,
            sample_tokens=bounds.sample_tokens,
        ),
    )


def estimated_room(available: DeviceMemory, sizes: MeshSizes) -> int:
    """Returns the bytes that an automatic capacity may need by estimate.

    Args:
        available: Memory of each device.
        sizes: Sizes of the mesh.
    """
    # On a single device, the compiled step corrects the choice in both directions.
    margin = _MARGIN if sizes.num_devices > 1 else 0.0
    return int((1 - margin) * available.num_bytes)


def largest_fitting(
    bounds: Bounds, estimate: Callable[[int | None], MeshFootprint], num_bytes: int
) -> int | None:
    """Returns the largest capacity that is estimated to fit; None if none does.

    Memory does not grow evenly with the capacity, so one may fit although a smaller one
    does not. All that a lower bound allows are tried, from the largest on.

    Args:
        bounds: Bounds of the capacity.
        estimate: Returns the memory of the run at a capacity, or for None a lower bound
            for every capacity.
        num_bytes: Bytes of available memory.
    """
    most = bounds.choose(estimate(None).fitting_tokens(num_bytes))
    if most is None:
        return None
    tried = range(most, bounds.smallest - 1, -bounds.unit)
    with contextlib.closing(_estimates(estimate, tried)) as estimates:
        fits = (t for t, found in estimates if found.total_bytes(t) <= num_bytes)
        return next(fits, None)


def _estimates(
    estimate: Callable[[int | None], MeshFootprint], tried: Sequence[int]
) -> Generator[tuple[int, MeshFootprint]]:
    """Yields capacities with their estimates, of which several are made at once."""
    num_threads = _num_threads()
    if num_threads == 1:
        yield from ((tokens, estimate(tokens)) for tokens in tried)
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="memory-estimate")
    try:
        for group in itertools.batched(tried, num_threads):
            yield from zip(group, pool.map(estimate, group), strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _num_threads() -> int:
    """Estimates to make at once: XLA compiles attention for each of them on a GPU."""
    if device.planned_device() is not None or device.platform() != "gpu":
        return 1
    return min(4, max(1, (os.cpu_count() or 1) // 3))


def fastest(options: Sequence[Option]) -> Option:
    """Returns the fastest option that fits; if none does, the one that needs least.

    An estimate may be too high, so the last one is tried as well.
    """
    fitting = [option for option in options if option.fits]
    if fitting:
        return min(fitting, key=lambda option: option.seconds)
    return min(options, key=lambda option: option.found.total_bytes(option.tokens))


def explain(chosen: Option, options: Sequence[Option]) -> str:
    """Says in one line why an option was chosen, with the estimates of the others."""
    describe = functools.partial(_describe, chosen)
    others = "; ".join(describe(o) for o in options if o is not chosen)
    if not others:
        others = "a stronger remat would only take longer"
    return f"remat: auto: {describe(chosen)}; {others}"


def _describe(chosen: Option, option: Option) -> str:
    needed = format_bytes(option.found.total_bytes(option.tokens))
    text = f"{option.remat} with {option.tokens} tokens, about {needed}"
    if option is chosen:
        return text
    if not option.fits:
        return f"{text}, which does not fit"
    return f"{text}, takes {option.seconds / chosen.seconds:.2f} times as long"


def seconds_per_token(
    spec: DecoderSpec,
    speed: DeviceSpeed,
    capacity: int,
    *,
    sample_tokens: float = 0.0,
) -> float:
    """Predicts the time of training on one token of a sample.

    A microbatch takes the time of its whole capacity, and that of reading the weights.
    Small microbatches are slower for that, and for the room that samples leave.

    Args:
        spec: The decoder; its `remat` adds the work that is done again.
        speed: Rates of the device.
        capacity: Capacity of a microbatch, in tokens.
        sample_tokens: Mean length of the samples.

    Returns:
        The time, in the unit of `decoder_seconds`.
    """
    each = decoder_seconds(spec, speed).whole.both
    filled = max(1.0, capacity - _FREE_SAMPLES * sample_tokens)
    return (capacity + speed.weight_tokens) * each / filled
