"""Tenants share microbatches fairly, and microbatches are full."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.scheduler import Limits, Sample, padded_tokens
from jaxlora.scheduler.stream.waiting import FairQueue, WaitingBatch

BLOCK = 64
LIMITS = Limits(capacity=8192, block_tokens=BLOCK, max_jobs=16)
SIZES = (512, 2048, 8192)


def batch(tenant, lengths, owner=None, **more) -> WaitingBatch:
    owner = tenant if owner is None else owner
    samples = [
        Sample(owner=owner, batch=0, index=i, num_tokens=n)
        for i, n in enumerate(lengths)
    ]
    return WaitingBatch(tenant=tenant, kind="training", samples=samples, **more)


@dataclasses.dataclass
class Client:
    """A tenant in a closed loop: its next batch comes when the last one has run."""

    tenant: int
    draw: object  # returns the lengths of a batch
    left: WaitingBatch | None = None
    sent_at: int = 0
    num_tokens: int = 0
    waits: list = dataclasses.field(default_factory=list)

    def send(self, queue) -> None:
        self.sent_at = queue.num_rows
        self.left = batch(self.tenant, self.draw(), came=self.sent_at)

    def receive(self, queue, samples) -> None:
        assert self.left is not None
        rest = [s for s in self.left.samples if s not in samples]
        self.num_tokens += LIMITS.padded(sum(s.num_tokens for s in samples))
        if rest:
            self.left = dataclasses.replace(self.left, samples=rest, has_begun=True)
        else:
            self.waits.append(queue.num_rows - self.sent_at)
            self.left = None


def run(queue, clients, turns, *, delay=1, limits=LIMITS) -> list:
    """Runs microbatches; the results of one are known `delay` microbatches later."""
    made, answers = [], []
    for client in clients:
        client.send(queue)
    for _ in range(turns):
        waiting = [c.left for c in clients if c.left is not None]
        if waiting:
            turn = queue.next(waiting)
            check(turn, waiting, limits)
            made.append(turn)
            mine = {}
            for sample in turn.microbatch:
                mine.setdefault(sample.owner, []).append(sample)
            for owner, samples in mine.items():
                client = next(c for c in clients if c.tenant == owner)
                client.receive(queue, samples)
            answers.append([c for c in clients if c.left is None])
        if len(answers) > delay or not waiting:
            for client in answers.pop(0):
                if client.left is None:
                    client.send(queue)
    return made


def check(turn, waiting, limits) -> None:
    """The rules that each microbatch keeps."""
    every = [sample for one in waiting for sample in one.samples]
    assert len(set(turn.microbatch)) == len(turn.microbatch) > 0
    assert set(turn.microbatch) <= set(every)
    assert padded_tokens(turn.microbatch, limits) <= turn.rows <= limits.capacity
    assert len({s.owner for s in turn.microbatch}) <= limits.most_jobs
    owners = [s.owner for s in turn.microbatch]
    assert len(list(itertools.groupby(owners))) == len(set(owners))


def log_normal(rng, number=8, mean=350):
    def draw():
        lengths = rng.lognormal(np.log(mean) - 0.18, 0.6, number)
        return np.clip(lengths, 4, 2048).astype(int).tolist()

    return draw


@pytest.mark.parametrize("number", [2, 16, 32])
def test_equal_tenants_have_equal_shares(number):
    queue, rng = FairQueue(LIMITS, SIZES), np.random.default_rng(number)
    # One sends long batches, one short ones, and the others some between.
    sizes = [16, 64, *[24] * (number - 2)]
    clients = [Client(i, log_normal(rng, sizes[i], 700)) for i in range(number)]
    run(queue, clients, 25 * number + 100, delay=0)
    shares = np.array([c.num_tokens for c in clients], float)
    assert abs(shares / shares.mean() - 1).max() < 0.05


def test_weights_are_shares():
    queue, rng = FairQueue(LIMITS, SIZES), np.random.default_rng(0)
    clients = [Client(i, log_normal(rng, 32)) for i in range(4)]
    weights = np.array([1.0, 2.0, 0.5, 4.0])
    for tenant, weight in enumerate(weights):
        queue.weigh(tenant, weight)
    run(queue, clients, 400, delay=0)
    shares = np.array([c.num_tokens for c in clients])
    relative = shares / weights / (shares.sum() / weights.sum())
    assert abs(relative - 1).max() < 0.05


def test_a_tenant_with_64_times_the_load_delays_others_by_a_microbatch():
    waits = []
    for times in (1, 64):
        queue, rng = FairQueue(LIMITS, SIZES), np.random.default_rng(0)
        clients = [Client(i, log_normal(rng)) for i in range(16)]
        clients[0].draw = log_normal(rng, 8 * times)
        run(queue, clients, 200)
        own = [wait for client in clients[1:] for wait in client.waits]
        waits.append(np.quantile(own, [0.5, 0.99]))
    (median, most), (with_it, most_with_it) = waits
    assert with_it <= median + LIMITS.capacity
    assert most_with_it <= most + LIMITS.capacity


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_nobody_starves(data):
    """Each batch ends within a round of all tenants, however they are mixed."""
    number = data.draw(st.integers(1, 12))
    quantum = data.draw(st.sampled_from([None, BLOCK, 1024]))
    most_jobs = data.draw(st.sampled_from([1, 2, 16]))
    limits = dataclasses.replace(LIMITS, max_jobs=most_jobs)
    queue = FairQueue(limits, SIZES, quantum=quantum)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    samples = data.draw(
        st.lists(st.sampled_from([1, 2, 8, 40]), min_size=number, max_size=number)
    )
    mean = data.draw(st.sampled_from([10, 350, 1500]))
    clients = [Client(i, log_normal(rng, n, mean)) for i, n in enumerate(samples)]
    run(queue, clients, 40, limits=limits)
    for client in clients:
        own = len(client.draw()) // 2
        waited = max([*client.waits, queue.num_rows - client.sent_at])
        assert waited <= (number + 2) * (own + 2) * LIMITS.capacity


def test_batches_that_end_soon_go_first():
    """Among equals; one that has begun ends before another begins."""
    queue = FairQueue(LIMITS, SIZES)
    one = batch("a", [4000] * 3)
    two = batch("b", [100], has_begun=True)
    three = batch("c", [2000])
    turn = queue.next([one, three, two])
    assert [s.owner for s in turn.microbatch] == ["a", "b", "c"]
    assert len({s for s in turn.microbatch if s.owner == "a"}) == 1
    queue = FairQueue(Limits(capacity=128, block_tokens=BLOCK), (128,))
    turn = queue.next([batch("a", [64] * 3), batch("b", [64]), batch("c", [64])])
    assert [s.owner for s in turn.microbatch] == ["b", "c"]


def test_a_batch_that_has_waited_long_goes_first():
    limits = Limits(capacity=128, block_tokens=BLOCK)
    old, new = batch("a", [64] * 3), batch("b", [128], came=385)
    for num_rows, first in {256: "b", 385: "a"}.items():
        queue = FairQueue(limits, (128,))
        queue.num_rows = num_rows
        assert queue.next([new, old]).microbatch[0].owner == first


def test_kinds_take_turns():
    """Neither waits for the end of the other, and they share no microbatch."""
    queue, kinds = FairQueue(LIMITS, SIZES), []
    for _ in range(10):
        waiting = [
            dataclasses.replace(batch(tenant, [1000] * 20), kind=tenant)
            for tenant in ("training", "forward")
        ]
        turn = queue.next(waiting)
        assert {s.owner for s in turn.microbatch} == {turn.kind}
        kinds.append(turn.kind)
    assert kinds.count("training") == 5


def test_adapters_in_slots_go_first_among_equals():
    limits = Limits(capacity=128, block_tokens=BLOCK)
    queue = FairQueue(limits, (128,))
    waiting = [batch("a", [128], is_near=False), batch("b", [128])]
    owners = [queue.next(waiting).microbatch[0].owner for _ in range(6)]
    assert owners[0] == "b" and owners.count("a") == 3


def test_adapters_that_are_in_no_slot_wait_no_longer():
    """A round takes 11 microbatches, and nobody waits for much more."""
    number, num_slots = 32, 8
    queue, rng = FairQueue(LIMITS, SIZES), np.random.default_rng(0)
    clients = [Client(i, log_normal(rng)) for i in range(number)]
    here = list(range(num_slots))  # the one that was used least recently is first
    for client in clients:
        client.send(queue)
    for _ in range(2 * number):
        for client in clients:
            near = client.tenant in here
            client.left = dataclasses.replace(client.left, is_near=near)
        turn = queue.next([client.left for client in clients])
        for owner in dict.fromkeys(s.owner for s in turn.microbatch):
            here = [*(one for one in here if one != owner), owner][-num_slots:]
            own = [s for s in turn.microbatch if s.owner == owner]
            clients[owner].receive(queue, own)
            if clients[owner].left is None:
                clients[owner].send(queue)
    longest = max(wait for client in clients for wait in client.waits)
    assert longest <= 18 * LIMITS.capacity


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([512], 512), ([400, 90], 512), ([2800 // 8] * 8, 2048), ([2048], 2048)],
)
def test_a_microbatch_has_no_more_rows_than_it_needs(lengths, rows):
    """A lone request runs in the smallest size; a batch may take several."""
    queue = FairQueue(LIMITS, SIZES)
    assert queue.next([batch("a", lengths)]).rows == rows


def test_a_sample_decides_the_least_size():
    assert FairQueue(LIMITS, SIZES).next([batch("a", [600, 1200, 1000])]).rows == 2048


@pytest.mark.parametrize("number", [1, 4, 16])
def test_microbatches_are_full(number):
    """Beside first-fit over all that waits in one size, which has 0.70 to 0.98."""
    rng = np.random.default_rng(number)
    queue = FairQueue(LIMITS, SIZES)
    clients = [Client(i, log_normal(rng)) for i in range(number)]
    made = run(queue, clients, 100)
    tokens = sum(s.num_tokens for turn in made for s in turn.microbatch)
    fill = tokens / sum(turn.rows for turn in made)
    assert fill > {1: 0.85, 4: 0.9, 16: 0.95}[number]


def test_a_tenant_that_comes_back_is_owed_little():
    queue = FairQueue(LIMITS, SIZES)
    for _ in range(50):
        queue.next([batch("a", [2000] * 8)])
    owners = []
    for _ in range(6):
        turn = queue.next([batch("a", [2048] * 8), batch("b", [2048] * 8)])
        owners += [s.owner for s in turn.microbatch]
    assert owners.count("b") - owners.count("a") <= 4


def test_a_tenant_has_no_more_owners_in_a_microbatch_than_it_may():
    most = {"few": 1, "many": None}
    queue = FairQueue(LIMITS, SIZES, most_owners_of=most.__getitem__)
    tenants = ["few", "many"]
    waiting = [batch(t, [64], owner=f"{t}{i}") for t in tenants for i in range(4)]
    owners = [s.owner for s in queue.next(waiting).microbatch]
    assert sorted(owners) == ["few0", "many0", "many1", "many2", "many3"]
