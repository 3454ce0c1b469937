"""Keeps a job's global batches the distance D apart."""

from collections.abc import Iterable

from jaxlora.scheduler.types import Microbatch, Sample


class Spacing:
    """Positions of microbatches, with the no-ops that the distance asks for.

    A microbatch is placed at the first position that is far enough from the batches
    before it. As positions only grow, no order can do with fewer no-ops.

    Args:
        distance: D of the pipeline.
    """

    def __init__(self, distance: int):
        self.distance = distance
        self.position = -1  # of the microbatch placed last
        self._reached: dict[
            int, tuple[int, int]
        ] = {}  # job: (batch, its last position)

    def copy(self) -> "Spacing":
        """Independent of this one."""
        out = Spacing(self.distance)
        out.position, out._reached = self.position, dict(self._reached)
        return out

    def earliest(self, sample: Sample) -> int:
        """First position that a sample may have."""
        batch, last = self._reached.get(sample.job, (sample.batch, -1))
        return 0 if batch == sample.batch else last + self.distance

    def place(self, microbatch: Iterable[Sample]) -> int:
        """Places a microbatch after all others; returns how many no-ops precede it."""
        samples = tuple(microbatch)
        following = self.position + 1
        self.position = max([following, *(self.earliest(s) for s in samples)])
        self.join(samples)
        return self.position - following

    def join(self, samples: Iterable[Sample]) -> None:
        """Adds samples to the microbatch that was placed last."""
        for sample in samples:
            self._reached[sample.job] = (sample.batch, self.position)


def with_no_ops(microbatches: Iterable[Microbatch], distance: int):
    """The microbatches, and an empty one wherever one must wait."""
    spacing = Spacing(distance)
    for microbatch in microbatches:
        for _ in range(spacing.place(microbatch)):
            yield ()
        yield microbatch
