"""Measures the cost per record of rendering templates in a child process.

    python -m scripts.bench_templates

It prints the processor time of both processes, and the wall time, in microseconds per
record. Each is the minimum over several rounds.
"""

import dataclasses
import datetime
import time
from collections.abc import Callable

import psutil

from jaxlora.data.sandbox import ChatTemplate, RecordTemplate
from jaxlora.data.template import TemplateProcess
from jaxlora.data.template_tasks import Payload, Task
from jaxlora.data.turns import RenderedConversation

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


@dataclasses.dataclass
class Cost:
    """Times in microseconds per record."""

    processor: float
    wall: float


def measure(work: Callable[[], object]) -> Cost:
    """Measures the minimum over several rounds; the time of child processes counts."""
    costs = []
    for _ in range(NUM_ROUNDS):
        processor, wall = processor_seconds(), time.perf_counter()
        work()
        costs.append((processor_seconds() - processor, time.perf_counter() - wall))
    scale = 1e6 / NUM_RECORDS
    return Cost(*(scale * min(kind) for kind in zip(*costs, strict=True)))


def processor_seconds() -> float:
    """Processor time of this process and of its children that run."""
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


def report(name: str, here: Cost, there: Cost) -> None:
    print(
        f"{name:8} here {here.processor:6.1f} ({here.wall:6.1f} wall)   in the child "
        f"{there.processor:6.1f} ({there.wall:6.1f})   added "
        f"{there.processor - here.processor:6.1f} ({there.wall - here.wall:6.1f})"
    )


def main() -> None:
    records = [{"question": f"What is {i} + {i}?"} for i in range(NUM_RECORDS)]
    fields = RecordTemplate(FIELDS, lambda: None)
    payloads = [Payload("text", record) for record in records]
    here = measure(lambda: [fields.render(r) for r in records])
    report("fields", here, in_child(Task(FIELDS), payloads))

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
    report("chat", here, in_child(Task(CHATML, NOW), payloads))

    start = time.perf_counter()
    process = TemplateProcess()
    process.run(Task(FIELDS), payloads[:1])
    print(f"start of the child: {time.perf_counter() - start:.2f} s")
    process.stop()


if __name__ == "__main__":
    main()
