"""The server: its parts, its routes, and its life."""

import asyncio
import contextlib
import logging
import pathlib
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from jaxlora.common.console import complain
from jaxlora.config.serve_config import ServeConfig
from jaxlora.errors import CheckpointError, ConfigError, JaxloraError
from jaxlora.generate.generator import check_one_device
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.run.lock import RunLock
from jaxlora.serve import metrics, page
from jaxlora.serve.database import Database
from jaxlora.serve.guard import Guard, answer_to
from jaxlora.serve.hub import Hub
from jaxlora.serve.ids import Ids, engine_of
from jaxlora.serve.jobs import routes as jobs
from jaxlora.serve.jobs.jobs import Jobs
from jaxlora.serve.keys import Keys
from jaxlora.serve.limits import BodyLimits, Limits
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
# How long requests may still be answered when the server ends. Clients whose long polls
# are cut off ask again.
_LAST_SECONDS = 2
# For so long a connection without requests is kept. Proxies and clients keep theirs for
# a minute at most, and should be the ones that close it: a request that is sent while
# the server closes the connection fails.
_KEEP_SECONDS = 75
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
        except JaxloraError as error:
            app.state.failure = error
            raise
        tending = asyncio.create_task(_tend(server))
        yield
        tending.cancel()
        await asyncio.to_thread(server.hub.stop)
        server.database.close()

    app = FastAPI(title="jaxlora", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    for make_router in (_own_router, *ROUTERS):
        app.include_router(make_router(server))
    for kind in (HTTPException, RequestValidationError, JaxloraError):
        app.add_exception_handler(kind, _answer)
    # The last one is the outermost.
    app.add_middleware(BodyLimits, limits=server.config.limits)
    app.add_middleware(Guard, server=server)
    metrics.install(app, server.hub)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    return answer_to(error, request.scope)


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


class _Uvicorn(uvicorn.Server):
    """Ends by SIGTERM and Ctrl-C as it should, instead of raising them again."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]):
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True


def serve(config: ServeConfig, *, on_start: Callable[[], None] = lambda: None) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit status.

    Args:
        config: The settings.
        on_start: Called when the server takes requests.

    Raises:
        JaxloraError: The address, the certificate, the folder, the model, the database
            or the storage cannot be used.
    """
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(_bind(config))
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_TURN_SECONDS)
        if config.tls is not None:
            _check_tls(config.tls.certificate, config.tls.key)
        try:
            stack.enter_context(RunLock(pathlib.Path(config.folder)))
        except CheckpointError as error:
            owner = str(error).partition(" Two runs cannot share")[0]
            raise ConfigError(f"{owner} Stop that, or set another folder.") from None
        parts = make_server(config)
        parts.hub.prepare()
        app = make_app(parts)
        settings = uvicorn_settings(config, app)
        uvicorn_server = _Uvicorn(settings, on_start)
        died = app.state.server.hub.died
        died.add_done_callback(lambda _: uvicorn_server.handle_exit(0, None))
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the guard logs
        try:
            uvicorn_server.run(sockets=[bound])
        except SystemExit:
            if (failure := getattr(app.state, "failure", None)) is not None:
                raise failure from None
            raise
        if died.done():
            complain(
                "the engine cannot go on; start the server again. Nothing that it "
                "has acknowledged is lost."
            )
        return int(died.done() or not uvicorn_server.started)


def uvicorn_settings(config: ServeConfig, app: FastAPI) -> uvicorn.Config:
    """Returns how the app is served."""
    tls: dict[str, Any] = {}
    if config.tls is not None:
        tls = {"ssl_certfile": config.tls.certificate, "ssl_keyfile": config.tls.key}
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=config.behind_proxy,
        forwarded_allow_ips="*" if config.behind_proxy else None,
        timeout_graceful_shutdown=_LAST_SECONDS,
        timeout_keep_alive=_KEEP_SECONDS,
        ws="none",
        **tls,
    )


def _bind(config: ServeConfig) -> socket.socket:
    """Takes the address, before anything is loaded."""
    try:
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # that of a name that is none
        reason = getattr(error, "strerror", None) or "this is no name of a machine"
        raise ConfigError(
            f"the server cannot listen on port {config.port} of {config.host}: "
            f"{reason}. Set another port, or host."
        ) from None
    return bound


def _check_tls(certificate: str, key: str) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key
        )
    except OSError as error:
        raise ConfigError(
            f"tls: {certificate} and {key} cannot be used: {error.strerror or error}. "
            "Give the PEM files of a certificate and of its key."
        ) from None
