"""An executor without a device, which reports steps as late as a pipeline may."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.slots import ParkedSlot
from jaxlora.train.execute.executor import Outcomes, StepOutcome, Window
from jaxlora.train.job_state import JobState


@dataclasses.dataclass
class LateExecutor:
    """Counts the steps of each slot, and checks how it is used.

    Attributes:
        in_flight: Microbatches that are queued after a step before it is reported.
        loss: Gives the loss of a job's step, counted from 1; NaN makes it not finite.
        eval_loss: Gives the evaluation loss of a job after a number of steps.
        steps: Steps taken by the adapter in each slot that is in use.
        queued: By slot, the samples of each job's name that ran.
    """

    in_flight: int
    loss: Callable[[str, int], float]
    eval_loss: Callable[[str, int], float]
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    ran: Counter = dataclasses.field(default_factory=Counter)

    def __post_init__(self):
        self._window: Window | None = None
        self._queued = 0  # microbatches
        self._released: set[int] = set()
        self._may_release: set[int] | None = None  # None: any, between windows

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        assert self._window is None and slot not in self.steps
        self.steps[slot] = 0

    def park(self, slot: int) -> ParkedSlot:
        assert self._window is None
        return self.steps.pop(slot)  # type: ignore[return-value]

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        assert self._window is None and slot not in self.steps
        self.steps[slot] = parked  # type: ignore[assignment]

    def read(self, slot: int, like: Adapter) -> Adapter:
        assert slot in self.steps
        return like

    def run(self, window: Window) -> Iterator[Outcomes]:
        assert set(window.jobs) == set(self.steps), "another set of jobs"
        self._window, self._queued, self._released = window, 0, set()
        microbatches = window.schedule.microbatches
        remaining = Counter((s.owner, s.batch) for m in microbatches for s in m)
        pending: deque[tuple[int, dict[int, int]]] = deque()
        for number, microbatch in enumerate(microbatches):
            kept = [s for s in microbatch if s.owner not in self._released]
            self._queued = number + 1
            for s in kept:
                remaining[s.owner, s.batch] -= 1
                self.ran[window.jobs[s.owner].name] += 1
            complete = {
                s.owner: s.batch for s in kept if not remaining[s.owner, s.batch]
            }
            while pending and (
                number - pending[0][0] >= self.in_flight
                or any(complete.keys() & steps.keys() for _, steps in pending)
            ):
                yield self._report(pending.popleft()[1])
            complete = {s: b for s, b in complete.items() if s not in self._released}
            for slot, batch in complete.items():
                assert batch == self.steps[slot]
                self.steps[slot] += 1
            if complete:
                pending.append((number, complete))
        while pending:
            yield self._report(pending.popleft()[1])
        self._window, self._may_release = None, None

    def _report(self, steps: dict[int, int]) -> Outcomes:
        assert self._window is not None
        self._may_release = set(steps)
        outcomes = {}
        for slot, step in steps.items():
            loss = self.loss(self._window.jobs[slot].settings.name, step + 1)
            outcomes[slot] = StepOutcome(
                loss=loss,
                grad_norm=1.0,
                learning_rate=1e-3,
                num_tokens=8,
                num_target_tokens=8,
                is_finite=loss == loss,
            )
        return Outcomes(steps=outcomes, num_microbatches=1, num_tokens=8)

    def release(self, slot: int) -> int:
        if self._may_release is not None:
            assert slot in self._may_release, "its step may be in flight"
        del self.steps[slot]
        self._released.add(slot)
        if self._window is None:
            return 0
        rest = self._window.schedule.microbatches[self._queued :]
        return sum(s.owner == slot for m in rest for s in m)

    def evaluate(self, runs: Mapping[int, JobState]) -> dict[int, float]:
        return {s: self.eval_loss(r.name, self.steps[s]) for s, r in runs.items()}

    def wait(self) -> None:
        pass
