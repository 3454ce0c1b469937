"""The page of a server, with what each reader may see.

A key with the scope `admin` sees all tenants, and any other key its own tenant only.
Samples are for their tenant alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.responses import Response

from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.errors import JaxloraError
from jaxlora.run.status_view import format_seconds
from jaxlora.serve.history import Drawn, History
from jaxlora.serve.jobs.record import Job, is_of_job
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.registry import NotFound
from jaxlora.serve.server import Server
from jaxlora.serve.status import HubStatus, ModelStatus
from jaxlora.serve.view import (
    Figures,
    Health,
    Level,
    ModelRow,
    Page,
    Sample,
    TenantRow,
    View,
)

_STATE = "/page/state"
_CURVES = "curves.json"  # in the folder of the server
_SAVE_SECONDS = 60.0
_MOST_KNOWN = 10_000
_MOST_OVER = 100  # jobs that have ended
_MOST_TOKENS = 400  # of a prompt, and of a sample, that are shown
_LEVELS: dict[str, Level] = {"running": "good", "starting": "busy", "stopping": "busy"}
_WORDS = {
    "running": "serving",
    "starting": "replays what was not saved",
    "paused": "accepts nothing",
    "stopping": "stopping",
    "failed": "failed, restart it",
}
_PLACES = {"slot": "resident", "host": "parked", "file": "on disk", None: "waiting"}


def router(server: Server) -> APIRouter:
    """Returns the routes of the page, which record what the hub does from now on."""
    history = History(pathlib.Path(server.config.folder) / _CURVES)
    history.follow(server.hub, server.jobs)
    viewer = Viewer(server, history)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(history.load)
        saving = asyncio.create_task(_save_often(history))
        try:
            yield
        finally:
            saving.cancel()
            await asyncio.to_thread(history.save)

    made = APIRouter(lifespan=lifespan)
    page = Page.of("server", state=_STATE, needs_key=server.keys.demanded)

    @made.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return Response(page.body, headers=dict(page.headers))

    @made.get(_STATE, include_in_schema=False)
    def get_state(
        who: Annotated[Principal, Depends(allowed("read"))],
        after: Annotated[int, Query(ge=0)] = 0,
        epoch: Annotated[str, Query(max_length=64)] = "",
    ) -> Response:
        view = viewer.view(who, after, epoch)
        return Response(view.json(), media_type="application/json")

    return made


async def _save_often(history: History) -> None:
    while True:
        await asyncio.sleep(_SAVE_SECONDS)
        await asyncio.to_thread(history.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _About:
    """What never changes of a model."""

    name: str
    rank: int | None = None


class Viewer:
    """Puts together what a reader may see."""

    def __init__(self, server: Server, history: History):
        """Makes the object.

        Args:
            server: The server.
            history: What is remembered of it.
        """
        self._server, self._history = server, history
        self._known: dict[str, _About] = {}

    def view(self, who: Principal, after: int, epoch: str) -> View:
        """Returns what the page shows.

        Args:
            who: The reader.
            after: Cursor of the points that the page has.
            epoch: Where it has them from.
        """
        tenant = None if who.may("admin") else who.tenant
        status, history = self._server.hub.status(), self._history
        models = {m.id: m for m in status.models if tenant in (None, m.tenant)}
        rows = self._rows(models, tenant)
        cursor, points = history.curves.after(after, {row.id for row in rows}, epoch)
        return View(
            kind="server",
            title=self._server.config.served_name,
            subtitle=self._subtitle(tenant),
            health=_health(status, is_admin=tenant is None),
            epoch=history.curves.epoch,
            cursor=cursor,
            time=time.time(),
            figures=self._figures(status, [*models.values()], tenant),
            models=rows,
            points=points,
            rates=history.trained.recent(tenant),
            tenants=self._tenants([*models.values()]) if tenant is None else None,
            samples=[self._sample(drawn) for drawn in history.drawn(who.tenant)],
        )

    def _subtitle(self, tenant: str | None) -> str:
        if not self._server.keys.demanded:
            return "this machine"
        return "all tenants" if tenant is None else f"tenant {tenant}"

    # ---- models and jobs -------------------------------------------------------------

    def _rows(
        self, models: dict[str, ModelStatus], tenant: str | None
    ) -> list[ModelRow]:
        """Returns models and jobs, the newest first, and then those that have ended."""
        jobs = {
            job.id: job
            for job in self._server.jobs.every()
            if tenant in (None, job.tenant)
        }
        live = [job for job in jobs.values() if not job.progress.is_over]
        over = [job for job in jobs.values() if job.progress.is_over][-_MOST_OVER:]
        clients = [model for model in models.values() if not is_of_job(model.id)]
        places = self._server.jobs.places()
        return [
            *(self._job(job, places, models.get(job.id)) for job in reversed(live)),
            *(self._model(model) for model in reversed(clients)),
            *(self._job(job, places) for job in reversed(over)),
            *self._unloaded({*models}, tenant),
        ]

    def _job(
        self, job: Job, places: Mapping[str, int], model: ModelStatus | None = None
    ) -> ModelRow:
        progress = job.progress
        return ModelRow(
            id=job.id,
            name=job.name,
            tenant=job.tenant,
            state=progress.status,
            step=progress.step,
            num_steps=job.num_steps,
            rank=job.rank,
            loss=progress.last_loss,
            held_out=progress.best_eval,
            waiting_tokens=0 if model is None else model.pending_tokens,
            waiting_datums=0 if model is None else model.pending_datums,
            note=progress.reason or self._prospect(job, places),
        )

    def _prospect(self, job: Job, places: Mapping[str, int]) -> str:
        """Says when a job begins or ends."""
        if (place := places.get(job.id)) is not None:
            return f"place {place} in the queue"
        left = self._server.jobs.seconds_left(job)
        return "" if left is None else f"{format_seconds(left)} left"

    def _model(self, model: ModelStatus) -> ModelRow:
        about, last = self._about(model), self._history.curves.last(model.id)
        return ModelRow(
            id=model.id,
            name=about.name,
            tenant=model.tenant,
            state="failed" if model.failure else _PLACES[model.place],
            step=model.steps,
            rank=about.rank,
            loss=model.loss_per_token if last is None else last.loss,
            waiting_tokens=model.pending_tokens,
            waiting_datums=model.pending_datums,
            note=model.failure or "",
        )

    def _unloaded(self, shown: set[str], tenant: str | None) -> list[ModelRow]:
        """Returns rows of models that have curves and nothing else any more."""
        rows, curves = [], self._history.curves
        for model in reversed(curves.models()):
            owner, last = self._history.tenants.get(model), curves.last(model)
            is_shown = model in shown or is_of_job(model)  # which may be deleted
            if is_shown or owner is None or tenant not in (None, owner):
                continue
            about = self._known.get(model) or _About(name=_short(model))
            rows.append(
                ModelRow(
                    id=model,
                    name=about.name,
                    tenant=owner,
                    state="unloaded",
                    step=0 if last is None else last.step,
                    rank=about.rank,
                    loss=None if last is None else last.loss,
                )
            )
        return rows

    def _about(self, model: ModelStatus) -> _About:
        if model.id not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[model.id] = self._look_up(model)
        return self._known[model.id]

    def _look_up(self, model: ModelStatus) -> _About:
        registry = self._server.registry
        try:
            entry = registry.owned(model.tenant, "model", model.id)
            session = registry.owned(model.tenant, "session", entry.parent or "")
        except NotFound:
            return _About(name=_short(model.id))
        name = session.fields.get("display_name")
        rank = entry.fields.get("lora", {}).get("rank")
        if not name:
            return _About(name=_short(model.id), rank=rank)
        number = model.id.rpartition(":")[2]  # of the model among the session's
        return _About(name=name if number == "0" else f"{name}:{number}", rank=rank)

    # ---- the rest --------------------------------------------------------------------

    def _figures(
        self, status: HubStatus, models: Sequence[ModelStatus], tenant: str | None
    ) -> Figures:
        places = [model.place for model in models]
        is_admin, session = tenant is None, self._server.config.session
        return Figures(
            tokens_per_second=self._history.trained.now(tenant),
            sampled_per_second=self._history.sampled.now(tenant),
            steps=self._history.num_steps(tenant),
            waiting_tokens=sum(model.pending_tokens for model in models),
            waiting_datums=sum(model.pending_datums for model in models),
            resident=places.count("slot"),
            parked=places.count("host"),
            cold=places.count("file"),
            slots=session.num_slots if is_admin else None,
            fill=status.fill if is_admin else None,
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
                waiting_tokens=sum(model.pending_tokens for model in own),
                waiting_datums=sum(model.pending_datums for model in own),
                tokens_per_second=self._history.trained.now(tenant),
            )
            for tenant, own in sorted(by_tenant.items())
        ]

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None: the model has none that fits."""
        model = self._server.hub.engine.model
        try:
            tokenizer = load_tokenizer(model.folder)
            tokenizer.check_fits(model.config.vocab_size)
        except JaxloraError:
            return None
        return tokenizer

    def _sample(self, drawn: Drawn) -> Sample:
        one, tokenizer = drawn.completion, self._tokenizer
        jobs = {job.id: job.name for job in self._server.jobs.every()}
        *_, folder, name = f"/{drawn.version}".split("/")  # of a job, that is its id
        at = time.strftime("%H:%M:%S", time.localtime(drawn.time))
        return Sample(
            model=jobs.get(folder) or _short(name),
            prompt=_text(tokenizer, one.prompt[-_MOST_TOKENS:]),
            text=_text(tokenizer, one.tokens[:_MOST_TOKENS]),
            note=f"{at}, {len(one.tokens)} tokens, {one.finish_reason}",
        )


def _text(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return tokenizer.decode(tokens)


def _short(model: str) -> str:
    """Shortens an id, `SESSION:train:NUMBER` or another one, to what tells it apart."""
    session, _, number = model.partition(":train:")
    return f"{session[:8]}:{number}" if number else session[:24]


def _health(status: HubStatus, *, is_admin: bool) -> Health:
    why = f": {status.reason}" if is_admin and status.reason else ""
    level = _LEVELS.get(status.health, "bad")
    return Health(level=level, text=f"{_WORDS[status.health]}{why}")
