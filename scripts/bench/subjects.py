"""The subjects of `jaxlora bench`, and the modules that measure them."""

import dataclasses
import importlib
from collections.abc import Sequence

from jaxlora.device_check import check_device_in_child
from jaxlora.memory.gpu_share import take_free_gpus


@dataclasses.dataclass(frozen=True)
class Subject:
    """A benchmark.

    Attributes:
        module: Module with the functions `parser()` and `main(argv)`.
        summary: What it measures, in a few words.
        on_device: Whether it computes on the device.
        gathers: Whether it may gather weights, as with FSDP.
    """

    module: str
    summary: str
    on_device: bool = True
    gathers: bool = False


SUBJECTS = {
    "kernels": Subject("kernels.benchmark", "LoRA linears against the frozen layer"),
    "step": Subject("step.benchmark", "training steps against peft and the base alone"),
    "joint": Subject("joint", "joint training against one job after the other"),
    "mesh": Subject(
        "mesh.benchmark", "pipelines and FSDP on the GPUs of a machine", gathers=True
    ),
    "scheduler": Subject(
        "scheduler.benchmark", "packers on a simulated pipeline", on_device=False
    ),
    "fill": Subject("scheduler.fill", "how full microbatches are", on_device=False),
    "scaling": Subject(
        "scheduler.scaling", "simulated throughput of large meshes", on_device=False
    ),
    "compile": Subject("compile", "tracing, lowering and compiling a step"),
    "fuse": Subject("fuse.benchmark", "functions as they are, and fused"),
    "traffic": Subject("kernels.traffic", "device memory traffic of LoRA linears"),
    "tune": Subject("kernels.tune", "tile choices, for the kernels' tuning table"),
    "memory": Subject(
        "memory", "by estimate, which settings fit into which GPUs", on_device=False
    ),
    "data": Subject("data", "reading and tokenizing records", on_device=False),
    "convergence": Subject("convergence", "losses with and without fused kernels"),
    "together": Subject("together", "differences of jobs alone and together"),
    "formats": Subject("formats", "held-out losses on quantized bases"),
}


def run(name: str, argv: Sequence[str]) -> None:
    """Imports a subject's module and runs it, with the GPU memory that a run takes.

    Args:
        name: One of `SUBJECTS`.
        argv: The options; those of a subject are printed by `--help`.

    Raises:
        DeviceError: It computes, a GPU is visible, and JAX does not use it.
    """
    subject = SUBJECTS[name]
    if subject.on_device and not {"-h", "--help"} & set(argv):
        check_device_in_child()
        take_free_gpus(gathers=subject.gathers)
    importlib.import_module(f"jaxlora.bench.{subject.module}").main(argv)
