"""Tenants that load a server, and what is counted of it in a window of time."""

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from typing import Any

import httpx
import numpy as np

from jaxlora.profile.tokens import TARGET_SHARE
from scripts.bench.http.client import Event, Fields, Tenant
from scripts.bench.http.server import Seen, Server
from scripts.bench.serve import POOL, Case
from scripts.bench.shapes import config_json

NAME = "base-model"  # by which clients ask for it
_GET_SECONDS = 0.05  # between two small requests
Columns = dict[str, Any]


class Load:
    """A server and its tenants.

    Attributes:
        case: The settings of the load, which the benchmark without HTTP shares.
        server: The server.
        args: The options.
        events: What has ended so far.
        capacity: Tokens a second of the first closed loop; None: it did not run.
        vocab_size: Number of tokens that the model knows.
        leaves: Whether loops end at once, and leave what they have sent to the server.
    """

    def __init__(self, case: Case, server: Server, args: argparse.Namespace):
        """Sends nothing yet."""
        self.case, self.server, self.args = case, server, args
        self.vocab_size = config_json(case.model, case.layers)["vocab_size"]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=server.address, timeout=60.0, limits=limits
        )
        self._tenants: dict[str, Tenant] = {}
        self._creating = asyncio.Lock()
        self.events: list[Event] = []
        self.capacity: float | None = None
        self.leaves = False

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    # ---- tenants ---------------------------------------------------------------------

    async def tenant(self, name: str) -> Tenant:
        """Returns a tenant, which has a model."""
        async with self._creating:
            if name not in self._tenants:
                made = Tenant(self._http, name, self.server.keys[name], NAME)
                await made.create(self.case.rank, seed=len(self._tenants))
                self._tenants[name] = made
        return self._tenants[name]

    async def tenants(self, number: int) -> list[Tenant]:
        """Returns the first tenants, each of which has a model."""
        return [await self.tenant(f"t{i}") for i in range(number)]

    def data(self, rng: np.random.Generator, lengths: Sequence[int]) -> list[Fields]:
        """Makes datums whose last tokens are targets."""
        return [
            {
                "tokens": rng.integers(0, self.vocab_size, length),
                "target_tokens": rng.integers(0, self.vocab_size, length),
                "weights": np.arange(length) >= (1 - TARGET_SHARE) * length,
            }
            for length in lengths
        ]

    def batches(self, seed: int) -> Iterator[list[Fields]]:
        """Returns the batches of a tenant, in turn."""
        rng, case = np.random.default_rng(seed), self.case
        some = [self.data(rng, case.lengths(rng, case.samples)) for _ in range(POOL)]
        return itertools.cycle(some)

    # ---- loops, which run until they are cancelled -----------------------------------

    async def training(self, number: int, passes: int = 1) -> None:
        """Trains as a tenant that waits for each step.

        What was sent is waited for, so that the next case finds nothing of it.
        """
        tenant, batches = await self.tenant(f"t{number}"), self.batches(number)
        while True:
            step = asyncio.create_task(tenant.train(next(batches), passes=passes))
            try:
                self.events.append(await asyncio.shield(step))
            except asyncio.CancelledError:
                if self.leaves:
                    step.cancel()
                else:
                    self.events.append(await step)
                raise

    async def arrivals(self, number: int, rate: float) -> None:
        """Sends batches at random times, whether or not others are done.

        Args:
            number: The tenants that send them in turn.
            rate: Batches a second.
        """
        rng, at = np.random.default_rng(5), time.monotonic()
        tenants, sent = await self.tenants(number), []
        batches = [self.batches(i) for i in range(number)]

        async def send(i: int, began: float) -> None:
            self.events.append(await tenants[i].train(next(batches[i]), began=began))

        try:
            for i in itertools.cycle(range(number)):
                at += rng.exponential(1 / rate)
                await asyncio.sleep(at - time.monotonic())
                sent.append(asyncio.create_task(send(i, at)))
        finally:
            await asyncio.gather(*sent)

    async def small_requests(self) -> None:
        """Sends a small request now and then."""
        tenant = await self.tenant("t0")
        while True:
            began = time.monotonic()
            await tenant.send("GET", "/api/v1/get_server_capabilities")
            now = time.monotonic()
            times = {"began": began, "sent": began, "accepted": now, "ended": now}
            self.events.append(Event(tenant="", kind="get", num_tokens=0, **times))
            await asyncio.sleep(_GET_SECONDS)

    @contextlib.asynccontextmanager
    async def running(self, *loops: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
        """Runs loops meanwhile, and waits for what they have sent.

        Raises:
            JaxloraError: One of them has failed.
        """
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, Exception):
                    raise found

    # ---- what is counted -------------------------------------------------------------

    async def seen(self) -> Seen:
        """Reads the counters of the server."""
        return await asyncio.to_thread(self.server.seen)

    async def window(
        self, seconds: float, *, warm_up: float = 0.0
    ) -> tuple[Seen, Seen]:
        """Waits; returns the counters before and after."""
        await asyncio.sleep(warm_up)
        first = await self.seen()
        await asyncio.sleep(seconds)
        return first, await self.seen()

    def columns(
        self, window: tuple[Seen, Seen], *, without: Collection[str] = ()
    ) -> Columns:
        """Describes the batches that ended in a window of time.

        Args:
            window: The counters at its beginning and its end.
            without: Tenants whose times and shares do not count.
        """
        first, last = window
        seconds = last.at - first.at
        events = [e for e in self.events if first.at <= e.ended < last.at]
        train = [e for e in events if e.kind == "train"]
        mine = [e for e in train if e.tenant not in without]
        gets = [e.seconds for e in events if e.kind == "get"]
        accepts = [e.accepted - e.sent for e in mine]
        return {
            "tokens_per_second": round(sum(e.num_tokens for e in train) / seconds),
            **quantiles([e.seconds for e in mine]),
            "requests": len(mine),
            "unfairness": _unfairness(mine),
            **quantiles(accepts, "accept_", 1e3, "ms"),
            **quantiles(gets, "get_", 1e3, "ms"),
            "outside_ms": _outside_ms(train, window),
            **server_columns(window),
        }


def quantiles(
    values: Sequence[float], name: str = "", scale: float = 1.0, unit: str = "s"
) -> Columns:
    """Returns columns with the median and the 99th percentile; None without values."""
    return {
        f"{name}p{round(100 * q)}_{unit}": (
            round(scale * float(np.quantile(values, q)), 3) if values else None
        )
        for q in (0.5, 0.99)
    }


def server_columns(window: tuple[Seen, Seen]) -> Columns:
    """Describes what the processes did in a window of time."""
    first, last = window
    seconds = last.at - first.at
    commits = _difference(window, "jaxlora_commit_seconds_count")
    commit_seconds = _difference(window, "jaxlora_commit_seconds_sum")
    return {
        "commit_ms": round(1e3 * commit_seconds / commits, 2) if commits else None,
        "fill": round(last.sum("jaxlora_fill_ratio"), 3),  # of the last minute
        "microbatches": _difference(window, "jaxlora_microbatches_total"),
        "cores": round((last.cpu_seconds - first.cpu_seconds) / seconds, 2),
        "client_cores": round(
            (last.client_seconds - first.client_seconds) / seconds, 2
        ),
        "compiled": last.compiled - first.compiled,
    }


def _difference(window: tuple[Seen, Seen], name: str, *labels: str) -> float:
    first, last = window
    return last.sum(name, *labels) - first.sum(name, *labels)


def _outside_ms(train: Sequence[Event], window: tuple[Seen, Seen]) -> float | None:
    """Returns the mean time of a step that passed outside of the server's hub."""
    label = 'operation="step"'
    count = _difference(window, "jaxlora_operation_seconds_count", label)
    inside = _difference(window, "jaxlora_operation_seconds_sum", label)
    if not (count and train):
        return None
    mean = sum(e.step_seconds for e in train) / len(train)
    return round(1e3 * (mean - inside / count), 2)


def _unfairness(events: Sequence[Event]) -> float | None:
    """Returns the largest deviation of a tenant's tokens from the mean."""
    shares: dict[str, int] = {}
    for event in events:
        shares[event.tenant] = shares.get(event.tenant, 0) + event.num_tokens
    if not shares:
        return None
    each = np.array([*shares.values()])
    return round(float(np.abs(each / each.mean() - 1).max()), 3)


async def timed(
    name: str, run: Callable[[int], Awaitable[object]], times: int = 7
) -> Columns:
    """Runs something several times; returns a row with the first time and the median.

    Args:
        name: Name of the row.
        run: What is timed; it gets the number of the call.
        times: How often it is timed after the first time.
    """
    seconds = []
    for number in range(1 + times):
        began = time.monotonic()
        await run(number)
        seconds.append(1e3 * (time.monotonic() - began))
    rest = seconds[1:]
    return {
        "row": name,
        "ms": round(float(np.median(rest)), 2),
        "p99_ms": round(float(np.quantile(rest, 0.99)), 2),
        "first_ms": round(seconds[0], 1),
    }
