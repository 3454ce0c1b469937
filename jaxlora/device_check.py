"""Refuses to compute on the CPU of a machine whose GPU JAX does not use.

If its CUDA back end is missing or fails to start, JAX goes on with the CPU, and a run
would take weeks in place of hours. `check_device` is called before anything computes.
"""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from jaxlora.errors import DeviceError

_SECONDS = 20.0  # without its daemon, the driver starts anew for each query
_A_GPU = re.compile(r"\d+|(GPU|MIG)-.*")  # an entry of CUDA_VISIBLE_DEVICES
_MEANT = "To compute on the CPU, say so: --device cpu, or JAX_PLATFORMS=cpu."


_starting: list[Future[None]] = []  # what `start_backend` has begun


def start_backend() -> None:
    """Starts JAX's back ends in a thread, so that other work is done meanwhile.

    CUDA takes two to three seconds, most of them outside of Python. The environment
    must be as JAX shall see it, and several processes must have joined. `check_device`
    waits for the back ends, and reports their errors.
    """
    import jax

    future: Future[None] = Future()

    def start() -> None:
        try:
            jax.default_backend()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    _starting[:] = [future]
    # Python waits for it at exit: it cannot be ended while CUDA starts.
    threading.Thread(target=start, name="jaxlora-backend").start()


def _default_backend() -> str:
    import jax

    # If a back end fails, JAX may raise the error only to the first who asks.
    if _starting:
        _starting.pop().result()
    return jax.default_backend()


def check_device() -> None:
    """Refuses to go on if an NVIDIA GPU is visible and JAX uses another device.

    This starts JAX's back ends. Nothing is refused if JAX was told which platforms to
    use (JAX_PLATFORMS), except if they fail to start.

    Raises:
        DeviceError: JAX uses another device, or does not start.
    """
    try:
        backend = _default_backend()
    except RuntimeError as error:
        raise DeviceError(f"JAX does not start here: {_sentence(error)}") from error
    if backend == "gpu" or _is_told():
        return
    seen = visible_gpu(os.environ)
    if seen is None:
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
    if os.environ.get("JAX_PLATFORMS") or visible_gpu(os.environ) is None:
        return
    command = [sys.executable, "-m", "jaxlora.device_check"]
    environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
        raise DeviceError(lines[-1] if lines else "JAX does not start here.")


def use_cpu() -> None:
    """Makes JAX compute on the CPU in this process and its children, as if told to."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_platforms", "cpu")


def visible_gpu(environ: Mapping[str, str]) -> str | None:
    """Says by what an NVIDIA GPU is known to be visible here; None if none is.

    Args:
        environ: Environment variables; CUDA_VISIBLE_DEVICES may hide all GPUs.
    """
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA ignores what follows an invalid entry.
    if allowed is not None and not _A_GPU.fullmatch(allowed.split(",")[0].strip()):
        return None
    # A container may show the driver of its host in /proc, but no device.
    if node := next(iter(_device_nodes()), None):
        return node
    return "nvidia-smi lists it" if _smi_lists_a_gpu() else None


def _device_nodes() -> list[str]:
    nodes = pathlib.Path("/dev").glob("nvidia[0-9]*")
    return sorted(str(node) for node in nodes)


def _smi_lists_a_gpu() -> bool:
    """Whether `nvidia-smi` lists a GPU, which in WSL has no device node of its own."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def _is_told() -> bool:
    """Whether JAX was told which platform to use."""
    import jax

    return bool(jax.config.jax_platforms or os.environ.get("JAX_PLATFORM_NAME"))


def _reason() -> str:
    """Says why JAX does not use the GPU, and what to do, in whole sentences."""
    errors = _backend_errors()
    if (error := errors.get("cuda")) is not None:
        return f"its CUDA back end failed to start: {_sentence(error)}"
    if (error := _load_error()) is not None:
        return f"its CUDA back end failed to load: {_sentence(error)}"
    packages = _cuda_packages()
    if packages:
        return (
            f"its CUDA back end ({', '.join(packages)}) did not load. `python -c "
            "'import jax; jax.devices()'` shows why."
        )
    return (
        "the installed jaxlib is for CPUs only. Install its CUDA back end: pip install "
        "'jaxlora[cuda]'."
    )


def _load_error() -> Exception | None:
    """Returns why JAX's CUDA plugin does not load, which JAX only logs."""
    for plugin in importlib.metadata.entry_points(group="jax_plugins"):
        if "cuda" in plugin.name:
            try:
                plugin.load().initialize()
            except Exception as error:  # whatever the plugin raises is the reason
                return error
    return None


def _backend_errors() -> Mapping[str, str]:
    """Returns the errors of back ends that failed while JAX chose one by itself."""
    from jax._src import xla_bridge

    return getattr(xla_bridge, "_backend_errors", {})


def _cuda_packages() -> list[str]:
    names = (d.metadata["Name"] for d in importlib.metadata.distributions())
    found = {name for name in names if name}
    return sorted(n for n in found if re.fullmatch(r"jax[-_]cuda\d+[-_]plugin", n))


def _sentence(error: object) -> str:
    """Returns an error on one line, with a full stop."""
    text = " ".join(str(error).split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _main() -> int:
    try:
        check_device()
    except DeviceError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
