"""The routes of `/jobs/v1`: data, jobs, their progress and their adapters.

Those of `/v1` are among them, as the adapters of jobs answer chats.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse

from jaxlora.config import LoraJob
from jaxlora.errors import ConfigError
from jaxlora.run.clone_settings import settings_to_add
from jaxlora.run.job_progress import Status
from jaxlora.serve import chat
from jaxlora.serve.jobs.archive import adapter_archive
from jaxlora.serve.jobs.driver import awaited
from jaxlora.serve.jobs.jobs import Jobs
from jaxlora.serve.jobs.tenant_data import described
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.server import Server

Reader = Annotated[Principal, Depends(allowed("read"))]
Trainer = Annotated[Principal, Depends(allowed("train"))]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]

_MOST_CHARACTERS = 200  # of a reason


def router(server: Server) -> APIRouter:
    """Returns the routes. Their lifespan starts and ends the jobs."""
    jobs = server.jobs

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(jobs.start)
        try:
            yield
        finally:
            await asyncio.to_thread(jobs.stop)

    made = APIRouter(prefix="/jobs/v1")
    _add_data(made, jobs)
    _add_jobs(made, jobs)
    _add_requests(made, jobs)
    _add_results(made, jobs, server)
    both = APIRouter(lifespan=lifespan)
    both.include_router(made)
    both.include_router(chat.router(server, jobs))
    return both


async def _run[T](jobs: Jobs, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the thread of the jobs."""
    return await awaited(jobs.submit(work))


async def _settings(request: Request) -> LoraJob:
    """Reads the settings of a job from a body.

    Raises:
        ConfigError: They are none. The message lists all problems.
    """
    return settings_to_add(await _json(request))


async def _reason(request: Request) -> str:
    """Reads why a job is stopped or paused, which may be left out.

    Raises:
        ConfigError: The body has another key, or the reason is no short text.
    """
    values = await _json(request)
    reason = values.pop("reason", "")
    if values or not isinstance(reason, str) or len(reason) > _MOST_CHARACTERS:
        raise ConfigError(
            "the body may have a reason, a text of at most "
            f"{_MOST_CHARACTERS} characters, and nothing else."
        )
    return reason


async def _json(request: Request) -> dict[str, Any]:
    try:
        values = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise ConfigError(f"the body is no JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError("the body must be a JSON object, such as {...}.")
    return values


# ---- data ----------------------------------------------------------------------------


def _add_data(made: APIRouter, jobs: Jobs) -> None:
    @made.put("/uploads/{name}", status_code=201)
    async def upload(name: str, request: Request, user: Trainer) -> dict[str, Any]:
        """Stores the body as a file of records."""
        entry = await jobs.data.upload(user.tenant, name, request.stream())
        return described(entry)

    @made.get("/uploads")
    async def uploads(
        user: Reader, limit: Limit = 100, offset: Offset = 0
    ) -> dict[str, Any]:
        """Lists uploads, and the data sets that all tenants share."""
        found = jobs.data.uploads(user.tenant, limit, offset)
        shared = sorted(jobs.data.shared)
        return {"uploads": [described(entry) for entry in found], "datasets": shared}

    @made.get("/uploads/{name}")
    async def find(name: str, user: Reader) -> dict[str, Any]:
        """Describes an upload."""
        return described(jobs.data.find(user.tenant, name))

    @made.delete("/uploads/{name}", status_code=204)
    async def delete(name: str, user: Trainer) -> None:
        """Deletes an upload that no job needs."""
        await _run(jobs, jobs.delete_upload(user.tenant, name))

    @made.post("/preview")
    async def preview(
        request: Request,
        user: Trainer,
        samples: Annotated[int, Query(ge=1, le=20)] = 3,
    ) -> dict[str, Any]:
        """Shows the first samples of a job as they are trained on."""
        settings = await _settings(request)
        shown = await _run(jobs, jobs.preview(user.tenant, settings, samples))
        return {"data": shown}


# ---- jobs ----------------------------------------------------------------------------


def _add_jobs(made: APIRouter, jobs: Jobs) -> None:
    @made.post("/jobs", status_code=201)
    async def add(request: Request, user: Trainer) -> dict[str, Any]:
        """Adds a job, whose settings are those of a job in a run file."""
        settings = await _settings(request)
        return await _run(jobs, jobs.add(user.tenant, settings))

    @made.get("/jobs")
    async def listing(
        user: Reader,
        status: Status | None = None,
        limit: Limit = 100,
        offset: Offset = 0,
    ) -> dict[str, Any]:
        """Lists jobs, the newest first."""
        return await _run(jobs, jobs.listing(user.tenant, status, limit, offset))

    @made.get("/queue")
    async def queue(user: Reader) -> dict[str, Any]:
        """Shows which jobs run, and which wait in which place."""
        return await _run(jobs, jobs.queue(user.tenant))

    @made.get("/jobs/{name}")
    async def job(name: str, user: Reader) -> dict[str, Any]:
        """Describes a job and its progress."""
        return await _run(jobs, jobs.job(user.tenant, name))

    @made.delete("/jobs/{name}", status_code=204)
    async def delete(name: str, user: Trainer) -> None:
        """Deletes a job that has ended, with its adapter."""
        await _run(jobs, jobs.delete_job(user.tenant, name))


def _add_requests(made: APIRouter, jobs: Jobs) -> None:
    @made.post("/jobs/{name}/stop")
    async def stop(name: str, request: Request, user: Trainer) -> Any:
        """Ends a job after its current batch; it is evaluated and exported."""
        reason = await _reason(request)
        return await _run(jobs, jobs.stop_job(user.tenant, name, reason))

    @made.post("/jobs/{name}/pause")
    async def pause(name: str, request: Request, user: Trainer) -> Any:
        """Pauses a job after its current batch."""
        reason = await _reason(request)
        return await _run(jobs, jobs.pause_job(user.tenant, name, reason))

    @made.post("/jobs/{name}/resume")
    async def resume(name: str, user: Trainer) -> Any:
        """Lets a paused job go on."""
        return await _run(jobs, jobs.resume_job(user.tenant, name))

    @made.post("/jobs/{name}/clone", status_code=201)
    async def clone(name: str, request: Request, user: Trainer) -> Any:
        """Adds a copy of a job, which goes on with other settings."""
        changes = await _json(request)
        return await _run(jobs, jobs.clone_job(user.tenant, name, changes))


# ---- results -------------------------------------------------------------------------


def _add_results(made: APIRouter, jobs: Jobs, server: Server) -> None:
    @made.get("/jobs/{name}/metrics")
    async def metrics(
        name: str, user: Reader, after: Offset = 0, limit: Limit = 1000
    ) -> dict[str, Any]:
        """Returns the steps and evaluations of a job from a number on."""
        lines = await _run(jobs, jobs.metrics(user.tenant, name, after, limit))
        return {"metrics": lines, "next": after + len(lines)}

    @made.get("/jobs/{name}/adapter")
    async def adapter(
        name: str, user: Reader, format: Literal["zip", "tar"] = "zip"
    ) -> Response:
        """Sends the PEFT folder of a job's adapter as one file."""
        job, key = jobs.adapter(user.tenant, name)
        folder = await asyncio.to_thread(server.storage.fetch, key)
        model = server.hub.engine.model
        return StreamingResponse(
            adapter_archive(folder, job, model, format),
            media_type=f"application/{'zip' if format == 'zip' else 'x-tar'}",
            headers={
                "Content-Disposition": f'attachment; filename="{job.name}.{format}"'
            },
        )
