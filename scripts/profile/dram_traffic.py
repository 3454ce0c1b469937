"""Device memory traffic of a part of a program, counted by Nsight Compute.

`dram_bytes` runs a command under `ncu`. In the process that it runs, `counting` marks
the kernels that count. So neither compilation nor the making of operands is profiled.
"""

import contextlib
import csv
import ctypes
import io
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from jaxlora.errors import JaxloraError

COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Makes Nsight Compute count the kernels that run inside on the first GPU.

    All work must have ended before the exit.

    Raises:
        JaxloraError: The CUDA driver refuses.
    """
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    # The driver starts a profiler for the thread's context, and JAX leaves none here.
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(driver.cuCtxSetCurrent(context))
    _check(driver.cuProfilerStart())
    try:
        yield
    finally:
        _check(driver.cuProfilerStop())


def _check(status: int) -> None:
    if status:
        raise JaxloraError(f"the CUDA driver cannot start a profiler: error {status}.")


def dram_bytes(command: Sequence[str]) -> float:
    """Runs a command, and returns the bytes that its counted kernels read and wrote.

    Raises:
        JaxloraError: `ncu` is not installed, or it counted nothing. It may lack the
            permission to read the device's counters.
    """
    if shutil.which("ncu") is None:
        raise JaxloraError(
            "counting memory traffic needs `ncu` of NVIDIA Nsight Compute on the PATH."
        )
    ncu = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base"]
    ncu += ["--profile-from-start", "off", "--metrics", ",".join(COUNTERS)]
    out = subprocess.run([*ncu, *command], capture_output=True, text=True)
    lines = [line for line in out.stdout.splitlines() if line.startswith('"')]
    rows = csv.DictReader(io.StringIO("\n".join(lines)))
    values = [row["Metric Value"] for row in rows if row["Metric Name"] in COUNTERS]
    if out.returncode or not values:
        raise JaxloraError(f"ncu counted nothing:\n{out.stdout}\n{out.stderr}")
    return sum(float(value.replace(",", "")) for value in values)
