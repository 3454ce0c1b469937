"""A training step of this library with random weights, compiled and timed."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.optimizer import OptimizerInputs
from jaxlora.adapters.slots import SlotTable, fresh_adapter
from jaxlora.adapters.targets import resolve_targets
from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.pack import PackedBatch
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.models.base_format import kernel_of
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.forward import SlotKeys, job_losses, training_options
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.pallas_kernels import compile_program, get_backend
from jaxlora.scheduler import Limits
from jaxlora.train.execute.step import (
    CompiledSteps,
    no_garbage_collection,
)
from jaxlora.train.plan.kernel_choice import kernels_unsupported

GIB = 2**30
WARM_UPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The training step to measure.

    Attributes:
        model: Shape of the base.
        options: Options of the decoder.
        limits: Limits of a microbatch.
        num_jobs: Number of adapters, one per slot; 0: the base alone, without LoRA.
        rank: Rank of each adapter, on all linears.
        dropout: Dropout rate of each adapter.
    """

    model: ModelConfig
    options: DecoderOptions
    limits: Limits
    num_jobs: int = 4
    rank: int = 16
    dropout: float = 0.1

    def spec(self) -> DecoderSpec:
        """Returns the decoder's structure."""
        slots = SlotShape(num_slots=max(1, self.num_jobs), rank=self.rank)
        paths = linear_names(self.model) if self.num_jobs else ()
        return DecoderSpec(
            config=self.model,
            options=self.options,
            slots=slots,
            adapted=tuple(sorted(map(linear_path, paths))),
        )

    def unsupported(self) -> str | None:
        """Returns why the LoRA kernels asked for cannot run this, or None."""
        if not self.num_jobs:
            return None
        backend = get_backend(self.options.implementation)
        return kernels_unsupported(backend, self.spec(), self.limits.block_tokens)


class Training:
    """A run's programs and state, like those in the trainer.

    Attributes:
        programs: Compiled programs, by name.
        compile_seconds: Time to trace and compile them.
    """

    def __init__(self, setup: Setup, base: Mapping[str, jax.Array], batch: PackedBatch):
        """Compiles for batches of one shape.

        Args:
            setup: The training step.
            base: Weights of the base.
            batch: Any batch of the shape.
        """
        self.setup, self._base, self._spec = setup, dict(base), setup.spec()
        self.programs: dict[str, jax.stages.Compiled] = {}
        self._steps = CompiledSteps(self._spec)
        self._table = SlotTable(self._spec, self._steps.write_slot)
        # These are the options with which the training step is compiled.
        options = training_options(self._spec)
        self._frozen = jax.jit(self._frozen_gradient, compiler_options=options)
        if setup.num_jobs:
            self._start_adapters()
            slots: Any = np.arange(setup.num_jobs, dtype=np.int32)
            self._keys = SlotKeys(seed=slots, step=np.zeros_like(slots))
            self._hyper = usual_hyper(setup.num_jobs)
        began = time.perf_counter()
        with no_garbage_collection():
            for name, program in self._lowered(batch).items():
                self.programs[name] = compile_program(program)
        self.compile_seconds = time.perf_counter() - began

    def _lowered(self, batch: PackedBatch) -> dict[str, jax.stages.Lowered]:
        if not self.setup.num_jobs:
            return {"accumulate": self._frozen.lower(self._base, batch)}
        return {
            "accumulate": self._steps.accumulate.lower(*self._arguments(batch)),
            "step": self._steps.step.lower(self._table.state, self._hyper, ()),
        }

    def _arguments(self, batch: PackedBatch) -> tuple[Any, ...]:
        state, settings = self._table.state, self._table.settings
        return self._base, state.params, state.pending, settings, batch, self._keys

    def _start_adapters(self) -> None:
        setup = self.setup
        names = linear_names(setup.model)
        shapes = self._spec.base_shapes()
        base = self._spec.options.base_format
        kernels = {
            n: kernel_of(shapes, f"{linear_path(n)}.kernel", base) for n in names
        }
        for slot in range(setup.num_jobs):
            job = LoraJob(
                name=f"job{slot}",
                data=DataConfig(path="random"),
                rank=setup.rank,
                dropout=setup.dropout,
                seed=slot,
            )
            start = fresh_adapter(job, resolve_targets(job, names), kernels)
            self._table.load(slot, start)

    def _frozen_gradient(self, base, batch: PackedBatch) -> jax.Array:
        """Runs forward, and backward down to the first norm."""
        first = next(path for path in base if path.endswith("attention_norm.scale"))
        # Without adapters there is one slot, which gets the loss of all jobs. If the
        # other jobs had gradients of zero, products would draw less power.
        owner = jnp.minimum(batch.block_adapter, 0)
        batch = dataclasses.replace(batch, block_adapter=owner)

        def loss(scale):
            own = {**base, first: scale}
            settings = self._table.settings
            return job_losses(self._spec, own, {}, settings, batch, None).loss.sum()

        return jax.grad(loss)(base[first])

    def run(self, batches: Sequence[PackedBatch]) -> bool:
        """Takes one optimizer step of every job, and waits for its end.

        Returns:
            Whether the gradients are finite. Otherwise times are meaningless.
        """
        made: Any = self.start(batches)()
        if self.setup.num_jobs:
            return bool(made.is_finite.all())
        return all(bool(jnp.isfinite(gradient).all()) for gradient in made)

    def start(self, batches: Sequence[PackedBatch]) -> Callable[[], object]:
        """Queues a step without waiting, and returns a function that waits for it.

        That function returns the gradient of the base alone, or the step's result.
        """
        if not self.setup.num_jobs:
            frozen = [self._frozen(self._base, x) for x in batches]
            return functools.partial(jax.block_until_ready, frozen)
        table = self._table
        for batch in batches:
            pending, *_ = self._steps.accumulate(*self._arguments(batch))
            table.state = dataclasses.replace(table.state, pending=pending)
        table.state, result = self._steps.step(table.state, self._hyper, ())
        return functools.partial(jax.block_until_ready, result)

    def program_bytes(self) -> int:
        """Returns the bytes of the largest program with its arguments, as XLA says."""
        found = []
        for program in self.programs.values():
            m = program.memory_analysis()
            assert m is not None
            beyond = m.output_size_in_bytes - m.alias_size_in_bytes
            found.append(m.argument_size_in_bytes + beyond + m.temp_size_in_bytes)
        return max(found)


def usual_hyper(num_jobs: int) -> OptimizerInputs:
    """Makes usual settings of an optimizer step, which all slots take."""

    def row(value: float, dtype: type = np.float32) -> Any:
        return np.full(num_jobs, value, dtype)

    return OptimizerInputs(
        step_mask=row(True, np.bool_),
        count=row(0, np.int32),
        learning_rate=row(1e-5),
        rate_ratio=rate_ratios(lambda ratio: row(1.0)),
        weight_decay=row(0.0),
        b1=row(0.9),
        b2=row(0.999),
        eps=row(1e-8),
        max_norm=row(1.0),
    )


def time_steps(
    start: Callable[[], Callable[[], object]], repeats: int, warm_ups: int = WARM_UPS
) -> list[float]:
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


def peak_bytes() -> int | None:
    """Returns the peak device memory of this process, or None where it is unknown."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats["peak_bytes_in_use"]
