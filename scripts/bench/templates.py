"""Measures the cost per record of rendering templates in a child process.

Prints a table of the CPU time of both processes, and of wall time, in microseconds per
record. Each is the minimum over several rounds. Needs the package psutil.

    jaxlora bench templates
"""

import argparse
import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence

from jaxlora.bench.options import make_parser
from jaxlora.bench.report import markdown
from jaxlora.data.sandbox import ChatTemplate, RecordTemplate
from jaxlora.data.template import TemplateProcess
from jaxlora.data.template_tasks import Payload, Task
from jaxlora.data.turns import RenderedConversation
from jaxlora.errors import JaxloraError

NUM_RECORDS = 10_000
NUM_ROUNDS = 5
CHUNK = 1000
NOW = datetime.datetime(2024, 7, 26)
FIELDS = "Question: {{ question }}\nAnswer in one word:\n"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Times in microseconds per record.

    Attributes:
        cpu: CPU time of this process and its children.
        wall: Wall time.
    """

    cpu: float
    wall: float


def measure(work: Callable[[], object]) -> Cost:
    """Measures the minimum over several rounds; the time of child processes counts."""
    costs = []
    for _ in range(NUM_ROUNDS):
        cpu, wall = cpu_seconds(), time.perf_counter()
        work()
        costs.append((cpu_seconds() - cpu, time.perf_counter() - wall))
    scale = 1e6 / NUM_RECORDS
    return Cost(*(scale * min(kind) for kind in zip(*costs, strict=True)))


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its running children.

    Raises:
        JaxloraError: psutil is not installed.
    """
    try:
        import psutil
    except ImportError:
        raise JaxloraError(
            "`jaxlora bench templates` needs psutil: `pip install psutil`."
        ) from None
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children())]
    return sum(t.user + t.system for t in times)


def in_child(task: Task, payloads: list[Payload]) -> Cost:
    """Measures the cost of rendering in the child process, after its start."""
    process = TemplateProcess()
    process.run(task, payloads[:1])

    def work() -> None:
        for i in range(0, NUM_RECORDS, CHUNK):
            process.run(task, payloads[i : i + CHUNK])

    cost = measure(work)
    process.stop()
    return cost


def line(name: str, here: Cost, child: Cost) -> list[str]:
    """Formats a template's line of the table."""
    shown = lambda cpu, wall: f"{cpu:.1f} ({wall:.1f})"
    added = shown(child.cpu - here.cpu, child.wall - here.wall)
    return [name, shown(here.cpu, here.wall), shown(child.cpu, child.wall), added]


def measure_fields() -> list[str]:
    """Measures a template of a record's fields."""
    records = [{"question": f"What is {i} + {i}?"} for i in range(NUM_RECORDS)]
    template = RecordTemplate(FIELDS, lambda: None)
    here = measure(lambda: [template.render(r) for r in records])
    payloads = [Payload("text", record) for record in records]
    return line("fields", here, in_child(Task(FIELDS), payloads))


def measure_chat() -> list[str]:
    """Measures a chat template of four turns."""
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} + {i}? " * 10},
                {"role": "assistant", "content": f"It is {i + i}. " * 10},
                {"role": "user", "content": "Are you sure?"},
                {"role": "assistant", "content": "Yes."},
            ],
            "add_generation_prompt": False,
        }
        for i in range(NUM_RECORDS)
    ]
    chat = ChatTemplate(CHATML, NOW, lambda: None)
    here = measure(lambda: [RenderedConversation(chat, t).answers(()) for t in talks])
    payloads = [Payload("answers", talk) for talk in talks]
    return line("chat", here, in_child(Task(CHATML, NOW), payloads))


def start_seconds() -> float:
    """Measures the time until a child process has rendered a record."""
    start = time.perf_counter()
    process = TemplateProcess()
    process.run(Task(FIELDS), [Payload("text", {"question": "Why?"})])
    seconds = time.perf_counter() - start
    process.stop()
    return seconds


def parser() -> argparse.ArgumentParser:
    """Makes the parser, which has no options."""
    return make_parser("templates", __doc__)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser().parse_args(argv)
    head = ("template", "here, us", "in the child, us", "added, us")
    lines = [measure_fields(), measure_chat()]
    print("CPU time per record (wall time in brackets)\n")
    print(markdown(head, lines))
    print(f"\nstart of the child: {start_seconds():.2f} s")
