"""The share of a GPU's memory that the command line takes."""

import logging
import os
import pathlib

import pytest

from jaxlora.plan.memory import gpu_share
from jaxlora.plan.memory.gpu_share import take_free_gpus

ONE = "0, GPU-aaaa, NVIDIA L40S, 580.95, 46068, 3\n"
LINES = (
    "0, GPU-aaaa, NVIDIA L40S, 580.95, 46068, 3\n"
    "1, GPU-bbbb, NVIDIA L40S, 580.95, 46068, 2210\n"
    "2, GPU-cccc, NVIDIA L40S, 580.95, 46068, 0\n"
)


@pytest.fixture
def smi(tmp_path, monkeypatch, caplog):
    """Puts an `nvidia-smi` that prints these lines first on the path."""
    caplog.set_level(logging.INFO)

    def install(lines: str, status: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\ncat <<'X'\n{lines}X\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def taken(environ: dict[str, str], local_ids=None) -> bool:
    environ = dict(environ)
    before = dict(environ)
    take_free_gpus(local_ids, environ)
    share = environ.pop(gpu_share.FRACTION, None)
    if share is None:
        return False
    assert environ == before and share == "0.92"
    return True


def test_a_gpu_of_its_own(smi, caplog):
    smi(ONE)
    assert taken({})
    assert "JAX takes 92%, as no other process uses it" in caplog.text


def test_what_was_asked_before_is_used(smi):
    smi(LINES)
    environ = {}
    used = gpu_share.query_gpus()
    smi(ONE)
    take_free_gpus(None, environ, query=lambda: used)
    assert environ == {}  # another process uses the second GPU


def test_gathered_weights_have_memory_outside_of_the_share(smi, caplog):
    smi(ONE)
    environ = {}
    take_free_gpus(None, environ, gathers=True)
    assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.85"}
    assert "JAX takes 85%" in caplog.text and "gathered weights take" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
        ("JAX_PLATFORMS", "cpu"),
    ],
)
def test_what_the_user_has_set_stays(smi, name, value):
    smi(ONE)
    environ = {name: value}
    take_free_gpus(None, environ)
    assert environ == {name: value}


@pytest.mark.parametrize(
    ("visible", "local_ids", "expected"),
    [
        (None, None, False),
        ("0,2", None, True),
        ("2,1", None, False),
        ("GPU-cc, GPU-aaaa", None, True),
        ("GPU-bb", None, False),
        ("0,9,1", None, True),  # nothing after an invalid entry is visible
        (None, (0, 2), True),
        ("2,1", (0,), True),
        ("2,1", (1,), False),
        ("", None, False),
        ("MIG-1234", None, False),
    ],
)
def test_only_visible_gpus_count(smi, visible, local_ids, expected):
    smi(LINES)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert taken(environ, local_ids) is expected


def test_numbers_of_different_gpus_may_mean_others(smi):
    smi(LINES.replace("L40S, 580.95, 46068, 2210", "T400, 580.95, 2048, 2210"))
    assert not taken({"CUDA_VISIBLE_DEVICES": "0"})
    assert taken({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        (LINES, 9, "nvidia-smi fails"),
        ("No devices were found\n", 0, "nvidia-smi fails"),
        (ONE.replace(" 3", " [N/A]"), 0, "an unknown part of GPU 0"),
        (ONE.replace(" 3", " 900"), 0, "900 MiB of GPU 0 is in use"),
    ],
)
def test_the_default_stays_and_the_log_says_why(smi, caplog, lines, status, reason):
    smi(lines, status)
    assert not taken({})
    assert reason in caplog.text and "XLA_CLIENT_MEM_FRACTION changes it" in caplog.text


def test_without_a_gpu_nothing_is_said(monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(pathlib.Path, "exists", lambda self: False)
    assert not taken({})
    assert not caplog.text
