"""Routes about clients themselves: their configuration, sessions, and the server."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request

from jaxlora.serve.keys import Principal, allowed, authenticate
from jaxlora.serve.registry import Entry
from jaxlora.serve.server import Server
from jaxlora.serve.tinker import bodies
from jaxlora.serve.tinker.bodies import read
from jaxlora.serve.tinker.checkpoints import Limit, Offset, iso
from jaxlora.serve.tinker.training import Promise, accepted, unload

Anyone = Annotated[Principal, Depends(authenticate)]
MayRead = Annotated[Principal, Depends(allowed("read"))]
# A datum has 4 bytes for a token, and 8 for its target.
_LEAST_TOKEN_BYTES = 12
_CHUNK_BYTES, _CHUNK_DATUMS = 5_000_000, 1024
_MOST_SEARCHED = 10_000
_ABSENT = {
    "audit": "an audit log",
    "auth/apikey/me": "keys that clients manage; see `jaxlora keys`",
    "auth/token": "tokens in place of keys",
    "billing/usage/checkpoints/current": "billing",
    "billing/usage/events": "billing",
    "copy_weights": "copies of checkpoints; publish the checkpoint",
    "create_custom_loss": (
        "losses that run on the server; forward_backward_custom runs them in the client"
    ),
    "join_sampling_session": "numbers for clones of samplers",
    "retrieve_futures": "polls for several results; retrieve_future gives one",
    "sessions/{id}/project": "projects",
    "sessions/{id}/trace_export": "traces of sessions",
}


class Search(bodies.Body):
    """Looks for sessions."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: dict[str, Any] = {}
    statuses: list[dict[str, Any]] | None = None
    limit: Annotated[int, bodies.Field(ge=1, le=200)] = 50
    cursor: dict[str, Any] | None = None


def router(server: Server) -> APIRouter:
    """Returns the routes."""
    api = APIRouter()
    _add_configuration(api, server)
    _add_life(api, server)
    _add_lists(api, server)
    for path, what in _ABSENT.items():
        _add_absent(api, path, what)
    return api


def _add_configuration(api: APIRouter, server: Server) -> None:
    limits = server.config.limits
    by_tokens = _LEAST_TOKEN_BYTES * limits.tokens
    flags = {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": True,
        "proto_write_fwdbwd": True,
        "proto_compress_fwdbwd": True,
        "fwd_via_fwdbwd": True,
        "create_model_via_load_weights": True,
        "custom_loss_server_side": False,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
        "fwdbwd_max_chunk_len": min(_CHUNK_DATUMS, limits.datums),
        "fwdbwd_max_chunk_bytes_count": min(
            _CHUNK_BYTES, by_tokens, limits.body_bytes // 2
        ),
    }

    @api.post("/client/config")
    async def config(who: Anyone) -> Any:
        return flags

    @api.post("/client/dynamic_config")
    async def dynamic_config(who: Anyone) -> Any:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

    @api.get("/get_server_capabilities")
    async def get_server_capabilities(who: Anyone) -> Any:
        model = {
            "model_name": server.config.served_name,
            "max_context_length": server.hub.engine.most_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    @api.get("/healthz")
    async def healthz() -> Any:
        return {"status": "ok"}

    @api.post("/telemetry")
    async def telemetry(who: Anyone) -> Any:
        return {"status": "accepted"}


def _add_life(api: APIRouter, server: Server) -> None:
    registry = server.registry
    ignored = (
        "This server does not train the output layer: train_unembed=True, the client's "
        "default, is ignored."
    )

    @api.post("/create_session")
    async def create_session(who: Anyone, request: Request) -> Any:
        body = await read(request, bodies.CreateSession)
        if body.project_id is not None:
            raise HTTPException(
                400,
                f"project_id={body.project_id!r:.60}: this server has no projects. "
                "Leave it out.",
            )
        id = await asyncio.to_thread(
            lambda: registry.add(
                "session",
                who.tenant,
                tags=body.tags,
                metadata=bodies.texts(body.user_metadata),
                display_name=body.display_name,
                sdk_version=body.sdk_version,
            )
        )
        is_ignored = server.config.train_unembed == "ignore"
        return {
            "type": "create_session",
            "session_id": id,
            "warning_message": ignored if is_ignored else None,
        }

    @api.post("/session_heartbeat")
    async def session_heartbeat(who: Anyone, request: Request) -> Any:
        body = await read(request, bodies.OfSession)
        entry = await asyncio.to_thread(
            registry.touch, who.tenant, "session", body.session_id
        )
        if entry.fields.get("finished"):
            raise HTTPException(410, f"session {entry.id!r} has finished.")
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{id}/finish")
    async def finish(who: Anyone, id: str, request: Request) -> Any:
        body = await read(request, Finish)
        for promise in await asyncio.to_thread(_finish, server, who, id, body):
            await accepted(promise)
        return {}


class Finish(bodies.Body):
    """Ends a session."""

    reason: dict[str, Any] = {}
    detail: str | None = None


def _finish(server: Server, who: Principal, id: str, body: Finish) -> list[Promise]:
    """Ends a session and unloads its models; only the first reason counts.

    A request that comes again unloads the models that the first one did not reach.
    """
    registry = server.registry
    session = registry.owned(who.tenant, "session", id)
    if not who.may("train") and registry.count(who.tenant, "model", parent=id):
        raise HTTPException(
            403,
            "this key does not allow train, and the session has models, which would "
            "be unloaded. Finish it with the key that has made them.",
        )
    if not session.fields.get("finished"):
        reason = str(body.reason.get("type"))
        kind = reason if reason in ("success", "errored", "interrupted") else "success"
        ended = {"reason": kind, "detail": body.detail}
        registry.update(who.tenant, "session", id, finished=ended)
    models = registry.list(who.tenant, "model", parent=id)
    left = [model for model in models if not model.fields.get("unloaded")]
    return [unload(server, model) for model in left]


def _add_lists(api: APIRouter, server: Server) -> None:
    registry = server.registry

    @api.get("/sessions")
    def sessions(who: MayRead, limit: Limit = 20, offset: Offset = 0) -> Any:
        found = registry.list(who.tenant, "session", limit=limit, offset=offset)
        return {"sessions": [entry.id for entry in found]}

    @api.get("/sessions/{id}")
    def session(who: MayRead, id: str) -> Any:
        entry = registry.owned(who.tenant, "session", id)
        runs, samplers = (
            [one.id for one in registry.list(who.tenant, kind, parent=id)]
            for kind in ("model", "sampler")
        )
        return {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": entry.fields.get("metadata"),
            "display_name": entry.fields.get("display_name"),
        }

    @api.post("/sessions/search")
    async def search(who: MayRead, request: Request) -> Any:
        body = await read(request, Search)
        return await asyncio.to_thread(_search, server, who, body)


def _search(server: Server, who: Principal, body: Search) -> dict[str, Any]:
    """Returns a page of a tenant's sessions that a search finds, the newest first."""
    if body.project_ids:
        raise HTTPException(400, "this server has no projects. Leave project_ids out.")
    found = server.registry.list(who.tenant, "session", limit=_MOST_SEARCHED)
    found = [entry for entry in found if _is_found(entry, body)]
    if body.cursor is not None:
        last = str(body.cursor.get("last_session_id"))
        ids = [entry.id for entry in found]
        found = found[ids.index(last) + 1 :] if last in ids else []
    page = found[: body.limit]
    cursor = None
    if len(found) > len(page):
        cursor = {
            "last_created_at": iso(page[-1].created_at),
            "last_session_id": page[-1].id,
        }
    summaries = [_summary(server, entry) for entry in page]
    return {"sessions": summaries, "next_cursor": cursor}


def _is_found(entry: Entry, body: Search) -> bool:
    metadata = entry.fields.get("metadata") or {}
    if not body.user_metadata.items() <= metadata.items():
        return False
    status = _status(entry)
    if body.statuses is not None:
        wanted = [one.get("type") for one in body.statuses]
        if status["type"] not in wanted:
            return False
    if body.session_id is None and body.display_name is None:
        return True
    name = (entry.fields.get("display_name") or "").lower()
    words = (body.display_name or "").lower().split()
    return entry.id == body.session_id or bool(words and all(w in name for w in words))


def _status(entry: Entry) -> dict[str, Any]:
    if (finished := entry.fields.get("finished")) is None:
        return {"type": "active"}
    reason = {"type": finished["reason"]}
    return {"type": "client_finished", "reason": reason, "detail": finished["detail"]}


def _summary(server: Server, entry: Entry) -> dict[str, Any]:
    models = server.registry.list(entry.tenant, "model", parent=entry.id)
    saved = [
        one
        for model in models
        for one in server.registry.list(entry.tenant, "checkpoint", parent=model.id)
    ]
    return {
        "session_id": entry.id,
        "created_at": iso(entry.created_at),
        "owner": entry.tenant,
        "project_id": "",
        "status": _status(entry),
        "checkpoints_count": len(saved),
        "display_name": entry.fields.get("display_name"),
        "user_metadata": entry.fields.get("metadata"),
        "checkpoint_storage_bytes": sum(one.num_bytes for one in saved),
    }


def _add_absent(api: APIRouter, path: str, what: str) -> None:
    """Adds a route that says what this server does not have.

    Its status is 404, as the client asks again for minutes after others.
    """

    async def absent(who: Anyone) -> Any:
        raise HTTPException(404, f"this server has no {what}.")

    methods = ["GET", "POST", "PUT", "DELETE"]
    api.add_api_route(f"/{path}", absent, methods=methods, include_in_schema=False)
