"""Kernels that other processes lower are those that this process would lower."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jaxlora.pallas_kernels import device, multi_lora_linear, trace_program
from jaxlora.pallas_kernels.mosaic import compile as lower
from jaxlora.pallas_kernels.mosaic import launch, layer
from jaxlora.plan.memory.planned import TRACED_ON
from tests.pallas_kernels.problems import problem

# A name of a kernel ends with a number that counts the kernels of a process.
NUMBER = re.compile(r"(lora_[a-z_]+_)\d+")


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """The device is a Hopper GPU, which compiles nothing, and there are no workers."""
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.setattr(device, "not_nvidia", lambda: None)
    monkeypatch.setattr(device, "capability", lambda: 90)
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    monkeypatch.setattr(device, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(lower._Kernel, "compile", lambda self: None)
    monkeypatch.setattr(lower, "_started", {})
    monkeypatch.setattr(lower, "_lowered", {})
    monkeypatch.setattr(lower, "_queues", [])


class Gradient:
    """A jitted gradient of a linear, which is lowered for a GPU."""

    def trace(self, p):
        def loss(x, a, b):
            given = p | {"x": x, "a": a, "b": b}
            y = multi_lora_linear(**given, implementation="mosaic")
            return y.astype(jnp.float32).sum()

        run = jax.jit(jax.grad(loss, (0, 1, 2)))
        given = p["x"], p["a"], p["b"]
        return run.trace(*given)


def _without_lines(code):
    """Returns the text of a kernel without its number and the lines that it is from."""
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        return NUMBER.sub(r"\1", str(ir.Module.parse(code)))


def lowered(monkeypatch, num_workers):
    """Returns the calls of kernels in a program, and the program without their code."""
    # jax.clear_caches() would also drop the programs of all other tests.
    for traced in (layer.forward, layer.backward, launch._launch):
        traced.clear_cache()
    monkeypatch.setattr(lower, "_num_workers", lambda: num_workers)
    p, _ = problem(k=128, n=128)
    found = trace_program(Gradient(), p).lower(lowering_platforms=("cuda",))
    module = found.compiler_ir("stablehlo")
    calls = []
    for call in lower.calls_in(module.operation):
        attributes = lower.read_attributes(call)
        code = _without_lines(attributes.pop("module"))
        attributes.pop("kernel_hash")
        calls.append((code, attributes))
        lower._remove_code(call)
    text = re.sub(r'kernel_hash = "[^"]*"', "", found.as_text())
    return calls, text


@pytest.fixture(scope="module")
def lowered_here() -> list:
    """Programs that a process without workers has lowered, once a test has done so."""
    return []


def test_a_program_is_the_same_whoever_lowers_its_kernels(
    monkeypatch, caplog, lowered_here
):
    elsewhere = lowered(monkeypatch, 2)
    kernels = list(lower._lowered.values())
    here = lowered(monkeypatch, 0)
    lowered_here.append(here)
    assert here == elsewhere == lowered(monkeypatch, 1)
    assert len(lower._lowered) == len(kernels) >= 2  # each was sent once
    assert not caplog.records
    # Each was compiled as soon as it was there, and once.
    hashes = {kernel.attributes.result()["kernel_hash"] for kernel in kernels}
    started = {dict(key)["kernel_hash"] for key in lower._started}
    assert hashes <= started


def test_a_kernel_that_a_worker_cannot_lower_is_lowered_here(
    monkeypatch, caplog, lowered_here
):
    here = lowered_here[0] if lowered_here else lowered(monkeypatch, 0)
    monkeypatch.setattr(lower, "_start_processes", lambda number: [None] * number)
    monkeypatch.setattr(lower._Worker, "_exchange", lambda self, request: "no memory")
    assert lowered(monkeypatch, 1) == here
    assert "a kernel is lowered in this process: " in caplog.text
    assert "no memory" in caplog.text


def test_a_worker_that_has_ended_is_started_again(monkeypatch):
    started = []

    class Ended:
        def send_bytes(self, request):
            raise BrokenPipeError

    class Works:
        def send_bytes(self, request):
            started.append(request)

        def recv_bytes(self):
            return lower.pickle.dumps({"module": b""})

    worker = lower._Worker(lower.queue.SimpleQueue(), None)
    worker._connection = Ended()
    monkeypatch.setattr(lower, "_start_processes", lambda number: [Works()])
    assert worker._ask(b"kernel") == {"module": b""}
    assert started == [b"kernel"]


def test_workers_that_cannot_start_answer_with_the_reason(monkeypatch):
    """A wait for all kernels ends, and each kernel is lowered in this process."""

    def no_process(*args, **kwargs):
        raise OSError("no process is left")

    monkeypatch.setattr(lower, "_num_workers", lambda: 2)
    monkeypatch.setattr(lower.subprocess, "Popen", no_process)
    lower.start_workers()
    assert len(lower._queues) == 2
    answer = lower.Future()
    lower._send(b"kernel", answer)
    with pytest.raises(lower.WorkerError, match="no process is left"):
        answer.result(timeout=60)


def test_a_worker_says_why_it_cannot_read_a_kernel_and_goes_on():
    ours, theirs = lower.Pipe()
    worker = lower.threading.Thread(target=lower._serve, args=(theirs,))
    worker.start()
    for _ in range(2):
        ours.send_bytes(b"no pickle")
        assert "UnpicklingError" in lower.pickle.loads(ours.recv_bytes())
    ours.close()
    worker.join()


def test_workers_start_before_the_first_kernel(monkeypatch):
    """Once, and neither for devices that are only planned nor for other GPUs."""
    started = []
    monkeypatch.setattr(lower, "_num_workers", lambda: 3)
    monkeypatch.setattr(lower._Worker, "run", lambda self: started.append(self))
    with device.planned_for(TRACED_ON):
        lower.start_workers()
    monkeypatch.setattr(device, "capability", lambda: 89)
    lower.start_workers()
    assert not lower._queues
    monkeypatch.setattr(device, "capability", lambda: 90)
    for _ in range(2):
        lower.start_workers()
    assert len(lower._queues) == 3
