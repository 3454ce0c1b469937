"""The decoder of a run with its slots, and whether they can hold a job."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jaxlora.adapters.targets import Targets, choose_linears
from jaxlora.common.patterns import Patterns
from jaxlora.config import RunConfig
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import ConfigError
from jaxlora.models.config import ModelConfig, is_of_expert, shared_path
from jaxlora.models.options import DecoderOptions
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import chosen_experts, linear_names, linear_path
from jaxlora.models.tensor_parallel import part_config
from jaxlora.modules.slot_shape import SlotShape, largest_rows
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.modules.variants.table import replaces_lora
from jaxlora.plan.job.kernel_choice import with_choices
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob


def decoder_spec(
    config: RunConfig,
    planned: PlannedModel,
    jobs: Sequence[PreparedJob],
    max_tokens: int,
) -> tuple[DecoderSpec, str]:
    """Makes the decoder with the slots of a run, and says which kernels run it.

    Args:
        config: The run; its mesh is not `auto`.
        planned: The base model.
        jobs: Jobs of the run that slots and microbatches have to hold.
        max_tokens: Upper bound on the capacity of microbatches.

    Raises:
        ConfigError: No kernels or attention can run the model here.
    """
    model, dtype = planned.config, planned.dtype
    adapted = {shared_path(linear_path(n)) for job in jobs for n in job.adapted}
    if config.slot_targets is not None:
        where = "slot_targets"
        targets = Targets(where=where, target_modules=config.slot_targets)
        more = choose_linears(targets, linear_names(model), Patterns(where))
        adapted |= {shared_path(linear_path(name)) for name in more}
    adapts_experts = any(".experts." in path for path in adapted)
    slots = _slot_shape(config, jobs, model, adapts_experts=adapts_experts)
    most = config.adapters_per_microbatch
    longest = max(job.settings.max_length for job in jobs)
    # Replicas run the same kernels; those of the smallest parts run them all.
    degrees = [config.mesh_sizes.tensor, *(one.tensor for one in config.replica_shapes)]
    part = part_config(model, max(degrees))

    def mean_tokens() -> int:
        # Small replicas run the samples that fit there, which are shorter.
        tokens = (one.tokens for one in config.replica_shapes)
        most = min(tokens, default=max_tokens)
        return min(_mean_tokens(job.train_data, most) for job in jobs)

    options = DecoderOptions(
        dtype=dtype,
        base_format=planned.base_format,
        remat=config.weakest_remat,
        max_segment_tokens=min(longest, max_tokens),
        most_adapters=most if adapts_experts and most < slots.num_slots else None,
        objectives=tuple(sorted({job.settings.objective for job in jobs})),
    )
    spec = DecoderSpec(
        config=model,
        options=options,
        slots=slots,
        adapted=tuple(sorted(adapted)),
    )
    return with_choices(
        spec,
        part,
        attention=config.attention,
        implementation=config.implementation,
        block_tokens=config.block_tokens,
        mean_tokens=mean_tokens,
    )


def needed(job: PreparedJob) -> SlotShape:
    """Returns the smallest slots that can hold a job, and its reference in its place.

    The log-probabilities by a further reference are computed with it in the job's slot.
    """
    settings, held = job.settings, (job, *job.further_references)
    has = [{name for name in tensor_settings() if one.is_set(name)} for one in held]
    ranks = {is_expert: [0] for is_expert in (False, True)}
    for name, rank in job.adapted.items():
        ranks[is_of_expert(name)].append(rank)
    return SlotShape(
        num_slots=1,
        rank=max(1, *ranks[False]),
        expert_rank=max(ranks[True]),
        use_dropout=settings.dropout > 0,
        settings=_in_order(set().union(*has)),
        keeps_start=settings.keeps_start,
        dora_dropout=settings.use_dora and settings.dropout > 0,
        optimizers=(settings.optimizer,),
        outside=largest_rows(one.tokens for one in held),
        has_lora=any(not replaces_lora(names.__contains__) for names in has),
        has_references=job.needs_reference_table,
    )


def _in_order(settings: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in tensor_settings() if name in settings)


def _slot_shape(
    config: RunConfig,
    jobs: Sequence[PreparedJob],
    model: ModelConfig,
    *,
    adapts_experts: bool,
) -> SlotShape:
    """Returns the slots of a run: what any of its jobs needs, or the run asks for."""
    shapes = [needed(job) for job in jobs]

    def joined(name: str) -> Any:
        values = [getattr(shape, name) for shape in shapes]
        if isinstance(values[0], tuple):
            return tuple(sorted(set().union(*values)))
        return max(values)

    found = {field.name: joined(field.name) for field in dataclasses.fields(SlotShape)}
    # It is sorted, so of equal names the largest number stays.
    found["outside"] = tuple(dict(found["outside"]).items())
    found["settings"] = _in_order(found["settings"])
    found["num_slots"] = config.max_concurrent_jobs or len(config.jobs)
    found["rank"] = config.slot_rank or found["rank"]
    # Jobs that join later have experts of such a rank by default.
    scaled = max(1, found["rank"] // chosen_experts(model))
    found["expert_rank"] = max(found["expert_rank"], scaled if adapts_experts else 0)
    if config.slot_dropout is not None:
        found["use_dropout"] = config.slot_dropout
    return SlotShape(**found)


def _mean_tokens(data: TokenizedData, most: int) -> int:
    """Returns the mean length of the samples that are not longer than `most`."""
    lengths = data.lengths
    short = lengths[lengths <= most]
    return int((short if short.size else lengths).mean())


def check_fits(prepared: PreparedJob, spec: DecoderSpec, max_tokens: int) -> None:
    """Checks that the slots and a microbatch can hold a job.

    Args:
        prepared: The job.
        spec: The decoder with the slots.
        max_tokens: Capacity of a microbatch, or an upper bound on it.

    Raises:
        ConfigError: A rank is above the slots', a module has no slots, the job drops
            features and the slots do not, or a sample does not fit into a microbatch.
    """
    _check_slots(prepared, spec)
    _check_modules(prepared, spec)
    _check_start(prepared, spec)
    _check_lengths(prepared, spec, max_tokens)


_SUCH_A_JOB = "Start a run with such a job"
# By field of the slots: what a job has and they do not, for errors, and the cure.
_MISFITS = {
    "use_dropout": (
        "dropout {job.dropout}",
        "Set slot_dropout: true when the run starts",
    ),
    "keeps_start": ("init_lora_weights {job.init_lora_weights}", _SUCH_A_JOB),
    "dora_dropout": (
        "use_dora with dropout {job.dropout}",
        f"{_SUCH_A_JOB}, or leave dropout out",
    ),
    "has_references": (
        "an adapter as reference in each step",
        f"Set objective_args.reference_logps: kept. {_SUCH_A_JOB} otherwise",
    ),
    "optimizers": ("optimizer {need}", _SUCH_A_JOB),
    "rank": ("rank {need}", "Lower it, or set slot_rank to at least {need}"),
    "expert_rank": (
        "experts of rank {need}",
        "Lower expert_rank, or start a run with such a job",
    ),
    "settings": ("{need}", "Start the run with a job that has {need}: true"),
    "has_lora": ("A and B", "Start the run with a job of LoRA beside those of VeRA"),
}


def _check_slots(prepared: PreparedJob, spec: DecoderSpec) -> None:
    """Checks that the slots have all that a job needs, field by field."""
    assert spec.slots is not None
    shape, whose = needed(prepared), f"job {prepared.name!r}"
    if prepared.objective.name not in spec.options.objectives:
        raise ConfigError(
            f"{whose} has objective {prepared.objective.name!r}, and this run was "
            f"started for {', '.join(spec.options.objectives)}. Start a run with a job "
            "of this objective."
        )
    if prepared.further_references:
        whose += " with its reference"
    elif prepared.settings.keeps_start:
        whose += " with the first weights that it keeps"
    for field, (has, cure) in _MISFITS.items():
        need, have = getattr(shape, field), getattr(spec.slots, field)
        if isinstance(need, tuple):
            lacking = [name for name in need if name not in have]
            need, have = ", ".join(lacking), ", ".join(have)
        else:
            lacking = need > have
        if lacking:
            made = f"for {have}" if have else "without that"
            text = f"has {has}, and the slots of this run were made {made}. {cure}."
            text = text.format(need=need, job=prepared.settings)
            raise ConfigError(f"{whose} {text}")
    for name, number in shape.outside:
        if number > (have := spec.slots.num_rows(name)):
            made = f"for {have}" if have else "without that"
            raise ConfigError(
                f"{whose} has {SLOT_MODULES[name].describe(number)}, and the slots of "
                f"this run were made {made}. {_SUCH_A_JOB}, or train this one in "
                "another run."
            )


def _check_modules(prepared: PreparedJob, spec: DecoderSpec) -> None:
    for module in prepared.adapted:
        if shared_path(linear_path(module)) not in spec.adapted:
            raise ConfigError(
                f"job {prepared.name!r} adapts {module}, which has no slots in this "
                "run. Add the module to slot_targets when the run starts."
            )


def _check_start(prepared: PreparedJob, spec: DecoderSpec) -> None:
    """Checks that no weight of which the job takes a part is quantized."""
    name, settings = prepared.name, prepared.settings
    for module in prepared.modules:
        weight_format = spec.options.weight_format(linear_path(module))
        if settings.keeps_start and weight_format:
            raise ConfigError(
                f"job {name!r} has init_lora_weights {settings.init_lora_weights}, "
                f"which takes a part of {module}, and this weight is quantized. Use a "
                "base that is not, or leave init_lora_weights out."
            )


def _check_lengths(prepared: PreparedJob, spec: DecoderSpec, max_tokens: int) -> None:
    name = prepared.name
    longest = max(data.longest_sample for data in prepared.data)
    limit = spec.options.max_segment_tokens
    if longest > limit:
        raise ConfigError(
            f"job {name!r} has a sample of {longest} tokens, and this run supports "
            f"samples of at most {limit}. Raise microbatch_tokens (and, for a job that "
            "joins later, the max_length of the jobs it starts with), or lower the "
            "job's max_length."
        )
    if (longest := prepared.longest_group) > max_tokens:
        size = prepared.objective.group_size
        raise ConfigError(
            f"job {name!r} has {size} samples that are trained on together, of "
            f"{longest} tokens in all, and a microbatch holds {max_tokens}. Raise "
            "microbatch_tokens, or lower the job's max_length."
        )
