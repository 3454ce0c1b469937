"""The compiled functions of training: pure, of fixed shapes, for all slots at once."""

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.exchange import exchange
from jaxlora.adapters.optimizer import AdapterState, measure, optimizer_step
from jaxlora.adapters.slots import write_slot
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.data.pack import PackedBatch
from jaxlora.memory.footprint import StagePrograms
from jaxlora.memory.inputs import batch_shapes, key_shapes
from jaxlora.models.forward import Base, training_options
from jaxlora.models.spec import DecoderSpec, SlotSettings
from jaxlora.pallas_kernels import compile_program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.stage_passes import StagePasses

logger = logging.getLogger(__name__)


def compiled(jitted: Any, what: str, *args: Any) -> jax.stages.Compiled:
    """Compiles a function for arguments of these shapes, and logs how long it takes.

    Later calls with arguments of the same shapes reuse the program.

    Args:
        jitted: A jitted function.
        what: Name of the function for the log.
        *args: Arguments, or their shapes.
    """
    logger.info("compiling %s; later ones reuse it", what)
    began = time.perf_counter()
    with no_garbage_collection():
        program = compile_program(jitted.lower(*args))
    logger.info("compiled %s in %.1f s", what, time.perf_counter() - began)
    return program


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses Python's collector of reference cycles.

    Tracing and lowering make millions of long-lived objects. The collector would scan
    them repeatedly, which would take half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CompiledSteps:
    """The jitted functions of a stage; each compiles once for each batch shape.

    On several devices, each device runs the same program on a microbatch of its own.
    See `StagePasses` for the arguments.

    Attributes:
        accumulate: Forward and backward pass of the last stage, which adds to the
            pending gradients. It takes and returns only the pending part of the state,
            as each array costs host time.
        forward: Forward pass of another stage.
        backward: Backward pass of another stage, which adds to the pending gradients.
        evaluate: Forward pass without dropout and without residuals.
        exchange: Sum of a slot's pending gradients over the devices; not used if no
            devices share a slot.
        measure: Norms of the pending gradients, which the other stages need for their
            optimizer steps.
        step: Optimizer step of the slots whose global batch is complete.
        write_slot: Replaces the state of a slot; see `jaxlora.adapters.slots`.
    """

    def __init__(self, spec: DecoderSpec, placement: StageSharding = ONE_DEVICE):
        """Makes the functions; none is traced yet.

        Args:
            spec: The decoder, or one stage of it.
            placement: The devices of the stage.
        """
        self._spec, self._placement = spec, placement
        passes, p = StagePasses(spec, placement), placement
        training = training_options(spec)
        base, slots = spec.base_specs(), p.by_slot
        specs: Any = AdapterState  # with partition specs in the place of tables
        state = specs(params=slots, optimizer_state=slots, pending=p.partial)
        inputs = p.by_linear_and_slot, p.rows  # settings and batch
        h = () if spec.has_embedding else (p.rows,)

        def jitted(run, takes, gives, **options):
            return _jitted(run, placement, takes, gives, **options)

        self.accumulate = jitted(
            passes.accumulate,
            (base, slots, p.partial, *inputs, slots, *h),
            (p.partial, p.partial, p.rows),
            donate_argnums=2,
            compiler_options=training,
        )
        self.forward = jitted(
            passes.forward,
            (base, slots, *inputs, slots, *h),
            (p.rows, p.rows),
            compiler_options=training,
        )
        self.backward = jitted(
            passes.backward,
            (base, slots, p.rows, p.partial, p.rows),
            (p.partial, p.rows),
            donate_argnums=3,
            compiler_options=training,
        )
        self.evaluate = jitted(
            passes.evaluate,
            (base, slots, *inputs, *h),
            p.partial if spec.has_head else p.rows,
            compiler_options=spec.gather_options(),
        )
        self.exchange = jitted(
            functools.partial(exchange, axes=p.summed_axes),
            (p.partial, slots),
            p.partial,
            donate_argnums=0,
        )
        self.measure = jitted(measure, (p.partial,), slots)
        self.step = jitted(
            optimizer_step, (state, slots, slots), (state, slots), donate_argnums=0
        )
        self.write_slot = jax.jit(
            functools.partial(write_slot),
            donate_argnums=0,
            out_shardings=None if p.mesh is None else _shardings(placement, state),
        )

    def compile_accumulate(
        self, base: Base, state: AdapterState, settings: SlotSettings, limits: Limits
    ) -> jax.stages.Compiled:
        """Compiles `accumulate` as a run will call it; the run reuses the program.

        Args:
            base: Frozen weights.
            state: State of the slots.
            settings: Settings of the slots.
            limits: Limits of the microbatches.
        """
        return compiled(
            self.accumulate,
            "the training step",
            base,
            state.params,
            state.pending,
            settings,
            self._batch_shapes(limits),
            key_shapes(self._spec),
        )

    def compile_passes(
        self,
        base: Base,
        state: AdapterState,
        settings: SlotSettings,
        limits: Limits,
        name: str,
    ) -> StagePrograms:
        """Compiles the passes of a pipeline stage as a run will call them.

        Args:
            base: Frozen weights of the stage.
            state: State of the slots.
            settings: Settings of the slots.
            limits: Limits of the microbatches.
            name: Name of the stage for the log.
        """
        spec, rows = self._spec, self._placement.sharding(self._placement.rows)
        batch, keys = self._batch_shapes(limits), key_shapes(spec)
        size = len(batch.token_ids), spec.config.hidden_size
        hidden = jax.ShapeDtypeStruct(size, spec.options.dtype, sharding=rows)
        h = () if spec.has_embedding else (hidden,)
        inputs = settings, batch, keys, *h
        if spec.has_head:
            what = f"the forward and backward pass, {name}"
            args = base, state.params, state.pending, *inputs
            return StagePrograms(last=compiled(self.accumulate, what, *args))
        args = base, state.params, *inputs
        forward = compiled(self.forward, f"the forward pass, {name}", *args)
        _, kept = self.forward.eval_shape(*args)
        kept = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), kept
        )
        args = base, state.params, kept, state.pending, hidden
        backward = compiled(self.backward, f"the backward pass, {name}", *args)
        return StagePrograms(last=backward, forward=forward)

    def _batch_shapes(self, limits: Limits) -> PackedBatch:
        return batch_shapes(limits, self._placement, self._spec.options.objectives)

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        functions = vars(self).values()
        return sum(f._cache_size() for f in functions if hasattr(f, "_cache_size"))


def _jitted(
    run: Any, placement: StageSharding, takes: Any, gives: Any, **options
) -> Any:
    """Jits a function that each device of a stage runs on its own part of the arrays.

    Args:
        run: The function.
        placement: The devices.
        takes: Partition specs of its arguments.
        gives: Partition specs of its results.
        **options: Options of `jax.jit`.
    """
    # `partial` makes a new function, because jit caches programs by function.
    if placement.mesh is None:
        return jax.jit(functools.partial(run), **options)
    # Pallas kernels cannot be partitioned, so each device runs them on its own part.
    # Gradients are not summed here: that comes once, before the optimizer step.
    sharded = jax.shard_map(
        run, mesh=placement.mesh, in_specs=takes, out_specs=gives, check_vma=False
    )
    # With other shardings of equal meaning, the next call would compile again.
    return jax.jit(sharded, out_shardings=_shardings(placement, gives), **options)


def _shardings(placement: StageSharding, specs: Any) -> Any:
    def is_spec(x: object) -> bool:
        return isinstance(x, PartitionSpec)

    return jax.tree.map(placement.sharding, specs, is_leaf=is_spec)


@functools.lru_cache(maxsize=32)
def compiled_steps(
    spec: DecoderSpec, placement: StageSharding = ONE_DEVICE
) -> CompiledSteps:
    """The jitted functions of a stage, shared by all trainers of this process."""
    return CompiledSteps(spec, placement)
