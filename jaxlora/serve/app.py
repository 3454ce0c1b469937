"""The server: its parts, its routes, and its life."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from jaxlora.config.serve_config import ServeConfig
from jaxlora.errors import JaxloraError, StorageError
from jaxlora.generate.generator import check_one_device
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.serve.database import Database
from jaxlora.serve.hub import Hub
from jaxlora.serve.keys import Keys
from jaxlora.serve.limits import Limits, OverQuota, OverStorage
from jaxlora.serve.registry import NotFound, Registry, Taken
from jaxlora.serve.storage import Storage
from jaxlora.session.engine import Engine
from jaxlora.train.compilation_cache import keep_compiled_programs

logger = logging.getLogger(__name__)

_STATUS: dict[type[JaxloraError], int] = {
    NotFound: 404,
    Taken: 409,
    OverQuota: 429,
    OverStorage: 402,
    StorageError: 503,
    JaxloraError: 400,
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Server:
    """The parts of a server, which its routes use.

    Attributes:
        config: Its settings.
        database: Its database.
        hub: Runs operations of models.
        registry: What tenants have.
        keys: Their keys.
        storage: Files of checkpoints and uploads.
        limits: Limits and quotas.
    """

    config: ServeConfig
    database: Database
    hub: Hub
    registry: Registry
    keys: Keys
    storage: Storage
    limits: Limits


def make_server(config: ServeConfig, model: FrozenModel | None = None) -> Server:
    """Makes the parts of a server; `make_app` starts them.

    Args:
        config: The settings.
        model: The base model; None: it is loaded.

    Raises:
        JaxloraError: The model, the database or the storage cannot be used.
    """
    folder = pathlib.Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    database = Database(config.database_url)
    storage = Storage(folder / "files")
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
    registry = Registry(database)
    return Server(
        config=config,
        database=database,
        hub=Hub(Engine(model, config.session), storage),
        registry=registry,
        keys=Keys(database, demanded=config.demands_keys),
        storage=storage,
        limits=Limits(config, registry),
    )


def make_app(server: Server) -> FastAPI:
    """Returns the app with all routes. Its lifespan starts and ends the hub."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.hub.start()
        yield
        server.hub.stop()
        server.database.close()

    app = FastAPI(title="jaxlora", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.add_exception_handler(JaxloraError, _answer)
    return app


async def _answer(request: Request, error: Exception) -> JSONResponse:
    status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
    return JSONResponse({"detail": str(error)}, status)
