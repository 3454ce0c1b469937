"""Lowers kernels in processes of their own, several at a time.

Mosaic lowers a kernel in Python, which takes half a second per kernel and holds the
interpreter's lock. So a program's kernels are lowered by other processes, while this
one traces and lowers the rest of the program.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol, runtime_checkable

import jax
from jax._src import config as jax_config
from jax.extend import core as jax_core
from jax.interpreters import mlir

from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.mosaic.compile import (
    TARGET,
    calls_in,
    compile_ahead,
    compile_when_lowered,
    read_attributes,
)

logger = logging.getLogger(__name__)

_MAX_WORKERS = 8  # a program has 8 to 20 kernels
_MIN_CORES = 4  # with fewer cores, starting the workers takes longer than they save
_IDLE_SECONDS = 30  # after which a worker ends
_PROGRAM = """
import sys
sys.path[:] = {path!r}
import jaxlora.pallas_kernels.mosaic.products  # and not with the first kernel
from jaxlora.pallas_kernels.mosaic.lower import serve
serve({handle})
"""

_USED: contextvars.ContextVar[bool] = contextvars.ContextVar("workers", default=False)


@runtime_checkable
class Lowerable(Protocol):
    """A kernel that can be sent to another process."""

    @property
    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of its inputs."""
        ...

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of its results."""
        ...

    def function(self, interpret: Any = None) -> Callable[..., list[jax.Array]]:
        """Returns the kernel as a function of its inputs, to be traced.

        Args:
            interpret: Parameters of Pallas' GPU interpreter, or None.
        """
        ...


def lower_program(jitted: Any, *args: Any) -> jax.stages.Lowered:
    """Calls `jitted.lower(*args)`; other processes lower its Mosaic kernels meanwhile.

    Each kernel is compiled in a thread of its own as soon as it is lowered.

    Args:
        jitted: A jitted function.
        *args: Its arguments, or their shapes.
    """
    if device.platform() != "gpu" or device.not_nvidia() is not None:
        return jitted.lower(*args)
    compile_when_lowered()
    token = _USED.set(_num_workers() > 0)
    try:
        return jitted.lower(*args)
    finally:
        _USED.reset(token)


def are_used() -> bool:
    """Whether workers lower the kernels that are traced now."""
    return _USED.get()


def runnable(kernel: Lowerable, interpret: Any) -> Callable[..., list[jax.Array]]:
    """Returns a kernel as a function; a worker lowers it where workers are used.

    Args:
        kernel: The kernel.
        interpret: Parameters of Pallas' GPU interpreter, or None.
    """
    if interpret is None and are_used():
        return lowered_elsewhere(kernel)
    return kernel.function(interpret)


def lowered_elsewhere(kernel: Lowerable) -> Callable[..., list[jax.Array]]:
    """Returns a kernel as a function that a worker lowers, beginning now."""
    request = pickle.dumps((_jax_settings(), kernel), pickle.HIGHEST_PROTOCOL)
    with _lock:
        found = _lowered.get(request)
        if found is None:
            found = _lowered[request] = _Lowered(kernel, Future())
            _send(request, found.attributes)
    types = tuple(kernel.out_types)
    return lambda *inputs: _kernel_p.bind(*inputs, lowered=found, types=types)


@dataclasses.dataclass(frozen=True, eq=False)
class _Lowered:
    """A kernel that is lowered, or being lowered, and the attributes of its calls."""

    kernel: Lowerable
    attributes: Future[dict[str, Any]]


# The kernels that this process has sent to workers, by request.
_lowered: dict[bytes, _Lowered] = {}
_lock = threading.Lock()

_kernel_p = jax_core.Primitive("mosaic_kernel")
_kernel_p.multiple_results = True


@_kernel_p.def_abstract_eval
def _abstract_eval(*_, lowered, types):
    del lowered
    return [jax.core.ShapedArray(t.shape, t.dtype) for t in types]


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, lowered: _Lowered, types: Any):
    """Emits the call that Mosaic would emit, when the worker has answered."""
    try:
        attributes = lowered.attributes.result()
        call = jax.ffi.ffi_call(TARGET, types)
        run = lambda *inputs: call(*inputs, **attributes)
    except WorkerError as error:
        logger.warning("a kernel is lowered in this process: %s", error)
        run = lowered.kernel.function()
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


mlir.register_lowering(_kernel_p, _lower, platform="cuda")


class WorkerError(Exception):
    """A worker has not lowered a kernel; the text says why."""


def _jax_settings() -> dict[str, Any]:
    """Returns the settings of JAX that a trace depends on."""
    names = jax_config.trace_context_names()
    found = zip(names, jax_config.trace_context(), strict=True)
    has_default = jax.config.values
    return {
        name: value
        for name, value in found
        if name.startswith("jax_") and name in has_default and "device" not in name
    }


# ---- the workers, seen from this process ---------------------------------------------

# One queue of kernels for each worker, as soon as there is a kernel.
_queues: list[queue.SimpleQueue[tuple[bytes, Future]]] = []
_turns = itertools.count()


def _num_workers() -> int:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return 0 if cores < _MIN_CORES else min(_MAX_WORKERS, cores - 1)


def _send(request: bytes, answer: Future) -> None:
    """Gives a kernel to the next worker in turn; the first call starts all of them.

    Mosaic numbers the kernels of a process, and the number is a part of the code. So
    the order decides who lowers a kernel, and not who is free first: with other codes,
    JAX's persistent cache would not find the program again.
    """
    if not _queues:
        for _ in range(_num_workers()):
            _queues.append(queue.SimpleQueue())
            run = _Worker(_queues[-1]).run
            threading.Thread(target=run, name="mosaic-lower", daemon=True).start()
    _queues[next(_turns) % len(_queues)].put((request, answer))


class _Worker:
    """A worker and the thread that talks to it."""

    def __init__(self, requests: queue.SimpleQueue[tuple[bytes, Future]]):
        self._requests = requests
        self._connection: Connection | None = None

    def run(self) -> None:
        """Answers requests until this process ends."""
        # The first process starts before there is a request, as it takes seconds.
        with contextlib.suppress(OSError):
            self._connection = _start_process()
        while True:
            request, answer = self._requests.get()
            try:
                found = self._ask(request)
            except Exception as error:
                answer.set_exception(WorkerError(f"{type(error).__name__}: {error}"))
                continue
            with contextlib.suppress(RuntimeError):  # no thread starts at exit
                compile_ahead(found)
            answer.set_result(found)

    def _ask(self, request: bytes) -> dict[str, Any]:
        try:
            found = self._exchange(request)
        except (EOFError, OSError):  # it has ended, as it was idle
            self._connection = None
            found = self._exchange(request)
        if isinstance(found, str):
            raise WorkerError(found)
        return found

    def _exchange(self, request: bytes) -> dict[str, Any] | str:
        if self._connection is None:
            self._connection = _start_process()
        self._connection.send_bytes(request)
        return pickle.loads(self._connection.recv_bytes())


def _start_process() -> Connection:
    ours, theirs = Pipe()
    with theirs:
        handle = theirs.fileno()
        program = _PROGRAM.format(path=sys.path, handle=handle)
        # It needs no device. In its own session, it does not get a terminal's Ctrl-C.
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            pass_fds=[handle],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    # Takes the exit status of a process that has ended.
    threading.Thread(target=process.wait, name="mosaic-wait", daemon=True).start()
    return ours


# ---- the worker ----------------------------------------------------------------------


def serve(handle: int) -> None:
    """Lowers the kernels that come, until none comes or the other process has ended.

    Args:
        handle: File descriptor of the connection.
    """
    connection = Connection(handle)
    jax.devices()  # takes a while, the first time
    with contextlib.suppress(EOFError, BrokenPipeError):
        while connection.poll(_IDLE_SECONDS):
            settings, kernel = pickle.loads(connection.recv_bytes())
            try:
                answer: Any = lower_kernel(settings, kernel)
            except Exception:
                answer = traceback.format_exc()
            connection.send_bytes(pickle.dumps(answer))


def lower_kernel(settings: dict[str, Any], kernel: Lowerable) -> dict[str, Any]:
    """Returns the attributes of the call of a kernel, its code among them.

    Args:
        settings: Settings of JAX; see `_jax_settings`.
        kernel: The kernel.

    Raises:
        ValueError: The lowered kernel is more than one call.
    """
    for name, value in settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
    lowered = (
        jax.jit(kernel.function())
        .trace(*kernel.inputs)
        .lower(lowering_platforms=("cuda",))
    )
    module: Any = lowered.compiler_ir("stablehlo")
    (call,) = calls_in(module.operation)
    names = [argument for argument in call.operands]
    (main,) = [op for op in module.body if op.attributes["sym_name"].value == "main"]
    if names != list(main.regions[0].blocks[0].arguments):
        raise ValueError("the kernel's call has other operands than the kernel")
    return read_attributes(call)
