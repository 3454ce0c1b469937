"""Device memory traffic of a process, counted by Nsight Compute."""

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence

from jaxlora.errors import JaxloraError

COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def dram_bytes(command: Sequence[str]) -> float:
    """Runs a command, and returns the bytes that its kernels read and wrote.

    Raises:
        JaxloraError: `ncu` is not installed, or it counted nothing. It may lack the
            permission to read the device's counters.
    """
    if shutil.which("ncu") is None:
        raise JaxloraError(
            "counting memory traffic needs `ncu` of NVIDIA Nsight Compute on the PATH."
        )
    ncu = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base"]
    ncu += ["--metrics", ",".join(COUNTERS), "--target-processes", "all"]
    out = subprocess.run([*ncu, *command], capture_output=True, text=True)
    lines = [line for line in out.stdout.splitlines() if line.startswith('"')]
    rows = csv.DictReader(io.StringIO("\n".join(lines)))
    values = [row["Metric Value"] for row in rows if row["Metric Name"] in COUNTERS]
    if out.returncode or not values:
        raise JaxloraError(f"ncu counted nothing:\n{out.stdout}\n{out.stderr}")
    return sum(float(value.replace(",", "")) for value in values)
