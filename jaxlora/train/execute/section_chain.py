"""The passes of a whole decoder as a chain of programs; see `jaxlora.models.sections`.

A microbatch runs to its end before the next one begins: forward through the sections,
both passes of the head, and backward through the sections. So a device keeps the
activations of one microbatch, as it does with a single program. The host queues the
programs without waiting for any of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.optimizer import AdapterState, Pending
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.stage_sharding import StageSharding
from jaxlora.common.counted import counted
from jaxlora.data.pack import PackedBatch
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.sections import Position, Section, sections
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.programs.program import Prepared, Program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.pass_programs import (
    MakeProgram,
    PassPrograms,
    PreparedPasses,
)


class SectionChain:
    """The passes of a whole decoder, of which alike sections share their programs."""

    def __init__(
        self,
        spec: DecoderSpec,
        placement: StageSharding,
        state: AdapterState,
        make: Callable[[DecoderSpec], MakeProgram],
    ):
        """Makes the functions; none is traced yet.

        Args:
            spec: The whole decoder.
            placement: Its devices.
            state: Partition specs of the state of the slots.
            make: Returns what makes the programs of a section.
        """
        self._sections = sections(spec)
        self._where = placement.sharding(PartitionSpec())
        self._rows = placement.sharding(placement.rows)
        kinds: dict[DecoderSpec, PassPrograms] = {}
        for section in self._sections:
            if (own := section.spec) not in kinds:
                kinds[own] = PassPrograms(
                    own, placement, state, make(own), is_section=True
                )
        self._kinds = kinds

    def accumulate(
        self,
        base: Base,
        params: Tables,
        pending: Pending,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
    ) -> tuple[Pending, JobLosses, None]:
        """Queues both passes of a microbatch; see `StagePasses.accumulate`."""
        batch, kept = self._uploaded(batch), []
        *before, (head, at) = zip(self._sections, self._positions, strict=True)
        h: Sequence[Any] = ()
        own = dataclasses.replace(keys, baseline=None)
        for section, place in before:
            args = section.base(base), params, settings, batch, own, place
            *h, residuals = self._kinds[section.spec].forward(*args, *h)
            kept.append(residuals)
            del residuals  # each is freed by its own backward pass
        pending, losses, dh = self._kinds[head.spec].accumulate(
            *(head.base(base), params, pending, settings, batch, keys, at, *h)
        )
        del h
        for section, place in reversed(before):
            if not (programs := self._kinds[section.spec]).has_backward:
                break
            args = section.base(base), params, kept.pop(), pending, place, dh
            pending, dh = programs.backward(*args)
            del args
        return pending, losses, None

    def evaluate(
        self,
        base: Base,
        params: Tables,
        settings: SlotSettings,
        batch: PackedBatch,
        keys: SlotKeys,
    ) -> JobLosses:
        """Queues an evaluation of a microbatch; see `StagePasses.evaluate`."""
        h: tuple[Any, ...] = ()
        batch, own = self._uploaded(batch), dataclasses.replace(keys, baseline=None)
        for section, at in zip(self._sections, self._positions, strict=True):
            each = keys if section.spec.has_head else own
            args = section.base(base), params, settings, batch, each, at
            h = (self._kinds[section.spec].evaluate(*args, *h),)
        return h[0]

    def prepare(
        self,
        base: Mapping[str, Any],
        state: AdapterState,
        settings: SlotSettings,
        limits: Limits,
        name: str = "",
    ) -> PreparedPasses:
        """Starts to compile the passes of all sections; see `PassPrograms.prepare`."""
        each = [
            self._kinds[section.spec].prepare(
                section.base(base), state, settings, limits, f"{what}{name}", (at,)
            )
            for section, what, at in self._named()
        ]
        references = (p for one in each for p in one.reference)
        *before, head = each
        return PreparedPasses(
            last=head.last,
            sections=tuple(before),
            reference=tuple(dict.fromkeys(references)),
        )

    def prepare_evaluation(
        self,
        base: Mapping[str, Any],
        params: Mapping[str, Any],
        settings: SlotSettings,
        limits: Limits,
        name: str = "",
    ) -> tuple[Prepared, ...]:
        """Starts to compile the evaluation of a microbatch; the last has its losses."""
        found: dict[Prepared, None] = {}
        for section, what, at in self._named():
            args = section.base(base), params, settings, limits, f"{what}{name}", (at,)
            found |= dict.fromkeys(self._kinds[section.spec].prepare_evaluation(*args))
        return tuple(found)

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the number of their section's kind and their names."""
        return {
            f"{number}.{name}": program
            for number, kind in enumerate(self._kinds.values())
            for name, program in kind.programs.items()
        }

    def _uploaded(self, batch: PackedBatch) -> PackedBatch:
        """Starts to upload rows once, instead of in the call of each program."""
        is_there = isinstance(batch.token_ids, jax.Array)
        return batch if is_there else jax.device_put(batch, self._rows)

    @functools.cached_property
    def _positions(self) -> list[Position]:
        """The position of each section, on the devices."""
        return [jax.device_put(one.position, self._where) for one in self._sections]

    def _named(self) -> Iterator[tuple[Section, str, Position]]:
        """Yields each section, its name for the log, and the shapes of its position."""

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._where)

        for section in self._sections:
            name = ", the head" if section.spec.has_head else ", the embedding"
            if num := len(section.spec.layer_numbers):
                name = f", {counted(num, 'layer')}"
            yield section, name, jax.tree.map(shape, section.position)
