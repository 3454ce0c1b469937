"""The bytes that the kernels of a program move, as NVIDIA's Nsight Compute counts them.

Nsight Compute would count the kernels among which XLA chooses while it compiles, for
minutes. So a program is compiled here and loaded by a process of its own, which marks
a single call, and only that is counted.
"""

import csv
import ctypes
import dataclasses
import glob
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.errors import JaxloraError
from jaxlora.pallas_kernels import prepare_to_load
from jaxlora.programs.kept import deserialize, serialize

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_NANOSECONDS = "gpu__time_duration.sum"
_LARGE = 2**16  # elements of an array; others keep their values
# A process that counts shares the device with this one. In a CUDA graph, kernels could
# be counted only one by one as well.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
NO_GRAPHS = "--xla_gpu_enable_command_buffer="


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTraffic:
    """A run of a kernel.

    Attributes:
        name: Its name.
        read: Bytes that it read from device memory.
        written: Bytes that it wrote to device memory.
        seconds: Its time.
    """

    name: str
    read: int
    written: int
    seconds: float


def find_ncu() -> str | None:
    """Returns the path of Nsight Compute; None: it is not installed."""
    installed = sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"))
    return shutil.which("ncu") or (installed[-1] if installed else None)


def count(
    compiled: jax.stages.Compiled, arguments: tuple[Any, ...], timeout: float
) -> list[KernelTraffic]:
    """Returns the kernels of a call, in their order.

    Large arrays of floats are replaced by zeros, on which no traffic depends.

    Args:
        compiled: The program, compiled with `NO_GRAPHS` in `XLA_FLAGS`.
        arguments: Its arguments, a flat tuple of arrays.
        timeout: Limit in seconds.

    Raises:
        JaxloraError: Nsight Compute is missing or fails, or the program cannot be
            loaded by another process.
    """
    ncu = find_ncu()
    if ncu is None:
        raise JaxloraError(
            "memory traffic is counted by NVIDIA's Nsight Compute, and there is no "
            "`ncu`: install it, or put its folder into PATH."
        )
    entry = serialize(compiled, "the program")
    if entry is None:
        raise JaxloraError("the program calls Python, so no other process can run it.")
    with tempfile.TemporaryDirectory(prefix="jaxlora-traffic-") as name:
        folder = pathlib.Path(name)
        program, table = folder / "program", folder / "table.csv"
        program.write_bytes(pickle.dumps((entry, [*map(_described, arguments)])))
        command = [
            *(ncu, "--profile-from-start", "off", "--csv", "--page", "raw"),
            *("--print-units", "base", "--log-file", str(table)),
            *("--cache-control", "none", "--clock-control", "none"),
            *("--metrics", ",".join((READ, WRITTEN, _NANOSECONDS))),
            *(sys.executable, "-m", "scripts.bench.fuse.traffic", str(program)),
        ]
        try:
            run = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise JaxloraError(
                f"Nsight Compute did not end within {timeout:g} s: give it more time."
            ) from error
        lines = table.read_text().splitlines() if table.exists() else []
        if run.returncode:
            said = [*lines[-2:], *run.stderr.splitlines()[-4:]]
            raise JaxloraError(f"Nsight Compute failed: {' '.join(said)[-800:]}")
        return parse(lines)


def parse(lines: Sequence[str]) -> list[KernelTraffic]:
    """Reads the table that Nsight Compute writes; its second row has units.

    Raises:
        JaxloraError: There is no table, so no kernel was counted.
    """
    lines = [line for line in lines if line]
    said = [line for line in lines if line.startswith("==")]
    rows = csv.DictReader(line for line in lines if line not in said)
    number = lambda text: float(text.replace(",", ""))
    kernels = [
        KernelTraffic(
            name=row["Kernel Name"],
            read=int(number(row[READ])),
            written=int(number(row[WRITTEN])),
            seconds=1e-9 * number(row[_NANOSECONDS]),
        )
        for row in rows
        if row["ID"]  # the row of units has no number
    ]
    if not kernels:
        raise JaxloraError(f"Nsight Compute counted no kernel: {' '.join(said)[-800:]}")
    return kernels


def _described(array: Any) -> tuple[Any, ...]:
    """Describes an array: a key, a large one by its type, or another by its values."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return "key", np.asarray(jax.random.key_data(array))
    if array.size <= _LARGE:
        return "values", np.asarray(array)
    assert jnp.issubdtype(array.dtype, jnp.floating), "large arrays are of floats"
    return "zeros", (array.shape, array.dtype)


def _made(kind: str, given: Any) -> jax.Array:
    if kind == "key":
        return jax.random.wrap_key_data(given)
    # They come from the host, so that no program is compiled to make them.
    return jax.device_put(np.zeros(*given) if kind == "zeros" else given)


def main() -> None:
    """Loads a program and calls it twice; the second call is counted."""
    prepare_to_load()
    entry, described = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
    arguments = tuple(_made(*one) for one in described)
    program = deserialize(entry, arguments)
    jax.block_until_ready(program(*arguments))
    _start_counting(True)
    jax.block_until_ready(program(*arguments))
    _start_counting(False)


def _start_counting(is_on: bool) -> None:
    """Tells Nsight Compute where to start, or to stop."""
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuProfilerStart() if is_on else driver.cuProfilerStop()
    assert not failed, f"error {failed} of the CUDA driver"


if __name__ == "__main__":
    main()
