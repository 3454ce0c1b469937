"""Notes which weights each pass of a pipeline reads, and checks it by the schedule."""

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from jaxlora.scheduler.lanes import Tick
from jaxlora.train.execute.layout import Layout

# Functions of a stage that run a pass forward, and those that run one backward.
FORWARD, BACKWARD = ("forward", "accumulate"), ("backward", "accumulate")


@dataclasses.dataclass
class RunLog:
    """The passes and steps that the stages were given until they had nothing to do.

    Attributes:
        ticks: The ticks, in their order.
        passes: By stage and function, the optimizer steps that each slot had done in
            the weights that each call got.
        steps: Stage, slot and backward passes of the stage in this run so far, for
            each optimizer step of a slot.
    """

    ticks: list[Tick] = dataclasses.field(default_factory=list)
    passes: dict[tuple[int, str], list[dict[int, int]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    steps: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)


class PassLog:
    """Watches the compiled functions of all stages, in runs whose jobs keep a slot.

    Weights are recognized as the arrays that they are, so that a pass that gets old
    weights is noticed, whenever it is queued.
    """

    def __init__(self, layout: Layout, monkeypatch):
        """Wraps the functions of a layout, which new trainers share."""
        self.runs: list[RunLog] = []
        self._num_stages = len(layout.stages)
        self._done = [collections.Counter() for _ in layout.stages]
        self._known: dict[int, tuple[Any, dict[int, int]]] = {}  # by id of an array
        for number, stage in enumerate(layout.stages):
            for name in ("forward", "backward", "accumulate", "step"):
                jitted = getattr(stage.steps, name)
                watched = _Watched(jitted, self, number, name)
                monkeypatch.setattr(stage.steps, name, watched)

    def note_pass(self, stage: int, name: str, params: Any) -> None:
        array = jax.tree.leaves(params)[0]
        # Unknown weights were put into the slots between two runs.
        first = array, dict(self._done[stage])
        _, done = self._known.setdefault(id(array), first)
        self.runs[-1].passes[stage, name].append(done)

    def note_step(self, stage: int, step_mask: Any, params: Any) -> None:
        run = self.runs[-1]
        ran = sum(len(run.passes[stage, name]) for name in BACKWARD)
        for slot in np.flatnonzero(step_mask):
            self._done[stage][int(slot)] += 1
            run.steps.append((stage, int(slot), ran))
        array = jax.tree.leaves(params)[0]
        self._known[id(array)] = array, dict(self._done[stage])

    def wrong(self) -> list[str]:
        """Describes the passes and steps that are not those of the schedule."""
        found: list[str] = []
        for run in self.runs:
            batches = [
                {(s.owner, s.batch) for m in t for s in m} for t in run.ticks if any(t)
            ]
            for stage in range(self._num_stages):
                found += self._wrong_reads(run, stage, batches)
                found += _wrong_steps(run, stage, batches)
        return found

    def _wrong_reads(self, run, stage, batches):
        is_last = stage == self._num_stages - 1
        names = ("accumulate",) if is_last else ("forward", "backward")
        for name in names:
            passes = run.passes[stage, name]
            if len(passes) != len(batches):
                yield f"{len(passes)} of {len(batches)} passes {name}, stage {stage}"
            for tick, (done, mine) in enumerate(zip(passes, batches, strict=False)):
                for slot, batch in mine:
                    if done.get(slot, 0) != batch:
                        yield (
                            f"{name} of tick {tick} on stage {stage}: batch {batch} of "
                            f"slot {slot} reads weights of step {done.get(slot, 0)}"
                        )


def _wrong_steps(run, stage, batches):
    """A step follows all backward passes of its batch, and there is one per batch."""
    last_tick = {key: tick for tick, mine in enumerate(batches) for key in mine}
    taken = collections.defaultdict(list)
    for where, slot, num_passes in run.steps:
        if where == stage:
            taken[slot].append(num_passes)
    for slot in {slot for slot, _ in last_tick}:
        keys = sorted(key for key in last_tick if key[0] == slot)
        if len(keys) != len(taken[slot]):
            yield f"{len(taken[slot])} of {len(keys)} steps of slot {slot}"
        for key, num_passes in zip(keys, taken[slot], strict=False):
            if num_passes <= last_tick[key]:
                yield f"step of batch {key} on stage {stage} after {num_passes} passes"


class _Watched:
    """A compiled function that notes its calls."""

    def __init__(self, jitted: Any, log: PassLog, stage: int, name: str):
        self._jitted, self._log, self._stage, self._name = jitted, log, stage, name

    def __call__(self, *args: Any) -> Any:
        if self._name != "step":
            self._log.note_pass(self._stage, self._name, args[1])
            return self._jitted(*args)
        out = self._jitted(*args)
        self._log.note_step(self._stage, args[1].step_mask, out[0].params)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)
