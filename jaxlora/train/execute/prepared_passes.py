"""The passes of a stage while they are compiled."""

import dataclasses

from jaxlora.memory.footprint import StagePrograms
from jaxlora.programs.program import Prepared


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPasses:
    """The passes of a stage that are being compiled; see `StagePrograms`.

    Attributes:
        last: The pass with gradients; `forward` is before it on all but the last stage.
        reference: The evaluation by references, of a run that has any.
    """

    last: Prepared
    forward: Prepared | None = None
    reference: Prepared | None = None

    @property
    def each(self) -> list[Prepared]:
        """The passes."""
        return [p for p in (self.forward, self.last, self.reference) if p is not None]

    def compiled(self) -> StagePrograms:
        """Waits for the programs."""
        forward = None if self.forward is None else self.forward.compiled()
        return StagePrograms(last=self.last.compiled(), forward=forward)
