"""Metrics of a server for Prometheus, at `/metrics`, for keys with the scope admin."""

import time
from collections.abc import Iterator
from typing import Annotated, get_args

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxlora.serve.hub import Hub, Promise
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.operation import Done, Failed, Pass
from jaxlora.serve.status import Health, HubStatus
from jaxlora.session.engine import PassResult
from jaxlora.session.samples import SampleCall, SampleResult

# The largest are those of long polls, and of operations that wait for others.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def install(app: FastAPI, hub: Hub) -> None:
    """Adds the route, and counts the app's requests and what the hub does.

    It is the last that is added to the app, so that it counts requests that are
    refused, too.
    """
    metrics, made = Metrics(hub), APIRouter()

    @made.get("/metrics", include_in_schema=False)
    def get_metrics(who: Annotated[Principal, Depends(allowed("admin"))]) -> Response:
        text = prometheus_client.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_PLAIN_0_0_4)

    app.include_router(made)
    app.add_middleware(CountRequests, metrics=metrics)


class CountRequests:
    """Counts requests by method, route and status."""

    def __init__(self, app: ASGIApp, metrics: "Metrics"):
        """Makes the object.

        Args:
            app: The app.
            metrics: Where it counts.
        """
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            seconds = time.monotonic() - begin
            # Labels that clients choose would be without bound.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.answered(method, route, status, seconds)


class Metrics:
    """Counters of a server, in a registry of their own.

    Tenants are a label. Models are none, as they come and go without bound.

    Attributes:
        registry: The registry.
    """

    def __init__(self, hub: Hub):
        """Starts at zero.

        Args:
            hub: The hub.
        """
        self.registry = CollectorRegistry()
        self._tokens = self._counter(
            "tokens",
            "Tokens of passes that are done, without padding.",
            "tenant",
            "pass",
        )
        self._datums = self._counter(
            "datums", "Datums of passes that are done.", "tenant", "pass"
        )
        self._operations = self._counter(
            "operations", "Operations that have ended.", "operation", "outcome"
        )
        self._operation_seconds = self._histogram(
            "operation",
            "From an accepted operation to its durable outcome.",
            "operation",
        )
        self._requests = self._counter(
            "requests", "Requests that were answered.", "method", "route", "status"
        )
        self._request_seconds = self._histogram(
            "request", "Time of requests, long polls included.", "method", "route"
        )
        self._sampled = self._counter("sampled_tokens", "Tokens of samples.", "tenant")
        self._samples = self._counter("samples", "Samples that are done.", "tenant")
        self.registry.register(_OfHub(hub))
        hub.listeners.append(self._ended)
        hub.sample_listeners.append(self._drawn)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jaxlora_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(
            f"jaxlora_{name}_seconds",
            text,
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )

    def _ended(self, promise: Promise) -> None:
        operation, outcome = promise.operation, promise.outcome.result()
        kind = type(operation).__name__.lower()
        how = f"failed_{outcome.category}" if isinstance(outcome, Failed) else "done"
        self._operations.labels(kind, how).inc()
        self._operation_seconds.labels(kind).observe(
            time.monotonic() - promise.taken_at
        )
        if not isinstance(operation, Pass) or not isinstance(outcome, Done):
            return
        if isinstance(result := outcome.result, PassResult):
            labels = promise.tenant, "training" if operation.is_training else "forward"
            self._tokens.labels(*labels).inc(sum(map(len, result.logprobs)))
            self._datums.labels(*labels).inc(len(result.logprobs))

    def _drawn(self, call: SampleCall, result: SampleResult) -> None:
        lengths = [len(one.tokens) for one in result.completions]
        self._sampled.labels(call.tenant).inc(sum(lengths))
        self._samples.labels(call.tenant).inc(len(lengths))

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts a request that was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(method, route).observe(seconds)


class _OfHub(Collector):
    """Metrics that the hub knows by itself when it is asked."""

    def __init__(self, hub: Hub):
        self._hub = hub

    def describe(self) -> list[Metric]:
        return []  # else the hub would be asked before it has started

    def collect(self) -> Iterator[Metric]:
        status = self._hub.status()
        health = GaugeMetricFamily(
            "jaxlora_health", "1 for what the server is.", labels=["health"]
        )
        for one in get_args(Health):
            health.add_metric([one], float(status.health == one))
        yield health
        for name, text, value in _gauges(status):
            if value is not None:
                yield GaugeMetricFamily(f"jaxlora_{name}", text, value)
        for name, text, value in _counts(status):
            yield CounterMetricFamily(f"jaxlora_{name}", text, value)
        yield SummaryMetricFamily(
            "jaxlora_commit_seconds",
            "Time of commits of the log to the disk.",
            status.commits,
            status.commits_seconds,
        )


def _gauges(status: HubStatus) -> list[tuple[str, str, float | None]]:
    return [
        ("models", "Models that are not unloaded.", len(status.models)),
        ("queued_datums", "Datums without a result.", status.queued_datums),
        ("queued_tokens", "Tokens of these datums.", status.queued_tokens),
        (
            "fill_ratio",
            "Share of the rows of the last minute's microbatches that hold tokens.",
            status.fill,
        ),
        (
            "microbatch_seconds",
            "Mean time of a microbatch in the last minute.",
            status.microbatch_seconds,
        ),
    ]


def _counts(status: HubStatus) -> list[tuple[str, str, float]]:
    return [
        ("microbatches", "Microbatches that have run.", status.microbatches),
        ("steps", "Optimizer steps, without skipped ones.", status.steps),
        ("engine_restarts", "Engines made anew after an error.", status.restarts),
        (
            "replayed_microbatches",
            "Microbatches that ran again after a crash or an error.",
            status.replayed_microbatches,
        ),
        ("snapshots", "Snapshots of models that were written.", status.snapshots),
    ]
