"""The server: its parts, its routes, and its life."""

import asyncio
import contextlib
import logging
import pathlib
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse

from jaxlora.common.console import complain
from jaxlora.config.serve_config import ServeConfig
from jaxlora.errors import JaxloraError
from jaxlora.generate.generator import check_one_device
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.serve import metrics, page
from jaxlora.serve.database import Database
from jaxlora.serve.guard import Guard, install_errors
from jaxlora.serve.hub import Hub
from jaxlora.serve.ids import Ids, engine_of
from jaxlora.serve.jobs import routes as jobs
from jaxlora.serve.jobs.jobs import Jobs
from jaxlora.serve.keys import Keys
from jaxlora.serve.limits import BodyLimits, Limits
from jaxlora.serve.listener import SOCKET, listen, listen_at, lock_folder
from jaxlora.serve.registry import Entry, NotFound, Registry
from jaxlora.serve.server import Server
from jaxlora.serve.shared import HubSettings
from jaxlora.serve.storage import Links, Storage
from jaxlora.serve.tinker import api as tinker
from jaxlora.serve.tinker.checkpoints import settled
from jaxlora.serve.tinker.training import unload
from jaxlora.session.engine import Engine
from jaxlora.train.compilation_cache import keep_compiled_programs

logger = logging.getLogger(__name__)

_TEND_SECONDS = 30.0
# A thread that computes in Python lets others wait for so long at most. A request needs
# several turns, between the engine's thread, its own and that of the log; with Python's
# default, 5 ms, it waits for 20 ms where the engine computes.
_TURN_SECONDS = 0.0005

# The routes, in the order in which they are looked for.
ROUTERS: tuple[Callable[[Server], APIRouter], ...] = (
    tinker.router,
    jobs.router,
    page.router,
)


def make_server(
    config: ServeConfig, model: FrozenModel | None = None, *, engine: int = 0
) -> Server:
    """Makes the parts of a server; `make_app` starts them.

    Args:
        config: The settings.
        model: The base model; None: it is loaded.
        engine: Number of the engine among those that share a database and a storage.

    Raises:
        JaxloraError: The model, the database or the storage cannot be used.
    """
    folder = pathlib.Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    database = Database(config.database_url)
    try:
        return _make_parts(config, folder, database, model, Ids(engine))
    except BaseException:
        database.close()
        raise


def _make_parts(
    config: ServeConfig,
    folder: pathlib.Path,
    database: Database,
    model: FrozenModel | None,
    ids: Ids,
) -> Server:
    storage = Storage(
        config.storage_url,
        options=config.storage_options,
        cache=folder / "cache",
        cache_bytes=config.cache_bytes,
        writer=str(ids.engine),
    )
    keep_compiled_programs()
    if model is None:
        model = load_model(
            config.model,
            dtype=config.dtype,
            revision=config.revision,
            quantize=config.quantize_base,
            quantize_args=config.quantize_base_args,
            keep_bf16=config.keep_bf16,
        )
    check_one_device(model, "jaxlora serve")
    registry = Registry(database, ids)
    versions = folder / "versions"  # what an earlier process has left is in no use
    shutil.rmtree(versions, ignore_errors=True)
    versions.mkdir(mode=0o700)
    engine = Engine(
        model,
        config.session,
        host_bytes=config.session.host_bytes,
        folder=folder / "parked",
        weight_of=lambda tenant: config.quota(tenant).weight,
        slots_of=lambda tenant: config.quota(tenant).slots,
    )
    config = config.replace(session=engine.config)  # without `auto`
    limits = Limits(config, registry)
    hub = Hub(
        *(engine, storage, database),
        HubSettings(
            snapshot_steps=config.snapshots.steps,
            snapshot_seconds=config.snapshots.seconds,
            keep_seconds=config.retention.promise_seconds,
            sampler_seconds=config.retention.sampler_seconds,
        ),
        config.sampling,
        limits=limits,
        folder=versions,
        ids=ids,
    )
    return Server(
        config=config,
        database=database,
        ids=ids,
        hub=hub,
        registry=registry,
        keys=Keys(database, demanded=config.demands_keys),
        storage=storage,
        limits=limits,
        links=Links(database.secret("links")),
        jobs=Jobs(
            hub=hub,
            storage=storage,
            database=database,
            registry=registry,
            limits=limits,
            ids=ids,
        ),
    )


def make_app(server: Server) -> FastAPI:
    """Returns the app with all routes. Its lifespan starts and ends the hub."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await asyncio.to_thread(server.hub.start)
            tending = asyncio.create_task(_tend(server))
            try:
                yield  # what starts next may fail, too
            finally:
                tending.cancel()
        except Exception as error:
            app.state.failure = error
            raise
        finally:  # the process does not end as long as a thread runs
            await asyncio.to_thread(server.hub.stop)
            server.database.close()

    app = FastAPI(title="jaxlora", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    for make_router in (_own_router, *ROUTERS):
        app.include_router(make_router(server))
    install_errors(app)
    # The last one is the outermost.
    app.add_middleware(BodyLimits, limits=server.config.limits)
    app.add_middleware(Guard, server=server)
    metrics.install(app, server.hub)
    return app


def _own_router(server: Server) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def health() -> Response:
        """Whether the server takes requests, for whoever watches over it."""
        status = server.hub.status()
        is_well = status.health in ("running", "starting")
        return JSONResponse(
            {"status": "ok" if is_well else status.health}, 200 if is_well else 503
        )

    @router.get("/download/{key:path}")
    def download(
        key: str,
        expires: int,
        signature: Annotated[str, Query(max_length=200)],
        file: Annotated[str | None, Query(max_length=400)] = None,
    ) -> Response:
        """Sends what a link names: a file, or a tar of all."""
        server.links.check(key, file, expires, signature)
        if file is None:
            length, pieces = server.storage.archive(key)
            name = f"{key.rpartition('/')[2]}.tar"
        else:
            length = server.storage.files(key).get(file, 0)
            pieces, name = server.storage.read(key, file), file.rpartition("/")[2]
        headers = {
            "content-length": str(length),
            "content-disposition": f'attachment; filename="{name}"',
        }
        return StreamingResponse(pieces, 200, headers, "application/octet-stream")

    return router


async def _tend(server: Server) -> None:
    """Deletes what is over and parks what is not in use, now and then."""

    async def attempt(work: Callable[..., None], *given: Any) -> None:
        try:
            await asyncio.to_thread(work, *given)
        except Exception as error:  # such as a database that is away
            logger.warning("%s is tried again later: %s", work.__name__, error)

    await attempt(server.storage.clean)
    while True:
        await attempt(delete_expired, server)
        await attempt(park_lapsed, server)
        await attempt(end_unused, server)
        await asyncio.sleep(_TEND_SECONDS)


def delete_expired(server: Server) -> None:
    """Deletes checkpoints and uploads whose time is over.

    The files go first: a row without files is tried again, and files without a row
    would stay for ever.
    """
    for kind in ("checkpoint", "upload"):
        for entry in server.registry.expired(kind):
            try:
                _delete_expired(server, entry)
            except JaxloraError as error:  # it is not to keep the others
                logger.warning("a %s is deleted later: %s", kind, error)


def _delete_expired(server: Server, entry: Entry) -> None:
    if entry.kind == "checkpoint":
        now = settled(server, entry) or entry
        if now.expires_at != entry.expires_at:
            return  # what has replaced it lasts for a time of its own
    if (key := entry.fields.get("key")) is not None:
        server.storage.delete(key)
    with contextlib.suppress(NotFound):  # another engine has
        server.registry.delete(entry.tenant, entry.kind, entry.id)


def park_lapsed(server: Server) -> None:
    """Lets models leave their slots whose clients have sent no heartbeat for long."""
    seconds = server.config.retention.heartbeat_seconds
    for session in server.registry.lapsed("session", seconds, 3 * _TEND_SECONDS):
        for model in server.registry.list(session.tenant, "model", parent=session.id):
            server.hub.park(model.id)


def end_unused(server: Server) -> None:
    """Unloads the models of clients that are gone for good, and forgets such clients.

    Models with checkpoints stay in lists.
    """
    seconds = server.config.retention.session_seconds
    for model in server.registry.unused_models(seconds):
        if engine_of(model.id) == server.ids.engine:
            unload(server, model)
    server.registry.delete_unused(seconds)


def serve(
    config: ServeConfig,
    *,
    engine: int | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit status.

    Args:
        config: The settings.
        engine: Number of this engine of several, which a front reaches by a socket in
            the folder; None: it is the only one, and clients reach it.
        on_start: Called when the server takes requests.

    Raises:
        JaxloraError: The address, the certificate, the folder, the model, the database
            or the storage cannot be used.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_TURN_SECONDS)
        socket = pathlib.Path(config.folder) / SOCKET
        listener = stack.enter_context(
            listen(config) if engine is None else listen_at(socket)
        )
        stack.enter_context(lock_folder(config))
        parts = make_server(config, engine=engine or 0)
        parts.hub.prepare()
        app, died = make_app(parts), parts.hub.died
        uvicorn_server = listener.server(app, on_start)
        died.add_done_callback(lambda _: uvicorn_server.handle_exit(0, None))
        listener.run(uvicorn_server, app)
        if died.done():
            complain(
                "the engine cannot go on; start the server again. Nothing that it "
                "has acknowledged is lost."
            )
        return int(died.done() or not uvicorn_server.started)
