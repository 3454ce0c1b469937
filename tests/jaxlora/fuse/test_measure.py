"""Regions are timed within a limit, and the fastest way to compute each is kept."""

import dataclasses
import itertools
import json
import os
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxlora
from jaxlora.common.cache_home import device_path
from jaxlora.errors import ConfigError
from jaxlora.fuse import api
from jaxlora.fuse.api import FuseOptions, trace_call
from jaxlora.fuse.regions import kept, measure
from jaxlora.fuse.regions.measure import Stopwatch
from jaxlora.pallas_kernels import BACKENDS
from tests.jaxlora.fuse.reference_backend import NAME, REFERENCE, reference  # noqa: F401
from tests.jaxlora.fuse.row_functions import SWIGLU
from tests.oracle import relative_error

pytestmark = pytest.mark.usefixtures("only_reference")

_LOWERED, _COMPILE = measure._lowered, measure._compile
XLA, BOTH = "xla", "producer and gate(0, 1)"
LINEARS = "kernels(0), kernels(1)"


@pytest.fixture
def only_reference(reference, monkeypatch, tmp_path):  # noqa: F811
    """`auto` takes the reference back end; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    every = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS[NAME] = REFERENCE
    yield
    BACKENDS.clear()
    BACKENDS.update(every)  # in their order, which `auto` follows


class Clock:
    """Times that are given, in the order in which plans are timed."""

    def __init__(self, *seconds, each=1.0):
        self.seconds, self.each, self.now = list(seconds), each, 0.0
        self.called = 0

    def time_call(self, function, arguments):
        self.called += 1
        self.now += self.each
        return self.seconds.pop(0)

    def stopwatch(self, limit=100.0):
        return Stopwatch(limit, timer=self.time_call, clock=lambda: self.now)


def choose(stopwatch, function=SWIGLU, arguments=None):
    options = FuseOptions("auto", stopwatch)
    arguments = arguments or SWIGLU.arguments()
    return trace_call(function, options, (), arguments).rewritten.choices


def kept_file():
    return device_path("regions", jax.devices()[0].device_kind)


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch):
    """Programs that a given clock times need not be compiled."""
    monkeypatch.setattr(measure, "_lowered", lambda *_: None)
    monkeypatch.setattr(measure, "_compile", lambda _: None)


@pytest.mark.parametrize(
    ("seconds", "plan"),
    [
        ((9.0, 5.0, 6.0, 7.0), BOTH),
        ((9.0, 6.0, 5.0, 7.0), None),  # the second prediction is faster
        ((9.0, 5.05, 5.0, 7.0), BOTH),  # a tie goes to the best prediction
        ((9.0, 6.0, 7.0, 5.0), LINEARS),  # what is taken where nothing is measured
        ((4.0, 5.0, 6.0, 7.0), XLA),
        ((5.0, 5.0, 5.0, 7.0), XLA),  # nothing is taken that is not faster
        ((4.99, 5.0, 6.0, 7.0), XLA),
    ],
)
def test_the_fastest_is_taken(seconds, plan):
    clock = Clock(*seconds)
    (choice,) = choose(clock.stopwatch())
    assert clock.called == 4
    assert [*choice.seconds.values()] == list(seconds)
    names = [*choice.seconds]
    assert names[:2] == [XLA, BOTH]
    assert choice.plan.name == (plan or names[2])
    assert choice.reason.startswith("measured: ")


def test_a_gate_stays_as_it_is_where_nothing_is_measured():
    (choice,) = choose(None)
    assert not any(part.makers for part in choice.plan.parts)
    options = FuseOptions(NAME, None)  # a back end that is named runs what it can
    (named,) = trace_call(SWIGLU, options, (), SWIGLU.arguments()).rewritten.choices
    assert named.plan.name == BOTH


def test_times_are_kept_for_regions_of_the_same_form():
    def two(lora, frozen, x):
        return SWIGLU(lora, frozen, SWIGLU(lora, frozen, x))

    clock = Clock(9.0, 5.0, 6.0, 7.0)
    assert [c.plan.name for c in choose(clock.stopwatch(), two)] == [BOTH] * 2
    (kept,) = json.loads(kept_file().read_text())["regions"]
    assert [*kept["seconds"].values()] == [9.0, 5.0, 6.0, 7.0]
    assert kept_file().stat().st_mode & 0o777 == 0o600
    later = Clock()
    (choice,) = choose(later.stopwatch(limit=0))
    assert choice.plan.name == BOTH and choice.seconds[XLA] == 9.0


def test_other_sizes_are_measured_anew():
    choose(Clock(9.0, 5.0, 6.0, 7.0).stopwatch())
    other = Clock(4.0, 5.0, 6.0, 7.0)
    arguments = SWIGLU.arguments()
    arguments["x"] = jnp.concatenate([arguments["x"]] * 2)
    (choice,) = choose(other.stopwatch(), arguments=arguments)
    assert other.called == 4 and choice.plan.name == XLA


def test_the_limit_is_kept_and_gates_then_stay():
    clock = Clock(9.0, 8.0, each=2.0)
    (choice,) = choose(clock.stopwatch(limit=3.0))
    assert clock.called == 2 and not choice.seconds
    assert not any(part.makers for part in choice.plan.parts)
    assert choice.reason.endswith("not measured: measure_seconds are used up")
    assert not kept_file().exists()


@pytest.mark.parametrize("damage", ["{", '{"version": 2}', "mode"])
def test_a_damaged_file_is_measured_anew(damage, caplog):
    choose(Clock(9.0, 5.0, 6.0, 7.0).stopwatch())
    if damage == "mode":
        os.chmod(kept_file(), 0o666)
    else:
        kept_file().write_text(damage)
    clock = Clock(4.0, 5.0, 6.0, 7.0)
    (choice,) = choose(clock.stopwatch())
    assert clock.called == 4 and choice.plan.name == XLA
    assert "is not used" in caplog.text


class Compiler:
    """Compiles programs that only have names, and knows how many at the same time."""

    def __init__(self, together, fails=()):
        self.barrier = threading.Barrier(together)
        self.lock = threading.Lock()
        self.fails, self.active, self.ended = fails, 0, 0
        self.timed = threading.Event()

    def compile(self, number):
        with self.lock:
            self.active += 1
        self.barrier.wait(timeout=60)  # until so many are being compiled
        if number == 7:
            self.timed.wait(timeout=0.2)  # for what must not begin
        with self.lock:
            self.active -= 1
            self.ended += 1
        if number in self.fails:
            raise ValueError(f"candidate {number} does not compile")
        return number

    def time_call(self, number, arguments):
        """Times a program while nothing is compiled."""
        self.timed.set()
        assert not self.active
        self.ended_before.append(self.ended)
        return 9.0 - number

    @property
    def stopwatch(self):
        self.ended_before = []
        return Stopwatch(100.0, timer=self.time_call, num_threads=8)


@pytest.fixture
def numbered(monkeypatch):
    """Candidates are the numbers in whose order they are lowered."""
    numbers = itertools.count()
    monkeypatch.setattr(measure, "_lowered", lambda _: next(numbers))
    monkeypatch.setattr(measure.BothPasses, "arguments", lambda _: ())
    return lambda compiler: monkeypatch.setattr(measure, "_compile", compiler.compile)


def two_sizes(lora, frozen, x):
    y = SWIGLU(lora, frozen, x)
    return y, SWIGLU(lora, frozen, jnp.concatenate([x, x]))


def test_candidates_are_compiled_at_the_same_time_and_timed_alone(numbered):
    compiler = Compiler(together=8)  # those of two regions
    numbered(compiler)
    first, second = choose(compiler.stopwatch, two_sizes)
    assert compiler.ended_before == [8] * 8
    assert [*first.seconds.values()] == [9.0, 8.0, 7.0, 6.0]
    assert [*second.seconds.values()] == [5.0, 4.0, 3.0, 2.0]


def test_no_more_are_compiled_than_there_are_threads(numbered):
    compiler = Compiler(together=2)
    numbered(compiler)
    stopwatch = compiler.stopwatch
    stopwatch._num_threads = 2
    choose(stopwatch, two_sizes)
    assert compiler.ended_before == [4] * 4 + [8] * 4  # one region after the other


def test_the_error_of_a_candidate_is_raised_in_its_turn(numbered):
    compiler = Compiler(together=8, fails=(5, 6))
    numbered(compiler)
    with pytest.raises(ValueError, match="candidate 5 does not compile"):
        choose(compiler.stopwatch, two_sizes)
    (kept,) = json.loads(kept_file().read_text())["regions"]
    assert [*kept["seconds"].values()] == [9.0, 8.0, 7.0, 6.0]


def test_what_cannot_be_lowered_is_an_error_in_its_turn(monkeypatch):
    def fail(program):
        raise ValueError("it cannot be lowered")

    monkeypatch.setattr(measure, "_lowered", fail)
    with pytest.raises(ValueError, match="it cannot be lowered"):
        choose(Clock(9.0).stopwatch())


def test_time_of_compiling_counts(monkeypatch):
    """Candidates that have not begun when time is up are not compiled or timed."""
    clock, lowered = Clock(9.0, 5.0, 6.0, 7.0), []

    def lower(program):
        clock.now += 2.0
        lowered.append(program)

    monkeypatch.setattr(measure, "_lowered", lower)
    for limit, count in ((3.0, 2), (7.9, 4)):
        lowered.clear()
        (choice,) = choose(clock.stopwatch(limit))
        assert len(lowered) == count and not choice.seconds and not clock.called
        assert "measure_seconds are used up" in choice.reason
    (choice,) = choose(clock.stopwatch(8.5 + 3.0))
    assert clock.called == 4 and choice.plan.name == BOTH


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="several processes"):
        choose(Clock().stopwatch())


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(seconds):
    with pytest.raises(ConfigError, match="measure_seconds="):
        jaxlora.fuse(SWIGLU, measure_seconds=seconds)


def test_explain_prints_predicted_and_measured_times(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    clock = Clock(9e-3, 5e-3, 6e-3, 7e-3)
    monkeypatch.setattr(api, "Stopwatch", lambda limit: clock.stopwatch(limit))
    fused = jaxlora.fuse(SWIGLU, measure_seconds=60)
    explained = jaxlora.explain(fused, **SWIGLU.arguments())
    (region,) = explained.regions
    assert region.measured == (9e-3, 5e-3) and region.calls == BOTH
    text = str(explained)
    assert BOTH in text and "9.00 → 5.00 ms" in text and "measured: 9,000 us" in text
    explained.save(tmp_path / "regions.svg")
    drawn = (tmp_path / "regions.svg").read_text()
    assert "XLA, measured" in drawn and "9,000" in drawn


def test_programs_of_a_region_compute_the_same_while_a_function_is_traced(monkeypatch):
    monkeypatch.setattr(measure, "_lowered", _LOWERED)
    monkeypatch.setattr(measure, "_compile", _COMPILE)
    block, seen = dataclasses.replace(SWIGLU, keep=0.75), []

    def time_call(function, arguments):
        results = jax.block_until_ready(function(*arguments))
        seen.append(jax.tree.leaves(results))
        return float(len(seen))

    def run(arguments):
        (choice,) = choose(Stopwatch(100.0, timer=time_call), block, arguments)
        assert len(seen) == len(choice.seconds) == 4
        return arguments["x"]

    jax.eval_shape(run, block.arguments())
    first, *others = seen
    for other in others:
        for got, want in zip(other, first, strict=True):
            assert relative_error(got, want) < 0.05


def test_the_time_of_a_call_is_that_of_many():
    ran = []
    found = measure.time_call(lambda x: ran.append(x) or jnp.ones(()), (3,))
    assert 0 < found < 0.1 and len(ran) > 5


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """Times of the region are in the package, and not in the user's cache."""
    choose(Clock(9.0, 5.0, 6.0, 7.0).stopwatch())
    monkeypatch.setattr(kept, "_SHIPPED", tmp_path / "shipped")
    kept._SHIPPED.mkdir()
    return kept_file().rename(kept._SHIPPED / kept_file().name)


def test_shipped_times_decide_without_measuring(shipped):
    for stopwatch in (None, Clock().stopwatch(limit=0)):
        (choice,) = choose(stopwatch)
        assert choice.plan.name == BOTH and choice.seconds[XLA] == 9.0
    arguments = SWIGLU.arguments()
    arguments["x"] = jnp.concatenate([arguments["x"]] * 2)
    (other,) = choose(None, arguments=arguments)
    assert not other.seconds and not any(part.makers for part in other.plan.parts)


def test_a_plan_without_a_shipped_time_is_predicted(shipped):
    shipped.write_text(shipped.read_text().replace(BOTH, "another"))
    (choice,) = choose(None)
    assert not choice.seconds and not any(part.makers for part in choice.plan.parts)


def test_own_times_go_before_those_that_are_shipped(shipped):
    measured = json.loads(shipped.read_text())["regions"][0]
    own = dict.fromkeys(measured["seconds"], 5.0) | {XLA: 4.0}
    kept.write("cpu", kept.Measured.now(measured["region"], own))
    assert choose(Clock().stopwatch(limit=0))[0].plan.name == XLA
    assert choose(None)[0].plan.name == BOTH  # equal on all machines of this kind


def test_shipped_times_hold_for_a_series_of_jax(shipped):
    (version,) = {kept.Measured.now("", {}).jax_version}
    first, second, *_ = version.split(".")
    text = shipped.read_text()
    shipped.write_text(text.replace(version, f"{first}.{second}.999"))
    assert choose(None)[0].plan.name == BOTH
    shipped.write_text(text.replace(version, f"{first}.{int(second) + 1}.0"))
    assert not choose(None)[0].seconds
