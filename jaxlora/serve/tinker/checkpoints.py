"""Checkpoints of the Tinker API: their paths, their entries, and routes about them.

A checkpoint `tinker://MODEL/weights/NAME` has the entry `MODEL/weights/NAME`, made when
the client asks for it. It is there as soon as the storage has what the entry names.
"""

import asyncio
import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse

from jaxlora.errors import ConfigError
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.registry import Entry, NotFound, Taken
from jaxlora.serve.server import Server
from jaxlora.serve.storage import NotStored
from jaxlora.serve.tinker.bodies import OfPath, SetTtl, read

KINDS = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_SCHEME = "tinker://"
_LINK_SECONDS = 3600.0
_MOST_LISTED = 1000

MayRead = Annotated[Principal, Depends(allowed("read"))]
MayTrain = Annotated[Principal, Depends(allowed("train"))]
Limit = Annotated[int, Query(ge=1, le=_MOST_LISTED)]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]


def entry_id(path: str) -> str:
    """Returns the id of the entry of a checkpoint.

    Raises:
        ConfigError: It is no path of a checkpoint.
    """
    parts = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
        raise ConfigError(
            f"{path!r:.300} is no path of a checkpoint. Give the path that the save "
            "has answered, tinker://MODEL/weights/NAME or .../sampler_weights/NAME."
        )
    return "/".join(parts)


def reserve(
    server: Server,
    model: Entry,
    kind: str,
    name: str,
    *,
    seq_id: int,
    ttl: float | None,
    metadata: Mapping[str, str] | None,
    overwrite: bool = False,
) -> str:
    """Makes the entry of a checkpoint that is to be written; returns its key.

    A request that comes again gets the same key.

    Args:
        server: The server.
        model: Its model.
        kind: One of `KINDS`.
        name: Its name.
        seq_id: Number of the request.
        ttl: Seconds until it is deleted; None: never.
        metadata: Whatever the client says about it.
        overwrite: Whether it replaces one of this name.

    Raises:
        ConfigError: There is one of this name.
    """
    id = f"{model.id}/{kind}/{name}"
    key = f"{model.tenant}/{id}"
    fields: dict[str, Any] = {"key": key, "seq_id": seq_id, "metadata": metadata}
    about = {name: model.fields[name] for name in ("base_model", "lora")}
    _check_storage(server, model.tenant)
    try:
        server.registry.add(
            "checkpoint",
            model.tenant,
            id,
            parent=model.id,
            expires_in=ttl,
            **fields,
            **about,
        )
    except Taken:
        old = server.registry.owned(model.tenant, "checkpoint", id)
        there = settled(server, old)
        for known in (old.fields, *_newer(old)):
            if known.get("seq_id") == seq_id:
                return known["key"]
        if overwrite:
            # What is there never changes, so the new one lies beside it until it is
            # whole.
            fields |= {"key": f"{key}:{seq_id}", "ttl": ttl}
            server.registry.change(
                *(model.tenant, "checkpoint", id),
                lambda now: {"next": [*_newer(now), fields]},
            )
            return fields["key"]
        if there is not None:
            raise ConfigError(
                f"{_SCHEME}{id} is there already. Choose another name, or overwrite it."
            ) from None
        return old.fields["key"]  # that save has not ended, or has failed
    return key


def _check_storage(server: Server, tenant: str) -> None:
    """Checks that a tenant has room for a checkpoint.

    Raises:
        OverStorage: It has not.
    """
    if server.limits.quota(tenant).storage_bytes is None:
        return
    for entry in server.registry.list(tenant, "checkpoint"):
        if not entry.num_bytes or _newer(entry):
            settled(server, entry)  # it counts from now on, if it is there
    server.limits.check_storage(tenant)


def _newer(entry: Entry) -> Sequence[Mapping[str, Any]]:
    """Returns what replaces a checkpoint as soon as it is written, the last one last.

    Several saves may wait in the queue of the model, and one that fails replaces
    nothing.
    """
    return entry.fields.get("next") or ()


def settled(server: Server, entry: Entry) -> Entry | None:
    """Returns the entry of a checkpoint as it is by now; None: it is not there yet."""
    registry, address = server.registry, (entry.tenant, entry.kind, entry.id)
    newer = _newer(entry)
    for number, new in reversed([*enumerate(newer)]):
        if (size := _size(server, new["key"])) is None:
            continue
        ends = None
        if new["ttl"] is not None:
            ends = registry.touch(*address).touched_at + new["ttl"]
        replace = functools.partial(_replaced, new, size, ends)
        found = registry.change(*address, replace)
        for old in (entry.fields, *newer[:number]):
            server.storage.delete(old["key"])
        return found
    if entry.num_bytes:
        return entry
    if (size := _size(server, entry.fields["key"])) is None:
        return None
    return registry.update(*address, num_bytes=size)


def _replaced(
    new: Mapping[str, Any], size: int, ends: float | None, now: Entry
) -> Mapping[str, Any]:
    """Returns the changes of an entry that what is newer replaces."""
    if new not in _newer(now):
        return {}  # another request has done this
    return {
        "key": new["key"],
        "seq_id": new["seq_id"],
        "metadata": new["metadata"],
        "next": _newer(now)[_newer(now).index(new) + 1 :],
        "num_bytes": size,
        "expires_at": ends,
    }


def _size(server: Server, key: str) -> int | None:
    """Returns the bytes of what is by a key; None: nothing is."""
    try:
        return server.storage.size(key)
    except NotStored:
        return None


def readable(server: Server, principal: Principal, path: str) -> Entry:
    """Returns the entry of a checkpoint that a tenant may read.

    Raises:
        JaxloraError: It is no path, or there is no such checkpoint.
    """
    id = entry_id(path)
    entry = server.registry.owned(principal.tenant, "checkpoint", id, or_public=True)
    if (found := settled(server, entry)) is None:
        raise NotFound(f"there is no checkpoint {id!r} of yours.")
    return found


def iso(seconds: float) -> str:
    """Returns Unix seconds as the client reads times."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _checkpoint(entry: Entry) -> dict[str, Any]:
    """Returns what the client is told about a checkpoint."""
    _, kind, name = entry.id.split("/")
    expires = entry.expires_at
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": iso(entry.created_at),
        "tinker_path": f"{_SCHEME}{entry.id}",
        "size_bytes": entry.num_bytes,
        "public": entry.is_public,
        "user_metadata": entry.fields.get("metadata"),
        "expires_at": None if expires is None else iso(expires),
    }


def _checkpoints(server: Server, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    found = (settled(server, entry) for entry in entries)
    return [_checkpoint(entry) for entry in found if entry is not None]


def _run(server: Server, model: Entry) -> dict[str, Any]:
    """Returns what the client is told about a model and its last checkpoints."""
    entries = server.registry.list(model.tenant, "checkpoint", parent=model.id)
    saved = _checkpoints(server, entries[:_MOST_LISTED])
    last = {one["checkpoint_type"]: one for one in reversed(saved)}
    return {
        "training_run_id": model.id,
        "base_model": model.fields["base_model"],
        "model_owner": model.tenant,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.fields["lora"]["rank"],
        "last_request_time": iso(model.touched_at),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": model.fields.get("metadata"),
    }


def _page(
    server: Server, tenant: str, kind: Any, limit: int, offset: int
) -> tuple[Sequence[Entry], dict[str, int]]:
    """Returns a page of a tenant's entries, and where it lies among them all."""
    total = server.registry.count(tenant, kind)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return server.registry.list(tenant, kind, limit=limit, offset=offset), cursor


def router(server: Server) -> APIRouter:
    """Returns the routes about checkpoints and models, which run in threads."""
    api = APIRouter()
    _add_lists(api, server)
    _add_changes(api, server)
    _add_downloads(api, server)
    return api


def _add_lists(api: APIRouter, server: Server) -> None:
    registry = server.registry

    @api.get("/training_runs")
    def training_runs(who: MayRead, limit: Limit = 20, offset: Offset = 0) -> Any:
        entries, cursor = _page(server, who.tenant, "model", limit, offset)
        runs = [_run(server, entry) for entry in entries]
        return {"training_runs": runs, "cursor": cursor}

    @api.get("/training_runs/{run}")
    def training_run(who: MayRead, run: str) -> Any:
        return _run(server, registry.owned(who.tenant, "model", run))

    @api.get("/training_runs/{run}/checkpoints")
    def checkpoints_of_run(who: MayRead, run: str) -> Any:
        registry.owned(who.tenant, "model", run)
        entries = registry.list(who.tenant, "checkpoint", parent=run)
        return {"checkpoints": _checkpoints(server, entries)}

    @api.get("/checkpoints")
    def checkpoints(who: MayRead, limit: Limit = 100, offset: Offset = 0) -> Any:
        entries, cursor = _page(server, who.tenant, "checkpoint", limit, offset)
        return {"checkpoints": _checkpoints(server, entries), "cursor": cursor}

    @api.post("/weights_info")
    async def weights_info(who: MayRead, request: Request) -> Any:
        body = await read(request, OfPath)
        entry = await asyncio.to_thread(readable, server, who, body.tinker_path)
        lora = entry.fields["lora"]
        return {
            "base_model": entry.fields["base_model"],
            "is_lora": True,
            "lora_rank": lora["rank"],
            **{name: lora[name] for name in lora if name.startswith("train_")},
        }


def _add_changes(api: APIRouter, server: Server) -> None:
    registry = server.registry

    def owned(who: Principal, run: str, kind: str, name: str) -> Entry:
        entry = registry.owned(who.tenant, "checkpoint", f"{run}/{kind}/{name}")
        return settled(server, entry) or entry

    @api.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
    def delete(who: MayTrain, run: str, kind: str, name: str) -> Any:
        entry = owned(who, run, kind, name)
        registry.delete(who.tenant, "checkpoint", entry.id)
        server.storage.delete(entry.fields["key"])
        return {}

    @api.post("/training_runs/{run}/checkpoints/{kind}/{name}/publish")
    def publish(who: MayTrain, run: str, kind: str, name: str) -> Any:
        entry = owned(who, run, kind, name)
        registry.update(who.tenant, "checkpoint", entry.id, is_public=True)
        return {}

    @api.delete("/training_runs/{run}/checkpoints/{kind}/{name}/publish")
    def unpublish(who: MayTrain, run: str, kind: str, name: str) -> Any:
        entry = owned(who, run, kind, name)
        registry.update(who.tenant, "checkpoint", entry.id, is_public=False)
        return {}

    @api.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(
        who: MayTrain, run: str, kind: str, name: str, request: Request
    ) -> Any:
        body = await read(request, SetTtl)

        def change() -> None:
            id = owned(who, run, kind, name).id
            now = registry.touch(who.tenant, "checkpoint", id).touched_at
            ends = None if body.ttl_seconds is None else now + body.ttl_seconds
            registry.update(who.tenant, "checkpoint", id, expires_at=ends)

        await asyncio.to_thread(change)
        return {}


def _add_downloads(api: APIRouter, server: Server) -> None:
    def base_url(request: Request) -> str:
        return (server.config.public_url or str(request.base_url)).rstrip("/")

    @api.get("/training_runs/{run}/checkpoints/{kind}/{name}/archive")
    def archive(who: MayRead, run: str, kind: str, name: str, request: Request) -> Any:
        entry = readable(server, who, f"{_SCHEME}{run}/{kind}/{name}")
        link = server.links.path(entry.fields["key"], _LINK_SECONDS)
        return RedirectResponse(base_url(request) + link, 302)

    @api.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
    def urls(who: MayRead, run: str, kind: str, name: str, request: Request) -> Any:
        entry = readable(server, who, f"{_SCHEME}{run}/{kind}/{name}")
        key = entry.fields["key"]
        found = server.storage.signed_urls(key, _LINK_SECONDS)
        if found is None:
            found = {
                file: base_url(request)
                + server.links.path(key, _LINK_SECONDS, file=file)
                for file in server.storage.files(key)
            }
        ends = datetime.datetime.now(datetime.UTC).timestamp() + _LINK_SECONDS
        return {"urls": found, "expires": iso(ends)}
