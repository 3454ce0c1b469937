"""Functions that are compiled, or loaded from disk, before they are called."""

import contextlib
import functools
import json
import logging
import math
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import jax
from jax._src import config as jax_config

from jaxlora.common import console
from jaxlora.common.background import in_background
from jaxlora.common.counted import counted
from jaxlora.common.garbage import no_garbage_collection
from jaxlora.distributed import processes
from jaxlora.pallas_kernels import (
    compile_program,
    lowers_elsewhere,
    prepare_to_load,
    start_workers,
    trace_program,
)
from jaxlora.programs.kept import (
    DamagedEntryError,
    KeptPrograms,
    ProgramMemory,
    SavedProgram,
    serialize,
)
from jaxlora.programs.key import program_key, source_stamp

logger = logging.getLogger(__name__)

_LOG_SECONDS, _SHOW_SECONDS = 15.0, 0.5  # between two counts of programs


class _Kept:
    """Where the programs of this process are kept; see `keep_programs`.

    Attributes:
        programs: The folder.
        writers: The threads that write programs, by key.
        will_compile: Whether this process compiles the programs that it plans.
    """

    programs: KeptPrograms | None = None
    will_compile: bool = True
    writers: ClassVar[dict[str, threading.Thread]] = {}


def keep_programs(programs: KeptPrograms | None, *, will_compile: bool = True) -> None:
    """Keeps the programs that are compiled from now on, or stops doing so.

    Args:
        programs: The folder; None: nothing is kept.
        will_compile: Whether this process compiles programs. One that only plans keeps
            estimates.
    """
    wait_until_kept()
    _Kept.programs, _Kept.will_compile = programs, will_compile


def wait_until_kept() -> None:
    """Waits until the programs that were compiled so far are written."""
    for writer in list(_Kept.writers.values()):
        writer.join()
    _Kept.writers.clear()


def _kept() -> KeptPrograms | None:
    """Returns the folder; None if the files of the package are newer than its code."""
    programs = _Kept.programs
    return programs if programs is not None and source_stamp().is_current() else None


def expect_new_programs() -> None:
    """Starts the processes that lower kernels, if no program was ever kept.

    They take seconds to start, which pass beside the plan. Otherwise they start with
    the first value or program that is new.
    """
    if (kept := _kept()) is not None and kept.is_empty:
        start_workers()


def kept_value[T](what: str, identity: Any, compute: Callable[[], T]) -> T:
    """Returns what a pure function computes, or what an earlier process has kept of it.

    Args:
        what: Its name for the log.
        identity: The name and all arguments of the function, for the key.
        compute: Computes the value, which JSON can hold.
    """
    if (kept := _kept()) is None:
        return compute()
    key = program_key(("value", identity), ())
    try:
        if (entry := kept.read(key)) is not None:
            return json.loads(entry)
    except (DamagedEntryError, ValueError) as error:
        _reject(kept.path(key), what, "computed instead", str(error))
    if _Kept.will_compile:
        start_workers()  # the programs of this run are probably new, too
    value = compute()
    kept.write(key, json.dumps(value).encode())
    return value


def _reject(path: pathlib.Path, what: str, how: str, why: str) -> None:
    logger.warning("%s cannot be used for %s, which is %s: %s", path, what, how, why)


class Program:
    """A function that has one program for each shape of some of its arguments.

    It is called as a jitted function is. But it can also be compiled before there are
    arguments, beside other programs; and a program that an earlier process has kept is
    loaded without being traced.
    """

    def __init__(
        self,
        jitted: Any,
        what: str,
        identity: Any,
        *,
        varies: Sequence[int] = (),
    ):
        """Makes the function; nothing is traced yet.

        Args:
            jitted: The jitted function.
            what: Its name for the log.
            identity: All that the function depends on besides its arguments, for the
                key; see `jaxlora.programs.key.canonical`.
            varies: Numbers of the arguments whose shapes may differ from call to call.
        """
        self.jitted, self.what = jitted, what
        self._identity, self._varies = identity, tuple(varies)
        self._prepared: dict[Any, Prepared] = {}

    def __call__(self, *args: Any) -> Any:
        """Calls the program for these arguments; compiles it if there is none yet."""
        prepared = self._prepared.get(self._signature(args))
        if prepared is None:
            prepared = self.prepare(*args)
            finish([prepared])
        return prepared.compiled()(*args)

    def prepare(
        self,
        *args: Any,
        what: str | None = None,
        before_tracing: Callable[[], Any] | None = None,
    ) -> "Prepared":
        """Starts to load or to compile the program for arguments of these shapes.

        Tracing is done when this returns; a thread lowers and compiles.

        Args:
            *args: Arguments, or their shapes.
            what: Name of the program for the log.
            before_tracing: Is called before the function is traced, if it is.
        """
        signature = self._signature(args)
        found = self._prepared.get(signature)
        if found is None or found.has_failed:
            found = Prepared(
                self.jitted, what or self.what, self._identity, args, before_tracing
            )
            self._prepared[signature] = found
        return found

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return sum(not one.is_loaded for one in self._prepared.values())

    def _signature(self, args: Sequence[Any]) -> Any:
        """Returns the values that select a program, as `jax.jit` does for each call."""
        varying = jax.tree.leaves([args[i] for i in self._varies])
        return (
            jax_config.trace_context(),
            jax.config.read("jax_disable_most_optimizations"),
            *[(leaf.shape, leaf.dtype) for leaf in varying],
        )


class Prepared:
    """A program that is loaded or compiled in the background.

    Attributes:
        what: Its name for the log.
        is_loaded: Whether it was loaded, and not compiled.
        is_announced: Whether the log has said that it is being compiled.
        is_finished: Whether the log has said how long it took.
        seconds: Time that it took so far, tracing included.
        waited: Time that threads have waited for it so far.
        began: Time of the clock when it was asked for.
    """

    def __init__(
        self,
        jitted: Any,
        what: str,
        identity: Any,
        args: tuple[Any, ...],
        before_tracing: Callable[[], Any] | None,
    ):
        """Starts; see `Program.prepare`."""
        self._before_tracing = before_tracing
        self.what, self.is_loaded, self.seconds = what, False, 0.0
        self.is_announced, self.is_finished, self.waited = False, False, 0.0
        self.began = time.perf_counter()
        self._jitted, self._args = jitted, shapes_of(args)
        self._traced: jax.stages.Traced | None = None
        self._compiled: jax.stages.Compiled | None = None
        self._saved: Future[SavedProgram | None] = Future()  # of a loaded program
        self._kept = _kept()
        self._key = program_key(identity, args) if self._kept is not None else ""
        # All processes of a run load a program, or all compile it.
        if processes.any_of(not self._is_there()):
            self._future = self._start_compiling()
        else:
            self.is_loaded = True
            self._future = in_background(self._load)
        if processes.count() > 1:  # in the same order on all of them
            self.compiled()

    def compiled(self) -> jax.stages.Compiled:
        """Waits for the program, and returns it."""
        if self._compiled is None:
            began = time.perf_counter()
            found = self._future.result()
            # All processes must agree on this too.
            if self.is_loaded and processes.any_of(found is None):
                self.is_loaded = False
                self._future = self._start_compiling()
                found = self._future.result()
            self._compiled, self._traced = found, None
            self.waited += time.perf_counter() - began
        return self._compiled

    @property
    def is_done(self) -> bool:
        """Whether the program is compiled or loaded, or has failed."""
        return self._future.done()

    @property
    def has_failed(self) -> bool:
        """Whether compiling has ended with an error."""
        return self._future.done() and self._future.exception() is not None

    @property
    def out_info(self) -> Any:
        """Shapes of the results, before the program is compiled if it is not loaded."""
        if self._traced is not None:
            return self._traced.out_info
        if self.is_loaded and (saved := self._saved.result()) is not None:
            return saved.out_info
        return self.compiled().out_info

    def memory_analysis(self) -> ProgramMemory | None:
        """Waits for the program, and returns its memory; None: it is not reported."""
        compiled = self.compiled()
        if self.is_loaded and (saved := self._saved.result()) is not None:
            return saved.memory
        return ProgramMemory.of(compiled)

    def _is_there(self) -> bool:
        """Whether an earlier program is kept, or this process has just kept it."""
        if self._kept is None:
            return False
        if (writer := _Kept.writers.get(self._key)) is not None:
            writer.join()
        return self._kept.has(self._key)

    def _load(self) -> jax.stages.Compiled | None:
        """Reads the entry, checks it and loads it; None if it cannot be used."""
        assert self._kept is not None
        began = time.perf_counter()
        try:
            if (entry := self._kept.read(self._key)) is None:
                return None  # another process has removed it
            saved = SavedProgram.read(entry)
            self._saved.set_result(saved._replace(executable=b""))
            prepare_to_load()
            compiled = saved.load(self._args)
        except DamagedEntryError as error:
            self._reject(str(error))
            return None
        except Exception as error:  # whatever a pickle of another kind may raise
            self._reject(f"{type(error).__name__}: {error}"[:200])
            return None
        finally:
            if not self._saved.done():
                self._saved.set_result(None)
        self.seconds += time.perf_counter() - began
        return compiled

    def _reject(self, why: str) -> None:
        assert self._kept is not None
        _reject(self._kept.path(self._key), self.what, "compiled instead", why)

    def _start_compiling(self) -> Future:
        began = time.perf_counter()
        with no_garbage_collection():
            if self._before_tracing is not None:
                self._before_tracing()
            traced = self._traced = trace_program(self._jitted, *self._args)
            lowered = None if _lowers_in_thread() else traced.lower()
        self.seconds += time.perf_counter() - began
        return in_background(lambda: self._compile(traced, lowered))

    def _compile(
        self, traced: jax.stages.Traced, lowered: jax.stages.Lowered | None
    ) -> jax.stages.Compiled:
        """Compiles the program; lowers it before, unless that was done."""
        began = time.perf_counter()
        if lowered is None:
            with no_garbage_collection():
                lowered = traced.lower()
        with _beside_xlas_cache() if self._kept else contextlib.nullcontext():
            compiled = compile_program(lowered)
        self.seconds += time.perf_counter() - began
        if self._kept is not None and source_stamp().is_current():
            # The first step does not wait for it, but the end of the process does.
            work = functools.partial(self._keep, compiled)
            writer = threading.Thread(target=work, name="jaxlora-keep")
            writer.start()
            _Kept.writers[self._key] = writer
        return compiled

    def _keep(self, compiled: jax.stages.Compiled) -> None:
        assert self._kept is not None
        entry = serialize(compiled, self.what)
        if entry is not None:
            self._kept.write(self._key, entry)


def _lowers_in_thread() -> bool:
    """Whether another thread lowers a program as this one would.

    A setting of JAX that a context manager has changed, such as `jax.enable_x64`, holds
    in this thread only.
    """
    return lowers_elsewhere() and in_background(_settings).result() == _settings()


def _settings() -> tuple[Any, ...]:
    """Returns the settings of JAX in this thread that lowering depends on."""
    return *jax_config.trace_context(), jax.config.jax_default_device


def announce(prepared: Sequence[Prepared]) -> None:
    """Logs in one line which programs are being compiled, each of them once."""
    new = [one for one in prepared if not (one.is_announced or one.is_loaded)]
    for one in new:
        one.is_announced = True
    if new:
        names = ", ".join(one.what for one in new)
        logger.info("compiling %s: %s", counted(len(new), "program"), names)


@contextlib.contextmanager
def counting(prepared: Sequence[Prepared]) -> Iterator[None]:
    """Shows how many programs are compiled, and for how long, while the block waits.

    A terminal has one line, in place; elsewhere the log has one every 15 seconds.
    """
    begun = [one for one in prepared if not one.is_loaded]
    if all(one.is_done for one in begun):
        yield
        return
    ended, first = threading.Event(), min(one.began for one in begun)

    def text() -> str:
        num_done = sum(one.is_done for one in begun)
        seconds = time.perf_counter() - first
        return f"compiling {num_done} of {len(begun)} programs, {seconds:.0f} s"

    def show(interval: float, shown: Callable[[str], None]) -> None:
        while not ended.wait(interval):
            shown(text())

    with contextlib.ExitStack() as stack:
        interval, shown = _LOG_SECONDS, logger.info
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and console.stderr.is_terminal:
            status = stack.enter_context(console.stderr.status(text()))
            interval, shown = _SHOW_SECONDS, status.update
        thread = threading.Thread(target=show, args=(interval, shown), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        yield


def finish(prepared: Sequence[Prepared]) -> None:
    """Waits for programs, and logs in one line how long new ones took.

    What was waited for one of them before counts, too.
    """
    new = [one for one in prepared if not one.is_finished]
    for one in new:
        one.compiled()
        one.is_finished = True
    for is_loaded, verb in ((False, "compiled"), (True, "loaded")):
        found = [one for one in new if one.is_loaded == is_loaded]
        if found:
            each = ", ".join(f"{one.what} {one.seconds:.1f}" for one in found)
            logger.info(
                "%s %s, waited %.1f s (%s)",
                verb,
                counted(len(found), "program"),
                sum(one.waited for one in found),
                each,
            )


@contextlib.contextmanager
def _beside_xlas_cache() -> Iterator[None]:
    """Lets JAX's persistent cache neither give nor take a program.

    It would serialize, compress and write the program before the first step could use
    it. And XLA's CPU client serializes a program that it has loaded without its
    functions, which fails when it runs ("Function ... not found").
    """
    # No entry has such a key, as none is written for it.
    with (
        jax_config.persistent_cache_min_compile_time_secs(math.inf),
        jax_config.compilation_cache_include_metadata_in_key(True),
    ):
        yield


def shapes_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments without arrays of the device, which would stay alive."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding if leaf.committed else None,
            weak_type=leaf.weak_type,
        )

    return jax.tree.map(shape, args)
