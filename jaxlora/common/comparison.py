"""A prediction beside what was measured."""

import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A prediction beside what was measured in this process; None: it is not known."""

    predicted: float | None = None
    measured: float | None = None

    def line(self, name: str, show: Callable[[float], str]) -> Iterator[str]:
        """Yields a line with both, if both are known.

        Args:
            name: What they are.
            show: Formats either.
        """
        if not self.predicted or self.measured is None:
            return
        more = self.measured / self.predicted - 1
        off = f"{abs(more):.1%} {'more' if more >= 0 else 'less'}"
        yield f"{name}: {show(self.measured)}, {show(self.predicted)} predicted ({off})"


NOT_KNOWN = Comparison()
