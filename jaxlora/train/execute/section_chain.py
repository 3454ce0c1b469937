"""The passes of a whole decoder as a chain of programs; see `jaxlora.models.sections`.

A microbatch runs to its end before the next one begins: forward through the sections,
both passes of the head, and backward through the sections. So a device keeps the
activations of one microbatch, as it does with a single program. The host queues the
programs without waiting for any of them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.optimizer import Pending
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.common.counted import counted
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.sections import Position, sections
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.programs.program import Prepared, Program
from jaxlora.train.execute.stage_programs import Arguments, PassPrograms, Shapes


class SectionChain:
    """The passes of a whole decoder, of which alike sections share their programs."""

    def __init__(self, arguments: Arguments):
        """Makes the functions; none is traced yet.

        Args:
            arguments: The arguments of the whole decoder.
        """
        self._arguments, placement = arguments, arguments.placement
        self._sections = sections(arguments.spec)
        self._where = placement.sharding(PartitionSpec())
        self._rows = placement.sharding(placement.rows)
        kinds = dict.fromkeys(section.spec for section in self._sections)
        self._kinds = {
            spec: PassPrograms(
                dataclasses.replace(arguments, spec=spec), is_section=True
            )
            for spec in kinds
        }

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
            args = section.base(base), params, settings, batch, own, *h, place
            *h, residuals = self._kinds[section.spec].forward(*args)
            kept.append(residuals)
            del args, residuals  # each is freed by its own backward pass
        pending, losses, dh = self._kinds[head.spec].accumulate(
            *(head.base(base), params, pending, settings, batch, keys, *h, at)
        )
        del h
        for section, place in reversed(before):
            if not (programs := self._kinds[section.spec]).has_backward:
                break
            args = section.base(base), params, kept.pop(), pending, dh, place
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
            args = section.base(base), params, settings, batch, each, *h, at
            h = (self._kinds[section.spec].evaluate(*args),)
        return h[0]

    def prepare(self, shapes: Shapes, suffix: str = "") -> StagePrograms[Prepared]:
        """Starts to compile the passes of all sections; see `PassPrograms.prepare`."""
        *before, head = [
            kind.prepare(own, name + suffix) for kind, own, name in self._each(shapes)
        ]
        return dataclasses.replace(head, sections=tuple(before))

    def prepare_evaluation(
        self, shapes: Shapes, suffix: str, *, evaluates: bool
    ) -> list[Prepared]:
        """Starts to compile the evaluation of all sections, likewise."""
        return [
            prepared
            for kind, own, name in self._each(shapes)
            for prepared in kind.prepare_evaluation(
                own, name + suffix, evaluates=evaluates
            )
        ]

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

    def _each(self, shapes: Shapes) -> Iterator[tuple[PassPrograms, Shapes, str]]:
        """Yields the programs of each section, with shapes and a name for the log.

        Args:
            shapes: Shapes of the arguments of the decoder.
        """
        for one in self._sections:
            own = {"base": one.base(shapes["base"])}
            if not one.spec.has_head:
                own["keys"] = dataclasses.replace(shapes["keys"], baseline=None)
            place = self._arguments.placed({"position": one.position})
            name = ", the head" if one.spec.has_head else ", the embedding"
            if num := len(one.spec.layer_numbers):
                name = f", {counted(num, 'layer')}"
            yield self._kinds[one.spec], shapes | own | place, name
