"""Measures a model on the present device, for `jaxlora profile`."""

import dataclasses
import datetime
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.common.counted import counted
from jaxlora.config import RunConfig
from jaxlora.costs.device_profile import (
    Kernels,
    LinkRate,
    MemoryAt,
    PassCost,
    PassTime,
    Profile,
    estimate,
    model_digest,
    versions,
)
from jaxlora.hf.files import tokenizer_folder
from jaxlora.models.options import Remat
from jaxlora.plan.job.planned_model import planned_model
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.mesh.machine import Machine, this_machine
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stages import measured_footprint
from jaxlora.profile.pass_times import PassTimes, Probe, make_probe, measure_passes
from jaxlora.profile.tokens import SIGMA, equal_shares, fill, job_batch
from jaxlora.profile.training import (
    Training,
    make_job,
    plan_run,
    random_jobs,
    time_steps,
)
from jaxlora.scheduler import Limits
from jaxlora.sharding.mesh_sizes import ONE_DEVICE
from jaxlora.train.execute.run_programs import RunPrograms

_MEDIAN_SHARE = 1 / 3  # median of the lengths that are drawn, of the longest
_LINK_BYTES = (2**20, 2**24, 2**26)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        model: A folder or a hub id; only its config.json is needed.
        revision: Branch, tag or commit of a hub id.
        microbatch_tokens: Tokens of the largest microbatches.
        longest_tokens: Largest length of a sample.
        block_tokens: Tokens of a block.
        adapters: Number of adapters that share a microbatch.
        rank: Rank of each adapter.
        remat: What the backward pass recomputes.
        dtype: Dtype of weights and activations; None: that of the checkpoint.
        quantize_base: Format of the base; None: that of the checkpoint.
        implementation: LoRA kernels, or `auto`.
        attention: Implementation of attention, or `auto`.
        quick: Whether to measure fewer sizes, fewer times.
    """

    model: str
    revision: str | None = None
    microbatch_tokens: int = 8192
    longest_tokens: int = 2048
    block_tokens: int = 64
    adapters: int = 4
    rank: int = 16
    remat: Remat = "none"
    dtype: str | None = None
    quantize_base: str | None = None
    implementation: str = "auto"
    attention: str = "auto"
    quick: bool = False

    @property
    def repeats(self) -> int:
        """Timed calls of each pass."""
        return 5 if self.quick else 20

    def sizes(self) -> Iterator[tuple[Limits, tuple[int, ...]]]:
        """Yields limits of microbatches, from small ones on, and largest lengths.

        Small ones come first, because the allocator's peak never falls.
        """
        halvings, cuts = (2, (1, 4)) if self.quick else (4, (1, 2, 4))
        for halving in reversed(range(halvings)):
            tokens = self.microbatch_tokens // 2**halving
            tokens = tokens // self.block_tokens * self.block_tokens
            if tokens < self.adapters * self.block_tokens:
                continue
            longest = min(self.longest_tokens, tokens)
            lengths = sorted({max(2, longest // cut) for cut in cuts})
            limits = Limits(capacity=tokens, block_tokens=self.block_tokens)
            yield limits, tuple(lengths)

    def config(self) -> RunConfig:
        """Returns a run of the adapters on one device."""
        longest = min(self.longest_tokens, self.microbatch_tokens)
        jobs = random_jobs(self.adapters, rank=self.rank, max_length=longest)
        given = {} if self.dtype is None else {"dtype": self.dtype}
        return RunConfig(
            model=self.model,
            revision=self.revision,
            jobs=jobs,
            mesh=ONE_DEVICE,
            microbatch_tokens=self.microbatch_tokens,
            block_tokens=self.block_tokens,
            quantize_base=self.quantize_base,  # type: ignore[arg-type]
            implementation=self.implementation,
            attention=self.attention,  # type: ignore[arg-type]
            remat=self.remat,
            **given,  # type: ignore[arg-type]
        )


def plan(settings: Settings, machine: Machine) -> tuple[RunPlan, list[PreparedJob]]:
    """Plans the run that is measured, as the trainer does.

    Raises:
        JaxloraError: The model cannot be read, or cannot be trained here.
    """
    config = settings.config()
    model = planned_model(config, tokenizer_folder(config.model, config.revision))
    rng = np.random.default_rng(0)
    lengths = _draw(settings.longest_tokens, settings.microbatch_tokens, rng)
    jobs = []
    for slot, job in enumerate(config.jobs):
        samples = job_batch(slot, lengths, model.config.vocab_size, rng).samples
        jobs.append(make_job(job, samples, model.config))
    mean = max(2, settings.longest_tokens // 4 // 4)  # of the shortest probes
    found = plan_run(config, model, jobs, machine, mean_segment_tokens=mean)
    return found, jobs


def measure(settings: Settings, note: Callable[[str], None]) -> Profile:
    """Measures a model.

    Args:
        settings: What is measured.
        note: Takes a line before each part.

    Raises:
        JaxloraError: The model cannot be trained here.
    """
    machine = this_machine()
    planned, jobs = plan(settings, machine)
    note(f"making random weights of {_describe(planned)}")
    training, memory = Training(planned, jobs), []

    def probes() -> Iterator[Probe]:
        for limits, lengths in settings.sizes():
            note(f"microbatches of {limits.capacity:,} tokens")
            needed = _needed_bytes(training, limits)
            for longest in lengths:
                yield _probe(training, settings, limits, longest)
            half, fewest = limits.capacity // 2, settings.adapters * limits.block_tokens
            if half >= fewest:
                yield _probe(training, settings, limits, min(lengths), half)
            peak = _peak_bytes()
            at = MemoryAt(tokens=limits.capacity, needed_bytes=needed, peak_bytes=peak)
            memory.append(at)

    found = measure_passes(training, probes(), settings.repeats)
    note("optimizer steps")
    step_seconds = _step_seconds(training, settings.repeats)
    link = None
    if machine.num_devices > 1 and len(jax.local_devices()) > 1:
        note("links")
        link = measure_link(settings.repeats)
    spec = planned.spec
    assert spec.slots is not None
    (stage,) = found.cost.stages
    return Profile(
        model=model_digest(spec),
        description=_describe(planned),
        kernels=Kernels.of(spec),
        remat=spec.options.remat,
        rank=spec.slots.rank,
        num_slots=spec.slots.num_slots,
        adapter_bytes=num_bytes(spec.adapter_shapes()),
        estimate=estimate(spec, machine.speed),
        **versions(),
        measured=datetime.datetime.now().isoformat(timespec="seconds"),
        passes=_passes(found),
        cost=PassCost(**dataclasses.asdict(stage.forward + stage.backward)),
        mape=found.mape,
        padding=found.padding,
        step_seconds=step_seconds,
        memory=tuple(memory),
        link=link,
    )


def _describe(planned: RunPlan) -> str:
    model = planned.model.config
    layers = counted(model.num_layers, "layer")
    return f"{model.model_type} with {layers} of width {model.hidden_size:,}"


def _passes(found: PassTimes) -> tuple[PassTime, ...]:
    (points,) = found.points.values()
    return tuple(PassTime(**dataclasses.asdict(point)) for point in points)


def _draw(longest: int, total: int, rng: np.random.Generator) -> list[int]:
    """Draws log-normal lengths, which are ragged as those of real samples."""
    median = max(2.0, _MEDIAN_SHARE * longest)
    return fill(total, longest, lambda: rng.lognormal(np.log(median), SIGMA))


def _probe(
    training: Training,
    settings: Settings,
    limits: Limits,
    longest: int,
    num_tokens: int | None = None,
) -> Probe:
    """Makes a microbatch that the adapters share equally; by default a full one."""
    num_tokens = limits.capacity if num_tokens is None else num_tokens
    totals = equal_shares(num_tokens, settings.adapters, limits.block_tokens)
    draw = lambda _, total, rng: _draw(longest, total, rng)
    probe = make_probe(training, limits, totals, draw)
    return dataclasses.replace(probe, num_padding=limits.capacity - probe.tokens)


def _needed_bytes(training: Training, limits: Limits) -> int | None:
    """Compiles the passes; returns the memory of a run as the compiler reports it."""
    programs = RunPrograms.start(training.layout, limits, evaluates=False)
    programs.finish()  # nothing may be compiled while passes are timed
    compiled = programs.compiled_passes()
    found = measured_footprint(training.plan.stages, compiled, limits)
    return None if found is None else found.total_bytes(limits.capacity)


def _peak_bytes() -> int | None:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def _step_seconds(training: Training, repeats: int) -> float:
    """Times the optimizer step of all slots alone."""
    return float(np.median(time_steps(lambda: training.start([]), repeats))) / 1000


def measure_link(repeats: int) -> LinkRate:
    """Measures transfers from the first device to the second."""
    source, target = jax.local_devices()[:2]
    seconds = []
    for size in _LINK_BYTES:
        rows = jax.device_put(jnp.zeros(size // 4, jnp.float32), source)
        move = functools.partial(jax.device_put, rows, target)
        start = lambda move=move: functools.partial(jax.block_until_ready, move())
        seconds.append(float(np.median(time_steps(start, repeats))) / 1000)
    return fit_link(_LINK_BYTES, seconds)


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkRate:
    """Fits a fixed time and a rate to transfers; both are positive.

    Args:
        sizes: Bytes of each transfer, ascending.
        seconds: Time of each.
    """
    slopes = [
        (t1 - t0) / (n1 - n0)
        for (n0, t0), (n1, t1) in itertools.combinations(
            zip(sizes, seconds, strict=True), 2
        )
    ]
    slope = float(np.median(slopes))
    if slope <= 0:  # all of it is overhead
        slope = seconds[-1] / sizes[-1]
    rests = [t - slope * n for n, t in zip(sizes, seconds, strict=True)]
    return LinkRate(
        base_seconds=max(0.0, float(np.median(rests))), bytes_per_second=1 / slope
    )
