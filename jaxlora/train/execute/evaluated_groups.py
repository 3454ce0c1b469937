"""Which groups of held-out samples are evaluated together."""

from collections.abc import Mapping

from jaxlora.data.pack import JobBatch


def all_groups(batches: Mapping[int, JobBatch]) -> dict[int, range]:
    """Returns all groups of samples of batches, by slot."""
    return {slot: range(batch.num_groups) for slot, batch in batches.items()}


def rounds(
    batches: Mapping[int, JobBatch], ranges: Mapping[int, Mapping[str, range]]
) -> list[dict[int, range]]:
    """Returns the groups that are evaluated together, by slot: a data set of each job.

    Microbatches then hold samples of one data set of a job, so that their sums are
    those of the data set.
    """
    whole = all_groups(batches)
    sets = {slot: [*ranges[slot].values()] or [whole[slot]] for slot in batches}
    return [
        {slot: groups[number] for slot, groups in sets.items() if number < len(groups)}
        for number in range(max(map(len, sets.values())))
    ]
