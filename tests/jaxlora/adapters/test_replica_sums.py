"""Replicas hand gradients of a slot to one of them, which hands out new weights."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlora.adapters import exchange
from jaxlora.adapters.optimizer import Pending
from jaxlora.adapters.slot_state import read_slot_rows
from jaxlora.adapters.stage_sharding import StageSharding

add_part, read_part = jax.jit(exchange.add_part), jax.jit(exchange.read_part)
SHAPES, SLOTS = {"b": (2, 7, 3), "a": (1, 3, 5), "c": (1,)}, 3


def tables(seed: int) -> dict[str, np.ndarray]:
    """Numbers of all magnitudes, so that sums in another order have other bits."""
    rng, out = np.random.default_rng(seed), {}
    for name, shape in SHAPES.items():
        scale = 10.0 ** rng.integers(-6, 6, (SLOTS, *shape))
        numbers = rng.normal(size=(SLOTS, *shape)) * scale
        out[name] = numbers.astype(np.float32)
    return out


def pending(seed: int, finite: bool = True) -> Pending:
    return Pending(gradients=tables(seed), is_finite=np.full(SLOTS, finite))


@pytest.mark.needs_devices(4)
def test_sums_have_the_same_bits_in_any_order_of_arrival():
    """Parts come from four devices, one after the other, and are added in order."""
    devices, slot = jax.devices()[:4], np.int32(1)
    each = [jax.device_put(pending(i), d) for i, d in enumerate(devices)]
    bits = set()
    for order in itertools.permutations(range(1, 4)):
        arrived = {}
        for i in order:
            part = jax.device_put(read_part(each[i], slot), devices[0])
            arrived[i] = jax.block_until_ready(part)
        total = each[0]
        for i in sorted(arrived):
            total = add_part(total, slot, *arrived[i])
        bits.add(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(total)))
    assert len(bits) == 1
    for name in SHAPES:
        parts = [tables(i)[name] for i in range(4)]
        wanted = parts[0].copy()
        for part in parts[1:]:
            wanted[1] = wanted[1] + part[1]  # in float32, and of this slot alone
        np.testing.assert_array_equal(np.asarray(total.gradients[name]), wanted)
    assert total.gradients["a"].devices() == {devices[0]}


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_part_that_is_not_finite_is_noticed(spoiled):
    both = [pending(i, finite=i != spoiled) for i in range(2)]
    total = add_part(both[0], np.int32(2), *read_part(both[1], np.int32(2)))
    assert not total.is_finite[2]
    np.testing.assert_array_equal(total.is_finite[:2], both[0].is_finite[:2])


def test_a_replica_takes_the_weights_of_one_slot():
    weights, own, gradients = tables(5), tables(6), pending(7, finite=False)
    slot = np.int32(2)
    row = jax.jit(read_slot_rows)(weights, slot)
    new, emptied = jax.jit(exchange.write_weights)(own, gradients, slot, row)
    for name in SHAPES:
        np.testing.assert_array_equal(new[name][2], weights[name][2])
        np.testing.assert_array_equal(new[name][:2], own[name][:2])
        assert not np.asarray(emptied.gradients[name][2]).any()
        np.testing.assert_array_equal(
            emptied.gradients[name][:2], gradients.gradients[name][:2]
        )
    assert emptied.is_finite.tolist() == [False, False, True]


# ---- replicas of several devices -----------------------------------------------------

pair = jax.devices()[:2]
TENSOR = StageSharding(
    mesh=jax.sharding.Mesh(
        np.array(pair).reshape(1, 1, len(pair)), ("data", "fsdp", "tensor")
    )
)
AXES = {"b": 2}  # of G L ..., cut among the devices


def on_two(seed: int) -> tuple[Pending, dict[str, np.ndarray]]:
    """Gradients on a mesh, and their sums: whole tables are terms of a sum."""
    terms = [tables(seed), tables(seed + 100)]
    sums = terms[0] | {n: terms[0][n] + terms[1][n] for n in ("a", "c")}
    own = {n: np.stack([one[n] for one in terms]) for n in ("a", "c")}
    gradients = own | {"b": terms[0]["b"][None]}
    where = Pending(gradients=TENSOR.gradients(gradients, AXES), is_finite=TENSOR.rows)
    found = Pending(gradients=gradients, is_finite=np.ones((1, SLOTS), bool))
    return jax.device_put(found, TENSOR.shardings(where)), sums


def on_devices(run, *takes, gives):
    jitted = jax.shard_map(
        run, mesh=TENSOR.mesh, in_specs=takes, out_specs=gives, check_vma=False
    )
    return jax.jit(jitted)


@pytest.fixture
def wide(monkeypatch):
    """Tables whose divided axis two devices can cut."""
    monkeypatch.setitem(SHAPES, "b", (2, 6, 3))


@pytest.mark.needs_devices(2)
def test_devices_of_a_replica_send_whole_gradients_and_add_their_parts(wide):
    """One mesh sends and another one adds the sum of all terms, each of them once."""
    (mine, own), (other, sent), slot = on_two(1), on_two(2), np.int32(1)
    whole = PartitionSpec()
    specs = Pending(gradients=TENSOR.gradients(SHAPES, AXES), is_finite=TENSOR.rows)
    read = functools.partial(
        exchange.read_part, whole_axes=TENSOR.whole_axes, divided=AXES
    )
    read = on_devices(read, specs, whole, gives=(whole, whole))
    flat, is_finite = read(other, slot)
    wanted = np.concatenate([sent[name][1].ravel() for name in sorted(SHAPES)])
    np.testing.assert_array_equal(flat, wanted)
    add = functools.partial(exchange.add_part, num_tensor=2, divided=AXES)
    add = on_devices(add, specs, whole, whole, whole, gives=specs)
    flat, _ = read(add(mine, slot, flat, is_finite), slot)
    wanted = np.concatenate(
        [(own[name] + sent[name])[1].ravel() for name in sorted(SHAPES)]
    )
    np.testing.assert_allclose(flat, wanted, rtol=1e-6)


@pytest.mark.needs_devices(2)
def test_devices_of_a_replica_take_their_parts_of_the_weights(wide):
    weights, own, slot = tables(5), tables(6), np.int32(2)
    gradients, _ = on_two(7)
    params = TENSOR.tables(SHAPES, AXES)
    specs = Pending(gradients=TENSOR.gradients(SHAPES, AXES), is_finite=TENSOR.rows)
    row, whole = jax.jit(read_slot_rows)(weights, slot), PartitionSpec()
    write = functools.partial(exchange.write_weights, divided=AXES)
    write = on_devices(write, params, specs, whole, whole, gives=(params, specs))
    new, emptied = write(own, gradients, slot, np.asarray(row))
    for name in SHAPES:
        np.testing.assert_array_equal(new[name][2], weights[name][2])
        np.testing.assert_array_equal(new[name][:2], own[name][:2])
        assert not np.asarray(emptied.gradients[name][:, 2]).any()
