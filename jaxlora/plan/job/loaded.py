"""The adapters that the slots of a run have to hold for a job."""

import dataclasses
from collections.abc import Collection, Mapping

from jaxlora.adapters.adapter import Adapter
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.plan.job.prepared_job import PreparedJob


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Loaded:
    """The shapes of an adapter that is put into a slot.

    Attributes:
        whose: Names it for errors, as the subject of a sentence.
        ranks: Rank of each linear that it adapts, by module name.
        settings: The settings of jobs that give it tensors, such as `use_dora`.
        token_ids: Tokens whose rows of `embed_tokens` and of `lm_head` it trains.
        whole_modules: Modules of which it trains whole copies.
        adapter: The adapter, if it was read from a folder.
    """

    whose: str
    ranks: Mapping[str, int]
    settings: Collection[str]
    token_ids: Mapping[str, Collection[int]]
    whole_modules: Collection[str]
    adapter: Adapter | None


def loaded_by(job: PreparedJob) -> list[Loaded]:
    """Returns the adapter of a job, and that of its reference if it is a further one.

    The log-probabilities by the reference are computed with it in the job's slot.
    """
    whole = " with the first weights that it keeps" if job.settings.keeps_start else ""
    own = Loaded(
        whose=f"job {job.name!r}{whole}",
        ranks=job.ranks,
        settings=[name for name in tensor_settings() if job.is_set(name)],
        token_ids=job.token_ids,
        whole_modules=job.settings.modules_to_save,
        adapter=job.start,
    )
    reference = job.reference
    if reference is None or reference is job.start:
        return [own]
    return [
        own,
        Loaded(
            whose=f"the reference of job {job.name!r}",
            ranks={name: one.rank for name, one in reference.modules.items()},
            settings=[name for name in tensor_settings() if reference.is_set(name)],
            token_ids=reference.token_ids,
            whole_modules=reference.modules_to_save,
            adapter=reference,
        ),
    ]
