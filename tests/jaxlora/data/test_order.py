import math
import random

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.data.order import JobOrder, expected_draws, interleave, permutation

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**31 - 1)


@given(sizes, sizes, seeds, st.booleans())
def test_each_epoch_has_each_sample_once(num, batch_size, seed, shuffle):
    order = JobOrder(
        num_samples=num, batch_size=batch_size, seed=seed, shuffle=shuffle, epochs=2.0
    )
    per_epoch = math.ceil(num / batch_size)
    assert order.num_steps == 2 * per_epoch
    for epoch in range(2):
        batches = [order.batch(epoch * per_epoch + i) for i in range(per_epoch)]
        assert all(len(b) == batch_size for b in batches[:-1])
        assert sorted(np.concatenate(batches)) == list(range(num))


@settings(deadline=None)
@given(sizes, sizes, seeds, st.randoms())
def test_batch_depends_on_step_alone(num, batch_size, seed, random):
    order = JobOrder(num_samples=num, batch_size=batch_size, seed=seed, epochs=3.0)
    in_order = [order.batch(step).tolist() for step in range(order.num_steps)]
    steps = list(range(order.num_steps))
    random.shuffle(steps)
    for step in steps:
        fresh = JobOrder(num_samples=num, batch_size=batch_size, seed=seed, epochs=3.0)
        assert order.batch(step).tolist() == in_order[step]
        assert fresh.batch(step).tolist() == in_order[step]


@given(st.integers(2, 60), st.integers(2, 60), seeds, st.booleans())
def test_no_batch_has_a_single_sample_where_two_are_needed(
    num, batch_size, seed, shuffle
):
    """One that is left over is in the batch before; all others are as without it."""
    common = {"num_samples": num, "batch_size": batch_size, "seed": seed}
    common |= {"shuffle": shuffle, "epochs": 2.0}
    order, plain = JobOrder(**common, smallest_batch=2), JobOrder(**common)
    per_epoch = order.batches_per_epoch
    assert order.num_steps == 2 * per_epoch
    assert per_epoch == plain.batches_per_epoch - (num % batch_size == 1)
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        batches = [order.batch(step).tolist() for step in steps]
        sizes = [len(batch) for batch in batches]
        assert min(sizes) >= 2 and max(sizes) <= batch_size + 1
        assert all(size == batch_size for size in sizes[:-1])
        first = epoch * plain.batches_per_epoch
        whole = [plain.batch(first + i) for i in range(plain.batches_per_epoch)]
        assert np.concatenate(batches).tolist() == np.concatenate(whole).tolist()
    neighbors = order.neighbors()
    assert (neighbors != np.arange(num)).all()
    for step in range(per_epoch):
        batch = order.batch(step)
        assert neighbors[batch].tolist() == np.roll(batch, 1).tolist()


def test_epochs_and_seeds_differ():
    def epoch(number, seed=0):
        order = JobOrder(num_samples=50, batch_size=50, seed=seed, epochs=2.0)
        return order.batch(number).tolist()

    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, seed=1)
    assert epoch(1) != epoch(0, seed=1)


def test_permutation_never_changes():
    assert permutation(8, seed=3, stream=5).tolist() == [0, 6, 2, 1, 3, 4, 7, 5]


def test_unshuffled_keeps_the_order_and_cycles():
    order = JobOrder(num_samples=5, batch_size=2, seed=0, shuffle=False, steps=4)
    batches = [order.batch(step).tolist() for step in range(4)]
    assert batches == [[0, 1], [2, 3], [4], [0, 1]]


@pytest.mark.parametrize(
    ("num", "batch_size", "epochs", "steps", "num_steps"),
    [
        (10, 4, 1.0, None, 3),
        (10, 4, 0.5, None, 2),
        (10, 4, 1.5, None, 5),
        (30, 1, 0.1, None, 3),
        (10, 4, 1e-12, None, 1),
        (10, 4, 3.0, 7, 7),
    ],
)
def test_num_steps(num, batch_size, epochs, steps, num_steps):
    order = JobOrder(
        num_samples=num, batch_size=batch_size, seed=0, epochs=epochs, steps=steps
    )
    assert order.num_steps == num_steps


def test_a_batch_may_be_changed_by_its_owner():
    order = JobOrder(num_samples=4, batch_size=4, seed=0)
    before = order.batch(0).tolist()
    order.batch(0)[:] = 9
    assert order.batch(0).tolist() == before


def test_orders_are_values():
    order = JobOrder(num_samples=4, batch_size=2, seed=0)
    order.batch(0)
    assert order == JobOrder(num_samples=4, batch_size=2, seed=0)


STRATEGIES = "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"


@pytest.mark.parametrize("case", range(24))
def test_interleaving_is_that_of_the_package_datasets(case):
    """Random mixtures of one to four data sets; every rule, in turn and by shares."""
    rng = random.Random(case)
    lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 4))]
    shares = None
    if case % 4:
        weights = [rng.random() + 0.02 for _ in lengths]
        shares = [weight / sum(weights) for weight in weights]
    rule, seed = STRATEGIES[case % 3], rng.randrange(2**31)
    sets = [
        datasets.Dataset.from_dict({"set": [number] * length, "row": range(length)})
        for number, length in enumerate(lengths)
    ]
    wanted = datasets.interleave_datasets(
        sets, probabilities=shares, seed=seed, stopping_strategy=rule
    )
    sources, rows = interleave(
        lengths, probabilities=shares, stopping_strategy=rule, seed=seed
    )
    assert sources.tolist() == list(wanted["set"])
    assert rows.tolist() == list(wanted["row"])


def test_a_set_that_is_never_drawn():
    sources, rows = interleave(
        [5, 3], probabilities=[0.0, 1.0], stopping_strategy="first_exhausted", seed=7
    )
    assert sources.tolist() == [1, 1, 1] and rows.tolist() == [0, 1, 2]


def test_draws_that_exhaust_all():
    assert expected_draws([10, 400], [0.001, 0.999]) == pytest.approx(10_000)
