"""Checks the rules of a schedule, independently of the code that makes schedules."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from jaxlora.scheduler.lanes import Lanes, Tick, ticks_of
from jaxlora.scheduler.types import Limits, Microbatch, Sample, Schedule, padded_tokens


def violations(
    schedule: Schedule,
    samples: Iterable[Sample],
    *,
    distance: int = 1,
    num_lanes: int = 1,
) -> list[str]:
    """Lists every violation of the rules; the list is empty for a legal schedule.

    The rules are:

    - Each sample appears exactly once.
    - A microbatch stays within its capacity, and its numbers of samples and jobs.
    - A microbatch holds samples of at most one global batch of each job, and samples of
      the same job are adjacent.
    - The batches of a job run in order. The first tick of a batch comes at least
      `distance` after the last tick of the previous batch.
    - A tick may be empty, a no-op, only if `distance` is greater than 1.

    Args:
        schedule: The schedule.
        samples: The samples that it should hold.
        distance: Distance between the batches of a job, in ticks.
        num_lanes: Number of microbatches in a tick.

    Raises:
        ValueError: `distance` is less than 1, or the microbatches do not divide into
            ticks.
    """
    if distance < 1:
        raise ValueError(f"distance={distance} must be at least 1.")
    ticks = ticks_of(schedule.microbatches, num_lanes)
    out = _check_samples(schedule, samples)
    for i, microbatch in enumerate(schedule.microbatches):
        out += microbatch_violations(i, microbatch, schedule.limits)
    last_batch: dict[int, int] = {}
    for i, tick in enumerate(ticks):
        if not any(tick) and distance == 1:
            out.append(f"tick {i} is empty.")
        out += _check_order(i, tick, last_batch)
    return out + _check_distance(ticks, distance)


def require_legal(schedule: Schedule, samples: Iterable[Sample], lanes: Lanes) -> None:
    """Checks a packer's schedule.

    Raises:
        RuntimeError: The schedule violates a rule, so the packer has a bug.
    """
    wrong = violations(
        schedule,
        samples,
        distance=lanes.pipeline.distance,
        num_lanes=lanes.num_lanes,
    )
    if wrong:
        raise RuntimeError(
            f"the packer's schedule violates {len(wrong)} rules; the first: {wrong[0]}"
        )


def _check_samples(schedule: Schedule, samples: Iterable[Sample]) -> list[str]:
    wanted = Counter(samples)
    found = Counter(s for m in schedule.microbatches for s in m)
    out = [f"{s} is scheduled {n} times, not once." for s, n in found.items() if n > 1]
    out += [f"{s} is not scheduled." for s in wanted - found]
    out += [
        f"{s} is scheduled but was not asked for." for s in found if s not in wanted
    ]
    return out


def microbatch_violations(i: int, microbatch: Microbatch, limits: Limits) -> list[str]:
    """Lists the violations of a microbatch, whose number is `i`."""
    out = []
    padded = padded_tokens(microbatch, limits)
    if padded > limits.capacity:
        out.append(
            f"microbatch {i} takes {padded} tokens, over its capacity of "
            f"{limits.capacity}."
        )
    if len(microbatch) > limits.most_samples:
        out.append(
            f"microbatch {i} has {len(microbatch)} samples; {limits.max_samples} are "
            "allowed."
        )
    jobs = {sample.owner for sample in microbatch}
    if len(jobs) > limits.most_jobs:
        out.append(
            f"microbatch {i} has samples of {len(jobs)} jobs; {limits.max_jobs} are "
            "allowed."
        )
    runs = [
        s.owner
        for k, s in enumerate(microbatch)
        if k == 0 or s.owner != microbatch[k - 1].owner
    ]
    if len(runs) != len(jobs):
        out.append(f"microbatch {i} does not keep the samples of a job adjacent.")
    return out


def _check_order(i: int, tick: Tick, last_batch: dict[int, int]) -> list[str]:
    """Checks the order of batches and updates `last_batch`, the latest of each job."""
    out = []
    batches_of: dict[int, set[int]] = {}
    for sample in itertools.chain.from_iterable(tick):
        batches_of.setdefault(sample.owner, set()).add(sample.batch)
    for job, batches in batches_of.items():
        first, last = min(batches), max(batches)
        if first != last:
            out.append(f"tick {i} mixes batches {sorted(batches)} of job {job}.")
        if first < last_batch.get(job, first):
            out.append(
                f"tick {i} holds batch {first} of job {job} after its batch "
                f"{last_batch[job]}."
            )
        last_batch[job] = last
    return out


def _check_distance(ticks: Sequence[Tick], distance: int) -> list[str]:
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for i, tick in enumerate(ticks):
        for key in {(s.owner, s.batch) for microbatch in tick for s in microbatch}:
            first.setdefault(key, i)
            last[key] = i
    out = []
    keys = sorted(first)
    for (job, batch), (next_job, next_batch) in itertools.pairwise(keys):
        if job != next_job:
            continue
        end, start = last[job, batch], first[next_job, next_batch]
        if end < start < end + distance:
            out.append(
                f"batch {next_batch} of job {job} starts in tick {start}, "
                f"{start - end} after the end of batch {batch}, but the distance must "
                f"be at least {distance}."
            )
    return out
