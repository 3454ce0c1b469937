"""The recent work of a server, which its page shows as numbers and curves."""

import collections
import dataclasses
import json
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlora.common.atomic import write_text
from jaxlora.common.json_file import read_json_file
from jaxlora.errors import StorageError
from jaxlora.serve.hub import Hub, Promise
from jaxlora.serve.jobs.jobs import Jobs
from jaxlora.serve.jobs.record import Job, is_of_job
from jaxlora.serve.operation import Done, Pass, Step, Unload
from jaxlora.serve.view import Curves, Point, Rate
from jaxlora.session.engine import PassResult, StepResult
from jaxlora.session.sampler import Completion
from jaxlora.session.samples import SampleCall, SampleResult

logger = logging.getLogger(__name__)

_KEPT_SECONDS = 600  # of rates
_STRETCH = 5  # seconds between two points of the chart of rates
_RECENT = 15  # seconds over which the rate of now is a mean
_MOST_DRAWN = 8  # samples of a tenant


class Rates:
    """Tokens of each second of the last minutes, by tenant."""

    def __init__(self, clock: Callable[[], float]):
        """Starts at zero; `clock` returns Unix seconds."""
        self._clock, self._began, self._lock = clock, clock(), threading.Lock()
        self._seconds: collections.deque[tuple[int, collections.Counter[str]]]
        self._seconds = collections.deque()

    def add(self, tenant: str, tokens: int) -> None:
        """Counts tokens."""
        second = int(self._clock())
        with self._lock:
            if not self._seconds or self._seconds[-1][0] != second:
                self._seconds.append((second, collections.Counter()))
                while self._seconds[0][0] < second - _KEPT_SECONDS:
                    self._seconds.popleft()
            self._seconds[-1][1][tenant] += tokens

    def now(self, tenant: str | None) -> float:
        """Returns the tokens per second of a tenant, or of all."""
        now = self._clock()
        first = now - _RECENT
        with self._lock:
            tokens = sum(_of(t, tenant) for at, t in self._seconds if at >= first)
        return tokens / max(1.0, min(_RECENT, now - self._began))

    def recent(self, tenant: str | None) -> list[Rate]:
        """Returns those of a tenant, or of all, over the last minutes."""
        now = self._clock()
        first = max(self._began, now - _KEPT_SECONDS) // _STRETCH
        sums = [0] * int(now // _STRETCH - first)  # the last stretch is not over yet
        with self._lock:
            for at, tokens in self._seconds:
                if 0 <= (place := int(at // _STRETCH - first)) < len(sums):
                    sums[place] += _of(tokens, tenant)
        return [
            Rate((first + 1 + place) * _STRETCH, tokens / _STRETCH, None)
            for place, tokens in enumerate(sums)
        ]


def _of(tokens: "collections.Counter[str]", tenant: str | None) -> int:
    return tokens.total() if tenant is None else tokens[tenant]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A sample.

    Attributes:
        time: When it was there, in Unix seconds.
        version: What has drawn it.
        completion: The sample.
    """

    time: float
    version: str
    completion: Completion


class History:
    """Keeps results of operations and calls, bounded in memory. Any thread may use it.

    Curves are saved by `save`, so that they go on after a restart. The rest begins with
    the process.

    Attributes:
        curves: The curves.
        tenants: Whose each model with a curve is.
        trained: Tokens of training passes.
        sampled: Tokens of samples.
    """

    def __init__(self, path: pathlib.Path, clock: Callable[[], float] = time.time):
        """Starts empty.

        Args:
            path: File for the curves.
            clock: Returns Unix seconds.
        """
        self.curves, self.tenants = Curves(), dict[str, str]()
        self.trained, self.sampled = Rates(clock), Rates(clock)
        self._path, self._clock, self._lock = path, clock, threading.Lock()
        self._saved = 0  # cursor
        # Loss and target tokens since the last step, by model.
        self._sums: dict[str, tuple[float, float]] = {}
        self._num_steps: collections.Counter[str] = collections.Counter()
        self._drawn: dict[str, collections.deque[Drawn]] = {}

    def follow(self, hub: Hub, jobs: Jobs) -> None:
        """Takes what the hub does from now on, and what jobs say of it."""
        hub.listeners.append(self._ended)
        hub.sample_listeners.append(self._sampled)
        jobs.listeners.append(self._noted)

    def _noted(self, job: Job, event: Mapping[str, Any]) -> None:
        """Takes a line of a job's metrics. Its passes do not tell its loss."""
        if (point := Point.of(event)) is not None:
            self._add(job.tenant, job.id, point)

    def _add(self, tenant: str, model: str, point: Point) -> None:
        with self._lock:
            self.tenants[model] = tenant
        self.curves.add(model, point)

    def _ended(self, promise: Promise) -> None:
        outcome = promise.outcome.result()
        if not isinstance(outcome, Done):
            return
        match promise.operation, outcome.result:
            case Pass(is_training=True), PassResult() as result:
                tokens = result.metrics["tokens:sum"]
                with self._lock:
                    before = self._sums.get(promise.model, (0.0, 0.0))
                    sums = before[0] + result.loss, before[1] + tokens
                    self._sums[promise.model] = sums
                self.trained.add(promise.tenant, sum(map(len, result.logprobs)))
            case Step(params=params), StepResult() as result:
                with self._lock:
                    loss, tokens = self._sums.pop(promise.model, (0.0, 0.0))
                    self._num_steps[promise.tenant] += 1
                if is_of_job(promise.model):
                    return
                point = Point(
                    result.step,
                    loss=loss / tokens if tokens else None,
                    learning_rate=params.learning_rate,
                    grad_norm=result.grad_norm,
                )
                self._add(promise.tenant, promise.model, point)
            case Unload(), _:
                with self._lock:
                    self._sums.pop(promise.model, None)

    def _sampled(self, call: SampleCall, result: SampleResult) -> None:
        found = result.completions
        self.sampled.add(call.tenant, sum(len(one.tokens) for one in found))
        if found and found[0].tokens:  # calls for log-probabilities have none
            new = Drawn(time=self._clock(), version=call.version, completion=found[0])
            with self._lock:
                empty = collections.deque[Drawn](maxlen=_MOST_DRAWN)
                self._drawn.setdefault(call.tenant, empty).appendleft(new)

    def drawn(self, tenant: str) -> Sequence[Drawn]:
        """Returns the latest samples of a tenant, the first of each call."""
        with self._lock:
            return [*self._drawn.get(tenant, ())]

    def num_steps(self, tenant: str | None) -> int:
        """Returns the steps of a tenant, or of all, since the process began."""
        with self._lock:
            return _of(self._num_steps, tenant)

    # ---- the file --------------------------------------------------------------------

    def save(self) -> None:
        """Writes the curves to the file, if there are new points."""
        cursor, points = self.curves.after(0, self.curves.models(), "")
        if cursor == self._saved:
            return
        with self._lock:
            self.tenants = {m: t for m, t in self.tenants.items() if m in points}
            saved = {"points": points, "tenants": self.tenants}
            text = json.dumps(saved)
        try:
            write_text(self._path, text)
        except StorageError as error:  # all else goes on
            logger.warning("the page cannot save its curves: %s", error)
        else:
            self._saved = cursor

    def load(self) -> None:
        """Reads the curves of an earlier process, if there are any."""
        try:
            found = read_json_file(self._path)
            for model, points in found["points"].items():
                self.tenants[model] = found["tenants"][model]
                for step, *values in points:
                    self.curves.add(model, Point(int(step), *values))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is damaged, so curves begin anew: %s", self._path, error)
