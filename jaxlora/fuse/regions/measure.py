"""Times the plans of a region on the device."""

import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax._src.core import eval_context
from jax.extend import core

from jaxlora.errors import ConfigError
from jaxlora.fuse.regions import kept
from jaxlora.fuse.regions.candidates import Plan
from jaxlora.fuse.regions.part import Region
from jaxlora.fuse.regions.programs import BothPasses, both_passes
from jaxlora.pallas_kernels import compile_program

logger = logging.getLogger(__name__)

_SHORTEST_SECONDS = 0.02  # of calls that are timed together
_NUM_BATCHES = 5
_MOST_THREADS = 8  # that compile at the same time
# Returns the seconds of a call of a compiled function.
Timer = Callable[[Callable[..., Any], Sequence[Any]], float]


def time_call(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Returns the median time of a call in a series of calls, in seconds."""

    def batch(count: int) -> float:
        start, results = time.perf_counter(), None
        for _ in range(count):
            results = function(*arguments)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    batch(2)
    count = max(1, round(_SHORTEST_SECONDS / max(batch(2), 1e-7)))
    return statistics.median(batch(count) for _ in range(_NUM_BATCHES))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A region whose plans are to be timed.

    Attributes:
        region: The region.
        key: The digest of its normal form.
        plans: The plans, XLA's first.
        program: Returns the program of the region with a plan; None: it has none.
    """

    region: Region
    key: str
    plans: Sequence[Plan]
    program: Callable[[Plan], core.Jaxpr | None]

    @property
    def names(self) -> list[str]:
        """Names of the plans."""
        return [plan.name for plan in self.plans]


# The times of plans, by name; or no times, and why.
Times = tuple[dict[str, float], str | None]
_USED_UP: Times = {}, "measure_seconds are used up"
# Both passes of the plans of a region, and what compiles them, by the plans' names.
_Programs = dict[str, tuple[BothPasses, Future[Callable[..., Any]]]]


class Stopwatch:
    """Times plans until a limit is reached, and keeps the times.

    The programs of several plans are compiled at the same time. None is being compiled
    while one is timed, since a compiler runs kernels on the device too, and takes the
    processors that start those that are timed.
    """

    def __init__(
        self,
        limit_seconds: float,
        *,
        timer: Timer = time_call,
        clock: Callable[[], float] = time.perf_counter,
        num_threads: int | None = None,
    ) -> None:
        """Starts with all of its time.

        Args:
            limit_seconds: Time for compiling and running candidates, in all, as a clock
                on the wall shows it; 0: only times that are kept are used. When it is
                reached, nothing more is compiled or timed; what is being compiled or
                timed then may exceed it.
            timer: Times a call.
            clock: Measures what is left of the limit.
            num_threads: Programs that are compiled at the same time; None: one for each
                processor, up to eight.
        """
        self._left = limit_seconds
        self._timer, self._clock = timer, clock
        self._num_threads = num_threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._kept: dict[str, kept.Measured] | None = None

    def times(self, requests: Sequence[Request]) -> list[Times]:
        """Returns the times of the plans of regions.

        Args:
            requests: The regions, each with another key.

        Raises:
            ConfigError: There are several processes.
            Exception: A program does not compile or run.
        """
        _check_processes()
        device = jax.devices()[0].device_kind
        if self._kept is None:
            self._kept = kept.shipped(device) | kept.read(device)
        found: dict[str, Times] = {}
        new = []
        for request in requests:
            key = request.key
            if key in self._kept and (known := self._kept[key].of(request.names)):
                found[key] = known, None
            elif "shard_map" in request.region.sites[0].path:
                found[key] = {}, "regions inside of shard_map are not timed"
            else:
                new.append(request)
        for batch in _batches(new, self._num_threads):
            start = self._clock()
            until = start + self._left
            compiled = self._compiled(batch, until)
            for request, programs in zip(batch, compiled, strict=True):
                found[request.key] = self._timed(programs, until)
                self._keep(device, request.key, found[request.key])
            self._left -= self._clock() - start
        return [found[request.key] for request in requests]

    def _compiled(
        self, batch: Sequence[Request], until: float
    ) -> list[_Programs | None]:
        """Compiles the plans of regions at the same time, and waits for all.

        Returns:
            For each region its programs; None if its turn had not come when the time
            was used up.
        """
        with ThreadPoolExecutor(self._num_threads, "measure-compile") as pool:
            return [self._started(pool, request, until) for request in batch]

    def _started(
        self, pool: ThreadPoolExecutor, request: Request, until: float
    ) -> _Programs | None:
        started: _Programs = {}
        for plan in request.plans:
            if self._clock() >= until:
                return None
            jaxpr = request.program(plan)
            if jaxpr is not None:
                with _apart():
                    program = both_passes(jaxpr, request.region)
                    started[plan.name] = program, _start(pool, program)
        return started

    def _timed(self, programs: _Programs | None, until: float) -> Times:
        """Times the programs of a region one after the other."""
        if programs is None:
            return _USED_UP
        seconds = {}
        for name, (program, compiled) in programs.items():
            if self._clock() >= until:
                return _USED_UP
            call = compiled.result()
            with _apart():
                seconds[name] = self._timer(call, program.arguments())
        return seconds, None

    def _keep(self, device: str, key: str, times: Times) -> None:
        seconds, reason = times
        if reason is None:
            assert self._kept is not None
            self._kept[key] = kept.Measured.now(key, seconds)
            kept.write(device, self._kept[key])


def _apart() -> contextlib.AbstractContextManager[None]:
    """Returns a context apart from the functions that are traced around this one.

    JAX's public context of this kind, `ensure_compile_time_eval`, would also evaluate
    what Mosaic's kernels compute without arrays, such as the number of a warpgroup.
    """
    return eval_context()


def _batches(requests: Sequence[Request], most: int) -> Iterator[list[Request]]:
    """Yields regions that are compiled together, with at most so many plans.

    A region with more is compiled alone.
    """
    batch: list[Request] = []
    for request in requests:
        if batch and sum(len(r.plans) for r in (*batch, request)) > most:
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


def _start(pool: ThreadPoolExecutor, program: BothPasses) -> Future[Callable[..., Any]]:
    """Traces and lowers a program here, and compiles it in a thread.

    It is traced here as the settings of JAX are those of a thread.
    """
    try:
        lowered = _lowered(program)
    except Exception as error:  # it is raised when the program would be timed
        failed: Future[Callable[..., Any]] = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(_compile, lowered)


def _lowered(program: BothPasses) -> jax.stages.Lowered:
    # Not by workers, as in `lower_program`: JAX keeps the traces of kernels, and the
    # fused function, which has the same, may also run without being compiled.
    return jax.jit(program.function).lower(program.values, program.gradients)


def _compile(lowered: jax.stages.Lowered) -> Callable[..., Any]:
    return compile_program(lowered)


def _check_processes() -> None:
    if jax.process_count() > 1:
        raise ConfigError(
            "measure_seconds is set, and there are several processes, which might "
            "choose different kernels. Leave it out, so that the prediction decides."
        )
