"""Where a sweep takes its next configuration from."""

from typing import Protocol, runtime_checkable

from jaxlora.config import LoraJob


@runtime_checkable
class Source(Protocol):
    """Suggests configurations while a sweep trains, beyond those of the run file.

    A suggestion is recorded before it trains. A sweep that continues calls `repeat` for
    each recorded one, in order, and then goes on.
    """

    def suggest(self) -> LoraJob | None:
        """Returns a configuration to train next; None: there is none now."""

    def repeat(self, job: LoraJob) -> None:
        """Takes note of a configuration that it has suggested before."""

    def tell(self, name: str, loss: float | None) -> None:
        """Takes note of the best held-out loss of a configuration that has ended.

        Args:
            name: The configuration.
            loss: The loss; None: it has none.
        """
