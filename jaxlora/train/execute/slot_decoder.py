"""The decoder of a run with its slots, for generation while it trains."""

import dataclasses
from collections.abc import Sequence

from jaxlora.adapters.slots import SlotTable
from jaxlora.generate.batch import GeneratingDecoder, LoadedDecoder
from jaxlora.generate.staged import LoadedStage, StagedDecoder
from jaxlora.models.forward import Base
from jaxlora.models.spec import DecoderSpec
from jaxlora.train.execute.layout import Layout


class SlotDecoder:
    """Makes decoders of the present weights, on the devices that train them."""

    def __init__(self, layout: Layout, base: Base):
        """Makes the object; nothing is copied or compiled yet.

        Args:
            layout: The stages of the run.
            base: The frozen weights.
        """
        self._layout, self._base = layout, base
        self._bases: list[Base] | None = None

    def loaded(self, tables: Sequence[SlotTable]) -> GeneratingDecoder:
        """Returns a decoder of the present weights, which a step would invalidate.

        Args:
            tables: The slots of each stage.
        """
        stages = self._layout.stages
        meshes = [m for s in stages if (m := s.placement.mesh) is not None]
        if not meshes:
            (table,) = tables
            return LoadedDecoder(
                spec=_plain(stages[0].spec),
                base=self._base,
                adapters=table.weights,
                settings=table.settings,
            )
        if self._bases is None:
            self._bases = self._layout.bases(self._base)
        return StagedDecoder(
            stages=tuple(
                LoadedStage(
                    spec=_plain(stage.spec),
                    mesh=mesh,
                    base=base,
                    adapters=table.weights,
                    settings=table.settings,
                )
                for stage, mesh, base, table in zip(
                    stages, meshes, self._bases, tables, strict=True
                )
            )
        )


def _plain(spec: DecoderSpec) -> DecoderSpec:
    """Returns a decoder that generates.

    A few rows of tokens are bound by reading weights, whatever the kernels.
    """
    options = dataclasses.replace(
        spec.options,
        implementation="xla",
        attention="xla",
        remat="none",
    )
    return dataclasses.replace(spec, options=options).divided()
