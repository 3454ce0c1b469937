"""The processes of engines, which are started, started again and ended."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence

import jax
from fastapi import FastAPI

from jaxlora.common.atomic import make_folder, write_bytes
from jaxlora.config.serve_config import ServeConfig
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.run.lock import find_owner, is_in_use
from jaxlora.serve.database import Database
from jaxlora.serve.fleet.front import Engine, Front, make_front
from jaxlora.serve.jobs.record import JobTable
from jaxlora.serve.keys import Keys
from jaxlora.serve.listener import SOCKET, listen, lock_folder
from jaxlora.serve.registry import Registry
from jaxlora.session.residence import default_host_bytes

logger = logging.getLogger(__name__)

_RESTART_SECONDS = 1.0, 30.0  # before a process is started again: first, and longest
_LOOK_SECONDS = 0.05  # between looks whether all have started
_STEADY_SECONDS = 60.0  # after which a process has been started well


@dataclasses.dataclass(kw_only=True, eq=False)
class EngineProcess:
    """The process of an engine.

    Attributes:
        number: Number of the engine.
        folder: Its folder.
        device: Its GPU, as CUDA_VISIBLE_DEVICES names it; None: it has none.
        has_ended: Whether a process has ended that nobody has stopped.
    """

    number: int
    folder: pathlib.Path
    device: str | None
    has_ended: bool = False
    _process: asyncio.subprocess.Process | None = None

    def prepare(self, config: ServeConfig) -> None:
        """Writes the settings of the engine.

        Raises:
            StorageError: They cannot be written.
        """
        make_folder(self.folder)
        self.folder.chmod(0o700)
        # Each engine alone would take half of the host's memory.
        host_bytes = config.session.host_bytes or default_host_bytes()
        share = max(1, host_bytes // config.num_engines)
        own = config.replace(
            engines=1,
            folder=str(self.folder),
            session=config.session.replace(host_bytes=share),
            database=config.database_url,
            storage=config.storage_url,
        )
        text = own.model_dump_json(exclude_unset=True)
        write_bytes(self.folder / "serve.yaml", text.encode(), mode=0o600)

    async def keep(self) -> None:
        """Runs one process after the other; if this is cancelled, the last one ends."""
        seconds, longest = _RESTART_SECONDS
        loop = asyncio.get_running_loop()
        try:
            await self._wait_for_earlier()
            while True:
                begun = loop.time()
                try:
                    self._process = await self._start()
                    how = f"with status {await self._process.wait()}"
                except OSError as error:  # such as no memory for a process
                    how = f"before it began: {error}"
                self.has_ended = True
                if loop.time() - begun > _STEADY_SECONDS:
                    seconds = _RESTART_SECONDS[0]
                logger.error(
                    "engine %d has ended %s, and starts again in %g s",
                    *(self.number, how, seconds),
                )
                await asyncio.sleep(seconds)
                seconds = min(longest, 2 * seconds)
        finally:
            await self._stop()

    async def _wait_for_earlier(self) -> None:
        """Waits for the engine of a front that was killed, which writes snapshots."""
        if (owner := find_owner(self.folder)) is not None:
            logger.warning("engine %d waits for the end of %s", self.number, owner)
        while is_in_use(self.folder):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _start(self) -> asyncio.subprocess.Process:
        device = {} if self.device is None else {"CUDA_VISIBLE_DEVICES": self.device}
        command = [*(sys.executable, "-m", "jaxlora", "serve")]
        command += [str(self.folder / "serve.yaml"), "--engine", str(self.number)]
        # The engine ends when its input does, so also if this process is killed.
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | device,
            start_new_session=True,  # Ctrl-C is for this process, which ends them
        )

    async def _stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()


def serve_engines(
    config: ServeConfig,
    devices: Sequence[str],
    *,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Serves with several engines until SIGTERM or Ctrl-C; returns the exit status.

    Args:
        config: The settings, of which `engines` is a number.
        devices: The GPUs, as CUDA_VISIBLE_DEVICES names them; none: the CPU is used.
        on_start: Called when the server takes requests.

    Raises:
        JaxloraError: The address, the certificate, the folder or the database cannot be
            used, or an engine has not started, which it says itself.
    """
    jax.config.update("jax_platforms", "cpu")  # the GPUs are for the engines
    folder = pathlib.Path(config.folder).absolute() / "engines"
    given = devices or [None] * config.num_engines
    processes = [
        EngineProcess(number=number, folder=folder / str(number), device=device)
        for number, device in zip(range(config.num_engines), given, strict=False)
    ]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(config))
        pathlib.Path(config.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        stack.enter_context(lock_folder(config))
        for process in processes:
            process.prepare(config)
        database = stack.enter_context(
            contextlib.closing(Database(config.database_url))
        )
        front = Front(
            config=config,
            keys=Keys(database, demanded=config.demands_keys),
            registry=Registry(database),
            jobs=JobTable(database),
            engines={p.number: Engine(p.number, p.folder / SOCKET) for p in processes},
        )

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            keeping = [asyncio.create_task(process.keep()) for process in processes]
            try:
                async with front.watching(app):
                    while not (server.should_exit or _have_started(front, processes)):
                        await asyncio.sleep(_LOOK_SECONDS)
                    yield
            except JaxloraError as error:
                app.state.failure = error
                raise
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.wait(keeping)

        app = make_front(front, lifespan)
        server = listener.server(app, on_start)
        listener.run(server, app)
        return int(not server.started)


def _have_started(front: Front, processes: Sequence[EngineProcess]) -> bool:
    """Returns whether all engines answer.

    Raises:
        ConfigError: One has ended.
    """
    for process in processes:
        if process.has_ended:
            raise ConfigError(
                f"engine {process.number} has not started, for the reason above."
            )
    return all(engine.health is not None for engine in front.engines.values())
