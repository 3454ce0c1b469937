"""Tests the process that renders templates: its limits, its life and its protocol."""

import datetime
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from jaxlora.data import template
from jaxlora.data.template import Failure, TemplateLimits, TemplateProcess, abort
from jaxlora.data.template_pool import run_task
from jaxlora.data.template_tasks import Payload, Task

HELLO = Task("{{ a }}!")


def text_of(process, source, **values):
    (answer,) = process.run(Task(source), [Payload("text", values)])
    return answer if isinstance(answer, Failure) else answer["text"]


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
        ("{{ 'a'.center(10**10) }}", MEMORY),
        ("{{ '%3000000000d' % 1 }}", MEMORY),
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
    process = TemplateProcess(SPACE_LIMITS)
    yield process
    process.stop()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'aaaaaaaaaaaaaaaa'.replace('a', 'a' * 10**8) }}", MEMORY_OR_TIME),
        ("{{ ([[[0] * 99999] * 99999] * 99999) | string }}", MEMORY_OR_TIME),
        (
            "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}"
            "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
            MEMORY_OR_TIME,
        ),
        ("{% for a in 'a' * 10**8 %}{% endfor %}", TIME),
        ("{{ lipsum(n=10**7) }}", TIME),
        ("{{ 10 ** (10 ** 9) }}", TIME),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
            "{% endmacro %}{{ f(60) }}",
            TIME,
        ),
        (
            "{% for a in range(9999) recursive %}{% if loop.depth0 < 3 %}"
            "{{ loop(range(9999)) }}{% endif %}{% endfor %}",
            TIME,
        ),
    ],
)
def test_time_is_limited(tight_limits, template, why):
    (answer,) = tight_limits.run(Task(template), [Payload("text", {})])
    assert answer.kind == "limit" and re.fullmatch(why, answer.why)
    assert text_of(tight_limits, "{{ a }}!", a="still here") == "still here!"


def test_memory_is_limited_without_the_system(monkeypatch):
    process = TemplateProcess(TemplateLimits(seconds=60, bytes=2**33))
    assert text_of(process, "{{ 1 }}") == "1"
    monkeypatch.setattr(template, "_SYSTEM_LIMITS_MEMORY", False)  # As on macOS.
    process._child._limits = TemplateLimits(bytes=2**28)
    source = "{% set big = [1] * 10**8 %}{% for i in range(99) %}{{ big | sum }}"
    answer = text_of(process, source + "{% endfor %}")
    assert answer == Failure("limit", MEMORY)
    process.stop()


def test_a_bad_record_among_good_ones_costs_only_itself(tight_limits):
    template = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}x"
    numbers = [1] * 700
    numbers[3] = numbers[400] = 99999
    payloads = [Payload("text", {"n": n}) for n in numbers]
    answers = tight_limits.run(Task(template), payloads)
    assert [i for i, a in enumerate(answers) if isinstance(a, Failure)] == [3, 400]
    assert answers[3] == answers[400] == Failure("limit", TIME)
    assert all(a == {"text": "x"} for i, a in enumerate(answers) if i not in (3, 400))


def test_a_template_that_never_ends_is_given_up(tight_limits):
    template = "{% for i in 'a' * 10**8 %}{% endfor %}"
    answers = tight_limits.run(Task(template), [Payload("text")] * 1000)
    assert answers[:3] == [Failure("limit", TIME)] * 3
    why = "it was not tried, as the 3 records before it exceeded a limit"
    assert answers[3:] == [Failure("limit", why)] * 997
    assert text_of(tight_limits, "{{ a }}", a=1) == "1"


def test_a_process_that_is_killed_is_started_again(tight_limits):
    assert text_of(tight_limits, "{{ a }}!", a="x") == "x!"
    first = tight_limits.pid
    template = "{{ a }}{% for i in 'a' * 10**8 %}{% endfor %}"
    assert text_of(tight_limits, template, a=1) == Failure("limit", TIME)
    assert text_of(tight_limits, "{{ a }}!", a="x") == "x!"
    assert tight_limits.pid != first
    assert not psutil.pid_exists(first)


def test_a_process_that_was_idle_is_started_again(monkeypatch, tight_limits):
    assert text_of(tight_limits, "{{ a }}!", a="x") == "x!"
    child = tight_limits._child.process
    # The program ends with this code when it has waited for long.
    child.stdin.close()
    assert child.wait() == 0
    monkeypatch.setattr(child, "stdin", open(os.devnull, "wb"))  # noqa: SIM115
    payloads = [Payload("text", {"a": i}) for i in range(3)]
    texts = [answer["text"] for answer in tight_limits.run(HELLO, payloads)]
    assert texts == ["0!", "1!", "2!"]


def test_works_after_an_interrupt(monkeypatch, tight_limits):
    assert text_of(tight_limits, "{{ a }}!", a="x") == "x!"
    child = tight_limits._child

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "_read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text_of(tight_limits, "{{ a }}!", a="old")
    assert child.process.poll() is not None
    assert text_of(tight_limits, "{{ a }}!", a="new") == "new!"


# --- What goes in and comes out ----------------------------------------------


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
    (answer,) = run_task(Task("{{ [a] }}"), [Payload("text", {"a": value})])
    assert answer == {"text": str([value])}


def test_values_that_are_not_plain_fail_alone():
    payloads = [Payload("text", {"a": a}) for a in (1, psutil.Process, lambda: 1, 2)]
    one, strange, function, two = run_task(HELLO, payloads)
    assert (one, two) == ({"text": "1!"}, {"text": "2!"})
    assert "a value is a psutil.Process, which is neither" in strange.why
    assert "a value cannot be sent to a template" in function.why


def test_large_records_are_sent_alone():
    values = ["a" * 10, "b" * 3 * 2**20, "c" * 10]
    answers = run_task(HELLO, [Payload("text", {"a": value}) for value in values])
    assert [answer["text"] for answer in answers] == [f"{value}!" for value in values]


def test_names_of_a_template():
    (answer,) = run_task(Task("{{ a }}{% set b = c %}{{ b }}"), [Payload("names")])
    assert answer == {"names": ["a", "c"]}


def test_renderings_of_a_thread_can_be_aborted():
    process = TemplateProcess(TemplateLimits(seconds=60))
    loop = "{% for i in range(10**5) %}"
    endless = loop * 2 + "{% endfor %}" * 2
    payloads = [Payload("text", {})] * 100
    thread = threading.Thread(target=process.run, args=(Task(endless), payloads))
    thread.start()
    while process.pid is None:
        time.sleep(0.01)
    abort([threading.get_ident()])
    assert thread.is_alive()
    began = time.monotonic()
    abort([thread.ident])
    thread.join()
    assert time.monotonic() - began < 2
    assert text_of(process, "{{ 1 }}") == "1"
    process.stop()


# --- The process -------------------------------------------------------------


def test_the_process_imports_nothing_heavy():
    program = "import sys; sys.argv[1:] = {}; sys.stdout.flush(); exec({!r})"
    script = textwrap.dedent(
        """
        import runpy, json, os
        os._exit = lambda code: print(json.dumps(sorted(sys.modules)))
        runpy.run_path(sys.argv.pop(1), run_name="__main__")
        """
    )
    from jaxlora.data.template import _command

    _, *flags, worker = _command(TemplateLimits())[:4]
    arguments = [worker, *_command(TemplateLimits())[4:]]
    done = subprocess.run(
        [sys.executable, *flags, "-c", program.format(arguments, script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = done.stdout.splitlines()[-1]
    assert '"jinja2"' in modules
    for heavy in ("jax", "numpy", "pydantic", "pyarrow", "tokenizers", "flax"):
        assert f'"{heavy}"' not in modules


SCRIPT = """
import os
import signal
import sys

# A shell starts background jobs with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

from jaxlora.data.template import TemplateProcess
from jaxlora.data.template_pool import run_task
from jaxlora.data.template_tasks import Payload, Task
import jax

jax.numpy.zeros(3).block_until_ready()
answers = run_task(Task("{{ a }}!"), [Payload("text", {"a": "hello"})])
from jaxlora.data import template_pool
print(answers[0]["text"], *template_pool._shared().pids, flush=True)
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
    ends = {"exit": ("", 0), "kill": (waits, -9), "interrupt": (waits, -2)}
    parents = {}
    for end, (more, _) in ends.items():
        (tmp_path / end).mkdir()
        parents[end] = start_script(tmp_path / end, more)
    for end, (_, code) in ends.items():
        with parents[end] as parent:
            said, pid = parent.stdout.readline().split()
            assert said == "hello!"
            child = psutil.Process(int(pid)) if end != "exit" else None
            if end == "kill":
                parent.kill()
            if end == "interrupt":
                # As Ctrl-C in a terminal, which reaches the whole group.
                os.killpg(parent.pid, signal.SIGINT)
            errors = parent.stderr.read()
        if child is not None:
            psutil.wait_procs([child], timeout=30)
        assert not psutil.pid_exists(int(pid))
        assert parent.returncode == code
        assert "os.fork" not in errors and "Warning" not in errors


def test_ctrl_c_in_a_terminal_does_not_reach_the_process(tight_limits):
    assert text_of(tight_limits, "{{ 1 }}") == "1"
    assert os.getsid(tight_limits.pid) == tight_limits.pid != os.getsid(0)


def test_a_fork_starts_its_own_process(tight_limits):
    assert text_of(tight_limits, "{{ 1 }}") == "1"
    first = tight_limits.pid
    tight_limits._child.owner = -1  # As it is seen in a fork.
    assert text_of(tight_limits, "{{ 2 }}") == "2"
    assert tight_limits.pid != first
