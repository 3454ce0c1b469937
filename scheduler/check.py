"""The rules of a schedule, as sentences; apart from everything that makes one."""

from collections import Counter
from collections.abc import Iterable

from scheduler.types import Sample, Schedule, padded_tokens


def violations(schedule: Schedule, samples: Iterable[Sample]) -> list[str]:
    """What is wrong with a schedule of `samples`; empty when nothing is.

    The rules: each sample appears once; a microbatch stays within its capacity; a job
    has one global batch in a microbatch, and its batches come in order; a job's samples
    stand side by side.
    """
    out = []
    wanted = Counter(samples)
    found = Counter(s for m in schedule.microbatches for s in m)
    out += [f"{s} is scheduled {n} times, not once." for s, n in found.items() if n > 1]
    out += [f"{s} is not scheduled." for s in wanted - found]
    out += [f"{s} is scheduled but was not asked for." for s in found - wanted]
    reached: dict[int, int] = {}
    for i, microbatch in enumerate(schedule.microbatches):
        padded = padded_tokens(microbatch, schedule.limits)
        if padded > schedule.limits.capacity:
            out.append(
                f"microbatch {i} takes {padded} tokens, over its capacity of "
                f"{schedule.limits.capacity}."
            )
        if not microbatch:
            out.append(f"microbatch {i} is empty.")
        for job in dict.fromkeys(s.job for s in microbatch):
            batches = sorted({s.batch for s in microbatch if s.job == job})
            if len(batches) > 1:
                out.append(f"microbatch {i} mixes batches {batches} of job {job}.")
            if batches[0] < reached.get(job, batches[0]):
                out.append(
                    f"microbatch {i} holds batch {batches[0]} of job {job} after its "
                    f"batch {reached[job]}."
                )
            reached[job] = batches[-1]
        runs = [
            s.job
            for i, s in enumerate(microbatch)
            if i == 0 or s.job != microbatch[i - 1].job
        ]
        if len(runs) != len(set(runs)):
            out.append(f"microbatch {i} does not keep a job's samples side by side.")
    return out
