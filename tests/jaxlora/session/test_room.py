"""Slots and microbatches fit into the device's memory, or are refused."""

import dataclasses
import math

import pytest

from jaxlora.config.session_config import SessionConfig
from jaxlora.errors import ConfigError
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.stages import MeshFootprint, resident_footprint
from jaxlora.session import room
from jaxlora.session.engine import Engine
from tests.jaxlora.session.conftest import SETTINGS


@pytest.fixture
def with_memory(monkeypatch):
    def give(num_bytes: float, *, is_shared: bool = False) -> None:
        memory = DeviceMemory(
            num_bytes=math.ceil(num_bytes), source="a GPU's", is_shared=is_shared
        )
        monkeypatch.setattr(room, "device_memory", lambda own_bytes: memory)

    def estimate(stages, block_tokens, num_tokens):
        """In place of that of the plans of runs, which has tests of its own."""
        (one,) = resident_footprint(stages).stages
        step = dataclasses.replace(one, bytes_per_token=1000.0)
        return MeshFootprint(stages=(step,))

    monkeypatch.setattr(room, "estimated_footprint", estimate)
    return give


def test_auto_takes_what_fits(tiny_model, with_memory):
    config = SessionConfig(rank=8)
    with_memory(2**40)
    found = Engine(tiny_model, config)
    assert (found.config.slots, found.sizes) == (64, (512, 2048, 8192))
    need = found.memory_estimate
    # Fewer slots, as long as 16 of them fit; and a tenth stays free.
    with_memory((need.total_bytes - 40 * need.slot_bytes) / 0.9)
    few = Engine(tiny_model, config)
    assert few.sizes == found.sizes and few.config.slots == 24
    # Smaller microbatches, then.
    with_memory((need.total_bytes - 55 * need.slot_bytes) / 0.9)
    small = Engine(tiny_model, config)
    assert small.sizes == (512, 1024, 4096) and small.config.num_slots > 16
    with_memory(2**40, is_shared=True)
    assert Engine(tiny_model, config).sizes == (128, 512, 2048)


def test_what_does_not_fit_is_refused(tiny_model, with_memory):
    with_memory(2**40)
    need = Engine(tiny_model, SessionConfig(**SETTINGS)).memory_estimate
    with_memory(need.total_bytes)
    Engine(tiny_model, SessionConfig(**SETTINGS))
    with_memory(need.total_bytes - 1)
    with pytest.raises(ConfigError, match="Lower slots to 4, rank or microbatch"):
        Engine(tiny_model, SessionConfig(**SETTINGS))
    with_memory(need.base_bytes)
    with pytest.raises(ConfigError, match=r"of .* KiB \(a GPU's\). Lower rank or"):
        Engine(tiny_model, SessionConfig(rank=8))


def test_memory_that_is_not_known_is_not_checked(tiny_model, monkeypatch):
    monkeypatch.setattr(room, "device_memory", lambda own_bytes: None)
    found = Engine(tiny_model, SessionConfig(rank=8))
    assert (found.config.slots, found.sizes) == (16, (512, 2048, 8192))
