"""The compiled functions of training: pure, of fixed shapes, for all slots at once."""

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.adapters.optimizer import AdapterState, Pending, optimizer_step
from jaxlora.adapters.slots import write_slot
from jaxlora.memory.inputs import batch_shapes, key_shapes
from jaxlora.models.forward import Base, job_losses, training_options
from jaxlora.models.spec import DecoderSpec, SlotSettings
from jaxlora.models.stacks import added, to_paths
from jaxlora.pallas_kernels import compile_program
from jaxlora.scheduler import Limits

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
    """The jitted functions of a decoder; each compiles once for each batch shape.

    Attributes:
        accumulate: Adds a microbatch's gradients to the pending ones. It takes and
            returns only the pending part of the state, as each array costs host time.
        evaluate: Losses of a microbatch, without dropout.
        step: Optimizer step of the slots whose global batch is complete.
        write_slot: Replaces the state of a slot; see `jaxlora.adapters.slots`.
    """

    def __init__(self, spec: DecoderSpec):
        losses = functools.partial(job_losses, spec)
        by_path = functools.partial(to_paths, spec.stacks, axis=1)

        def accumulate(base, params, pending: Pending, settings, batch, keys):
            def total(tables):
                out = losses(base, tables, settings, batch, keys)
                # Slots share no parameters, so this gives each slot its own gradient.
                return out.loss.sum(), out

            gradients, out = jax.grad(total, has_aux=True)(by_path(params))
            is_finite = out.is_finite & jnp.isfinite(out.loss)
            pending = Pending(
                gradients=added(spec.stacks, pending.gradients, gradients),
                is_finite=pending.is_finite & is_finite,
            )
            return pending, out

        def evaluate(base, params, settings, batch):
            return losses(base, by_path(params), settings, batch, None)

        options = training_options(spec.options.attention)
        self.accumulate = jax.jit(
            accumulate, donate_argnums=2, compiler_options=options
        )
        self.evaluate = jax.jit(evaluate)
        # `partial` makes a new function, because jit caches programs by function.
        self.step = jax.jit(functools.partial(optimizer_step), donate_argnums=0)
        self.write_slot = jax.jit(functools.partial(write_slot), donate_argnums=0)
        self._spec = spec

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
            batch_shapes(limits),
            key_shapes(self._spec),
        )

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        jitted = (self.accumulate, self.evaluate, self.step, self.write_slot)
        return sum(one._cache_size() for one in jitted)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=8)
def compiled_steps(spec: DecoderSpec) -> CompiledSteps:
    """The jitted functions of a decoder, shared by all trainers of this process."""
    return CompiledSteps(spec)
