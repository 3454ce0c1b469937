"""Refuses to compute on the CPU of a machine whose GPU JAX does not use.

If its CUDA back end is missing or fails to start, JAX goes on with the CPU, and a run
would take weeks in place of hours. `check_device` is called before anything computes.
"""

import contextlib
import importlib
import importlib.metadata
import itertools
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import Future

from jaxlora.common.background import in_background
from jaxlora.errors import DeviceError

_SECONDS = 20.0  # without its daemon, the driver starts anew for each query
_A_GPU = re.compile(r"\d+|(GPU|MIG)-.*")
_MEANT = "To compute on the CPU, say so: --device cpu, or JAX_PLATFORMS=cpu."
_CHECK = "from jaxlora.device_check import check_device; check_device()"

_starting: list[Future[str]] = []  # what `start_backend` has begun


def start_backend() -> None:
    """Starts JAX's back ends in a thread, so that other work is done meanwhile.

    CUDA takes two to three seconds, most of them outside of Python. The environment
    must be as JAX shall see it, and several processes must have joined. `check_device`
    waits for the back ends, and reports their errors.
    """
    import jax

    def start() -> str:
        backend = jax.default_backend()
        # The allocator takes its memory with the first array. If that fails, it fails
        # again where an array is needed, which reports it.
        with contextlib.suppress(Exception):
            jax.block_until_ready(jax.device_put(0))
        return backend

    _starting[:] = [in_background(start)]


def import_while_starting(name: str) -> None:
    """Imports a module unless the back ends have started, for which all else waits.

    An error is raised where the module is used.
    """
    if _starting and not _starting[0].done():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def check_device() -> None:
    """Refuses to go on if an NVIDIA GPU is visible and JAX uses another device.

    This starts JAX's back ends. Nothing is refused if JAX was told which platforms to
    use (JAX_PLATFORMS), except if they fail to start.

    Raises:
        DeviceError: JAX uses another device, or does not start.
    """
    import jax

    try:
        # If a back end fails, JAX may raise the error only to the first who asks.
        backend = _starting.pop().result() if _starting else jax.default_backend()
    except RuntimeError as error:
        raise DeviceError(f"JAX does not start here: {_sentence(error)}") from error
    is_told = jax.config.jax_platforms or os.environ.get("JAX_PLATFORM_NAME")
    if backend == "gpu" or is_told or (seen := visible_gpu()) is None:
        return
    raise DeviceError(
        f"an NVIDIA GPU is visible here ({seen}), but JAX would compute on the "
        f"{backend.upper()}: {_reason()} {_MEANT}"
    )


def check_device_in_child() -> None:
    """Does what `check_device` does, without starting JAX's back ends in this process.

    They would take the GPU's memory, of which other processes have need.

    Raises:
        DeviceError: See `check_device`.
    """
    if os.environ.get("JAX_PLATFORMS") or visible_gpu() is None:
        return
    command = [sys.executable, "-c", _CHECK]
    environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        found = re.search(r"^jaxlora\.errors\.DeviceError: (.*)", done.stderr, re.M)
        last = f"JAX does not start here: {_sentence(done.stderr[-300:])}"
        raise DeviceError(found[1] if found else last)


def use_cpu() -> None:
    """Makes JAX compute on the CPU in this process and its children, as if told to."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_platforms", "cpu")


def named_gpus(visible: str) -> list[str]:
    """Returns the GPUs that a value of CUDA_VISIBLE_DEVICES names, as CUDA reads it.

    CUDA ignores an invalid entry and all that follow it.
    """
    names = map(str.strip, visible.split(","))
    return list(itertools.takewhile(_A_GPU.fullmatch, names))


def visible_gpu() -> str | None:
    """Says by what an NVIDIA GPU is known to be visible here; None if none is."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None and not named_gpus(allowed):
        return None
    # A container may show the driver of its host in /proc, but no device.
    if nodes := _device_nodes():
        return nodes[0]
    return "nvidia-smi lists it" if _smi_lists_a_gpu() else None


def _device_nodes() -> list[str]:
    nodes = pathlib.Path("/dev").glob("nvidia[0-9]*")
    return sorted(str(node) for node in nodes)


def _smi_lists_a_gpu() -> bool:
    """Whether `nvidia-smi` lists a GPU, which in WSL has no device node of its own."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def _reason() -> str:
    """Says why JAX does not use the GPU, and what to do, in whole sentences."""
    from jax._src import xla_bridge

    # The errors of back ends that failed while JAX chose one by itself.
    error = getattr(xla_bridge, "_backend_errors", {}).get("cuda")
    plugins = _cuda_plugins()
    if error is None:
        for plugin in plugins:
            try:
                plugin.load().initialize()  # JAX only logs why it fails
            except Exception as raised:  # whatever the plugin raises is the reason
                error = raised
    if error is not None:
        return f"its CUDA back end failed to start: {_sentence(error)}"
    if plugins:
        return (
            "its CUDA back end is installed and did not start. `python -c "
            "'import jax; jax.devices()'` shows why."
        )
    return (
        "the installed jaxlib is for CPUs only. Install its CUDA back end: pip install "
        "'jaxlora[cuda]'."
    )


def _cuda_plugins() -> list[importlib.metadata.EntryPoint]:
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return [plugin for plugin in plugins if "cuda" in plugin.name]


def _sentence(error: object) -> str:
    """Returns an error on one line, with a full stop."""
    text = " ".join(str(error).split())
    return text if text.endswith((".", "!", "?")) else f"{text}."
