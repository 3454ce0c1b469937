"""`/api/v1`: the routes by which the unmodified `tinker` client trains and samples."""

from fastapi import APIRouter

from jaxlora.serve.server import Server
from jaxlora.serve.tinker import checkpoints, sampling, sessions, training


def router(server: Server) -> APIRouter:
    """Returns all routes of `/api/v1`."""
    api, samplers = APIRouter(prefix="/api/v1"), sampling.Samplers(server)
    api.include_router(training.router(server, samplers))
    api.include_router(sampling.router(server, samplers))
    api.include_router(sessions.router(server))
    api.include_router(checkpoints.router(server))
    return api
