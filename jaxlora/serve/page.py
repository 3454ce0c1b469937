"""The page of a server, with what each reader may see.

A key with the scope `admin` sees all tenants, and any other key its own tenant only.
Samples are for their tenant alone.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import pathlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.responses import Response

from jaxlora.common.atomic import write_text
from jaxlora.common.json_file import read_json_file
from jaxlora.errors import StorageError
from jaxlora.serve.hub import Promise
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.operation import Done, Pass, Step
from jaxlora.serve.registry import NotFound
from jaxlora.serve.server import Server
from jaxlora.serve.status import HubStatus, ModelStatus
from jaxlora.serve.view import (
    Curves,
    Figures,
    Health,
    Level,
    ModelRow,
    Page,
    Point,
    Rate,
    Sample,
    TenantRow,
    View,
)
from jaxlora.session.engine import PassResult, StepResult

logger = logging.getLogger(__name__)

_STATE = "/page/state"
_KEPT_SECONDS = 600  # of rates
_STRETCH = 5  # seconds between two points of the chart of rates
_RECENT = 15  # seconds over which the rate of now is a mean
_MOST_SAMPLES = 8  # of a tenant
_MOST_KNOWN = 10_000
CURVES = "curves.json"  # in the folder of the server
_SAVE_SECONDS = 60.0
_LEVELS: dict[str, Level] = {"running": "good", "starting": "busy", "stopping": "busy"}
_WORDS = {
    "running": "serving",
    "starting": "replays what was not saved",
    "paused": "accepts nothing",
    "stopping": "stopping",
    "failed": "failed, restart it",
}


def router(server: Server) -> APIRouter:
    """Returns the routes of the page, which record what the hub does from now on."""
    recorder = Recorder(pathlib.Path(server.config.folder) / CURVES)
    viewer = Viewer(server, recorder)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(recorder.load)
        saving = asyncio.create_task(_save_often(recorder))
        yield
        saving.cancel()
        await asyncio.to_thread(recorder.save)

    made = APIRouter(lifespan=lifespan)
    page = Page.of("server", state=_STATE, needs_key=server.keys.demanded)

    @made.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return Response(page.body, headers=dict(page.headers))

    @made.get(_STATE, include_in_schema=False)
    async def get_state(
        who: Annotated[Principal, Depends(allowed("read"))],
        after: Annotated[int, Query(ge=0)] = 0,
        epoch: Annotated[str, Query(max_length=64)] = "",
    ) -> Response:
        view = await asyncio.to_thread(viewer.view, who, after, epoch)
        headers = {"Cache-Control": "no-store"}
        return Response(view.json(), media_type="application/json", headers=headers)

    return made


async def _save_often(recorder: "Recorder") -> None:
    while True:
        await asyncio.sleep(_SAVE_SECONDS)
        await asyncio.to_thread(recorder.save)


class Recorder:
    """Remembers what became of operations, bounded in memory. Any thread may use it.

    Curves are saved now and then, so that they go on after a restart.

    Attributes:
        curves: The curves.
        tenants: Whose each model with a curve is.
    """

    def __init__(self, path: pathlib.Path, clock: Callable[[], float] = time.time):
        """Starts empty.

        Args:
            path: File for the curves.
            clock: Returns Unix seconds.
        """
        self.curves = Curves()
        self._path, self._clock, self._lock = path, clock, threading.Lock()
        self._saved = 0
        self._began = clock()
        # Loss and target tokens since the last step, by model.
        self._sums: dict[str, tuple[float, float]] = {}
        # Trained tokens of each second, by tenant.
        self._tokens: collections.deque[tuple[int, collections.Counter[str]]]
        self._tokens = collections.deque()
        self.tenants: dict[str, str] = {}
        self._num_steps: collections.Counter[str] = collections.Counter()
        self._samples: dict[str, collections.deque[Sample]] = {}

    def ended(self, promise: Promise) -> None:
        """Takes an operation that has its outcome."""
        outcome, model = promise.outcome.result(), promise.model
        if not isinstance(outcome, Done):
            return
        match promise.operation, outcome.result:
            case Pass(is_training=True), PassResult() as result:
                with self._lock:
                    loss, tokens = self._sums.get(model, (0.0, 0.0))
                    self._sums[model] = (
                        loss + result.loss,
                        tokens + result.metrics["tokens:sum"],
                    )
                    self._count(promise.tenant, sum(map(len, result.logprobs)))
            case Step(params=params), StepResult() as result:
                with self._lock:
                    loss, tokens = self._sums.pop(model, (0.0, 0.0))
                    self._num_steps[promise.tenant] += 1
                    self.tenants[model] = promise.tenant
                point = Point(
                    result.step,
                    loss=loss / tokens if tokens else None,
                    learning_rate=params.learning_rate,
                    grad_norm=result.grad_norm,
                )
                self.curves.add(model, point)
                self._forget()

    def save(self) -> None:
        """Writes the curves to the file, if there are new points."""
        cursor, points = self.curves.after(0, self.curves.models(), "")
        if cursor == self._saved:
            return
        with self._lock:
            tenants = {model: self.tenants.get(model, "") for model in points}
        try:
            write_text(self._path, json.dumps({"points": points, "tenants": tenants}))
        except StorageError as error:  # the page goes on
            logger.warning("the page cannot save its curves: %s", error)
        self._saved = cursor

    def load(self) -> None:
        """Reads the curves of an earlier process, if there are any."""
        try:
            found = read_json_file(self._path)
            for model, points in found["points"].items():
                for point in points:
                    self.curves.add(model, Point(*point))
                self.tenants[model] = found["tenants"][model]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is damaged, so curves begin anew: %s", self._path, error)

    def sampled(self, tenant: str, sample: Sample) -> None:
        """Takes a text that was sampled."""
        with self._lock:
            made = collections.deque[Sample](maxlen=_MOST_SAMPLES)
            self._samples.setdefault(tenant, made).appendleft(sample)

    def samples(self, tenant: str) -> Sequence[Sample]:
        """Returns the latest samples of a tenant."""
        with self._lock:
            return [*self._samples.get(tenant, ())]

    def num_steps(self, tenant: str | None) -> int:
        """Returns the steps of a tenant, or of all, since the process began."""
        with self._lock:
            steps = self._num_steps
            return steps.total() if tenant is None else steps[tenant]

    def rate(self, tenant: str | None) -> float:
        """Returns the tokens per second of a tenant, or of all, now."""
        now = self._clock()
        with self._lock:
            first = now - _RECENT
            tokens = sum(_of(t, tenant) for at, t in self._tokens if at >= first)
        return tokens / max(1.0, min(_RECENT, now - self._began))

    def rates(self, tenant: str | None) -> list[Rate]:
        """Returns the tokens per second of a tenant, or of all, in the last minutes."""
        now = self._clock()
        first = max(self._began, now - _KEPT_SECONDS) // _STRETCH
        sums = [0] * (int(now // _STRETCH - first) + 1)
        with self._lock:
            for at, tokens in self._tokens:
                if (place := int(at // _STRETCH - first)) >= 0:
                    sums[place] += _of(tokens, tenant)
        ends = [(first + 1 + place) * _STRETCH for place in range(len(sums))]
        # The last stretch is not over yet.
        return [
            Rate(end, count / _STRETCH, None)
            for end, count in zip(ends[:-1], sums[:-1], strict=True)
        ]

    def _count(self, tenant: str, tokens: int) -> None:
        second = int(self._clock())
        if not self._tokens or self._tokens[-1][0] != second:
            self._tokens.append((second, collections.Counter()))
            while self._tokens[0][0] < second - _KEPT_SECONDS:
                self._tokens.popleft()
        self._tokens[-1][1][tenant] += tokens

    def _forget(self) -> None:
        """Forgets models whose curves were dropped."""
        if len(self.tenants) > 2 * len(known := {*self.curves.models()}):
            with self._lock:
                self.tenants = {m: t for m, t in self.tenants.items() if m in known}


class Viewer:
    """Puts together what a reader may see."""

    def __init__(self, server: Server, recorder: Recorder):
        """Makes the object, whose recorder listens to the hub from now on.

        Args:
            server: The server.
            recorder: The recorder.
        """
        self._server, self._recorder = server, recorder
        self._known: dict[str, _About] = {}
        server.hub.listeners.append(self._recorder.ended)

    def view(self, who: Principal, after: int, epoch: str) -> View:
        """Returns what the page shows.

        Args:
            who: The reader.
            after: Cursor of the points that the page has.
            epoch: Where it has them from.
        """
        tenant = None if who.may("admin") else who.tenant
        status, recorder = self._server.hub.status(), self._recorder
        models = [one for one in status.models if tenant in (None, one.tenant)]
        rows = [self._row(one) for one in reversed(models)]
        rows += self._unloaded(status, tenant)
        cursor, points = recorder.curves.after(after, {row.id for row in rows}, epoch)
        return View(
            kind="server",
            title=self._server.config.served_name,
            subtitle="all tenants" if tenant is None else f"tenant {tenant}",
            health=_health(status, is_admin=tenant is None),
            epoch=recorder.curves.epoch,
            cursor=cursor,
            time=time.time(),
            figures=self._figures(status, models, tenant),
            models=rows,
            points=points,
            rates=recorder.rates(tenant),
            tenants=self._tenants(models) if tenant is None else None,
            samples=recorder.samples(who.tenant),
        )

    def _row(self, model: ModelStatus) -> ModelRow:
        about, last = self._about(model), self._recorder.curves.last(model.id)
        return ModelRow(
            id=model.id,
            name=about.name,
            tenant=model.tenant,
            state="failed" if model.failure else "ready",
            step=model.steps,
            rank=about.rank,
            loss=model.loss_per_token if last is None else last.loss,
            waiting_tokens=model.pending_tokens,
            waiting_datums=model.pending_datums,
            note=model.failure or "",
        )

    def _unloaded(self, status: HubStatus, tenant: str | None) -> list[ModelRow]:
        """Returns rows of the models that have curves and are there no more."""
        loaded = {model.id for model in status.models}
        rows, curves = [], self._recorder.curves
        for model in reversed(curves.models()):
            owner, last = self._recorder.tenants.get(model), curves.last(model)
            if model in loaded or owner is None or tenant not in (None, owner):
                continue
            name = self._known[model].name if model in self._known else _short(model)
            rows.append(
                ModelRow(
                    id=model,
                    name=name,
                    tenant=owner,
                    state="unloaded",
                    step=0 if last is None else last.step,
                    loss=None if last is None else last.loss,
                )
            )
        return rows

    def _about(self, model: ModelStatus) -> "_About":
        """Returns what never changes of a model."""
        if model.id not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[model.id] = self._look_up(model)
        return self._known[model.id]

    def _look_up(self, model: ModelStatus) -> "_About":
        registry = self._server.registry
        try:
            entry = registry.owned(model.tenant, "model", model.id)
            session = registry.owned(model.tenant, "session", entry.parent or "")
        except NotFound:
            return _About(name=_short(model.id))
        name = session.fields.get("display_name")
        rank = entry.fields.get("lora", {}).get("rank")
        number = model.id.rpartition(":")[2]
        return _About(name=f"{name}:{number}" if name else _short(model.id), rank=rank)

    def _figures(
        self, status: HubStatus, models: Sequence[ModelStatus], tenant: str | None
    ) -> Figures:
        is_admin, slots = tenant is None, self._server.config.session.num_slots
        return Figures(
            tokens_per_second=self._recorder.rate(tenant),
            fill=status.fill if is_admin else None,
            steps=self._recorder.num_steps(tenant),
            waiting_tokens=sum(one.pending_tokens for one in models),
            waiting_datums=sum(one.pending_datums for one in models),
            slots=slots if is_admin else None,
            commit_seconds=status.commit_seconds if is_admin else None,
        )

    def _tenants(self, models: Sequence[ModelStatus]) -> list[TenantRow]:
        by_tenant: dict[str, list[ModelStatus]] = {}
        for model in models:
            by_tenant.setdefault(model.tenant, []).append(model)
        return [
            TenantRow(
                name=tenant,
                models=len(own),
                waiting_tokens=sum(one.pending_tokens for one in own),
                waiting_datums=sum(one.pending_datums for one in own),
                tokens_per_second=self._recorder.rate(tenant),
            )
            for tenant, own in sorted(by_tenant.items())
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _About:
    name: str
    rank: int | None = None


def _short(model: str) -> str:
    """Shortens the id of a model, `SESSION:train:NUMBER`, to what tells it apart."""
    session, _, number = model.partition(":train:")
    return f"{session[:8]}:{number}" if number else session[:8]


def _health(status: HubStatus, *, is_admin: bool) -> Health:
    why = f": {status.reason}" if is_admin and status.reason else ""
    level = _LEVELS.get(status.health, "bad")
    return Health(level=level, text=f"{_WORDS[status.health]}{why}")


def _of(tokens: "collections.Counter[str]", tenant: str | None) -> int:
    return tokens.total() if tenant is None else tokens[tenant]
