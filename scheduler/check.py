"""The rules of a schedule, as sentences; apart from everything that makes one."""

import itertools
from collections import Counter
from collections.abc import Iterable

from jaxlora.scheduler.types import Limits, Microbatch, Sample, Schedule, padded_tokens


def violations(
    schedule: Schedule, samples: Iterable[Sample], *, distance: int = 1
) -> list[str]:
    """What is wrong with a schedule of `samples`; empty when nothing is.

    The rules: each sample appears once; a microbatch stays within its capacity; a job
    has one global batch in a microbatch; its batches come in order, and the first
    microbatch of one is at least `distance` after the last of the one before; a job's
    samples stand side by side. A microbatch may be empty, a no-op, where `distance`
    is over 1.
    """
    if distance < 1:
        raise ValueError(f"distance is {distance}, must be at least 1.")
    out = _samples_once(schedule, samples)
    reached: dict[int, int] = {}
    for i, microbatch in enumerate(schedule.microbatches):
        if not microbatch and distance == 1:
            out.append(f"microbatch {i} is empty.")
        out += _one_microbatch(i, microbatch, schedule.limits)
        out += _order(i, microbatch, reached)
    return out + _apart(schedule, distance)


def require_legal(
    schedule: Schedule, samples: Iterable[Sample], *, distance: int = 1
) -> None:
    """Raises RuntimeError if a packer broke a rule: its mistake, not its input's."""
    wrong = violations(schedule, samples, distance=distance)
    if wrong:
        raise RuntimeError(
            f"the packer's schedule breaks {len(wrong)} rules; the first: {wrong[0]}"
        )


def _samples_once(schedule: Schedule, samples: Iterable[Sample]) -> list[str]:
    wanted = Counter(samples)
    found = Counter(s for m in schedule.microbatches for s in m)
    out = [f"{s} is scheduled {n} times, not once." for s, n in found.items() if n > 1]
    out += [f"{s} is not scheduled." for s in wanted - found]
    out += [
        f"{s} is scheduled but was not asked for." for s in found if s not in wanted
    ]
    return out


def _one_microbatch(i: int, microbatch: Microbatch, limits: Limits) -> list[str]:
    out = []
    padded = padded_tokens(microbatch, limits)
    if padded > limits.capacity:
        out.append(
            f"microbatch {i} takes {padded} tokens, over its capacity of "
            f"{limits.capacity}."
        )
    runs = [
        s.job
        for k, s in enumerate(microbatch)
        if k == 0 or s.job != microbatch[k - 1].job
    ]
    if len(runs) != len(set(runs)):
        out.append(f"microbatch {i} does not keep a job's samples side by side.")
    return out


def _order(i: int, microbatch: Microbatch, reached: dict[int, int]) -> list[str]:
    """Also moves `reached`, the last batch seen of each job."""
    out = []
    batches_of: dict[int, set[int]] = {}
    for sample in microbatch:
        batches_of.setdefault(sample.job, set()).add(sample.batch)
    for job, batches in batches_of.items():
        first, last = min(batches), max(batches)
        if first != last:
            out.append(f"microbatch {i} mixes batches {sorted(batches)} of job {job}.")
        if first < reached.get(job, first):
            out.append(
                f"microbatch {i} holds batch {first} of job {job} after its batch "
                f"{reached[job]}."
            )
        reached[job] = last
    return out


def _apart(schedule: Schedule, distance: int) -> list[str]:
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for i, microbatch in enumerate(schedule.microbatches):
        for key in {(s.job, s.batch) for s in microbatch}:
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
                f"batch {next_batch} of job {job} starts in microbatch {start}, "
                f"{start - end} after batch {batch} ended, not {distance}."
            )
    return out
