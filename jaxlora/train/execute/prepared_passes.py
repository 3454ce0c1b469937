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
        sections: Those of the sections before `last`, if the passes are a chain.
    """

    last: Prepared
    forward: Prepared | None = None
    reference: tuple[Prepared, ...] = ()
    sections: tuple["PreparedPasses", ...] = ()

    @property
    def each(self) -> list[Prepared]:
        """The passes, each once."""
        before = [p for one in self.sections for p in one.each]
        forward = () if self.forward is None else (self.forward,)
        found = (*before, *forward, self.last, *self.reference)
        return [*dict.fromkeys(found)]  # alike sections share theirs

    def compiled(self) -> StagePrograms:
        """Waits for the programs."""
        forward = None if self.forward is None else self.forward.compiled()
        sections = tuple(one.compiled() for one in self.sections)
        return StagePrograms(
            last=self.last.compiled(), forward=forward, sections=sections
        )
