"""Tests that the queue of jobs has the order of its definition."""

import numpy as np
import pytest

from jaxlora.scheduler import AffineCost, CostModel, Limits, Pipeline, Sample, joint
from jaxlora.scheduler.pack.fill import fill_slot
from jaxlora.scheduler.pack.jobs import (
    BatchCursor,
    BatchSource,
    JobBatches,
    JobQueue,
    WorkModel,
    job_batches,
)

LIMITS = Limits(capacity=512, block_tokens=32)
WORK = WorkModel(square_in_tokens=0.0)


def cursor(job, rng, num_batches=3):
    batches = [
        [
            Sample(owner=job, batch=b, index=i, num_tokens=int(rng.integers(1, 300)))
            for i in range(rng.integers(1, 5))
        ]
        for b in range(num_batches)
    ]
    return started(
        JobBatches(
            batches=batches,
            num_batches=num_batches,
            batch_tokens=0.0,
            urgency_per_batch=float(rng.integers(1, 4)),
            priority=int(rng.integers(2)),
        )
    )


def started(job: JobBatches) -> BatchCursor:
    source = BatchSource(job.batches, WORK, LIMITS)
    each = job.urgency_per_batch or 1.0
    return BatchCursor(
        of=job, source=source, urgency_per_batch=each, items=source.batch(0)
    )


def in_order(jobs: list[BatchCursor], slot: int) -> list[int]:
    """The definition: by priority, started jobs first, then the most urgent ones."""
    ready = [i for i, job in enumerate(jobs) if job.ready <= slot and job.items]
    rank = lambda job: (-job.of.priority, not job.is_started, -job.urgency)
    return sorted(ready, key=lambda i: (*rank(jobs[i]), i))


@pytest.mark.parametrize("seed", range(5))
def test_order_is_that_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    jobs = [cursor(job, rng) for job in range(12)]
    queue = JobQueue()
    for job in jobs:
        queue.add(job)
    slot = 0
    while queue:
        assert queue.first(slot, 100) == in_order(jobs, slot)
        assert len(queue) == sum(bool(job.items) for job in jobs)
        tried = queue.copy()
        fill_slot(tried, slot, 400, LIMITS, 3)
        for index in queue.first(slot, 3):
            num = int(rng.integers(1, len(jobs[index].items) + 1))
            chosen = sorted(rng.permutation(len(jobs[index].items))[:num].tolist())
            queue.take(index, chosen, slot, 3)
            jobs[index] = jobs[index].after(chosen, slot, 3)
        slot += 1
    assert slot > 5


def test_a_slot_looks_at_few_jobs():
    """However many jobs there are, the time of a slot is about the same."""
    rng = np.random.default_rng(0)
    num_looks = []
    for num_jobs in (100, 400):
        samples = [
            Sample(owner=job, batch=0, index=i, num_tokens=int(n))
            for job in range(num_jobs)
            for i, n in enumerate(rng.integers(1, 300, 4))
        ]
        num_looks.append(0)

        class Counting(JobQueue):
            def __getitem__(self, index):
                num_looks[-1] += 1
                return super().__getitem__(index)

        queue = Counting()
        for job in job_batches(samples):
            queue.add(started(job))
        slot = 0
        while queue:
            fill_slot(queue, slot, 512, LIMITS, 1)
            slot += 1
        assert num_looks[-1] < 80 * slot


def test_many_jobs_fill_microbatches():
    samples = [
        Sample(owner=job, batch=0, index=i, num_tokens=100 + job % 50)
        for job in range(300)
        for i in range(2)
    ]
    token = AffineCost(base=100, per_token=1, per_square=0)
    cost = CostModel.uniform(1, forward=token, backward=token)
    schedule = joint.pack(samples, LIMITS, Pipeline(), cost)
    assert schedule.fill > 0.8


def test_a_job_is_alone_before_its_batch_begins():
    rng, queue = np.random.default_rng(0), JobQueue()
    assert queue.alone is None
    queue.add(cursor(7, rng))
    assert queue.alone == 0
    queue.take(0, [0], 0, 1)
    assert (queue.alone is None) == queue[0].is_started
    queue.add(cursor(8, rng))
    assert queue.alone is None
