"""The memory that devices report."""

import types

import pytest

from jaxlora.plan.memory import device_memory as device_module
from jaxlora.plan.memory.device_memory import (
    device_memory,
    format_bytes,
    measured_peak,
)
from jaxlora.plan.memory.gpu_share import FRACTIONS


def test_formatted_bytes():
    formatted = [format_bytes(n) for n in (2000, 2**20, 90 * 2**20, 2**29)]
    assert formatted == ["2.0 KiB", "1.00 MiB", "90.00 MiB", "0.50 GiB"]


def test_the_memory_of_this_device():
    found = device_memory(0)
    assert found is not None
    assert 2**28 < found.num_bytes < 2**45
    assert "less 5% in reserve" in found.source


@pytest.fixture
def device(monkeypatch):
    """Pretends that there is another device, and sets what it reports."""

    def set_to(platform: str, stats: dict | None) -> None:
        found = types.SimpleNamespace(
            platform=platform, device_kind="pretence", memory_stats=lambda: stats
        )
        monkeypatch.setattr(device_module.jax, "local_devices", lambda: [found])

    return set_to


def test_the_memory_of_other_devices(device, monkeypatch):
    for name in FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    machine = device_memory(0)
    device("cpu", None)
    assert device_memory(0) == machine
    device("gpu", {"bytes_limit": 1000, "bytes_in_use": 300})
    found = device_memory(200)
    assert found is not None and found.num_bytes == 1000 - 50 - 100
    assert "the pretence memory that JAX may use (75% by default" in found.source
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    found = device_memory(200)
    assert found is not None
    assert "(XLA_PYTHON_CLIENT_MEM_FRACTION=0.5)" in found.source
    for stats in (None, {}, {"bytes_in_use": 300}):
        device("gpu", stats)
        assert device_memory(0) is None


def test_the_peak_is_that_of_the_fullest_device(monkeypatch):
    def devices(*stats):
        found = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
        monkeypatch.setattr(device_module.jax, "local_devices", lambda: found)

    devices({"peak_bytes_in_use": 3}, {"peak_bytes_in_use": 7}, None)
    assert measured_peak() == 7
    devices(None, {"bytes_limit": 100})
    assert measured_peak() is None
