"""A visible GPU that JAX does not use stops everything that would compute."""

import subprocess
import sys
import threading
import types

import jax
import pytest
from jax._src import xla_bridge
from rich.console import Console

from jaxlora import Generator, LoraJob, RunConfig, Trainer, device_check
from jaxlora.cli.main import main
from jaxlora.device_check import (
    check_device,
    check_device_in_child,
    import_while_starting,
    start_backend,
    visible_gpu,
)
from jaxlora.errors import DeviceError
from jaxlora.forecast import plan_run
from jaxlora.hf.load import load_model
from jaxlora.inspect.device_support import inspect_device
from scripts.bench import __main__ as bench
from tests import tiny

BOTH_SET = (
    "XLA_CLIENT_MEM_FRACTION is specified together with "
    "XLA_PYTHON_CLIENT_MEM_FRACTION. Remove the latter one, it is deprecated."
)


@pytest.fixture
def machine(monkeypatch) -> types.SimpleNamespace:
    """A machine with a GPU whose back end fails, as JAX then sees it."""
    found = types.SimpleNamespace(nodes=["/dev/nvidia0"], errors={"cuda": BOTH_SET})
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("JAX_PLATFORM_NAME", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(device_check, "_device_nodes", lambda: found.nodes)
    monkeypatch.setattr(device_check, "_smi_lists_a_gpu", lambda: False)
    monkeypatch.setattr(xla_bridge, "_backend_errors", found.errors)
    monkeypatch.setattr(device_check, "_cuda_plugins", list)
    yield found
    jax.config.update("jax_platforms", before)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    path = tiny.write_records(tmp_path / "records.jsonl", 4, seed=0)
    job = LoraJob(name="job", data={"path": path}, rank=2)
    model = str(tiny.write_model(tmp_path / "model"))
    return RunConfig(model=model, output_dir=str(tmp_path / "run"), jobs=[job])


def test_a_back_end_that_fails_is_named_with_the_way_to_mean_the_cpu(machine):
    with pytest.raises(DeviceError) as error:
        check_device()
    text = str(error.value)
    assert "(/dev/nvidia0)" in text and "would compute on the CPU" in text
    assert BOTH_SET in text
    assert text.endswith("say so: --device cpu, or JAX_PLATFORMS=cpu.")


def test_a_jaxlib_for_cpus_says_what_to_install(machine):
    machine.errors.clear()
    with pytest.raises(DeviceError, match=r"pip install 'jaxlora\[cuda\]'"):
        check_device()


@pytest.mark.parametrize("raised", [ImportError("no libcuda.so\n here"), None])
def test_a_back_end_that_does_not_start_says_why(machine, monkeypatch, raised):
    def initialize():
        if raised is not None:
            raise raised

    machine.errors.clear()
    plugin = types.SimpleNamespace(
        load=lambda: types.SimpleNamespace(initialize=initialize)
    )
    monkeypatch.setattr(device_check, "_cuda_plugins", lambda: [plugin])
    match = (
        r"python -c" if raised is None else r"failed to start: no libcuda\.so here\."
    )
    with pytest.raises(DeviceError, match=match):
        check_device()


def test_everything_that_computes_refuses(machine, config, tmp_path):
    folder = config.model
    calls = {
        "Trainer": lambda: Trainer(config),
        "Generator": lambda: Generator(folder),
        "load_model": lambda: load_model(folder),
        "plan": lambda: plan_run(config),
        "inspect": lambda: inspect_device(Console()),
    }
    for call in calls.values():
        with pytest.raises(DeviceError, match="an NVIDIA GPU is visible"):
            call()
    assert not (tmp_path / "run").exists()


def test_commands_refuse_unless_the_cpu_is_meant(machine, capsys, monkeypatch):
    assert main(["inspect", "--device"]) == 1
    assert BOTH_SET in capsys.readouterr().err
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert main(["inspect", "--device", "cpu"]) == 0
    assert "LoRA kernels" in capsys.readouterr().out


def test_a_benchmark_asks_in_a_process_of_its_own(machine, monkeypatch, capsys):
    ran = []

    def run(command, **options):
        ran.append((command, options["env"]["XLA_PYTHON_CLIENT_PREALLOCATE"]))
        error = f"log\njaxlora.errors.DeviceError: {BOTH_SET}\n"
        return types.SimpleNamespace(returncode=1, stderr=error)

    faked = types.SimpleNamespace(run=run)
    monkeypatch.setattr(device_check, "subprocess", faked)
    assert bench.main(["step"]) == 1
    assert f"error: {BOTH_SET}" in capsys.readouterr().err
    assert ran == [([sys.executable, "-c", device_check._CHECK], "false")]
    for arguments in (["step", "--help"], ["scheduler", "--help"]):
        with pytest.raises(SystemExit) as ended:
            bench.main(arguments)
        assert ended.value.code == 0
    assert len(ran) == 1


def test_the_cpu_may_be_meant_for_a_benchmark(machine, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    given = []
    monkeypatch.setattr("scripts.bench.step.benchmark.run", given.append)
    monkeypatch.setattr(bench, "take_free_gpus", lambda gathers: None)
    assert bench.main(["step", "--device", "cpu", "--repeats", "2"]) == 0
    assert [options.repeats for options in given] == [2]
    check_device()
    check_device_in_child()


def test_the_child_really_asks():
    command = [sys.executable, "-c", device_check._CHECK]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_platforms_that_were_chosen_are_taken(machine):
    jax.config.update("jax_platforms", "cpu")
    check_device()


def test_a_gpu_that_is_used_is_no_matter(machine, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check_device()


def test_platforms_that_do_not_start_are_an_error_of_the_user(machine, monkeypatch):
    def fails():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no driver")

    monkeypatch.setattr(jax, "default_backend", fails)
    message = r"JAX does not start here: Unable .* 'cuda': no driver\.$"
    with pytest.raises(DeviceError, match=message):
        check_device()


@pytest.mark.parametrize(
    ("value", "is_visible"),
    [
        (None, True),
        ("0", True),
        ("1,0", True),
        ("GPU-8a5b", True),
        ("MIG-8a5b", True),
        ("", False),
        ("-1", False),
        ("NoDevFiles", False),
        ("-1,0", False),
    ],
)
def test_cuda_visible_devices_can_hide_the_gpu(machine, monkeypatch, value, is_visible):
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert (visible_gpu() is not None) == is_visible


def test_nvidia_smi_lists_gpus_without_a_node(machine, monkeypatch):
    machine.nodes = []
    assert visible_gpu() is None
    check_device()
    monkeypatch.setattr(device_check, "_smi_lists_a_gpu", lambda: True)
    assert visible_gpu() == "nvidia-smi lists it"


@pytest.mark.parametrize(
    ("script", "is_listed"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", True),
        ("echo 'No devices were found'", False),
        ("echo 'GPU access blocked'; exit 9", False),
    ],
)
def test_what_nvidia_smi_says(tmp_path, monkeypatch, script, is_listed):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert device_check._smi_lists_a_gpu() == is_listed


def test_the_back_end_starts_in_a_thread_whose_error_is_the_refusal(monkeypatch):
    """JAX raises the error of a back end once, and then goes on with the CPU."""
    threads = []

    def fails_once():
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise RuntimeError("no CUDA here")
        return "cpu"

    monkeypatch.setattr(jax, "default_backend", fails_once)
    start_backend()
    with pytest.raises(DeviceError, match=r"JAX does not start here: no CUDA here\."):
        check_device()
    assert threads[0] is not threading.current_thread() and len(threads) == 1


def test_modules_are_imported_only_while_the_back_end_starts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("early_a", "early_b", "early_c"):
        (tmp_path / f"{name}.py").write_text("raise ValueError\n" * (name[-1] == "a"))
        monkeypatch.delitem(sys.modules, name, raising=False)
    goes_on = threading.Event()
    monkeypatch.setattr(jax, "default_backend", lambda: goes_on.wait(60) and "cpu")
    start_backend()
    import_while_starting("early_a")
    import_while_starting("early_b")
    goes_on.set()
    check_device()
    import_while_starting("early_c")
    assert {n for n in sys.modules if n.startswith("early_")} == {"early_b"}


def test_a_back_end_that_has_started_is_used(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: asked.append(1) or "gpu")
    start_backend()
    check_device()
    check_device()
    assert len(asked) == 2
