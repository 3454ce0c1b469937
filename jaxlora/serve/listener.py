"""Where a server listens, and how uvicorn runs its app."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import resource
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxlora.config.serve_config import ServeConfig
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.run.lock import RunLock

# How long requests may still be answered when the server ends. Clients whose long polls
# are cut off ask again.
_LAST_SECONDS = 2
_LONGEST_PATH = 107
SOCKET = "socket"  # of an engine, in its folder
# For so long a connection without requests is kept. Proxies and clients keep theirs for
# a minute at most, and should be the ones that close it: a request that is sent while
# the server closes the connection fails.
KEEP_SECONDS = 75


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listener:
    """An address that an app is served at.

    Attributes:
        bound: The socket; None: it is made.
        settings: Settings of uvicorn.
    """

    bound: socket.socket | None = None
    settings: Mapping[str, Any]

    def server(self, app: FastAPI, on_start: Callable[[], None]) -> uvicorn.Server:
        """Returns the server of an app; it calls `on_start` when it takes requests."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_SECONDS,
            timeout_keep_alive=KEEP_SECONDS,
            ws="none",
            **self.settings,
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the guard logs
        return _Uvicorn(config, on_start)

    def run(self, server: uvicorn.Server, app: FastAPI) -> None:
        """Serves an app until SIGTERM or Ctrl-C.

        Raises:
            Exception: The app could not start, and has it as `app.state.failure`.
        """
        # Each long poll has a connection, and a second one from a front to its engine.
        # The usual soft limit of 1024 is for programs that use `select`.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            server.run(sockets=None if self.bound is None else [self.bound])
        except SystemExit:
            if (failure := getattr(app.state, "failure", None)) is not None:
                raise failure from None
            raise


@contextlib.contextmanager
def listen(config: ServeConfig) -> Generator[Listener]:
    """Takes the address of a server, before anything is loaded.

    Raises:
        ConfigError: The address or the certificate cannot be used.
    """
    with _bind(config) as bound:
        settings: dict[str, Any] = {
            "proxy_headers": config.behind_proxy,
            "forwarded_allow_ips": "*" if config.behind_proxy else None,
        }
        if config.tls is not None:
            settings |= {
                "ssl_certfile": config.tls.certificate,
                "ssl_keyfile": config.tls.key,
            }
            _check_tls(config.tls.certificate, config.tls.key)
        yield Listener(bound=bound, settings=settings)


@contextlib.contextmanager
def listen_at(path: pathlib.Path) -> Generator[Listener]:
    """Gives a socket at a path, which only processes of this user reach.

    Args:
        path: The path, in a folder for this user alone.

    Raises:
        ConfigError: The path is too long.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"{path} is longer than {_LONGEST_PATH} bytes, the most for a socket. Set "
            "a folder with a shorter path."
        )
    trusted = {"proxy_headers": True, "forwarded_allow_ips": "*"}
    yield Listener(settings={"uds": str(path), **trusted})


def lock_folder(config: ServeConfig) -> RunLock:
    """Returns the lock of a server's folder.

    Raises:
        ConfigError: Another process has it.
    """
    try:
        return RunLock(pathlib.Path(config.folder))
    except CheckpointError as error:
        owner = str(error).partition(" Two runs cannot share")[0]
        raise ConfigError(f"{owner} Stop that, or set another folder.") from None


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
