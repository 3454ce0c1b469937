"""Measures pipelines, FSDP and tensor parallelism on the GPUs of one machine.

Each mesh is measured in a process of its own. A pipeline gives the time of each pass
alone, and the bubble of windows of ragged lengths, measured and simulated from these
times. Other meshes give the time and the memory of a step, the share of its time in
which exchanges run, and the throughput of windows. Weights and tokens are random, and
the lengths are those of summarization data sets.

Each row is written as soon as it is measured: to DIR/mesh.jsonl, and with tables of all
rows to DIR/mesh.md. Without a GPU, only the models tiny and wide-2 run.

    python -m scripts.bench mesh --output-dir bench --seconds 600
    python -m scripts.bench mesh --model llama-3.1-70b --layers 8 --output-dir bench70
    JAX_NUM_CPU_DEVICES=2 python -m scripts.bench mesh --model tiny --layers 2
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from jaxlora.errors import JaxloraError
from jaxlora.pallas_kernels import BACKENDS
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes
from scripts.bench.mesh.cases import PARTS, Case
from scripts.bench.mesh.results import results, skipped
from scripts.bench.report import (
    add_output_dir,
    add_training_options,
    devices,
    needs_gpu,
    shared_fields,
)
from scripts.bench.scheduler.benchmark import KINDS
from scripts.bench.shapes import LARGE, MODELS


def default_meshes(num_devices: int) -> list[str]:
    """Returns each axis that divides the model over all devices, and one device.

    Raises:
        JaxloraError: There is one device only.
    """
    if num_devices < 2:
        raise JaxloraError(
            "the benchmark 'mesh' measures several devices, and there is 1 here. Run "
            "it where there are more, or give the meshes: --meshes fsdp=1."
        )
    axes = "stage", "fsdp", "tensor"
    return [*(f"{axis}={num_devices}" for axis in axes), ONE_DEVICE]


def make_case(args: argparse.Namespace, mesh: str, num_devices: int) -> Case:
    """Returns the case of a mesh.

    One device gets a share of the samples, so that it takes as long as the others.
    """
    sizes = MeshSizes.parse(mesh)
    share = 1 if sizes.num_devices > 1 else num_devices
    given = shared_fields(Case, args)
    given |= {"mesh": mesh, "num_microbatches": max(1, args.ticks // share)}
    return Case(**given)


def measure_alone(case: Case, folder: Path, limit: float) -> str | None:
    """Measures a case in a process of its own; returns why it ended early, or None.

    Args:
        case: The case.
        folder: Folder of the results, which has each row as soon as it is measured.
        limit: Seconds after which the process is killed.
    """
    command = [sys.executable, "-m", "scripts.bench.mesh.measure"]
    command += [case.to_json(), str(folder)]
    timeout = None if math.isinf(limit) else limit
    try:
        ended = subprocess.run(command, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"it took more than {limit:.3g} s"
    return f"its process ended with {ended.returncode}" if ended.returncode else None


def compile_all(cases: Sequence[Case], limit: float) -> None:
    """Compiles the programs of all cases beside each other, in a process for each.

    They are killed together at the limit; what they have not kept is compiled later.

    Args:
        cases: The cases.
        limit: Seconds after which the processes are killed.
    """
    # Each of them would otherwise take most of the devices' memory.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "scripts.bench.mesh.measure"]
    processes = [
        subprocess.Popen([*command, case.to_json()], env=environment) for case in cases
    ]
    end = time.monotonic() + limit
    for process in processes:
        try:
            left = end - time.monotonic()
            process.wait(None if math.isinf(left) else max(0.0, left))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--model", choices=MODELS, default=LARGE)
    add_training_options(out)
    out.set_defaults(longest_tokens=4096)
    out.add_argument(
        "--meshes",
        nargs="+",
        metavar="MESH",
        help="as in a run file; by default each of stage, fsdp and tensor over all "
        "devices, and one device",
    )
    out.add_argument("--adapters", type=int, nargs="+", default=[1, 2, 4])
    out.add_argument("--batch-samples", type=int, default=32, help="of each job")
    out.add_argument(
        "--ticks",
        type=int,
        default=128,
        help="full microbatches in a window; ticks of a pipeline of single devices",
    )
    out.add_argument("--implementation", choices=["auto", *BACKENDS], default="auto")
    out.add_argument("--remat", choices=["none", "mlp", "layer"], default="none")
    out.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=[],
        help="kinds of jobs of `bench scheduler` that pipelines train, with the share "
        "of padding and without",
    )
    for name in ("padding-share", "layers-per-program"):
        out.add_argument(
            f"--{name}", type=yaml.safe_load, default="auto", help="as in a run file"
        )
    out.add_argument("--repeats", type=int, default=10, help="of passes and steps")
    out.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="what to measure, where a mesh has it; by default all",
    )
    out.add_argument(
        "--compile",
        choices=["each", "first", "only"],
        default="each",
        help="compile each mesh when it is measured, or all of them first, beside each "
        "other, or do nothing else",
    )
    out.add_argument("--seconds", type=float, default=math.inf, help="for all of it")


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    end = time.monotonic() + args.seconds
    num_devices, backend, _ = devices()
    reason = needs_gpu(args.model, backend == "gpu")
    if reason is not None:
        raise JaxloraError(reason)
    meshes = args.meshes or default_meshes(num_devices)
    cases = [make_case(args, mesh, num_devices) for mesh in meshes]
    if args.compile != "each":
        compile_all(cases, end - time.monotonic())
    if args.compile == "only":
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output_dir or Path(temporary)
        for number, case in enumerate(cases):
            limit = (end - time.monotonic()) / (len(cases) - number)
            reason = measure_alone(case, folder, max(1.0, limit))
            if reason is not None:
                results(folder).add(skipped(case, "the rest", reason))
        print(results(folder).tables())
