"""Functions whose programs are compiled ahead of their calls, or loaded."""

import contextlib
import dataclasses
import functools
import gc
import io
import logging
import pickle
import threading
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxlora.common.garbage import no_garbage_collection
from jaxlora.programs import kept as on_disk
from jaxlora.programs import key, program
from jaxlora.programs.kept import KeptPrograms, SavedProgram
from jaxlora.programs.program import (
    Prepared,
    Program,
    finish,
    keep_programs,
    kept_value,
    wait_until_kept,
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("a", "b"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class State:
    a: jax.Array
    b: dict[str, jax.Array]


def step(base, state, rows):
    y = jnp.sin(rows).sum() + sum(jnp.tanh(w).sum() for w in base.values())
    return State(a=state.a + y, b={k: v * y for k, v in state.b.items()}), {"y": y}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keeps programs in a folder of the test, also if a file is new."""
    monkeypatch.setattr(key, "_IMPORTED", 2**63)
    key.source_stamp.cache_clear()
    found = KeptPrograms(folder=tmp_path / "programs")
    keep_programs(found)
    yield found
    keep_programs(None)
    key.source_stamp.cache_clear()


def make(*, what: str = "a step") -> Program:
    jitted = jax.jit(functools.partial(step), donate_argnums=1)
    return Program(jitted, what, ("test", "step"), varies=(2,))


def arguments(num_rows: int = 8):
    where = jax.devices()[0]
    base = {f"w{i}": jnp.full((4, 4), 0.1 * i) for i in range(5)}
    state = State(a=jnp.zeros(3), b={"t": jnp.ones((2, 3))})
    return base, jax.device_put(state, where), np.arange(num_rows, dtype=np.float32)


def test_a_value_is_computed_once_for_each_identity(kept, caplog):
    calls = []

    def value(number):
        def compute():
            calls.append(number)
            return {"third": number / 3, "none": None}

        return kept_value("a value", ("test", number), compute)

    first = [value(1), value(2)]
    assert (
        [value(1), value(2)]
        == first
        == [{"third": n / 3, "none": None} for n in (1, 2)]
    )
    assert calls == [1, 2] and not caplog.records
    for path in kept.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert value(2) == first[1] and calls == [1, 2, 2]
    assert "cannot be used for a value, which is computed instead" in caplog.text
    keep_programs(None)
    assert value(2) == first[1] and calls == [1, 2, 2, 2]


def test_a_process_that_only_plans_starts_no_workers(kept, monkeypatch):
    started = []
    monkeypatch.setattr(program, "start_workers", lambda: started.append(True))
    for will_compile in (False, True):
        keep_programs(kept, will_compile=will_compile)
        identity = "test", will_compile
        assert kept_value("a value", identity, lambda: 1) == 1
        assert kept_value("a value", identity, lambda: 2) == 1  # it was kept
    assert started == [True]


def bits(result) -> bytes:
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(result))


def test_a_loaded_program_is_the_compiled_one(kept):
    """Same bits, donation, memory and kinds of results; nothing is traced."""
    first, second = make(), make()
    args, again = arguments(), arguments()
    one, other = first(*args), second(*again)
    assert (first.num_compilations(), second.num_compilations()) == (1, 0)
    assert len(second._prepared) == 1
    assert second.jitted._cache_size() == 0
    assert bits(one) == bits(other) == bits(jax.jit(step)(*arguments()))
    assert args[1].a.is_deleted() and again[1].a.is_deleted()
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (x.sharding, x.committed) == (y.sharding, y.committed)
    prepared = [p.prepare(*arguments()) for p in (first, second)]
    kept_memory = [one.memory_analysis() for one in prepared]
    memory = [one.compiled().memory_analysis() for one in prepared]
    for name in ("argument", "output", "alias", "temp"):
        sizes = [getattr(m, f"{name}_size_in_bytes") for m in memory]
        assert sizes[0] == sizes[1]
        if name != "argument":
            own = [getattr(m, f"{name}_size_in_bytes") for m in kept_memory]
            assert own == sizes


def test_a_program_for_each_shape(kept):
    ours, theirs = make(), make()
    for num_rows in (8, 16, 8):
        assert bits(ours(*arguments(num_rows))) == bits(theirs(*arguments(num_rows)))
    assert (ours.num_compilations(), theirs.num_compilations()) == (2, 0)
    with pytest.raises(TypeError):
        ours({}, *arguments()[1:])


def test_a_program_is_prepared_before_there_are_arrays(kept):
    shapes = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.devices()[0] and jnp.zeros(()).sharding
            )
            if isinstance(x, jax.Array)
            else x
        ),
        arguments(),
    )
    one = make()
    prepared = one.prepare(*shapes)
    assert one.prepare(*shapes) is prepared
    found = prepared.out_info
    result = one(*arguments())
    assert one.num_compilations() == 1
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(jnp.shape, result)
    again = make().prepare(*shapes)
    assert again.is_loaded
    kept_info = again.out_info
    assert jax.tree.structure(kept_info) == jax.tree.structure(result)
    for info, x in zip(
        jax.tree.leaves(kept_info), jax.tree.leaves(result), strict=True
    ):
        assert (info.shape, info.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(
    "how", ["damaged", "another pickle", "another program", "mode"]
)
def test_an_entry_that_cannot_be_loaded(kept, caplog, how):
    make()(*arguments())
    wait_until_kept()
    (path,) = kept.folder.iterdir()
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "mode":
        path.chmod(0o666)
    elif how == "another pickle":
        kept.write(path.stem, pickle.dumps({"x": 1}))
    else:
        saved = SavedProgram.read(kept.read(path.stem))._replace(executable=b"")
        kept.write(path.stem, pickle.dumps(saved))
    one = make()
    assert bits(one(*arguments())) == bits(jax.jit(step)(*arguments()))
    assert one.num_compilations() == 1
    assert caplog.text.count(f"{path} cannot be used for a step") == 1
    again = make()
    again(*arguments())
    assert again.num_compilations() == 0


def test_what_calls_python_is_not_kept(kept):
    def callback(x):
        jax.debug.callback(lambda y: None, x)
        return x + 1

    Program(jax.jit(callback), "a callback", "test")(np.float32(1))
    wait_until_kept()
    assert not kept.folder.exists()


def test_a_program_of_jaxs_cache_is_not_serialized_again(kept, tmp_path):
    """On a CPU, XLA would serialize it without its functions."""
    jitted = jax.jit(functools.partial(step), donate_argnums=1)
    jitted.lower(*arguments()).compile()  # puts it into the cache, if it is slow enough
    with jax._src.config.persistent_cache_min_compile_time_secs(0.0):
        jitted.lower(*arguments()).compile()
        make()(*arguments())
    wait_until_kept()
    (path,) = kept.folder.iterdir()
    loaded = SavedProgram.read(kept.read(path.stem)).load(arguments())
    assert bits(loaded(*arguments())) == bits(jax.jit(step)(*arguments()))


def test_nothing_is_kept_by_newer_files(kept, monkeypatch):
    monkeypatch.setattr(key, "_IMPORTED", 0)
    key.source_stamp.cache_clear()
    make()(*arguments())
    wait_until_kept()
    assert not kept.folder.exists()


def test_an_error_comes_again_and_is_not_kept(kept):
    calls = []

    def fails(x):
        calls.append(x)
        if len(calls) < 3:
            raise ValueError("no such program")
        return x

    one = Program(jax.jit(fails), "a failure", "test")
    for _ in range(2):
        with pytest.raises(ValueError, match="no such program"):
            one(np.float32(1))
    assert one(np.float32(1)) == 1


def test_one_line_says_how_long_programs_took(kept, caplog):
    caplog.set_level(logging.INFO, "jaxlora")
    for verb in ("compiled", "loaded"):
        caplog.clear()
        programs = make(what="first"), make(what="second")
        prepared = [one.prepare(*arguments(8 * n)) for n, one in enumerate(programs, 1)]
        prepared[0].compiled()  # as a run does that reads its memory
        assert prepared[0].waited > 0
        finish(prepared)
        finish(prepared)
        (line,) = caplog.messages
        waited = sum(one.waited for one in prepared)
        assert line.startswith(f"{verb} 2 programs, waited {waited:.1f} s (first ")


def under_way(is_done: bool) -> Prepared:
    """A program that has begun to be compiled 41 seconds ago."""
    one = object.__new__(Prepared)
    one.began, one.is_loaded = time.perf_counter() - 41.2, False
    one._future = Future()
    if is_done:
        one._future.set_result(None)
    return one


@pytest.mark.parametrize("is_terminal", [False, True])
def test_programs_are_counted_while_they_are_compiled(monkeypatch, is_terminal):
    """The log has lines; a terminal has one, which goes away."""
    said, came = io.StringIO(), threading.Event()
    shown_on = Console(file=said, force_terminal=is_terminal, width=80)
    monkeypatch.setattr(program.console, "stderr", shown_on)
    monkeypatch.setattr(program, "_LOG_SECONDS", 0.001)
    logged = []
    log = lambda text: (logged.append(text), came.set())
    monkeypatch.setattr(program.logger, "info", log)
    with program.counting([under_way(True), under_way(False)]):
        assert is_terminal or came.wait(60)
    wanted = "compiling 1 of 2 programs, 41 s"
    assert wanted in (said.getvalue() if is_terminal else logged[0])
    assert bool(logged) != is_terminal


def test_the_collector_runs_again_after_an_error():
    with pytest.raises(ValueError), no_garbage_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_the_collector_pauses_until_the_last_block_ends():
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(no_garbage_collection())
        second.enter_context(no_garbage_collection())  # as another thread may
        first.close()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_other_settings_are_another_program():
    one = make()
    one(*arguments())
    with jax.default_matmul_precision("bfloat16"):
        one(*arguments())
    one(*arguments())
    assert len(one._prepared) == 2


def test_a_call_does_not_wait_until_its_program_is_kept(kept, monkeypatch):
    called = threading.Event()

    def serialize(*args):
        assert called.wait(60)
        return on_disk.serialize(*args)

    monkeypatch.setattr(program, "serialize", serialize)
    make()(*arguments())
    assert not kept.folder.exists()
    called.set()
    again = make()  # waits for the entry
    again(*arguments())
    assert again.num_compilations() == 0


def test_an_entry_that_cannot_be_looked_up_is_none(tmp_path):
    """Such as one in a folder of somebody else; here, its name is too long."""
    assert not KeptPrograms(folder=tmp_path).has("k" * 1000)


@pytest.fixture
def lowering(monkeypatch):
    """Lowers in other threads where that is allowed; lists which thread did."""
    threads, traced = [], jax.stages.Traced
    lower = traced.lower

    def noted(self, *args, **settings):
        threads.append(threading.current_thread())
        return lower(self, *args, **settings)

    monkeypatch.setattr(traced, "lower", noted)
    monkeypatch.setattr(program, "lowers_elsewhere", lambda: True)
    return threads


def test_lowering_in_a_thread_is_timed_and_not_interrupted(lowering, monkeypatch):
    """By the collector, as lowering in the thread that traces is not."""
    now, lower = [0.0], jax.stages.Traced.lower

    def slow(self):
        assert not gc.isenabled()
        now[0] += 100
        return lower(self)

    monkeypatch.setattr(program.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(jax.stages.Traced, "lower", slow)
    prepared = make().prepare(*arguments())
    prepared.compiled()
    assert threading.current_thread() not in lowering
    assert prepared.seconds == 100


@pytest.mark.parametrize(
    "context", [jax.enable_x64, lambda _: jax.default_device(jax.devices()[-1])]
)
def test_settings_of_one_thread_hold_where_a_program_is_lowered(lowering, context):
    def draw(x):
        return x + jax.random.uniform(jax.random.key(0), x.shape, x.dtype)

    with context(True):
        x = np.zeros(4, jax.dtypes.canonicalize_dtype(np.float64))
        found = Program(jax.jit(draw), "a draw", ("draw",))(x)
        assert lowering == [threading.current_thread()]
        assert found.dtype == x.dtype and found.devices() == jax.jit(draw)(x).devices()
