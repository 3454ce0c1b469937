"""`jaxlora inspect --device`."""

import dataclasses
import io
import re
import types

import jax
import pytest
from rich.console import Console

from jaxlora.cli.main import main
from jaxlora.inspect import device_support as inspect_device_module
from jaxlora.inspect.device_support import inspect_device
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.pallas_kernels import BACKENDS
from jaxlora.plan.memory.gpu_share import GpuUse


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def shown() -> str:
    out = io.StringIO()
    inspect_device(Console(file=out, width=400))
    return out.getvalue()


def test_the_present_device(monkeypatch):
    monkeypatch.setitem(
        BACKENDS,
        "toy",
        dataclasses.replace(BACKENDS["xla"], name="toy", unsupported=lambda _: "small"),
    )
    text = shown()
    assert jax.local_devices()[0].device_kind in text
    for name in ("CUDA", "cuDNN", "triton", "jax-triton", *BACKENDS, *ATTENTIONS):
        assert name in text
    assert "no: small" in text
    assert text.count("auto takes it") == 3


def test_a_back_end_that_is_slow_here_is_not_what_auto_takes(monkeypatch):
    entry = dataclasses.replace(
        BACKENDS["mosaic"],
        unsupported=lambda shape: None,
        slow_device=lambda: "it is a kettle",
    )
    monkeypatch.setitem(BACKENDS, "mosaic", entry)
    assert "yes; auto passes over it, as it is slow here: it is a kettle" in shown()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_machine_without_a_gpu_says_what_runs_instead():
    lines = shown().splitlines()
    [mosaic] = filter(re.compile(r"^\W*mosaic\b").search, lines)
    assert "no: the device is a cpu, not an NVIDIA GPU" in mosaic
    assert sum("xla" in line and "yes; auto takes it" in line for line in lines) == 3
    assert any("in fp8, of xla; mosaic and triton cannot" in line for line in lines)
    [nf4] = filter(re.compile(r"^\W*nf4\b").search, lines)
    assert "dequantized layer by layer, of xla" in nf4


def test_a_blackwell_gpu_is_untested(monkeypatch):
    device = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA RTX PRO 6000", compute_capability="12.0"
    )
    use = GpuUse(
        index=0,
        uuid="GPU-a",
        name=device.device_kind,
        driver="580.95",
        total_mib=97887,
        used_mib=2,
    )
    monkeypatch.setattr(inspect_device_module, "query_gpus", lambda: (use,))
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    facts = inspect_device_module._device_facts()
    assert "untested" in facts["tested"] and facts["compute capability"] == "12.0"
    assert facts["memory"] == "97887 MiB, of which 2 are in use"
    assert facts["driver"] == "580.95"


def test_the_command(capsys):
    assert main(["inspect", "--device"]) == 0
    assert "LoRA kernels" in capsys.readouterr().out
    for arguments in ([], ["--device", "folder"]):
        with pytest.raises(SystemExit):
            main(["inspect", *arguments])
