"""The decoder of a run with its slots, and whether they can hold a job."""

import dataclasses
from collections.abc import Sequence

from jaxlora.adapters.targets import Targets, choose_linears
from jaxlora.common.patterns import Patterns
from jaxlora.config import RunConfig
from jaxlora.config.starts import LOFTQ_FORMATS
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import ConfigError
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.tensor_parallel import part_config
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.plan.job.kernel_choice import (
    KernelChoices,
    choose_attention,
    choose_kernels,
)
from jaxlora.plan.job.loaded import Loaded, loaded_by
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob, longest_group, longest_sample


def decoder_spec(
    config: RunConfig,
    planned: PlannedModel,
    jobs: Sequence[PreparedJob],
    max_tokens: int,
) -> tuple[DecoderSpec, KernelChoices]:
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
    loaded = [one for job in jobs for one in loaded_by(job)]
    adapted = {linear_path(name) for one in loaded for name in one.ranks}
    if config.slot_targets is not None:
        where = "slot_targets"
        targets = Targets(where=where, target_modules=config.slot_targets)
        more = choose_linears(targets, linear_names(model), Patterns(where))
        adapted |= {linear_path(name) for name in more}
    longest = max(job.settings.max_length for job in jobs)
    # Replicas run the same kernels; those of the smallest parts run them all.
    degrees = [config.mesh_sizes.tensor, *(one.tensor for one in config.replica_shapes)]
    part = part_config(model, max(degrees))
    attention = choose_attention(config.attention, dtype, part)
    options = DecoderOptions(
        dtype=dtype,
        base_format=planned.base_format,
        remat=config.weakest_remat,
        attention=attention.name,
        max_segment_tokens=min(longest, max_tokens),
        objectives=tuple(sorted({job.settings.objective for job in jobs})),
    )
    # Otherwise, other data of the same shapes would be compiled for anew.
    if ATTENTIONS[attention.name].depends_on_mean:
        # Small replicas run the samples that fit there, which are shorter.
        tokens = (one.tokens for one in config.replica_shapes)
        most = min(tokens, default=max_tokens)
        mean = min(_mean_tokens(job.train_data, most) for job in jobs)
        options = dataclasses.replace(options, mean_segment_tokens=mean)
    spec = DecoderSpec(
        config=model,
        options=options,
        slots=_slot_shape(config, jobs, loaded),
        adapted=tuple(sorted(adapted)),
    )
    on_device = dataclasses.replace(spec, config=part)
    kernels = choose_kernels(config.implementation, on_device, config.block_tokens)
    options = dataclasses.replace(options, implementation=kernels.name)
    spec = dataclasses.replace(spec, options=options)
    return spec, KernelChoices(kernels=kernels, attention=attention)


def _slot_shape(
    config: RunConfig, jobs: Sequence[PreparedJob], loaded: Sequence[Loaded]
) -> SlotShape:
    """Returns the shape of slots that can hold each of the jobs and its reference."""
    settings = [job.settings for job in jobs]
    return SlotShape(
        num_slots=config.max_concurrent_jobs or len(config.jobs),
        rank=config.slot_rank or max(max(one.ranks.values()) for one in loaded),
        use_dropout=(
            any(job.dropout > 0 for job in settings)
            if config.slot_dropout is None
            else config.slot_dropout
        ),
        settings=tuple(
            setting
            for setting in tensor_settings()
            if any(setting in one.settings for one in loaded)
        ),
        keeps_start=any(job.keeps_start for job in settings),
        dora_dropout=any(job.use_dora and job.dropout > 0 for job in settings),
        optimizers=tuple(sorted({job.optimizer for job in settings})),
        has_score=any(job.objective.has_score for job in jobs),
        num_token_rows=max(len(one.token_ids["embed_tokens"]) for one in loaded),
        num_head_rows=max(len(one.token_ids["lm_head"]) for one in loaded),
        whole_modules=tuple(sorted({m for one in loaded for m in one.whole_modules})),
        has_lora=not all("use_vera" in one.settings for one in loaded),
        has_references=any(job.needs_reference_table for job in jobs),
    )


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
    _check_dropout(prepared, spec)
    _check_kinds(prepared, spec)
    for one in loaded_by(prepared):
        _check_tables(one, spec)
        _check_modules(one, spec)
    _check_start(prepared, spec)
    _check_lengths(prepared, spec, max_tokens)


def _check_dropout(prepared: PreparedJob, spec: DecoderSpec) -> None:
    assert spec.slots is not None
    name = prepared.name
    if prepared.settings.dropout > 0 and not spec.slots.use_dropout:
        raise ConfigError(
            f"job {name!r} has dropout {prepared.settings.dropout}, and the slots of "
            "this run were made without dropout. Set slot_dropout: true when the run "
            "starts."
        )
    if prepared.settings.keeps_start and not spec.slots.keeps_start:
        raise ConfigError(
            f"job {name!r} has init_lora_weights {prepared.settings.init_lora_weights},"
            " and this run was started without a job of this kind. Start a run with "
            "such a job."
        )
    drops_dora = prepared.settings.dropout > 0 and prepared.is_set("use_dora")
    if drops_dora and not spec.slots.dora_dropout:
        raise ConfigError(
            f"job {name!r} has use_dora and dropout {prepared.settings.dropout}, and "
            "this run was started without a job that has both. Start a run with such "
            "a job, or leave dropout out."
        )


def _check_tables(one: Loaded, spec: DecoderSpec) -> None:
    assert spec.slots is not None
    whose, largest = one.whose, max(one.ranks.values())
    if largest > spec.slots.rank:
        raise ConfigError(
            f"{whose} has rank {largest}, above the slots' rank {spec.slots.rank}. "
            f"Lower it, or set slot_rank to at least {largest}."
        )
    for setting in one.settings:
        if setting not in spec.slots.settings:
            raise ConfigError(
                f"{whose} has {setting}, and the slots of this run were made "
                f"without. Start the run with a job that has {setting}: true."
            )
    sizes = {
        "embed_tokens": spec.slots.num_token_rows,
        "lm_head": spec.slots.num_head_rows,
    }
    for module, size in sizes.items():
        if (num := len(one.token_ids[module])) > size:
            raise ConfigError(
                f"{whose} has {num} trainable_token_indices of {module}, and the "
                f"slots of this run hold {size}. Start the run with a job that has as "
                "many."
            )
    for module in one.whole_modules:
        if module not in spec.slots.whole_modules:
            raise ConfigError(
                f"{whose} has modules_to_save, and the slots of this run were made "
                f"without whole copies of {module}. Start the run with a job that has "
                "them, or train this one in another run."
            )
    if not ("use_vera" in one.settings or spec.slots.has_lora):
        raise ConfigError(
            f"{whose} has A and B, and this run was started for jobs with use_vera "
            "alone, which have none. Start the run with a job of LoRA."
        )


def _check_kinds(prepared: PreparedJob, spec: DecoderSpec) -> None:
    assert spec.slots is not None
    name = prepared.name
    if prepared.needs_reference_table and not spec.slots.has_references:
        raise ConfigError(
            f"job {name!r} compares with {prepared.describe_reference()} in each step, "
            "and this run was started without such a job, so that there is no memory "
            "for its reference. Set objective_args.reference_logps: kept, or start the "
            "run with such a job."
        )
    if prepared.settings.optimizer not in spec.slots.optimizers:
        raise ConfigError(
            f"job {name!r} has optimizer {prepared.settings.optimizer!r}, and this run "
            f"was started for {', '.join(spec.slots.optimizers)}. Start the run with a "
            "job of this optimizer."
        )
    if prepared.objective.name not in spec.options.objectives:
        raise ConfigError(
            f"job {name!r} has objective {prepared.objective.name!r}, and this run "
            f"was started for {', '.join(spec.options.objectives)}. Start a run with a "
            "job of this objective."
        )


def _check_modules(one: Loaded, spec: DecoderSpec) -> None:
    for module in one.ranks:
        path = linear_path(module)
        if one.adapter is not None:
            one.adapter.check_format(spec.options.weight_format(path))
        if path not in spec.adapted:
            raise ConfigError(
                f"{one.whose} adapts {module}, which has no slots in this run. Add the "
                "module to slot_targets when the run starts."
            )


def _check_start(prepared: PreparedJob, spec: DecoderSpec) -> None:
    """Checks that weights are quantized if, and only if, the job starts from that."""
    name, settings = prepared.name, prepared.settings
    for module in prepared.modules:
        weight_format = spec.options.weight_format(linear_path(module))
        if settings.keeps_start and weight_format:
            raise ConfigError(
                f"job {name!r} has init_lora_weights {settings.init_lora_weights}, "
                f"which takes a part of {module}, and this weight is quantized. Use a "
                "base that is not, or leave init_lora_weights out."
            )
        if (bits := settings.loftq_bits) is None or (
            wanted := LOFTQ_FORMATS[bits]
        ) == weight_format:
            continue
        raise ConfigError(
            f"job {name!r} has init_lora_weights=loftq, which starts from the error of "
            f"weights in {wanted}, and {module} is {weight_format or 'not quantized'}. "
            f"Set quantize_base: {wanted}, exclude the module, or leave "
            "init_lora_weights out."
        )


def _check_lengths(prepared: PreparedJob, spec: DecoderSpec, max_tokens: int) -> None:
    name = prepared.name
    longest, limit = longest_sample(prepared), spec.options.max_segment_tokens
    if longest > limit:
        raise ConfigError(
            f"job {name!r} has a sample of {longest} tokens, and this run supports "
            f"samples of at most {limit}. Raise microbatch_tokens (and, for a job that "
            "joins later, the max_length of the jobs it starts with), or lower the "
            "job's max_length."
        )
    if (longest := longest_group(prepared)) > max_tokens:
        size = prepared.objective.group_size
        raise ConfigError(
            f"job {name!r} has {size} samples that are trained on together, of "
            f"{longest} tokens in all, and a microbatch holds {max_tokens}. Raise "
            "microbatch_tokens, or lower the job's max_length."
        )
