"""Tests the default packer: its schedules are legal, deterministic and short."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    greedy,
    joint,
    lower_bound,
    padded_tokens,
    simulate,
    violations,
)
from scripts.bench.scheduler.lengths import jobs
from tests.scheduler.strategies import (
    LIMITS,
    costs,
    job_mixes,
    num_stale_batches,
    pipelines,
)

FORWARD = AffineCost(base=256, per_token=1, per_square=2e-5)
BACKWARD = AffineCost(base=256, per_token=1, per_square=5e-5)
COST = CostModel.uniform(4, forward=FORWARD, backward=BACKWARD)
PIPELINE = Pipeline.one_f_one_b(4)


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(
    samples=job_mixes(max_batches=3), pipeline=pipelines(), data=st.data()
)
def test_keeps_every_rule(samples, pipeline, data):
    cost = data.draw(costs(pipeline.num_stages))
    schedule = joint.pack(samples, LIMITS, pipeline, cost)
    assert violations(schedule, samples, distance=pipeline.distance) == []
    assert schedule == joint.pack(samples[::-1], LIMITS, pipeline, cost)
    ran = simulate(schedule, cost, pipeline)
    assert num_stale_batches(schedule, pipeline, ran) == 0
    bound = lower_bound(samples, LIMITS, pipeline, cost)
    assert bound.makespan <= ran.makespan * (1 + 1e-9)
    assert bound.microbatches <= len(schedule.microbatches)


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(samples=job_mixes(max_batches=8), pipeline=pipelines())
def test_keeps_every_rule_across_windows(samples, pipeline):
    """The windows are so small that most batches extend over several of them."""
    cost = CostModel.uniform(pipeline.num_stages, forward=FORWARD, backward=BACKWARD)
    effort = joint.Effort(committed=1, lookahead=1)
    schedule = joint.pack(samples, LIMITS, pipeline, cost, effort)
    assert violations(schedule, samples, distance=pipeline.distance) == []


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(samples=job_mixes(), pipeline=pipelines())
def test_fills_buckets(samples, pipeline):
    cost = CostModel.uniform(
        pipeline.num_stages, forward=FORWARD, backward=BACKWARD, buckets=(256, 512)
    )
    schedule = joint.pack(samples, LIMITS, pipeline, cost)
    assert violations(schedule, samples, distance=pipeline.distance) == []


@pytest.mark.parametrize("num_jobs", [1, 2, 3, 4, 8])
def test_bubbles_stay_small(num_jobs):
    """Jobs with a global batch of 16 run on four stages with 6144 tokens."""
    max_bubble = {1: 0.24, 2: 0.06, 3: 0.03, 4: 0.025, 8: 0.02}[num_jobs]
    limits = Limits(capacity=6144, block_tokens=64)
    samples = jobs(["mix"] * num_jobs, num_samples=320, batch_size=16)
    schedule = joint.pack(samples, limits, PIPELINE, COST)
    assert violations(schedule, samples, distance=4) == []
    assert simulate(schedule, COST, PIPELINE).bubble <= max_bubble


@pytest.mark.parametrize("num_stages", [1, 4, 8, 16])
def test_one_job_waits_for_each_of_its_steps(num_stages):
    """With one microbatch per batch, there are S - 1 no-ops between two batches."""
    samples = [
        Sample(owner=0, batch=b, index=0, num_tokens=LIMITS.capacity) for b in range(4)
    ]
    pipeline = Pipeline.one_f_one_b(num_stages)
    cost = CostModel.uniform(num_stages, forward=FORWARD, backward=BACKWARD)
    schedule = joint.pack(samples, LIMITS, pipeline, cost)
    full = [i for i, m in enumerate(schedule.microbatches) if m]
    assert full == [0, num_stages, 2 * num_stages, 3 * num_stages]
    assert len(schedule.microbatches) == full[-1] + 1


def test_keeps_the_tail_of_a_longer_job():
    samples = [
        Sample(owner=job, batch=b, index=i, num_tokens=100 + i)
        for job, num_batches in ((3, 1), (7, 9))
        for b in range(num_batches)
        for i in range(b % 3 + 1)
    ]
    schedule = joint.pack(samples, LIMITS, PIPELINE, COST)
    assert violations(schedule, samples, distance=4) == []


def test_batch_numbers_need_not_start_at_zero():
    samples = [Sample(owner=0, batch=b, index=0, num_tokens=9) for b in (5, 6, 9)]
    schedule = joint.pack(samples, LIMITS, PIPELINE, COST)
    assert violations(schedule, samples, distance=4) == []


def test_packs_nothing_from_nothing():
    assert joint.pack([], LIMITS, PIPELINE, COST).microbatches == ()


@pytest.mark.parametrize("batch", [0, 3])
def test_refuses_a_sample_over_the_capacity_before_planning(batch):
    samples = [Sample(owner=2, batch=b, index=0, num_tokens=9) for b in range(4)]
    samples[batch] = Sample(owner=2, batch=batch, index=0, num_tokens=513)
    with pytest.raises(ValueError, match="job 2 has 513 tokens, over the capacity of"):
        joint.pack(samples, LIMITS, PIPELINE, COST)


def test_refuses_costs_of_another_pipeline():
    with pytest.raises(ValueError, match="4 stages and the pipeline 2"):
        joint.pack([], LIMITS, Pipeline.one_f_one_b(2), COST)


@pytest.mark.parametrize(
    "wrong",
    [{"committed": 0}, {"lookahead": -1}, {"fill_targets": ()}, {"fill_targets": (0,)}],
)
def test_effort_is_checked(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        joint.Effort(**wrong)


def test_reads_no_further_than_its_window():
    """Batches are only read when they are needed, so memory is that of a window."""
    read = 0
    limits = Limits(capacity=6144, block_tokens=64)
    rng = np.random.default_rng(0)

    def batches(job):
        nonlocal read
        for b in range(400):
            read += 1
            lengths = rng.integers(32, 2000, 16)
            yield [
                Sample(owner=job, batch=b, index=i, num_tokens=int(n))
                for i, n in enumerate(lengths)
            ]

    sources = [
        joint.JobBatches(batches=batches(job), num_batches=400, batch_tokens=16000)
        for job in range(2)
    ]
    windows = joint.stream(sources, limits, PIPELINE, COST)
    first = next(windows)
    assert len(first) >= 24
    assert read < 60
    for _ in range(5):
        next(windows)
    assert read < 200


def test_a_stream_is_what_pack_makes():
    samples = jobs(["xsum", "cnn"], num_samples=[70, 50], batch_size=[8, 16])
    limits = Limits(capacity=8192, block_tokens=128)
    packed = joint.pack(samples, limits, PIPELINE, COST)
    sources = []
    for job in range(2):
        own = [s for s in samples if s.owner == job]
        numbers = sorted({s.batch for s in own})
        sources.append(
            joint.JobBatches(
                batches=iter([[s for s in own if s.batch == b] for b in numbers]),
                num_batches=len(numbers),
                batch_tokens=sum(s.num_tokens for s in own) / len(numbers),
            )
        )
    windows = joint.stream(sources, limits, PIPELINE, COST)
    assert tuple(m for w in windows for m in w) == packed.microbatches


def test_fills_as_well_as_first_fit_decreasing():
    """With one batch per job, the number of microbatches is that of greedy packing."""
    limits = Limits(capacity=4096, block_tokens=64)
    samples = jobs(["mix"] * 4, num_samples=32, batch_size=32)
    flat = AffineCost(base=1e6, per_token=1, per_square=0)
    cost = CostModel.uniform(1, forward=flat, backward=flat)
    ours = joint.pack(samples, limits, Pipeline(), cost)
    theirs = greedy.pack(samples, limits)
    assert len(ours.microbatches) <= len(theirs.microbatches)
    assert all(padded_tokens(m, limits) for m in ours.microbatches)


def source(job, num_batches, size=4, num_tokens=200):
    return joint.JobBatches(
        batches=[
            [
                Sample(owner=job, batch=b, index=i, num_tokens=num_tokens)
                for i in range(size)
            ]
            for b in range(num_batches)
        ],
        num_batches=num_batches,
        batch_tokens=size * num_tokens,
    )


def samples_of(sources):
    return [s for j in sources for batch in j.batches for s in batch]


def test_jobs_join_and_pause_between_windows():
    """Job 1 joins late; job 0 pauses after a complete batch and resumes later."""
    # With ramps, a batch that runs alone would be planned as a whole.
    effort = joint.Effort(committed=4, lookahead=2, polish_rounds=0)
    planner = joint.Planner(LIMITS, PIPELINE, COST, effort)
    sources = [source(0, 4, size=30), source(1, 20), source(2, 3)]
    planner.add(sources[0])
    out = planner.next_window()
    planner.add(sources[1])
    planner.pause(0)
    middle = []
    for _ in range(8):
        middle += planner.next_window()
    done = {s.batch for m in [*out, *middle] for s in m if s.owner == 0}
    of_job = [s for m in [*out, *middle] for s in m if s.owner == 0]
    assert 0 < sum(len(m) for m in out) < 30  # job 0 was paused within a batch
    assert done == {0}
    assert len(of_job) == 30
    planner.add(sources[2])
    planner.resume(0)
    out += middle
    while window := planner.next_window():
        out += window
    schedule = Schedule(microbatches=tuple(out), limits=LIMITS)
    assert violations(schedule, samples_of(sources), distance=4) == []


def test_a_job_may_have_no_batches():
    jobs = [source(0, 0), source(1, 1), source(2, 0)]
    windows = joint.stream(jobs, LIMITS, PIPELINE, COST)
    assert sum(len(m) for w in windows for m in w) == 4


def test_frees_batches_that_are_planned():
    planner = joint.Planner(LIMITS, PIPELINE, COST)
    planner.add(source(0, 300))
    num_held = []
    while planner.next_window():
        progress = planner._state.jobs[0]
        num_held.append(len(progress.source._items))
    assert max(num_held) < 100
    assert num_held[-1] == 0


def test_jobs_are_checked():
    planner = joint.Planner(LIMITS, PIPELINE, COST)
    planner.add(source(3, 1))
    with pytest.raises(ValueError, match="job 3 was already added"):
        planner.add(source(3, 2))
    with pytest.raises(ValueError, match=r"job 5 was not added. The jobs are \[3\]"):
        planner.pause(5)


def test_nothing_runs_while_all_are_paused():
    planner = joint.Planner(LIMITS, PIPELINE, COST)
    planner.add(source(0, 1))
    planner.pause(0)
    assert planner.next_window() == []
    planner.resume(0)
    assert planner.next_window() != []


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[(0, 0)], []], "batch 1 of job 0 has 0 samples"),
        ([[(0, 0), (0, 1)]], r"with the \(job, batch\) \[\(0, 0\), \(0, 1\)\]"),
        ([[(0, 1)], [(0, 0)]], "batch 0 of job 0 follows batch 1 of job 0"),
        ([[(0, 0)], [(1, 1)]], "batch 1 of job 1 follows batch 0 of job 0"),
    ],
)
def test_refuses_invalid_batches(batches, message):
    samples = [
        [Sample(owner=j, batch=b, index=0, num_tokens=9) for j, b in batch]
        for batch in batches
    ]
    job = joint.JobBatches(batches=samples, num_batches=2, batch_tokens=9)
    with pytest.raises(ValueError, match=message):
        list(joint.stream([job], LIMITS, PIPELINE, COST))


def test_a_stream_refuses_a_sample_over_the_capacity():
    with pytest.raises(ValueError, match="job 4 has 513 tokens, over the capacity of"):
        list(joint.stream([source(4, 2, num_tokens=513)], LIMITS, PIPELINE, COST))


def test_full_microbatches_take_longer():
    """Filling every microbatch gives close to the fewest, but not the shortest run."""
    limits = Limits(capacity=6144, block_tokens=64)
    samples = jobs(["mix"] * 4, num_samples=160, batch_size=16)
    effort = joint.Effort(fill_targets=(1.12,), trades_per_slot=0, polish_rounds=0)
    full = joint.pack(samples, limits, PIPELINE, COST, effort)
    bound = lower_bound(samples, limits, PIPELINE, COST)
    assert violations(full, samples, distance=4) == []
    assert len(full.microbatches) <= 1.02 * bound.microbatches
    default = joint.pack(samples, limits, PIPELINE, COST)
    times = [simulate(s, COST, PIPELINE).makespan for s in (default, full)]
    assert times[0] < times[1]
