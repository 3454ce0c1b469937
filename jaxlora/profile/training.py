"""Runs with random weights, planned and laid out as in the trainer, and timed."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.fresh import fresh_adapter
from jaxlora.adapters.optimizer import OptimizerInputs, Pending
from jaxlora.adapters.targets import resolve_targets
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.hf.base_format import kept_linears
from jaxlora.hf.load import Place
from jaxlora.models.base_format import BaseFormat, kernel_of
from jaxlora.models.config import ModelConfig
from jaxlora.models.forward import SlotKeys
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import chosen_experts, linear_names, linear_path
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.pallas_kernels import WeightOptions
from jaxlora.plan.job.planned_model import PlannedModel, run_format
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.resolve import resolve
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stages import MeshStages
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.step import optimizer_inputs
from jaxlora.train.job_state import JobState

SCORES = 2.0  # standard deviation of the attention scores


def random_base(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    place: Place | None = None,
    base_format: BaseFormat | None = None,
) -> dict[str, jax.Array]:
    """Makes weights with realistic activations and gradients.

    Activations stay near 1. Gradients of different tokens are as different as in
    training, because a device at its power limit multiplies similar numbers faster.
    If attention scores had a standard deviation of 1, attention would be so even that
    gradients of a sample's prompt would resemble each other (mean cosine 0.2 to 0.4; a
    trained SmolLM2-135M has 0.02 to 0.12). With a standard deviation of 2 they do not.

    Args:
        shapes: Shape and dtype of each array, by path.
        place: Where each array goes, by path and shape; each device makes its own part,
            and the values do not depend on it. None: JAX's default device.
        base_format: How linears are quantized, one after the other; None: they are not.
    """
    base: dict[str, jax.Array] = {}
    for i, (path, like) in enumerate(shapes.items()):
        where = None if place is None else place(path, like.shape)
        key = jax.random.fold_in(jax.random.key(0), i)
        kernel = path.rpartition(".kernel.")[0] + ".kernel"
        if path.endswith(("norm.scale", "norm")):
            base[path] = jnp.ones(like.shape, like.dtype, device=where)
        elif path.endswith(".bias") or len(like.shape) == 1:  # or rates of decay
            base[path] = jnp.zeros(like.shape, like.dtype, device=where)
        elif path.endswith(".kernel.values"):
            assert base_format is not None
            base |= _quantized(kernel, shapes, place, base_format, key)
        elif not path.startswith(f"{kernel}."):  # else it comes with the values
            inputs = like.shape[-1 if path.startswith("embed") else -2]
            make = _normal(where)
            base[path] = make(key, _scale(path, inputs), like.shape, like.dtype)
    return base


def _scale(path: str, in_features: int) -> float:
    """Standard deviation of a weight."""
    is_score = path.endswith(("q_proj.kernel", "k_proj.kernel"))
    return in_features**-0.5 * (SCORES**0.5 if is_score else 1.0)


@functools.cache
def _normal(where: Sharding | None):
    def normal(key, scale, shape, dtype):
        return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)

    return jax.jit(normal, static_argnums=(2, 3), out_shardings=where)


def _quantized(
    kernel: str,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    place: Place | None,
    base_format: BaseFormat,
    key: jax.Array,
) -> dict[str, jax.Array]:
    """Makes the arrays of a quantized linear, by path."""
    # All experts of a layer have one array, and their linears are alike.
    one = kernel.replace(".experts.", ".experts.0.")
    k, n = kernel_of(shapes, one, base_format).shape
    first = shapes[f"{kernel}.values"].shape[:1] if one != kernel else ()
    fields = {field: f"{kernel}.{field}" for field in base_format.shapes(n, k, *first)}
    where = None
    if place is not None:
        where = tuple((f, place(p, shapes[p].shape)) for f, p in fields.items())
    make = _quantizer(base_format.options_of(kernel), where)
    arrays = make(key, _scale(kernel, k), (n, k), *first)
    # The next linear's unquantized weight would otherwise lie beside this one's.
    return {fields[f]: array for f, array in jax.block_until_ready(arrays).items()}


@functools.cache
def _quantizer(options: WeightOptions, where: tuple[tuple[str, Sharding], ...] | None):
    def quantized(key, scale, shape, num_experts=None):
        def one(key):
            w = jax.random.normal(key, shape, jnp.bfloat16) * scale
            return options.quantize(w).arrays

        if num_experts is None:
            return one(key)
        return jax.lax.map(one, jax.random.split(key, num_experts))

    shardings = None if where is None else dict(where)
    return jax.jit(quantized, static_argnums=(2, 3), out_shardings=shardings)


GIB = 2**30
WARM_UPS = 3

Start = Callable[[], Callable[[], object]]
Programs = dict[str, jax.stages.Compiled]


def random_jobs(number: int, **settings: Any) -> list[LoraJob]:
    """Returns the settings of equal jobs, whose samples come from `make_job`."""
    data = DataConfig(path="random")
    return [
        LoraJob(name=f"job{i}", data=data, learning_rate=1e-5, seed=i, **settings)
        for i in range(number)
    ]


def make_job(
    settings: LoraJob, samples: Sequence[TokenizedSample], model: ModelConfig
) -> PreparedJob:
    """Makes a job of given samples."""
    data = TokenizedData(
        source="random",
        samples=tuple(samples),
        max_length=settings.max_length,
        num_records=len(samples),
        num_truncated=0,
        num_dropped=0,
        num_without_target=0,
    )
    return PreparedJob(
        settings=settings,
        modules=resolve_targets(
            settings, linear_names(model), chosen_experts=chosen_experts(model)
        ),
        start=None,
        train_data=data,
        eval_data=None,
    )


def model_of_shapes(config: RunConfig, model: ModelConfig) -> PlannedModel:
    """Describes the base of a run whose model has no files."""
    stored = None
    if config.quantize_base is not None:
        kept = kept_linears(model, config.keep_bf16)
        args = config.quantize_base_args
        stored = BaseFormat.named(config.quantize_base, kept=kept, **args)
    return PlannedModel(
        config=model,
        dtype=jnp.dtype(config.dtype),
        base_format=run_format(config, model, stored),
    )


def plan_run(
    config: RunConfig,
    model: PlannedModel,
    jobs: Sequence[PreparedJob],
    machine: Machine,
    *,
    mean_segment_tokens: int,
) -> RunPlan:
    """Plans a run as the trainer does, with room for samples of another mean length.

    Args:
        config: The run; nothing of it is `auto` but kernels and attention.
        model: The base model.
        jobs: The jobs.
        machine: The machine that the run is for.
        mean_segment_tokens: Mean length of samples for which attention has room.

    Raises:
        ConfigError: The run cannot be trained here.
    """
    plan = resolve(config, model, jobs, machine)
    # All jobs share each microbatch, also where a run would have fewer in it.
    options = dataclasses.replace(
        plan.spec.options, mean_segment_tokens=mean_segment_tokens, most_adapters=None
    )
    spec = dataclasses.replace(plan.spec, options=options)
    return dataclasses.replace(plan, stages=MeshStages.of(plan.config, spec))


class Training:
    """The weights, the slots and the programs of a run.

    Attributes:
        plan: The plan of the run.
        layout: The stages on their devices.
        bases: Frozen weights of each stage.
        slots: The slots.
        jobs: The jobs, each in the slot of its number, with a fresh adapter.
    """

    def __init__(self, plan: RunPlan, jobs: Sequence[PreparedJob]):
        """Makes weights and adapters on the devices; nothing is compiled yet.

        Args:
            plan: The plan of the run.
            jobs: The jobs; none: the base alone.
        """
        self.plan, base_format = plan, plan.spec.options.base_format
        shapes = plan.spec.base_shapes()
        params = random_base(shapes, plan.place, base_format)
        self.params = jax.block_until_ready(params)
        self.layout = Layout.of(plan.stages, self.params)
        self.bases = self.layout.bases(self.params)
        self.slots = self.layout.empty_slots()
        self.jobs = [JobState(job, _fresh_adapter(job, plan.spec)) for job in jobs]
        self.load()

    @property
    def spec(self) -> DecoderSpec:
        """The whole decoder."""
        return self.plan.spec

    @property
    def starts(self) -> list[Adapter]:
        """The adapter that each job starts from."""
        return [job.start for job in self.jobs]

    def load(self) -> None:
        """Puts the first adapters into the slots, without gradients and moments."""
        for slot, job in enumerate(self.jobs):
            self.slots.load(slot, job.start, job.settings.optimizer)

    @functools.cached_property
    def keys(self) -> SlotKeys:
        """Keys of the jobs' dropout in their first step."""
        zeros: Any = np.zeros(self.plan.num_slots, np.int32)
        return SlotKeys(seed=zeros + np.arange(len(zeros), dtype=np.int32), step=zeros)

    @functools.cached_property
    def _first_inputs(self) -> OptimizerInputs:
        assert self.spec.slots is not None
        jobs = dict(enumerate(self.jobs))
        return optimizer_inputs(jobs, dict.fromkeys(jobs, 0), self.spec.slots)

    def place(self, rows: Any, stage: int) -> Any:
        """Puts rows of tokens on the devices of a stage."""
        placement = self.layout.stages[stage].placement
        return jax.device_put(rows, placement.sharding(placement.rows))

    def inputs(self, stage: int, batch: PackedBatch) -> tuple[Any, ...]:
        """Returns what a pass of a stage takes: base, adapters, settings, batch, keys.

        Args:
            stage: Number of the stage.
            batch: The rows.
        """
        table = self.slots.tables[stage]
        base, params = self.bases[stage], table.state.params
        return base, params, table.settings, batch, self.keys

    def accumulate(self, batch: PackedBatch, *h: Any) -> tuple[Pending, Any]:
        """Queues the last stage, forward and backward.

        Args:
            batch: The rows.
            *h: Hidden states of the stage before, if there is one.

        Returns:
            The pending gradients, and the gradient of `h`.
        """
        base, params, *rest = self.inputs(-1, batch)
        table = self.slots.tables[-1]
        run = self.layout.stages[-1].steps.accumulate
        pending, _, dh = run(base, params, table.state.pending, *rest, *h)
        table.state = dataclasses.replace(table.state, pending=pending)
        return pending, dh

    def start(self, batches: Sequence[PackedBatch]) -> Callable[[], Any]:
        """Queues a step of all jobs on one stage; returns a function that waits for it.

        That function returns the result of the optimizer step.
        """
        (stage,), (table,) = self.layout.stages, self.slots.tables
        for batch in batches:
            self.accumulate(batch)
        args = table.state, self._first_inputs, (), table.settings["rank"]
        table.state, result = stage.steps.step(*args)
        return functools.partial(jax.block_until_ready, result)

    def is_finite(self, made: Any) -> bool:
        """Whether the gradients of a step are; otherwise times are meaningless."""
        return bool(made.is_finite.all())

    def compiled(self, batch: PackedBatch) -> Programs:
        """Compiles the programs of a step on one stage as a run does, by name.

        Args:
            batch: Rows of a microbatch, which has the capacity of the run.
        """
        (stage,), (table,) = self.layout.stages, self.slots.tables
        args = table.state, self._first_inputs, (), table.settings["rank"]
        limits = self.plan.config.limits
        assert len(batch.token_ids) == limits.capacity
        passes = stage.steps.passes.prepare(stage.steps.shapes(limits))
        named = {f"pass {i}": one for i, one in enumerate(passes.each)}
        named["step"] = stage.steps.step.prepare(*args)
        return {name: one.compiled() for name, one in named.items()}


def _fresh_adapter(job: PreparedJob, spec: DecoderSpec) -> Adapter:
    shapes, base_format = spec.base_shapes(), spec.options.base_format
    kernels = {
        name: kernel_of(shapes, f"{linear_path(name)}.kernel", base_format)
        for name in job.modules
    }
    return fresh_adapter(job.settings, job.modules, kernels)


def program_bytes(programs: Programs) -> int:
    """Returns the bytes of the largest program with its arguments, as XLA says."""
    found = []
    for program in programs.values():
        m = program.memory_analysis()
        assert m is not None
        beyond = m.output_size_in_bytes - m.alias_size_in_bytes
        found.append(m.argument_size_in_bytes + beyond + m.temp_size_in_bytes)
    return max(found)


def time_steps(start: Start, repeats: int, warm_ups: int = WARM_UPS) -> list[float]:
    """Measures milliseconds from the end of each step to the end of the next.

    As in training, the next step is queued before the host waits for one.

    Args:
        start: Queues a step; returns a function that waits for its end.
        repeats: Number of timed steps.
        warm_ups: Number of steps before them, at least 1.
    """
    times: list[float] = []
    wait, ended = start(), 0.0
    for i in range(warm_ups + repeats):
        following = start()
        wait()
        now = time.perf_counter()
        if i >= warm_ups:
            times.append(1000 * (now - ended))
        wait, ended = following, now
    wait()
    return times


def peak_gib(num_devices: int = 1) -> float | None:
    """Returns the largest peak memory of the first devices; None if it is unknown."""
    stats = [device.memory_stats() for device in jax.devices()[:num_devices]]
    peaks = [one["peak_bytes_in_use"] for one in stats if one]
    return round(max(peaks) / GIB, 2) if peaks else None
