"""Numbers of a hub: those of each model, and those of the engine that they share."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Literal

from jaxlora.session.residence import Place

# Rates are those of this time.
WINDOW_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """Numbers of a model that is not unloaded.

    Attributes:
        id: Its id.
        tenant: The tenant that owns it.
        next_seq: Number of the operation that starts next.
        pending_datums: Datums that were accepted and whose results are not there.
        pending_tokens: Tokens of these datums.
        steps: Optimizer steps behind its weights.
        loss_per_token: Loss of the last training pass divided by the number of
            positions that count; None: there was none, or no position counted.
        tokens_per_second: Tokens that it had trained or evaluated in each second of
            the last minute.
        failure: Why it cannot be used any more; None: it can.
        place: Where its adapter is: in a slot of the device, on the host, or in a file;
            None: it has none (yet).
    """

    id: str
    tenant: str
    next_seq: int
    pending_datums: int
    pending_tokens: int
    steps: int
    loss_per_token: float | None
    tokens_per_second: float
    failure: str | None
    place: Place | None


Health = Literal["starting", "running", "paused", "stopping", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubStatus:
    """Numbers of a hub. Counts begin when the process does.

    Attributes:
        health: `starting`: it replays what the snapshots lack, and accepts; `running`;
            `paused`: the database or its disk fails, so nothing new is accepted until
            it works again; `stopping`; `failed`: the engine cannot be made anew, so
            the process has to be restarted, and nothing that was accepted is lost.
        reason: Why it is paused or has failed; None: it is not.
        models: The models that are not unloaded, in the order of their creation.
        queued_datums: Datums that were accepted and whose results are not there.
        queued_tokens: Tokens of these datums.
        tokens_per_second: Tokens, without padding, in each second of the last minute.
        fill: Tokens, without padding, of each row of the last minute's microbatches;
            None: there were none.
        microbatch_seconds: Mean time between the results of successive microbatches
            while the engine was busy, in the last minute; None: there were none.
        tokens: Tokens that were trained or evaluated.
        microbatches: Microbatches that have run.
        steps: Optimizer steps that were taken, without those that were skipped.
        restarts: How often the engine was made anew after an error.
        replayed_microbatches: Microbatches that ran again after a crash or an error.
        snapshots: Snapshots of models that were written.
        commits: Commits of the ledger to the disk.
        commits_seconds: How long these took, in all.
        commit_seconds: How long the last of them took; None: there was none.
    """

    health: Health
    reason: str | None
    models: tuple[ModelStatus, ...]
    queued_datums: int
    queued_tokens: int
    tokens_per_second: float
    fill: float | None
    microbatch_seconds: float | None
    tokens: int
    microbatches: int
    steps: int
    restarts: int
    replayed_microbatches: int
    snapshots: int
    commits: int = 0
    commits_seconds: float = 0.0
    commit_seconds: float | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether operations are accepted and run."""
        return self.health in ("starting", "running")


class Recent:
    """Sums of the last minute. One thread adds, and any thread may read."""

    def __init__(self, width: int):
        """Starts at zero, with so many sums."""
        self._width, self._lock = width, threading.Lock()
        self._added: collections.deque[tuple[float, ...]] = collections.deque()
        self._begun_at: float | None = None

    def add(self, now: float, *values: float) -> None:
        """Adds to each of the sums."""
        with self._lock:
            self._begun_at = now if self._begun_at is None else self._begun_at
            self._added.append((now, *values))
            while self._added[0][0] < now - WINDOW_SECONDS:
                self._added.popleft()

    def sums(self, now: float) -> list[float]:
        """Returns the sums."""
        with self._lock:
            recent = [one for one in self._added if one[0] >= now - WINDOW_SECONDS]
        return [sum(one[i + 1] for one in recent) for i in range(self._width)]

    def rates(self, now: float) -> list[float]:
        """Returns the sums for each second of the minute, or since the first one."""
        begun_at = now if self._begun_at is None else self._begun_at
        seconds = min(WINDOW_SECONDS, max(1.0, now - begun_at))
        return [one / seconds for one in self.sums(now)]


class Meter:
    """Counts what the engine does. One thread counts, and any thread may read.

    Attributes:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        """Starts at zero; `clock` returns seconds."""
        self.clock = clock
        self._recent = Recent(4)  # tokens, rows, seconds and number of microbatches
        self._last = clock()
        self.tokens = self.microbatches = self.steps = 0
        self.restarts = self.replayed = self.snapshots = 0

    def begin(self) -> None:
        """Notes that the engine was idle, and is not any more."""
        self._last = self.clock()

    def end_microbatch(self, rows: int, tokens: int) -> None:
        """Notes that a microbatch has its results."""
        now = self.clock()
        self.tokens += tokens
        self.microbatches += 1
        self._recent.add(now, tokens, rows, now - self._last, 1)
        self._last = now

    def status(
        self, models: Iterable[ModelStatus], health: Health, reason: str | None
    ) -> HubStatus:
        """Returns the numbers of the hub, with those of its models."""
        models, now = tuple(models), self.clock()
        tokens, rows, seconds, number = self._recent.sums(now)
        return HubStatus(
            health=health,
            reason=reason,
            models=models,
            queued_datums=sum(model.pending_datums for model in models),
            queued_tokens=sum(model.pending_tokens for model in models),
            tokens_per_second=self._recent.rates(now)[0],
            fill=tokens / rows if rows else None,
            microbatch_seconds=seconds / number if number else None,
            tokens=self.tokens,
            microbatches=self.microbatches,
            steps=self.steps,
            restarts=self.restarts,
            replayed_microbatches=self.replayed,
            snapshots=self.snapshots,
        )
