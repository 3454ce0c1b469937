"""All programs of a run, which are compiled side by side before its first step."""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from jaxlora.common.background import in_background
from jaxlora.distributed import processes
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.programs.program import Prepared, announce, counting, finish
from jaxlora.scheduler import Limits
from jaxlora.train.execute.layout import Layout, Stage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPrograms:
    """The programs of a run while they are compiled.

    Attributes:
        passes: Forward and backward passes of each stage.
        further: Those of each further replica.
        others: Optimizer steps, evaluations and what else the run calls.
    """

    passes: tuple[StagePrograms[Prepared], ...]
    others: tuple[Prepared, ...]
    further: tuple[StagePrograms[Prepared], ...] = ()

    @staticmethod
    def start(layout: Layout, limits: Limits, *, evaluates: bool) -> "RunPrograms":
        """Starts to compile the programs, or to load them; the base is not needed.

        Args:
            layout: The stages.
            limits: Limits of the microbatches.
            evaluates: Whether a job has held-out samples.
        """
        named = [(one, name, one.steps.shapes(limits)) for one, name in _named(layout)]
        passes, further = [], []
        others: list[Prepared] = []  # the passes take longest
        for stage, name, shapes in named:
            own = stage.steps.passes
            passes.append(own.prepare(shapes, name))
            others += own.prepare_evaluation(shapes, name, evaluates=evaluates)
        for stage, name, shapes in named:
            others += stage.steps.prepare_updates(
                shapes, name, num_stages=len(named), evaluates=evaluates
            )
        if layout.further:
            further, more = _prepare_further(layout, limits)
            others += more
        found = RunPrograms(
            passes=tuple(passes), further=tuple(further), others=tuple(others)
        )
        announce(found.each)
        return found

    @property
    def each(self) -> list[Prepared]:
        """The programs, one by one."""
        passes = [p for one in (*self.passes, *self.further) for p in one.each]
        return [*dict.fromkeys((*passes, *self.others))]

    def compiled_passes(self) -> tuple[StagePrograms[Prepared], ...]:
        """Waits for the passes of all stages."""
        return self._compiled(self.passes)

    def compiled_further(self) -> tuple[StagePrograms[Prepared], ...]:
        """Waits for the passes of the further replicas."""
        return self._compiled(self.further)

    def _compiled(
        self, passes: tuple[StagePrograms[Prepared], ...]
    ) -> tuple[StagePrograms[Prepared], ...]:
        with counting(self.each):
            for program in [program for one in passes for program in one.each]:
                program.compiled()
        return passes

    def finish(self) -> None:
        """Waits for all programs, and logs how long they took."""
        with counting(self.each):
            finish(self.each)


class FurtherPrograms:
    """The passes of smaller microbatches, compiled beside training in a thread.

    Training begins with the largest shape. Which ticks have a smaller one does not
    depend on when its programs are ready: training waits for them.
    """

    def __init__(self, layout: Layout, shapes: Sequence[Limits]):
        """Starts to compile the programs, or to load them.

        Args:
            layout: The stages.
            shapes: Limits of the microbatches of each shape, in the order in which they
                are compiled.
        """
        self._layout, self._is_closed = layout, False
        self._compiled: dict[int, Future[None]] = {}
        before: Future[None] | None = None
        for limits in shapes:
            compile_one = functools.partial(self._compile, limits, before)
            before = self._compiled[limits.capacity] = in_background(compile_one)
            if processes.count() > 1:  # in the same order on all of them
                before.exception()

    def _compile(self, limits: Limits, before: Future[None] | None) -> None:
        if before is not None:
            before.exception()  # waits for it
        for stage, name in _named(self._layout):
            if self._is_closed:
                return
            name = f", {limits.capacity} tokens{name}"
            shapes, passes = stage.steps.shapes(limits), stage.steps.passes
            found = passes.prepare(shapes, name).each
            found += passes.prepare_evaluation(shapes, name, evaluates=False)
            announce(found)
            finish(found)

    def wait_for(self, rows: int) -> None:
        """Waits for the programs of microbatches of so many rows."""
        future = self._compiled.get(rows)
        if future is None or (future.done() and future.exception() is None):
            return
        began = time.perf_counter()
        future.result()
        logger.info(
            "waited %.1f s for the programs of microbatches of %d tokens",
            time.perf_counter() - began,
            rows,
        )

    def __enter__(self) -> "FurtherPrograms":
        return self

    def __exit__(self, *_) -> None:
        """Compiles no further program, and waits for the one that is compiled now."""
        self._is_closed = True
        for future in self._compiled.values():
            future.exception()


def _named(layout: Layout) -> Iterator[tuple[Stage, str]]:
    """Yields each stage, and what the log adds to the name of a program of it."""
    num_stages = len(layout.stages)
    for number, stage in enumerate(layout.stages, start=1):
        yield stage, f", stage {number} of {num_stages}" if num_stages > 1 else ""


def _prepare_further(
    layout: Layout, limits: Limits
) -> tuple[list[StagePrograms[Prepared]], list[Prepared]]:
    """Starts to compile the programs of further replicas.

    Args:
        layout: The first replica, and the others.
        limits: Limits of the microbatches of the first replica.

    Returns:
        The passes of each; and what makes slots, and what takes and gives weights and
        gradients, also on the first replica.
    """
    home, passes = layout.stages[0].steps, []
    shapes = home.shapes(limits)
    # The weights or gradients of a slot, as they are sent.
    row = home.read_slot.prepare(shapes["params"], shapes["slot"]).out_info
    shapes |= home.arguments.placed({"row": row})
    others = [home.add_part.prepare_from(shapes, "")]
    pairs = zip(layout.further, layout.planned.further, strict=True)
    for number, (stage, own) in enumerate(pairs, start=2):
        steps, name = stage.steps, f", replica {number}"
        shapes = steps.shapes(dataclasses.replace(limits, capacity=own.tokens))
        shapes |= steps.arguments.placed({"row": row})
        passes.append(steps.passes.prepare(shapes, name))
        others += steps.passes.prepare_evaluation(shapes, name, evaluates=False)
        others.append(steps.empty.prepare())
        for program in (steps.write_weights, steps.read_part):
            others.append(program.prepare_from(shapes, name))
    return passes, others
