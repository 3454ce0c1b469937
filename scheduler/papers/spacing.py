"""Inserts no-ops so that consecutive batches of a job are the distance D apart."""

from collections.abc import Iterable, Iterator

from jaxlora.scheduler.types import Microbatch, Sample


class Spacing:
    """Assigns positions to microbatches, with no-ops where the distance requires them.

    Each microbatch gets the first position that is far enough from the previous batches
    of its jobs. This needs the fewest no-ops that the given order allows.

    Attributes:
        distance: Distance D of the pipeline.
        position: Position of the last microbatch; -1 before the first.
    """

    def __init__(self, distance: int):
        """Starts without microbatches."""
        self.distance = distance
        self.position = -1
        # The last batch of each job, and the position of its last microbatch.
        self._last: dict[int, tuple[int, int]] = {}

    def copy(self) -> "Spacing":
        """Returns an independent copy."""
        out = Spacing(self.distance)
        out.position, out._last = self.position, dict(self._last)
        return out

    def earliest(self, sample: Sample) -> int:
        """Returns the first position that a sample may have."""
        batch, last = self._last.get(sample.owner, (sample.batch, -1))
        return 0 if batch == sample.batch else last + self.distance

    def place(self, microbatch: Iterable[Sample]) -> int:
        """Appends a microbatch and returns the number of no-ops before it."""
        samples = tuple(microbatch)
        following = self.position + 1
        self.position = max([following, *(self.earliest(s) for s in samples)])
        self.join(samples)
        return self.position - following

    def join(self, samples: Iterable[Sample]) -> None:
        """Adds samples to the last microbatch."""
        for sample in samples:
            self._last[sample.owner] = (sample.batch, self.position)


def with_no_ops(
    microbatches: Iterable[Microbatch], distance: int
) -> Iterator[Microbatch]:
    """Yields the microbatches, with no-ops where the distance requires them."""
    spacing = Spacing(distance)
    for microbatch in microbatches:
        for _ in range(spacing.place(microbatch)):
            yield ()
        yield microbatch
