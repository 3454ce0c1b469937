"""The address of several engines: it sends each request to the one that it is for.

It checks keys and sizes, as each engine does, and knows no model. A session lives on
one engine, with its models, samplers and results, and the ids of all of these tell
which. What has no id goes to the engine with the fewest sessions and jobs, or the
fewest open requests. All else is in the database and the storage that engines share.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jaxlora.config.serve_config import ServeConfig
from jaxlora.serve.fleet import merge
from jaxlora.serve.fleet.address import TINKER, engine_named
from jaxlora.serve.fleet.relay import Away, ClientGone, Incoming, Relay
from jaxlora.serve.guard import Guard, install_errors
from jaxlora.serve.ids import engine_of
from jaxlora.serve.jobs.record import JobTable
from jaxlora.serve.keys import Keys, Principal, authenticate
from jaxlora.serve.limits import BodyLimits
from jaxlora.serve.registry import Registry

_LOOK_SECONDS, _AWAY_SECONDS = 1.0, 0.1  # between looks whether an engine answers
_ANSWER_SECONDS = 10.0
_WAIT_SECONDS = 30.0  # for an engine that is away
_ACTIVE_SECONDS = 120.0  # since the last heartbeat of a session that counts as load

_NEW = {("POST", f"{TINKER}create_session"), ("POST", "/jobs/v1/jobs")}
_JOBS = "/jobs/v1/jobs/"

Anyone = Annotated[Principal, Depends(authenticate)]


class Engine:
    """An engine, as its clients see it.

    Attributes:
        number: Its number.
        relay: The way to it.
        health: What it says of itself; None: it is away.
        num_new: Sessions and jobs that are being made there.
    """

    def __init__(self, number: int, socket: pathlib.Path):
        """Makes the object; `socket` is that of the engine's process."""
        self.number, self.relay = number, Relay(socket)
        self.health: str | None = None
        self.num_new = 0
        self._is_back = asyncio.Event()

    @property
    def is_well(self) -> bool:
        """Whether it accepts requests."""
        return self.health == "ok"

    async def look(self) -> None:
        """Looks whether it answers."""
        get = self.relay.get("/healthz", [(b"host", b"localhost")])
        try:
            _, body = await asyncio.wait_for(get, _ANSWER_SECONDS)
            self.health = json.loads(body)["status"]
            self._is_back.set()
        except (Away, TimeoutError, ValueError, KeyError):  # it may answer an error
            self.lose()

    async def watch(self) -> None:
        """Looks again and again."""
        while True:
            await self.look()
            known = self.health is not None
            await asyncio.sleep(_LOOK_SECONDS if known else _AWAY_SECONDS)

    def lose(self) -> None:
        """Notes that it does not answer."""
        self.health = None
        self._is_back.clear()
        self.relay.close()

    async def forward(self, scope: Scope, incoming: Incoming, send: Send) -> None:
        """Sends a request on, and its answer back.

        Raises:
            Away: It does not answer.
        """
        try:
            await self.relay.forward(scope, incoming, send)
        except Away:
            await self.look()
            raise

    async def wait(self, seconds: float) -> None:
        """Waits until it answers.

        Raises:
            Away: That is not so after some seconds.
        """
        try:
            await asyncio.wait_for(self._is_back.wait(), seconds)
        except TimeoutError:
            raise Away(
                f"engine {self.number}, which has what this request is about, does not "
                "answer now. Nothing that it has acknowledged is lost. Send the "
                "request again."
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Front:
    """The parts of the front.

    Attributes:
        config: The settings of the server.
        keys: The keys of tenants.
        registry: What tenants have.
        jobs: Their jobs.
        engines: The engines by number.
    """

    config: ServeConfig
    keys: Keys
    registry: Registry
    jobs: JobTable
    engines: Mapping[int, Engine]

    @contextlib.asynccontextmanager
    async def watching(self, app: FastAPI) -> AsyncIterator[None]:
        """Looks after the engines meanwhile."""
        tasks = [asyncio.create_task(e.watch()) for e in self.engines.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for engine in self.engines.values():
                await engine.relay.end()

    # ---- choice ----------------------------------------------------------------------

    async def place(self) -> Engine:
        """Returns the engine for a new session or job."""
        load = await asyncio.to_thread(self._load)
        return min(
            await self._well(), key=lambda e: (load[e.number] + e.num_new, e.number)
        )

    def _load(self) -> collections.Counter[int]:
        """Returns the number of sessions in use and live jobs on each engine."""
        used = self.registry.used("session", _ACTIVE_SECONDS)
        ids = [entry.id for entry in used if not entry.fields.get("finished")]
        return collections.Counter(map(engine_of, [*ids, *self.jobs.live()]))

    async def any(self) -> Engine:
        """Returns the engine for a request that all can answer."""
        return min(await self._well(), key=lambda e: (e.relay.num_open, e.number))

    async def _well(self) -> Sequence[Engine]:
        """Returns the engines that accept, or else all that answer, and waits for one.

        Raises:
            Away: None answers.
        """
        every = [*self.engines.values()]
        if well := [engine for engine in every if engine.is_well]:
            return well
        if up := [engine for engine in every if engine.health is not None]:
            return up
        waits = {asyncio.create_task(engine.wait(_WAIT_SECONDS)) for engine in every}
        done, late = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in late:
            one.cancel()
        done.pop().result()
        return [engine for engine in every if engine.health is not None]

    async def choose(self, scope: Scope, incoming: Incoming) -> Engine:
        """Returns the engine for a request about what is there.

        Raises:
            Away: It does not answer.
            HTTPException: The body cannot be read.
        """
        if scope["path"].startswith(_JOBS):
            number = await self._engine_of_job(scope)
        else:
            most = self.config.limits.body_bytes
            number = await engine_named(scope, incoming, most)
        if number not in self.engines:
            return await self.any()
        engine = self.engines[number]
        if scope["method"] == "GET" and engine.health is None:
            return await self.any()  # all can read
        await engine.wait(_WAIT_SECONDS)
        # It may be away again by now. Another one would say that it has nothing.
        return engine

    async def _engine_of_job(self, scope: Scope) -> int | None:
        name = scope["path"].removeprefix(_JOBS).partition("/")[0]
        tenant = (await authenticate(Request(scope))).tenant
        id = await asyncio.to_thread(self.jobs.id_of, tenant, name)
        return None if id is None else engine_of(id)

    # ---- requests --------------------------------------------------------------------

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request by an engine's answer."""
        if scope["type"] != "http":
            return
        incoming = Incoming(receive)
        try:
            if (scope["method"], scope["path"]) in _NEW:
                engine = await self.place()
                engine.num_new += 1
                try:
                    await engine.forward(scope, incoming, send)
                finally:
                    engine.num_new -= 1
            else:
                engine = await self.choose(scope, incoming)
                await engine.forward(scope, incoming, send)
        except ClientGone:
            return

    async def ask(self, request: Request, paths: Mapping[int, str]) -> dict[int, bytes]:
        """Returns the answers of engines to a request that all have to answer.

        Args:
            request: The request, whose headers are sent on.
            paths: The path with its query, by the engine. Those that are away have no
                answer.

        Raises:
            HTTPException: An engine has answered with an error, or none answers.
        """
        headers = [*request.headers.raw]

        async def one(number: int) -> tuple[int, bytes] | None:
            engine = self.engines[number]
            if engine.health is None:
                return None
            try:
                get = engine.relay.get(paths[number], headers)
                return await asyncio.wait_for(get, _ANSWER_SECONDS)
            except (Away, TimeoutError):
                return None

        found = await asyncio.gather(*map(one, paths))
        answers = {n: one for n, one in zip(paths, found, strict=True) if one}
        for status, body in answers.values():
            if status != 200:
                raise HTTPException(status, json.loads(body)["detail"])
        if not answers:
            raise Away("no engine answers now. Send the request again.")
        return {number: body for number, (_, body) in answers.items()}


def make_front(front: Front, lifespan: Callable[[FastAPI], Any]) -> FastAPI:
    """Returns the app of a front.

    Args:
        front: The front.
        lifespan: What goes on while it runs; it has `front.watching` in it.
    """
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = front
    app.include_router(_router(front))
    # A request without a route here is for an engine.
    app.router.default = front.forward
    app.router.redirect_slashes = False
    install_errors(app)
    app.add_middleware(BodyLimits, limits=front.config.limits, decompresses=False)
    app.add_middleware(Guard, server=front)
    return app


def _router(front: Front) -> APIRouter:
    """Returns the routes about the whole server."""
    router = APIRouter()
    everywhere = lambda path: dict.fromkeys(front.engines, path)

    @router.get("/healthz")
    async def health() -> Response:
        """Whether the server takes requests, for whoever watches over it."""
        states = {e.number: e.health or "away" for e in front.engines.values()}
        is_well = any(engine.is_well for engine in front.engines.values())
        status = "ok" if {*states.values()} == {"ok"} else "partly"
        content = {"status": status if is_well else "away", "engines": states}
        return JSONResponse(content, 200 if is_well else 503)

    @router.get("/metrics")
    async def metrics(request: Request, who: Anyone) -> Response:
        answers = await front.ask(request, everywhere("/metrics"))
        texts = {number: body.decode() for number, body in answers.items()}
        text = merge.merge_metrics(texts, [*front.engines])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/jobs/v1/queue")
    async def queue(request: Request, who: Anyone) -> Any:
        answers = await front.ask(request, everywhere("/jobs/v1/queue"))
        return merge.merge_queues([json.loads(body) for body in answers.values()])

    @router.get("/page/state")
    async def state(
        request: Request,
        who: Anyone,
        after: Annotated[str, Query(max_length=20_000, pattern="^[0-9.]*$")] = "",
        epoch: Annotated[str, Query(max_length=20_000, pattern="^[0-9a-f.-]*$")] = "",
    ) -> Response:
        epochs = dict(one.split("-", 1) for one in epoch.split(".") if "-" in one)
        known = dict(zip(epochs, after.split("."), strict=False))
        paths = everywhere("/page/state") | {
            number: f"/page/state?after={known[name]}&epoch={epochs[name]}"
            for number in front.engines
            if known.get(name := str(number))
        }
        views = _views(await front.ask(request, paths))
        if epoch and merge.epoch_of(views) != epoch:  # all points are to come anew
            views = _views(await front.ask(request, everywhere("/page/state")))
        away = [number for number in front.engines if number not in views]
        return JSONResponse(merge.merge_views(views, away))

    return router


def _views(answers: Mapping[int, bytes]) -> dict[int, Any]:
    return {number: json.loads(body) for number, body in answers.items()}
