"""Compiles a kernel for a GPU that need not be here, and says what it takes."""

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jaxlora.pallas_kernels.triton.launch import FP_FUSION

# The most shared memory of a block, by capability; NVIDIA, CUDA C++ Programming Guide,
# "Technical specifications per compute capability".
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
_TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """The resources that one block of a compiled kernel takes on a multiprocessor.

    Attributes:
        registers: Registers of a thread.
        local_bytes: Local memory of a thread: spilled registers and stack.
        shared_bytes: Shared memory of a block.
    """

    registers: int
    local_bytes: int
    shared_bytes: int


def shared_memory_bytes(capability: int) -> int:
    """Returns the most shared memory of a block; of unknown devices, the least known.

    Args:
        capability: Ten times the compute capability.
    """
    return 1024 * _SHARED_KIB.get(capability, min(_SHARED_KIB.values()))


def kernel_facts(
    kernel: Any,
    pointers: Sequence[str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    num_warps: int,
    num_stages: int,
) -> KernelFacts:
    """Compiles a kernel for a compute capability.

    Args:
        kernel: A function with `triton.jit`, whose pointers come first.
        pointers: Triton's types of the pointers, such as `*bf16`, all aligned to 16
            bytes.
        constants: The other arguments by name; those that the kernel lacks are ignored.
        capability: Ten times the compute capability.
        num_warps: Warps of a block.
        num_stages: Depth of the pipelines of loads.
    """
    names = kernel.arg_names[len(pointers) :]
    signature = dict(zip(kernel.arg_names, pointers, strict=False))
    source = ASTSource(
        kernel,
        signature=signature | dict.fromkeys(names, "constexpr"),
        constexprs={name: constants[name] for name in names},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": num_warps,
            "num_stages": num_stages,
            "enable_fp_fusion": FP_FUSION,
        },
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [_TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
    return KernelFacts(
        registers=found["REG"],
        local_bytes=found["STACK"] + found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )
