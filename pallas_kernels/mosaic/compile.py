"""Lowers and compiles the Mosaic kernels of a program, several at a time.

Mosaic lowers a kernel in Python, which takes half a second per kernel and holds the
interpreter's lock. So `trace_program` lets other processes lower a program's kernels,
while this one traces the next program, and lowers the rest in a thread. XLA compiles
the kernels of a program one after the other, so `compile_program` compiles them
beforehand, in threads.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import logging
import math
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax.extend import core as jax_core
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.mosaic import hopper

logger = logging.getLogger(__name__)

TARGET = "mosaic_gpu_v2"
_CONFIG = "mhlo.backend_config"
# A call has this in place of its kernel's code, once that is compiled. Errors of Mosaic
# would show it.
_PLACEHOLDER = b"compiled beforehand"
# Attributes of the calls of kernels that run on one device, besides hash and code.
_ONE_DEVICE = {
    "use_custom_barrier": False,
    "skip_device_barrier": False,
    "uses_xla_collective_metadata": False,
}

_MAX_WORKERS = 8  # a program has 8 to 20 kernels
_MIN_CORES = 4  # with fewer cores, starting the workers takes longer than they save
_IDLE_SECONDS = 30  # after which a worker ends
_PROGRAM = """
import sys
sys.path[:] = {path!r}
import jaxlora.pallas_kernels.mosaic.products  # once for all workers
from jaxlora.pallas_kernels.mosaic.compile import serve_all
serve_all({handles})
"""

_USED: contextvars.ContextVar[bool] = contextvars.ContextVar("workers", default=False)


# ---- compiling -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel as XLA calls it.

    Attributes:
        attributes: Attributes of the custom call, from which Mosaic's runtime compiles
            the kernel, by name.
    """

    attributes: Mapping[str, Any]

    @property
    def key(self) -> frozenset:
        """Attributes that identify the kernel: all but the code, which has a hash."""
        return frozenset((k, v) for k, v in self.attributes.items() if k != "module")

    def compile(self) -> None:
        """Compiles a program that only calls the kernel, and is never run.

        Its operands do not matter: Mosaic's runtime compiles from the attributes alone.
        """
        call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.float32))

        def kernel_alone() -> Any:
            return call(**self.attributes)

        # A program that JAX's persistent cache holds would be loaded, not compiled.
        with jax_config.persistent_cache_min_compile_time_secs(math.inf):
            jax.jit(kernel_alone).lower().compile()


class _LoweredKernels(dict[bytes, bytes]):
    """Mosaic's table of lowered kernels, code by hash; compiles new ones at once."""

    def __setitem__(self, kernel_hash: bytes, code: bytes) -> None:
        super().__setitem__(kernel_hash, code)
        found = {"kernel_hash": kernel_hash, "module": code}
        compile_ahead({**found, **_ONE_DEVICE})


def compile_ahead(attributes: Mapping[str, Any]) -> None:
    """Starts to compile a kernel in a thread; see `_Kernel`. Any thread may call it."""
    _start(_Kernel(attributes))


# The kernels of this process that are compiled or being compiled.
_started: dict[frozenset, Future] = {}
_lock = threading.Lock()


def _start(kernel: _Kernel) -> Future:
    """Starts to compile a kernel in a thread, unless that was done before."""
    with _lock:
        found = _started.get(kernel.key)
        if found is None:
            found = _started[kernel.key] = _threads().submit(kernel.compile)
        return found


@functools.cache
def _threads() -> ThreadPoolExecutor:
    name = "jaxlora-pool-mosaic"  # see jaxlora.common.background
    return ThreadPoolExecutor(_num_cores(), thread_name_prefix=name)


def _num_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare_to_load() -> None:
    """Lets programs with Mosaic kernels run here that another process has compiled.

    Mosaic's runtime is a part of XLA's plugin. It finds its own library by environment
    variables, which are set when the Python part is imported. A process that traces no
    kernel would not import it.
    """
    if device.platform() == "gpu" and device.not_nvidia() is None:
        import jax.experimental.mosaic.gpu  # noqa: F401


def compile_when_lowered() -> None:
    """Lets Mosaic compile the kernels that it lowers from now on."""
    from jax.experimental.mosaic.gpu import core

    if not isinstance(core.KNOWN_KERNELS, _LoweredKernels):
        core.KNOWN_KERNELS = _LoweredKernels(core.KNOWN_KERNELS)


def compile_program(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Calls `lowered.compile()` after its Mosaic kernels were compiled in parallel.

    XLA compiles the kernels of a program one after the other in one thread, for one to
    five seconds each. And it searches the code of the kernel of every call for two
    words, again and again: a third of the time to compile a deep model. Mosaic's
    runtime keeps compiled kernels for the whole process, by a hash of their code which
    is an attribute of the call. So this function compiles each kernel as a program of
    its own in a thread of its own, unless `trace_program` has done so, and then takes
    its code out of the calls.

    A kernel that does not compile on its own, such as one for a device that is not
    here, stays in the program, so that XLA compiles it or reports why it cannot.

    Args:
        lowered: The program, with or without Mosaic kernels. It is changed, and so is
            what JAX keeps of it: lowered again in this process, it has no code either.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    calls: dict[Future, list[ir.Operation]] = {}
    for call in calls_in(module.operation):
        attributes = read_attributes(call)
        if attributes["module"] != _PLACEHOLDER:
            calls.setdefault(_start(_Kernel(attributes)), []).append(call)
    for kernel, same in calls.items():
        if (error := kernel.exception()) is not None:
            logger.debug("XLA compiles a Mosaic kernel itself: %s", error)
            continue
        for call in same:
            _remove_code(call)
    _wait_for_kernels()
    return lowered.compile()


def _wait_for_kernels() -> None:
    """Waits until no kernel is lowered or compiled any more, in any thread.

    XLA lends LLVM's options to one kind of compilation at a time: Mosaic's kernels go
    side by side, and so do XLA's programs, but each kind waits for the other. A program
    between two kernels would make the second wait for the first, several seconds.
    """
    with _lock:
        lowered = [one.attributes for one in _lowered.values()]
    wait(lowered)  # by then, the compilation of each has started
    with _lock:
        started = list(_started.values())
    wait(started)


def calls_in(operation: ir.Operation) -> Iterator[ir.Operation]:
    """Yields the calls of Mosaic kernels in an operation, such as a module."""
    for region in operation.regions:
        for block in region:
            for view in block:
                inner = view.operation
                if inner.name == "stablehlo.custom_call":
                    target = inner.attributes["call_target_name"]
                    if ir.StringAttr(target).value == TARGET:
                        yield inner
                yield from calls_in(inner)


def read_attributes(call: ir.Operation) -> dict[str, Any]:
    """Returns the attributes of a kernel's call; see `_Kernel`."""
    values: dict[str, Any] = {}
    for named in ir.DictAttr(call.attributes[_CONFIG]):
        if isinstance(named.attr, ir.BoolAttr):
            values[named.name] = bool(ir.BoolAttr(named.attr).value)
        else:
            values[named.name] = ir.StringAttr(named.attr).value_bytes
    return values


def _remove_code(call: ir.Operation) -> None:
    with call.context:
        config = {x.name: x.attr for x in ir.DictAttr(call.attributes[_CONFIG])}
        config["module"] = ir.StringAttr.get(_PLACEHOLDER)
        call.attributes[_CONFIG] = ir.DictAttr.get(config)


# ---- lowering ------------------------------------------------------------------------


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


def trace_program(jitted: Any, *args: Any) -> jax.stages.Traced:
    """Calls `jitted.trace(*args)`; other processes begin to lower its Mosaic kernels.

    Each kernel is compiled in a thread of its own as soon as it is lowered.

    Args:
        jitted: A jitted function.
        *args: Its arguments, or their shapes.
    """
    if device.platform() != "gpu" or device.not_nvidia() is not None:
        return jitted.trace(*args)
    compile_when_lowered()
    token = _USED.set(lowers_elsewhere())
    try:
        return jitted.trace(*args)
    finally:
        _USED.reset(token)


def lowers_elsewhere() -> bool:
    """Whether other processes lower the Mosaic kernels of a program that is traced.

    Programs can then be lowered in threads. In this process, Mosaic would number the
    kernels in an order that changes from run to run.
    """
    is_here = device.planned_device() is None and hopper.unsupported_device() is None
    return is_here and _num_workers() > 0


def start_workers() -> None:
    """Starts the processes that lower kernels, where there are kernels and processes.

    They take some seconds to start. The first kernel starts them, too.
    """
    if lowers_elsewhere():
        with _lock:
            _start_all()


def runnable(kernel: Lowerable, interpret: Any) -> Callable[..., list[jax.Array]]:
    """Returns a kernel as a function; a worker lowers it where workers are used.

    Args:
        kernel: The kernel.
        interpret: Parameters of Pallas' GPU interpreter, or None.
    """
    if interpret is None and _USED.get():
        return lowered_elsewhere(kernel)
    return kernel.function(interpret)


def lowered_elsewhere(kernel: Lowerable) -> Callable[..., list[jax.Array]]:
    """Returns a kernel as a function that a worker lowers, beginning now."""
    request = pickle.dumps((_jax_settings(), kernel), pickle.HIGHEST_PROTOCOL)
    with _lock:
        found = _lowered.get(request)
        if found is None:
            found = _Lowered(kernel, Future())
            _send(request, found.attributes)
            _lowered[request] = found  # now it will be answered
    types = tuple(kernel.out_types)
    return lambda *inputs: _kernel_p.bind(*inputs, lowered=found, types=types)


@dataclasses.dataclass(frozen=True, eq=False)
class _Lowered:
    """A kernel that is lowered, or being lowered, and the attributes of its calls."""

    kernel: Lowerable
    attributes: Future[dict[str, Any]]


# The kernels that this process has sent to workers, by request.
_lowered: dict[bytes, _Lowered] = {}

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
    cores = _num_cores()
    return 0 if cores < _MIN_CORES else min(_MAX_WORKERS, cores - 1)


def _send(request: bytes, answer: Future) -> None:
    """Gives a kernel to the next worker in turn.

    Mosaic numbers the kernels of a process, and the number is a part of the code. So
    the order decides who lowers a kernel, and not who is free first: with other codes,
    JAX's persistent cache would not find the program again.
    """
    _start_all()
    _queues[next(_turns) % len(_queues)].put((request, answer))


def _start_all() -> None:
    """Starts the workers, unless that was done before."""
    if _queues:
        return
    number = _num_workers()
    connections: Sequence[Connection | None] = [None] * number
    # If the host has no process left, each worker is tried again with its first kernel.
    with contextlib.suppress(OSError):
        connections = _start_processes(number)
    for connection in connections:
        requests = queue.SimpleQueue()
        run = _Worker(requests, connection).run
        threading.Thread(target=run, name="mosaic-lower", daemon=True).start()
        _queues.append(requests)


class _Worker:
    """A worker and the thread that talks to it."""

    def __init__(
        self,
        requests: queue.SimpleQueue[tuple[bytes, Future]],
        connection: Connection | None,
    ):
        self._requests, self._connection = requests, connection

    def run(self) -> None:
        """Answers requests until this process ends."""
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
            (self._connection,) = _start_processes(1)
        self._connection.send_bytes(request)
        return pickle.loads(self._connection.recv_bytes())


def _start_processes(number: int) -> list[Connection]:
    """Starts workers; the first forks into the others when it has imported JAX."""
    with contextlib.ExitStack() as theirs:
        ours, handles = [], []
        for _ in range(number):
            mine, its = Pipe()
            theirs.enter_context(its)
            ours.append(mine)
            handles.append(its.fileno())
        program = _PROGRAM.format(path=sys.path, handles=handles)
        # They need no device, and no threads that a fork would lose. In their own
        # session, they do not get a terminal's Ctrl-C.
        without = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | without | {"OPENBLAS_NUM_THREADS": "1"},
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    # Takes the exit status of a process that has ended.
    threading.Thread(target=process.wait, name="mosaic-wait", daemon=True).start()
    return ours


# ---- the worker ----------------------------------------------------------------------


def serve_all(handles: list[int]) -> None:
    """Lowers kernels in a process for each connection, of which this one is the first.

    Args:
        handles: File descriptors of the connections.
    """
    # JAX warns of its threads, of which it starts none before it asks for devices.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    own, *others = handles
    for handle in others:
        if os.fork() == 0:
            own, others = handle, [one for one in handles if one != handle]
            break
    for other in others:  # else the end of a worker would not end its connection
        os.close(other)
    _serve(Connection(own))


def _serve(connection: Connection) -> None:
    """Lowers the kernels that come, until none comes or the other process has ended."""
    jax.devices()  # takes a while, the first time
    with contextlib.suppress(EOFError, BrokenPipeError):
        while connection.poll(_IDLE_SECONDS):
            request = connection.recv_bytes()
            try:
                answer: Any = lower_kernel(*pickle.loads(request))
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
