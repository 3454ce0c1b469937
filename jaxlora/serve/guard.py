"""The checks of every request before its route, and of every answer after it."""

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import Mapping
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

import sqlalchemy.exc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxlora.config.serve_config import ServeConfig
from jaxlora.errors import DeviceError, JaxloraError, StorageError
from jaxlora.problems import Problem, Source, format_problems
from jaxlora.serve.hub import Unavailable
from jaxlora.serve.ids import Misdirected
from jaxlora.serve.keys import Keys, authenticate
from jaxlora.serve.limits import OverQuota, OverStorage
from jaxlora.serve.registry import Conflict, NotFound
from jaxlora.serve.storage import LinkError, NotStored

logger = logging.getLogger(__name__)

# Paths that need no key. Links for downloads are signed, and the page at `/` asks for a
# key before it shows anything.
PUBLIC = frozenset({"/", "/healthz", "/api/v1/healthz", "/download/{key:path}"})
_PUBLIC_FOLDERS = tuple(p.partition("{")[0] for p in PUBLIC if "{" in p)

_STATUS: dict[type[BaseException], int] = {
    NotFound: 404,
    NotStored: 404,
    LinkError: 403,
    Conflict: 409,
    Misdirected: 421,
    OverQuota: 429,
    OverStorage: 402,
    StorageError: 503,
    Unavailable: 503,
    DeviceError: 503,
    JaxloraError: 400,
}
_NO_ROUTE = ("Not Found", "Method Not Allowed")  # as Starlette says it
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@runtime_checkable
class Guarded(Protocol):
    """The parts of a server that its guard needs."""

    @property
    def config(self) -> ServeConfig:
        """The settings."""
        ...

    @property
    def keys(self) -> Keys:
        """The keys."""
        ...


class Guard:
    """The outermost part of the app.

    It gives each request an id, refuses those without a key and those that a page of
    another site sends, sets headers of answers, and turns errors into answers. Log
    lines have the id, and neither bodies nor queries.
    """

    def __init__(self, app: ASGIApp, server: Guarded):
        """Makes the object.

        Args:
            app: The app.
            server: The server.
        """
        self._app, self._server = app, server
        self._has_tls = server.config.tls is not None or server.config.behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise NotImplementedError("there are no routes for web sockets")
        request_id, begin, status = secrets.token_hex(8), time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._set_headers(MutableHeaders(scope=message), request_id)
            await send(message)

        request = Request(scope, receive)
        try:
            self._check_site(request)
            # In older versions of Starlette, the header Host can change `request.url`.
            if _is_public(scope["path"]):
                _check_no_body(request)
            else:
                await authenticate(request)
            await self._app(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends, and this is a long poll
            if status:
                raise
            text = "the server is ending. Send the request again in a moment."
            response = _answer(scope, text, 503, {"retry-after": "1"})
            await response(scope, receive, answer)
        except Exception as error:
            response = answer_to(error, scope)
            if response.status_code == 500:
                _log(error, request_id)
                text = f"an unexpected error; the server's log has it as {request_id}."
                response = _answer(scope, text, 500)
            if status:  # part of the answer is sent: the client sees that it breaks off
                raise ConnectionAbortedError("the answer breaks off") from None
            await response(scope, receive, answer)
        finally:
            logger.debug(
                "%s %s %s -> %d in %.0f ms",
                *(request_id, scope["method"], _path(scope), status),
                (time.monotonic() - begin) * 1000,
            )

    def _check_site(self, request: Request) -> None:
        """Refuses requests of pages of other sites, which a browser has opened.

        A server without keys would obey them; and it only answers to local names, so
        that no other name can be given this machine's address.
        """
        host = _host_name(f"//{request.headers.get('host', '')}")
        if not self._server.keys.demanded and host not in _LOCAL_HOSTS:
            raise HTTPException(
                403,
                "this server has no keys, so it answers only as localhost or "
                f"127.0.0.1, not as {host!r:.100}. Use one, or set keys: true.",
            )
        origin = request.headers.get("origin")
        if origin is not None and _host_name(origin) != host:
            raise HTTPException(403, f"pages of {origin:.100} cannot use this server.")

    def _set_headers(self, headers: MutableHeaders, request_id: str) -> None:
        headers.setdefault("x-request-id", request_id)  # an engine has set its own
        for key, value in _HEADERS.items():
            headers.setdefault(key, value)
        if self._has_tls:
            headers.setdefault("strict-transport-security", "max-age=31536000")


def _is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith(_PUBLIC_FOLDERS)


def _check_no_body(request: Request) -> None:
    """Refuses a body of somebody without a key, which would take memory."""
    headers = request.headers
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise HTTPException(413, "a request for this path has no body. Leave it out.")


def _path(scope: Scope) -> str:
    """Returns the path of a route, without what stands for its parameters."""
    return getattr(scope.get("route"), "path", "(no route)")


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _log(error: Exception, request_id: str) -> None:
    """Logs where an error comes from; its text may quote what a tenant has sent."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed: %s\n%s", request_id, type(error).__name__, frames)


def install_errors(app: FastAPI) -> None:
    """Lets an app answer to the errors of its routes as the guard does to others."""

    async def answer(request: Request, error: Exception) -> Response:
        return answer_to(error, request.scope)

    for kind in (HTTPException, RequestValidationError, JaxloraError):
        app.add_exception_handler(kind, answer)


def answer_to(error: Exception, scope: Scope) -> Response:
    """Returns the answer to a request that has raised an error."""
    if isinstance(error, HTTPException):
        text, status = error.detail, error.status_code
        if text in _NO_ROUTE:
            text = (
                f"this server has no {scope['method']} {scope['path']:.200}; its "
                "requests are in docs/serve.md."
            )
        return _answer(scope, text, status, error.headers)
    if isinstance(error, RequestValidationError):
        problems = [
            Problem(
                path=tuple(one["loc"][1:]),
                kind=one["type"],
                text=one["msg"],
                given=() if one["type"] == "missing" else one.get("input", ()),
            )
            for one in error.errors()
        ]
        return _answer(scope, format_problems(problems, Source("the request")), 422)
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        error = StorageError("the server's database is busy. Try again.")
    status = next((_STATUS[k] for k in type(error).__mro__ if k in _STATUS), 500)
    return _answer(scope, str(error), status)


def _answer(
    scope: Scope, text: str, status: int, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an answer with the text of an error, where clients look for it."""
    values: dict[str, object] = {"detail": text}
    if scope["path"].startswith("/v1/"):  # clients of OpenAI's API
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": text, "type": kind, "param": None, "code": None}
        values["error"] = error
    return JSONResponse(values, status, headers)
