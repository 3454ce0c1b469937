"""The passes of one stage over a microbatch, as each of its devices runs them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlora.adapters.optimizer import Pending
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.stage_sharding import StageSharding
from jaxlora.models.division import own_heads
from jaxlora.models.forward import Base, JobLosses, SlotKeys, run_stage
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.residuals import Pullback, pull_back
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import added, to_modules
from jaxlora.objectives.table import reads_rows

Hidden = Float[Array, "T D"]


class StagePasses:
    """Pure functions of one device's arrays.

    A device runs its own part of the decoder. On several devices, pending gradients and
    losses have a first axis of size 1, the device's own part of that axis. Residuals
    always have it, as some are scalars.
    """

    def __init__(self, spec: DecoderSpec, placement: StageSharding):
        """Makes the functions.

        Args:
            spec: The stage, or the whole decoder.
            placement: The devices of the stage.
        """
        assert spec.slots is not None
        self._placement = placement
        self._spec = spec.own_part
        # The backward functions of traced forward passes, by rows of hidden states.
        self._pullbacks: dict[int, Pullback] = {}
        self._by_path = functools.partial(to_modules, self._spec.stacks)

    def accumulate(
        self,
        base: Base,
        params: Tables,
        pending: Pending,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
        h: Hidden | None = None,
    ) -> tuple[Pending, JobLosses, Hidden | None]:
        """Runs the last stage forward and backward.

        Returns:
            The pending gradients with those of the microbatch; its losses; and the
            gradient of h, or None if there is no h.
        """
        run = self._runner(base, settings, batch, keys)

        def total(tables, h):
            out = run(tables, h)
            assert isinstance(out, JobLosses)
            # Slots share no parameters, so this gives each slot its own gradient.
            if not reads_rows(self._spec.options.objectives):
                out = dataclasses.replace(out, nll=None)
            return out.loss.sum(), out

        tables = self._by_path(params)
        if h is None:
            gradients, out = jax.grad(total, has_aux=True)(tables, None)
            dh = None
        else:
            gradient = jax.grad(total, argnums=(0, 1), has_aux=True)
            (gradients, dh), out = gradient(tables, h)
        is_finite = out.is_finite & jnp.isfinite(out.loss)
        pending = self._added(pending, gradients, is_finite)
        return pending, self._each_losses(out), dh

    def forward(
        self,
        base: Base,
        params: Tables,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
        h: Hidden | None = None,
    ) -> tuple[Hidden, tuple[Array, ...]]:
        """Runs a stage that is not the last; returns hidden states and residuals.

        Its trace decides how residuals make a backward pass, so it comes first.
        """
        run = self._runner(base, settings, batch, keys)
        tables = self._by_path(params)
        primals = (tables,) if h is None else (tables, h)

        def hidden(tables, h=None) -> Hidden:
            out = run(tables, h)
            assert not isinstance(out, JobLosses)
            return out

        out, pullback, kept = pull_back(hidden, primals, (base, tables))
        self._pullbacks[len(out)] = pullback
        return out, jax.tree.map(lambda x: x[None], kept)

    def backward(
        self,
        base: Base,
        params: Tables,
        residuals: Sequence[Array],
        pending: Pending,
        dh: Hidden,
    ) -> tuple[Pending, Hidden | None]:
        """Runs a stage that is not the last backward.

        Slots may have stepped since the forward pass, but none of them has rows in this
        microbatch, so the weights of the slots that have rows are the same. The rows of
        a slot that was released meanwhile leave gradients that are discarded.

        Returns:
            The pending gradients with those of the microbatch, and the gradient of the
            stage's input; None on the first stage.
        """
        kept = jax.tree.map(lambda x: x[0], residuals)
        arguments = base, self._by_path(params)
        pullback = self._pullbacks[len(dh)].join(kept, arguments)
        gradients, *rest = pullback(dh)
        pending = self._added(pending, gradients, is_finite=True)
        return pending, rest[0] if rest else None

    def evaluate(
        self,
        base: Base,
        params: Tables,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
        h: Hidden | None = None,
    ) -> Hidden | JobLosses:
        """Runs a stage without dropout; returns hidden states, or losses at the end."""
        assert keys.seed is None, "nothing is dropped"
        out = self._runner(base, settings, batch, keys)(self._by_path(params), h)
        if not isinstance(out, JobLosses):
            return out
        return self._each_losses(out)

    def add_baseline(
        self,
        baseline: Float[Array, " G"],
        loss: Float[Array, "..."],
        is_new: Bool[Array, " G"],
    ) -> Float[Array, " G"]:
        """Adds the losses of recombined samples to the baselines of their slots.

        Args:
            baseline: The baselines.
            loss: Sums of each device: `JobLosses.loss`.
            is_new: Slots whose baseline starts at 0.
        """
        loss = self._own(loss)
        if self._placement.summed_axes:
            loss = jax.lax.psum(loss, self._placement.summed_axes)
        return jnp.where(is_new, 0.0, baseline) + loss

    def _runner(self, base, settings, batch, keys):
        base = own_heads(self._spec, base)

        def run(tables, h):
            tables = own_heads(self._spec, tables)
            return run_stage(self._spec, base, tables, settings, batch, keys, h)

        return run

    def _added(self, pending: Pending, gradients, is_finite) -> Pending:
        pending = self._own(pending)
        return self._each(
            Pending(
                gradients=added(self._spec.stacks, pending.gradients, gradients),
                is_finite=pending.is_finite & is_finite,
            )
        )

    def _own(self, tree: Any) -> Any:
        """Takes off the axis of devices."""
        if self._placement.num_devices == 1:
            return tree
        return jax.tree.map(lambda x: x[0], tree)

    def _each_losses(self, losses: JobLosses) -> JobLosses:
        """Puts the axis of devices on sums; rows are divided among devices."""
        sums = self._each(dataclasses.replace(losses, nll=None))
        return dataclasses.replace(sums, nll=losses.nll)

    def _each(self, tree: Any) -> Any:
        """Puts on the axis of devices."""
        if self._placement.num_devices == 1:
            return tree
        return jax.tree.map(lambda x: x[None], tree)
