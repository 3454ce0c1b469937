"""The ways to compute linears are timed within a limit, and the fastest is taken."""

import dataclasses
import itertools
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxlora
from jaxlora.errors import ConfigError
from jaxlora.fuse import api, measure
from jaxlora.fuse.api import FuseOptions, trace_call
from jaxlora.fuse.measure import SiteTimer
from jaxlora.pallas_kernels import BACKENDS
from tests.jaxlora.fuse.reference_backend import NAME, REFERENCE, reference  # noqa: F401
from tests.jaxlora.fuse.row_functions import SWIGLU
from tests.oracle import relative_error

pytestmark = pytest.mark.usefixtures("only_reference")

_LOWERED, _COMPILE = measure._lowered, measure.compile_program
XLA, LINEARS, BOTH = "xla", "kernels", "producer and gate"
DROPPED = dataclasses.replace(SWIGLU, keep=0.75)


@pytest.fixture
def only_reference(reference):  # noqa: F811
    """`auto` takes the reference back end."""
    every = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS[NAME] = REFERENCE
    yield
    BACKENDS.clear()
    BACKENDS.update(every)  # in their order, which `auto` follows


class Clock:
    """Times that are given, in the order in which ways are timed."""

    def __init__(self, *seconds, each=1.0):
        self.seconds, self.each, self.now = list(seconds), each, 0.0
        self.called = 0

    def time_call(self, function, arguments):
        self.called += 1
        self.now += self.each
        return self.seconds.pop(0)

    def site_timer(self, limit=100.0):
        return SiteTimer(limit, timer=self.time_call, clock=lambda: self.now)


def choose(site_timer, function=SWIGLU, arguments=None, implementation="auto"):
    options = FuseOptions(implementation, site_timer)
    arguments = arguments or SWIGLU.arguments()
    return trace_call(function, options, (), arguments).rewritten.choices


def taken(choices):
    return ["xla" if c.part is None else c.part.name for c in choices]


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch):
    """Programs that a given clock times need not be compiled."""
    monkeypatch.setattr(measure, "_lowered", lambda *_: None)
    monkeypatch.setattr(measure, "compile_program", lambda _: None)


@pytest.mark.parametrize(
    ("seconds", "way"),
    [
        ((9.0, 7.0, 5.0), BOTH),
        ((9.0, 5.0, 6.0), LINEARS),
        ((4.0, 5.0, 6.0), XLA),
        ((5.0, 5.0, 5.0), XLA),  # nothing is taken that is not faster
    ],
)
def test_the_fastest_is_taken(seconds, way):
    clock = Clock(*seconds)
    choices = choose(clock.site_timer())
    assert clock.called == 3
    for choice in choices:
        assert choice.seconds == dict(zip((XLA, LINEARS, BOTH), seconds, strict=True))
        assert choice.reason.startswith("measured: ")
    assert taken(choices) == [way] * 2


def test_a_back_end_that_is_named_is_not_compared_with_xla():
    clock = Clock(5.0, 6.0)
    assert taken(choose(clock.site_timer(), implementation=NAME)) == [LINEARS] * 2
    assert clock.called == 2


def test_the_rule_decides_where_nothing_is_measured():
    assert taken(choose(None)) == [LINEARS] * 2
    assert taken(choose(None, DROPPED)) == [BOTH] * 2
    assert taken(choose(None, implementation=NAME)) == [BOTH] * 2


def test_parts_that_are_alike_are_timed_once():
    def two(lora, frozen, x):
        return SWIGLU(lora, frozen, SWIGLU(lora, frozen, x))

    clock = Clock(9.0, 7.0, 5.0)
    site_timer = clock.site_timer()
    assert taken(choose(site_timer, two)) == [BOTH] * 4
    assert taken(choose(site_timer)) == [BOTH] * 2
    assert clock.called == 3
    clock.seconds = [4.0, 5.0, 6.0]
    arguments = SWIGLU.arguments()
    arguments["x"] = jnp.concatenate([arguments["x"]] * 2)
    assert taken(choose(site_timer, arguments=arguments)) == [XLA] * 2


def test_nothing_is_kept_for_another_function():
    choose(Clock(9.0, 7.0, 5.0).site_timer())
    other = Clock(4.0, 5.0, 6.0)
    assert taken(choose(other.site_timer())) == [XLA] * 2 and other.called == 3


def test_the_rule_decides_when_the_time_is_used_up():
    clock = Clock(9.0, 8.0, each=2.0)
    choices = choose(clock.site_timer(limit=3.0))
    assert clock.called == 2 and taken(choices) == [LINEARS] * 2
    for choice in choices:
        assert not choice.seconds
        assert choice.reason.endswith("not measured: measure_seconds are used up")


def test_time_of_compiling_counts(monkeypatch):
    clock = Clock(9.0, 7.0, 5.0)

    def lower(program):
        clock.now += 2.0

    monkeypatch.setattr(measure, "_lowered", lower)
    site_timer = clock.site_timer(6.0)
    assert not any(choice.seconds for choice in choose(site_timer))
    assert not clock.called
    choose(site_timer)  # nothing is left, and nothing more is compiled
    assert clock.now == 6.0


class Compiler:
    """Compiles programs that only have names, and knows how many at the same time."""

    def __init__(self, together, fails=()):
        self.barrier = threading.Barrier(together)
        self.fails, self.ended = fails, []

    def compile(self, number):
        self.barrier.wait(timeout=60)  # until so many are being compiled
        self.ended.append(number)
        if number in self.fails:
            raise ValueError(f"way {number} does not compile")
        return number

    def time_call(self, number, arguments):
        """Times a program when all are compiled."""
        assert len(self.ended) == 3
        return 9.0 - number


@pytest.fixture
def numbered(monkeypatch):
    """Programs are the numbers in whose order they are lowered."""
    numbers = itertools.count()
    monkeypatch.setattr(measure, "_lowered", lambda _: next(numbers))
    monkeypatch.setattr(measure.BothPasses, "arguments", lambda _: ())
    return lambda compiler: monkeypatch.setattr(
        measure, "compile_program", compiler.compile
    )


def test_ways_are_compiled_at_the_same_time_and_timed_alone(numbered):
    compiler = Compiler(together=3)
    numbered(compiler)
    choice, _ = choose(SiteTimer(100.0, timer=compiler.time_call))
    assert [*choice.seconds.values()] == [9.0, 8.0, 7.0]


def test_a_way_that_does_not_compile_is_an_error(numbered):
    compiler = Compiler(together=3, fails=(1,))
    numbered(compiler)
    with pytest.raises(ValueError, match="way 1 does not compile"):
        choose(SiteTimer(100.0, timer=compiler.time_call))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="several processes"):
        choose(Clock().site_timer())


@pytest.mark.parametrize("seconds", [-1, 0, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"measure_seconds=.* above 0"):
        jaxlora.fuse(SWIGLU, measure_seconds=seconds)


def test_explain_prints_measured_times(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    clock = Clock(9e-3, 7e-3, 5e-3)
    monkeypatch.setattr(api, "SiteTimer", lambda limit: clock.site_timer(limit))
    fused = jaxlora.fuse(SWIGLU, measure_seconds=60)
    explained = jaxlora.explain(fused, **SWIGLU.arguments())
    assert [site.computed_by for site in explained.sites] == [BOTH] * 2
    text = str(explained)
    assert BOTH in text and "measured: 9,000 us as XLA compiles it" in text


def test_programs_compute_the_same_while_a_function_is_traced(monkeypatch):
    monkeypatch.setattr(measure, "_lowered", _LOWERED)
    monkeypatch.setattr(measure, "compile_program", _COMPILE)
    seen = []

    def time_call(function, arguments):
        results = jax.block_until_ready(function(*arguments))
        seen.append(jax.tree.leaves(results))
        return float(len(seen))

    def run(arguments):
        choice, _ = choose(SiteTimer(100.0, timer=time_call), DROPPED, arguments)
        assert len(seen) == len(choice.seconds) == 3
        return arguments["x"]

    jax.eval_shape(run, DROPPED.arguments())
    first, *others = seen
    for other in others:
        for got, want in zip(other, first, strict=True):
            assert relative_error(got, want) < 0.05


def test_the_time_of_a_call_is_that_of_many():
    ran = []
    found = measure.time_call(lambda x: ran.append(x) or jnp.ones(()), (3,))
    assert 0 < found < 0.1 and len(ran) > 5
