"""Settings of every test."""

import gc
import os
import sys
import tempfile

# Pallas' GPU interpreter runs a kernel's threads at once, and each blocks a thread of
# XLA's pool while it waits for another: the pool must hold them all, also on two cores.
os.environ.setdefault("NPROC", "32")

import hypothesis
import jax
import pytest

from tests.checks import begin_test, check_imports
from tests.program_cache import compiled_programs

# Runs of the same shapes compile once, in all processes of a session and in later
# sessions: those of pytest-xdist start later than this one and take over the variable.
# No test writes into the user's own cache.
_TEMPORARY = tempfile.TemporaryDirectory(prefix="jaxlora-tests-")
_CACHE = os.environ.setdefault("JAXLORA_TESTS_CACHE_DIR", str(compiled_programs()))
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
os.environ["XDG_CACHE_HOME"] = _TEMPORARY.name
os.environ["MPLCONFIGDIR"] = f"{_CACHE}/matplotlib"  # lists of fonts
# A test may change a function, which the key of a whole program would not show.
os.environ.setdefault("JAXLORA_KEEP_PROGRAMS", "0")
# Each process that a test starts would compile all of our modules again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# No test cuts the power; each run would wait a hundred times for the disk.
os.fsync = lambda file: None
# Reading even the smallest takes half the time of compiling it.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# Likewise, none of them may be queued behind another.
jax.config.update("jax_cpu_enable_async_dispatch", False)

# XLA's CPU compiler would run MLIR's passes for every fusion, half of its work; older
# emitters make the same loops. And LLVM would compile each program in up to 32 modules
# at once, which two cores do not. Processes that tests start take these flags over.
XLA_FLAGS = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
if XLA_FLAGS not in (given := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{given} {XLA_FLAGS}".strip()

# Each operation of a lowered program would name all calls that lead to it.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"
jax.config.update("jax_traceback_in_locations_limit", 1)

# Meshes are tested on simulated devices. Work without a mesh runs on the first of them.
jax.config.update("jax_num_cpu_devices", 8)

# The examples of a test follow from its code, so that a commit passes or fails whoever
# runs it.
hypothesis.settings.register_profile("derandomized", derandomize=True, deadline=None)
hypothesis.settings.load_profile("derandomized")

# On a GPU, float32 products would otherwise run in tf32.
jax.config.update("jax_default_matmul_precision", "highest")
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

# The scheduler and most of fuse are not checked: their inner loops would run five times
# as long.
check_imports(
    "jaxlora",
    unchecked=("jaxlora.fuse.", "jaxlora.scheduler."),
    checked=("jaxlora.fuse.kernel_call", "jaxlora.fuse.rows"),
)


def pytest_collection_finish() -> None:
    """Spares the collector of reference cycles what stays until the end anyway.

    Modules and tests are a million objects, and a trace makes as many. By default, the
    collector scans them again and again, for a tenth of the time of most tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that need more devices than there are, as on one GPU."""
    begin_test()
    for mark in item.iter_markers("needs_devices"):
        (wanted,) = mark.args
        if jax.device_count() < wanted:
            pytest.skip(f"{wanted} devices are needed, and {jax.device_count()} here")


_QUICK = "jax_disable_most_optimizations"


@pytest.fixture(scope="session", autouse=True)
def compiled_quickly():
    """On CPUs, programs are compiled without LLVM's costly optimizations.

    XLA's own passes run, so that fusions, collectives and the memory that a program
    needs are those of users. It holds for processes that tests start, too.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_QUICK.upper(), "1")
        jax.config.update(_QUICK, True)
        yield
        jax.config.update(_QUICK, False)
