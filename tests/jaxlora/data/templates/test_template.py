"""Tests the process that renders templates: its limits, its life and its protocol."""

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from jaxlora.data.templates.template import Failure, TemplatePool, run_task
from jaxlora.data.templates.template_task import Payload, Task, TemplateLimits

HELLO = Task("{{ a }}!")
# It takes minutes, and no memory.
ENDLESS = "{% for i in range(10**5) %}" * 2 + "{% endfor %}" * 2


def text_of(pool, source, **values):
    (answer,) = pool.run(Task(source), [Payload("text", values)])
    return answer if isinstance(answer, Failure) else answer["text"]


def children():
    """Process ids of the child processes that render templates."""
    found = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # It may have ended.
            if "jaxlora.data.templates.template_worker" in str(process.cmdline()):
                found.add(process.pid)
    return found


@pytest.fixture
def new_children(tight_limits):
    """Lists the children that were started since the test began."""
    before = children()
    return lambda: children() - before


# --- Limits ------------------------------------------------------------------

MEMORY = "it takes more than 256 MiB of memory"
TIME = "it takes more than 0.3 s"
MEMORY_OR_TIME = f"{MEMORY}|{TIME}"
LENGTH = "it prints more than 1000000 characters"


# Enough time that memory runs out first, however slow the processor is.
SPACE_LIMITS = TemplateLimits(seconds=60, bytes=2**28, characters=10**6)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ '{:3000000000}'.format(1) }}", MEMORY),
        ("{{ {'a': [1]} | tojson(indent=10**10) }}", MEMORY),
        (
            "{% set ns = namespace(s='aa') %}{% for i in range(64) %}"
            "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
            MEMORY,
        ),
        ("{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}", LENGTH),
    ],
)
def test_memory_and_length_are_limited(space_limits, template, why):
    (answer,) = space_limits.run(Task(template), [Payload("text", {})])
    assert answer == Failure("limit", why)
    assert text_of(space_limits, "{{ a }}!", a="still here") == "still here!"


@pytest.fixture(scope="module")
def space_limits():
    return TemplatePool(limits=SPACE_LIMITS)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'aaaaaaaaaaaaaaaa'.replace('a', 'a' * 10**8) }}", MEMORY_OR_TIME),
        ("{{ 10 ** (10 ** 9) }}", TIME),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
            "{% endmacro %}{{ f(60) }}",
            TIME,
        ),
        # Other tests have loops that do not end.
        *(
            pytest.param(template, why, marks=pytest.mark.grid)
            for template, why in (
                ("{{ ([[[0] * 99999] * 99999] * 99999) | string }}", MEMORY_OR_TIME),
                (
                    "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}"
                    "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | string }}",
                    MEMORY_OR_TIME,
                ),
                ("{% for a in 'a' * 10**8 %}{% endfor %}", TIME),
                ("{{ lipsum(n=10**7) }}", TIME),
                (
                    "{% for a in range(9999) recursive %}{% if loop.depth0 < 3 %}"
                    "{{ loop(range(9999)) }}{% endif %}{% endfor %}",
                    TIME,
                ),
            )
        ),
    ],
)
def test_time_is_limited(tight_limits, template, why):
    (answer,) = tight_limits.run(Task(template), [Payload("text", {})])
    assert answer.kind == "limit" and re.fullmatch(why, answer.why)
    assert text_of(tight_limits, "{{ a }}!", a="still here") == "still here!"


def test_memory_is_limited_without_the_system():
    # As on macOS.
    pool = TemplatePool(limits=TemplateLimits(seconds=60, bytes=2**28, by_system=False))
    source = "{% set big = [1] * 10**8 %}{% for i in range(99) %}{{ big | sum }}"
    assert text_of(pool, source + "{% endfor %}") == Failure("limit", MEMORY)
    assert text_of(pool, "{{ 1 }}") == "1"


def test_bad_records_among_good_ones_cost_only_themselves(tight_limits):
    template = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}x"
    numbers, bad = [1] * 700, (3, 4, 200, 400)
    for i in bad:
        numbers[i] = 99999
    payloads = [Payload("text", {"n": n}) for n in numbers]
    answers = tight_limits.run(Task(template), payloads)
    assert [i for i, a in enumerate(answers) if isinstance(a, Failure)] == list(bad)
    assert all(answers[i] == Failure("limit", TIME) for i in bad)
    assert all(a == {"text": "x"} for i, a in enumerate(answers) if i not in bad)


def test_a_template_that_never_ends_is_given_up(tight_limits):
    template = "{% for i in 'a' * 10**8 %}{% endfor %}"
    answers = tight_limits.run(Task(template), [Payload("text")] * 1000)
    assert answers[:3] == [Failure("limit", TIME)] * 3
    why = "it was not tried, as the 3 records before it exceeded a limit"
    assert answers[3:] == [Failure("limit", why)] * 997
    assert text_of(tight_limits, "{{ a }}", a=1) == "1"


def test_a_process_that_is_killed_is_started_again(tight_limits, new_children):
    assert text_of(tight_limits, "{{ a }}!", a="x") == "x!"
    first = new_children()
    template = "{{ a }}{% for i in 'a' * 10**8 %}{% endfor %}"
    assert text_of(tight_limits, template, a=1) == Failure("limit", TIME)
    assert text_of(tight_limits, "{{ a }}!", a="x") == "x!"
    assert len(first) == len(new_children()) == 1
    assert not first & new_children()


def test_a_process_that_was_idle_is_started_again(new_children):
    pool = TemplatePool(limits=TemplateLimits(idle_seconds=0.01))
    assert text_of(pool, "{{ a }}!", a="x") == "x!"
    for pid in new_children():
        # Waits for its end, and leaves it to the pool to see it.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    payloads = [Payload("text", {"a": i}) for i in range(3)]
    texts = [answer["text"] for answer in pool.run(HELLO, payloads)]
    assert texts == ["0!", "1!", "2!"]


def test_works_after_an_interrupt(monkeypatch, new_children):
    pool = TemplatePool(limits=TemplateLimits(seconds=60))
    assert text_of(pool, "{{ a }}!", a="x") == "x!"
    (child,) = new_children()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        text_of(pool, ENDLESS)
    signal.signal(signal.SIGALRM, before)
    assert not psutil.pid_exists(child)
    assert text_of(pool, "{{ a }}!", a="new") == "new!"


# --- What goes in and comes out ----------------------------------------------


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ a }}", "a is an object, not text; write {{ a.b[0].c }} or {{ a | tojson"),
        (
            "{{ a.b }}",
            "a.b is a list, not text; write {{ a.b[0].c }} or {{ a.b | tojson",
        ),
        ("{{ a ~ '' }}", "a is an object"),
        ("{{ '%s' | format(a) }}", "a is an object"),
        ("{{ [a] | join }}", "a is an object"),
        ("{{ a | string }}", "a is an object"),
        (
            "{{ a['items'] }}",
            r"a['items'] is a list, not text; write {{ a['items'][0] }}",
        ),
        ("{{ a.b[:1] }}", "a value in {{ }} is a list, not text"),
        ("{{ a.b | map('upper') }}", "a value in {{ }} is of type generator"),
        ("{{ c }}", "a value in {{ }} is binary"),
    ],
)
def test_only_text_is_printed(template, why):
    values = {"a": {"b": [{"c": "x"}], "items": [1]}, "c": b"x"}
    (answer,) = run_task(Task(template), [Payload("text", values)])
    assert answer.kind == "not text" and answer.why.startswith(why)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ a.b[0].c }}{{ n }}", "x1.5"),
        ("{{ a | tojson }}", '{"b": [{"c": "x"}]}'),
        (
            "{% for x in l %}{{ x }}{% endfor %}{{ l | join('+') }}{{ l | length }}",
            "yzy+z2",
        ),
        (
            "{% if a.b == [{'c': 'x'}] %}same{{ a.x is defined }}{% endif %}",
            "sameFalse",
        ),
    ],
)
def test_what_is_within_is_printed(template, text):
    values = {"a": {"b": [{"c": "x"}]}, "n": 1.5, "l": ["y", "z"]}
    assert run_task(Task(template), [Payload("text", values)]) == [{"text": text}]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "é🙂\0\n\u2028",
        "half a surrogate \ud800",
        1.5,
        datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC),
        {"a": [1, {"b": None}]},
        b"bytes",
    ],
)
def test_values_arrive_as_they_are(value):
    is_object = isinstance(value, dict)
    template = "{{ a | tojson }}" if is_object else "{{ [a] | string }}"
    (answer,) = run_task(Task(template), [Payload("text", {"a": value})])
    assert answer == {"text": json.dumps(value) if is_object else str([value])}


def test_values_that_are_not_plain_fail_alone():
    payloads = [Payload("text", {"a": a}) for a in (1, psutil.Process, lambda: 1, 2)]
    one, strange, function, two = run_task(HELLO, payloads)
    assert (one, two) == ({"text": "1!"}, {"text": "2!"})
    assert "a value is a psutil.Process, which is neither" in strange.why
    assert "a value cannot be sent to a template" in function.why


def test_large_records_among_small_ones():
    values = ["a" * 10, "b" * 3 * 2**20, "c" * 10]
    answers = run_task(HELLO, [Payload("text", {"a": value}) for value in values])
    assert [answer["text"] for answer in answers] == [f"{value}!" for value in values]


def test_names_of_a_template():
    (answer,) = run_task(Task("{{ a }}{% set b = c %}{{ b }}"), [Payload("names")])
    assert answer == {"names": ["a", "c"]}


def test_renderings_of_a_thread_can_be_aborted(new_children):
    pool = TemplatePool(limits=TemplateLimits(seconds=60))
    payloads = [Payload("text", {})] * 100
    thread = threading.Thread(target=pool.run, args=(Task(ENDLESS), payloads))
    thread.start()
    while not new_children():
        time.sleep(0.01)
    pool.abort([threading.get_ident()])
    assert thread.is_alive()
    began = time.monotonic()
    pool.abort([thread.ident])
    thread.join()
    assert time.monotonic() - began < 2
    assert text_of(pool, "{{ 1 }}") == "1"


# --- The process -------------------------------------------------------------


def test_the_process_imports_nothing_heavy(tight_limits, new_children):
    assert text_of(tight_limits, "{{ 1 }}") == "1"
    (child,) = new_children()
    command = psutil.Process(child).cmdline()
    started = "main(sys.argv[1])"
    (program,) = (part for part in command if started in part)
    listed = program.replace(started, "print(*sys.modules)")
    command[command.index(program)] = listed
    modules = subprocess.check_output(command, text=True).split()
    assert "jinja2" in modules and "jaxlora.data.templates.template_worker" in modules
    for heavy in ("jax", "numpy", "pydantic", "pyarrow", "tokenizers", "flax"):
        assert heavy not in modules


SCRIPT = """
import os
import signal
import sys

# A shell starts background jobs with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

from jaxlora.data.templates.template import run_task
from jaxlora.data.templates.template_task import Payload, Task
import jax
import psutil

def render(a):
    (answer,) = run_task(Task("{{ a }}!"), [Payload("text", {"a": a})])
    print(answer["text"], *[p.pid for p in psutil.Process().children()], flush=True)

jax.numpy.zeros(3).block_until_ready()
render("hello")
"""
FORK = """
if os.fork() == 0:
    render("fork")
    os._exit(0)
os.wait()
render("again")
"""


def start_script(tmp_path, more=""):
    """A user's script without a guard for `__main__`, in a folder with odd names."""
    (tmp_path / "tokenize.py").write_text("raise SystemExit('wrong module')")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + more)
    root = os.path.dirname(os.path.dirname(sys.modules["jaxlora"].__file__))
    return subprocess.Popen(
        [sys.executable, "-P", str(path)],
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_no_process_is_left(tmp_path):
    waits = "sys.stdin.read()"
    ends = {"kill": (waits, -9), "interrupt": (waits, -2)}
    parents = {}
    for end, (more, _) in ends.items():
        (tmp_path / end).mkdir()
        parents[end] = start_script(tmp_path / end, more)
    for end, (_, code) in ends.items():
        with parents[end] as parent:
            said, pid = parent.stdout.readline().split()
            assert said == "hello!"
            child = psutil.Process(int(pid))
            if end == "kill":
                parent.kill()
            if end == "interrupt":
                # As Ctrl-C in a terminal, which reaches the whole group.
                os.killpg(parent.pid, signal.SIGINT)
            errors = parent.stderr.read()
        psutil.wait_procs([child], timeout=30)
        assert not psutil.pid_exists(int(pid))
        assert parent.returncode == code
        assert "os.fork" not in errors and "Warning" not in errors


def test_ctrl_c_in_a_terminal_does_not_reach_the_process(tight_limits, new_children):
    assert text_of(tight_limits, "{{ 1 }}") == "1"
    (child,) = new_children()
    assert os.getsid(child) == child != os.getsid(0)


def test_a_fork_starts_its_own_process(tmp_path):
    with start_script(tmp_path, FORK) as parent:
        lines = [line.split() for line in parent.stdout]
    assert parent.returncode == 0
    (hello, first), (fork, second), (again, third) = lines
    assert (hello, fork, again) == ("hello!", "fork!", "again!")
    assert first == third != second
    assert not psutil.pid_exists(int(first))  # that of a script that has ended
