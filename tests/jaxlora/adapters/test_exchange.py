"""Every device gets the sum of a slot's gradients, bit for bit, with little memory."""

import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxlora.adapters.exchange import exchange, exchanged_slots
from jaxlora.adapters.optimizer import Pending
from jaxlora.adapters.stage_sharding import ONE_DEVICE, REPLICATED, StageSharding
from jaxlora.sharding.mesh import STAGE_AXES
from tests.deviceless import ROOT, compile_deviceless

SHAPES = {"a": (2, 7, 3), "b": (1, 3, 5), "c": (1,)}  # of a slot; 58 numbers
PROGRAM = "tests.jaxlora.adapters.exchange_program"


def on(data: int, fsdp: int) -> StageSharding:
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp, 1, 1)
    mesh = jax.sharding.Mesh(devices, STAGE_AXES)
    return StageSharding(mesh=mesh)


def random_pending(placement: StageSharding, num_slots: int, shapes=SHAPES) -> Pending:
    """Numbers of all magnitudes, so that sums in another order have other bits."""
    rng, parts = np.random.default_rng(0), placement.num_lanes

    def numbers(shape):
        size = parts, num_slots, *shape
        scale = 10.0 ** rng.integers(-6, 6, size)
        return (rng.normal(size=size) * scale).astype(np.float32)

    return Pending(
        gradients={name: numbers(shape) for name, shape in shapes.items()},
        is_finite=np.ones((parts, num_slots), np.bool_),
    )


def exchanged(placement: StageSharding, pending: Pending, slots) -> Pending:
    """Returns the gradients on the devices after an exchange, by one program."""
    rows = placement.rows
    run = placement.jit(
        functools.partial(exchange, axes=placement.summed_axes),
        (rows, REPLICATED),
        rows,
        donate_argnums=0,
    )
    pending = jax.device_put(pending, placement.sharding(rows))
    for slot in exchanged_slots(slots, placement):
        pending = run(pending, slot)
    assert run._cache_size() <= 1
    return jax.tree.map(np.asarray, pending)


@pytest.mark.needs_devices(8)
@pytest.mark.parametrize(
    ("data", "fsdp"),
    [(1, 2), (3, 1), (2, 3), (1, 8)],
    ids=["fsdp2", "data3", "data2_fsdp3", "fsdp8"],
)
def test_the_slots_that_step_get_sums_in_the_order_of_devices(data, fsdp):
    placement = on(data, fsdp)
    before = random_pending(placement, 4)
    before.is_finite[-1, 3] = False
    slots = (0, 1, 3)
    after = exchanged(placement, before, slots)
    for name, parts in before.gradients.items():
        total = functools.reduce(np.add, list(parts))
        for mine, own in zip(after.gradients[name], parts, strict=True):
            for slot in range(4):
                expected = total[slot] if slot in slots else own[slot]
                assert mine[slot].tobytes() == expected.tobytes(), (name, slot)
    assert (after.is_finite == [True, True, True, False]).all()


@pytest.mark.needs_devices(4)
def test_what_is_not_finite_stays_in_its_slot():
    placement = on(2, 2)
    before = random_pending(placement, 3)
    for value in before.gradients.values():
        value[1, 1] = np.nan
    after = exchanged(placement, before, (0, 1))
    for name, value in after.gradients.items():
        assert np.isfinite(value[:, 0]).all() and np.isnan(value[:, 1]).all(), name


@pytest.mark.needs_devices(4)
def test_a_stage_without_adapted_linears():
    placement = on(1, 4)
    before = random_pending(placement, 2, {})
    before.is_finite[2, 1] = False
    after = exchanged(placement, before, (0, 1))
    assert after.is_finite.tolist() == [[True, False]] * 4


def test_one_device_exchanges_nothing():
    assert not exchanged_slots({4, 1, 2}, ONE_DEVICE)


@pytest.mark.needs_devices(2)
def test_each_call_takes_a_slot_of_those_that_step():
    assert exchanged_slots({4, 1, 2}, on(2, 1)) == [1, 2, 4]


# ---- memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "slots"),
    [
        pytest.param(2, 4, marks=pytest.mark.grid),
        (64, 4),
        pytest.param(64, 1, marks=pytest.mark.grid),
    ],
)
def test_memory_does_not_grow_with_devices(tmp_path, devices, slots):
    out = tmp_path / "memory.json"
    command = [sys.executable, "-m", PROGRAM, "cpu", str(devices), str(slots), str(out)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, env=env, cwd=ROOT, check=True)
    check_memory(json.loads(out.read_text()))


@pytest.mark.parametrize(("devices", "slots"), [(8, 4), (64, 1)])
def test_memory_of_h200s(tmp_path, devices, slots):
    out = tmp_path / "memory.json"
    compile_deviceless(PROGRAM, "cuda", str(devices), str(slots), out)
    check_memory(json.loads(out.read_text()))


def check_memory(found: dict[str, int]) -> None:
    """At most 2.5 times the bytes of the slots, and as much as is estimated."""
    slots, estimate = found.pop("slots"), found.pop("estimate")
    assert max(found.values()) <= 2.5 * slots
    assert estimate == pytest.approx(max(found.values()), rel=0.05)
