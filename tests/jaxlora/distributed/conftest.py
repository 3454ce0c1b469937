"""Runs that two real processes train together, on simulated devices."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from jaxlora.cli.main import main
from jaxlora.run.log import read_events
from tests import tiny

# Ends its process, by a signal to itself, at the given event of the run.
CHILD = """
import functools, os, signal, sys
from jaxlora.distributed import start
from jaxlora.train.execute.rounds import Rounds
start.joined = functools.partial(start.joined, lost_seconds=15)
left, end_window = int(sys.argv[1]) - 1, Rounds._end_window
def count(self):
    global left
    end_window(self)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), int(sys.argv[2]))
Rounds._end_window = count
from jaxlora.cli.main import main
sys.exit(main(["train", *sys.argv[3:]]))
"""
# Nothing that this machine's scheduler may have set counts in a test.
_FOREIGN = ("JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS", "SLURM_", "OMPI_")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        status: Exit status; negative: the signal that ended it.
        stdout: What it printed.
        stderr: What it logged.
    """

    status: int
    stdout: str
    stderr: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(
    arguments: Sequence[object], *, devices: int, signal: tuple[int, int] = (-1, 0)
) -> subprocess.Popen:
    """Starts `jaxlora train`; may send itself a signal before its n-th window."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    env = kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        # Only the first start of a run traces and compiles its programs.
        "JAXLORA_KEEP_PROGRAMS": "1",
        # XLA's pool must hold the threads of all collectives at the same time.
        "NPROC": "8",
    }
    command = [sys.executable, "-c", CHILD, *signal, *arguments]
    return subprocess.Popen(
        [*map(str, command)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait(process: subprocess.Popen) -> Ended:
    """Waits for a process, and ends it after ten minutes."""
    try:
        stdout, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    return Ended(status=process.returncode, stdout=stdout, stderr=stderr)


def train_in_two(
    run_files: Sequence[pathlib.Path], *arguments: object, signals=((-1, 0), (-1, 0))
) -> list[Ended]:
    """Trains one run in two processes with two devices each, on one host.

    Args:
        run_files: The run file of each process.
        *arguments: Further arguments of both.
        signals: For each process, the number of a window and a signal.
    """
    address = f"127.0.0.1:{free_port()}"
    member = "--coordinator", address, "--num-processes", 2, "--process-id"
    both = [
        start(
            [run_file, *member, i, *arguments],
            devices=2,
            signal=signal,
        )
        for i, (run_file, signal) in enumerate(zip(run_files, signals, strict=True))
    ]
    return [wait(process) for process in both]


def results(run_file: pathlib.Path):
    """Returns the adapters' bytes, and the losses of every step and evaluation."""
    folder = folder_of(run_file)
    adapters = {
        path.parent.name: path.read_bytes()
        for path in folder.glob("adapters/*/adapter_model.safetensors")
    }
    losses = [
        (e["event"], e["job"], e["step"], e.get("loss", e.get("eval_loss")))
        for e in read_events(folder / "metrics.jsonl")
        if e["event"] in ("step", "eval")
    ]
    return adapters, losses


@pytest.fixture(scope="session")
def make_run(tmp_path_factory) -> Callable[..., pathlib.Path]:
    """Writes run files of the same run for other output folders."""
    folder = tmp_path_factory.mktemp("hosts")
    one_layer = tiny.CONFIG | {"num_hidden_layers": 1}
    model = tiny.write_model(folder / "model", config=one_layer)
    data = [tiny.write_records(folder / f"{i}.jsonl", 16, i) for i in range(2)]
    count = iter(range(1000))

    def make(*, num_jobs: int = 2, output_dir: object = "", **settings) -> pathlib.Path:
        number = next(count)
        jobs = [
            {
                "name": f"job{i}",
                "data": {"path": str(data[i])},
                "target_modules": ["down_proj"],
                "batch_size": 3 + i,
                "rank": 2 + i,
                "dropout": 0.1,
                "steps": 7 + i,
                "learning_rate": 0.01,
                "max_length": 96,
                "eval_fraction": 0.2,
                "eval_every": 2,
                "seed": i,
            }
            for i in range(num_jobs)
        ]
        run = {
            "model": str(model),
            "output_dir": str(output_dir or folder / f"out{number}"),
            "microbatch_tokens": 256,
            "block_tokens": 16,
            "window_steps": 1,
            "dtype": "float32",
            "mesh": "data=2,fsdp=2",
            "checkpoint_every": 2,
            "jobs": jobs,
        }
        path = folder / f"run{number}.json"  # JSON is YAML
        path.write_text(json.dumps(run | settings))
        return path

    return make


def folder_of(run_file: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(json.loads(run_file.read_text())["output_dir"])


@pytest.fixture(scope="module")
def whole(make_run):
    """Returns the results of the run in this process, which nothing stops."""
    run_file = make_run()
    assert main(["train", str(run_file)]) == 0
    return results(run_file)
