"""Compiles programs for NVIDIA GPUs that are not here."""

import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def compile_deviceless(module: str, *arguments: str | pathlib.Path) -> None:
    """Runs a module that compiles a program for a GPU; skips the test if it cannot.

    It is a process of its own, because XLA must be set up before JAX starts.

    Args:
        module: Name of the module.
        *arguments: Its arguments.
    """
    if (cuda := _cuda_folder()) is None:
        pytest.skip(
            "compiling for a GPU that is not here needs the packages "
            "jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-nvvm, "
            "nvidia-cuda-runtime, nvidia-cuda-cupti and nvidia-nvjitlink, in this "
            "environment or in the folder that JAXLORA_TESTS_CUDA names"
        )
    toolkit = cuda / "nvidia/cu13"
    # Deviceless, XLA cannot choose among kernels of matrix products by timing them.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    env = os.environ | {
        "PATH": f"{toolkit}/bin:{toolkit}/nvvm/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(cuda)]),
        "CUDA_ROOT": str(toolkit),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={toolkit} {flags}",
    }
    env.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # see conftest.py
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, env=env, cwd=ROOT, check=True)


def _cuda_folder() -> pathlib.Path | None:
    """Returns the folder with NVIDIA's compiler and JAX's CUDA plugin, if any."""
    folders = [os.environ.get("JAXLORA_TESTS_CUDA"), sysconfig.get_path("purelib")]
    for folder in map(pathlib.Path, filter(None, folders)):
        compiler, plugin = folder / "nvidia/cu13/bin/ptxas", folder / "jax_plugins"
        if compiler.is_file() and (plugin / "xla_cuda13").is_dir():
            return folder
    return None
