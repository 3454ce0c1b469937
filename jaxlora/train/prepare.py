"""Prepares a run from its settings: data, targets and the decoder with its slots."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxlora.adapters.slots import fresh_adapter
from jaxlora.adapters.targets import resolve_targets
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokenize import DataReader, TokenizedData
from jaxlora.errors import ConfigError
from jaxlora.hf import names
from jaxlora.hf.load import BaseModel
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.models.base_format import kernel_of
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.train.job_run import JobRun
from jaxlora.train.kernel_choice import choose_attention, choose_kernels, log_choices
from jaxlora.train.planned_model import PlannedModel
from jaxlora.train.prepared_job import PreparedJob, longest_sample, prepare_job


def linear_shapes(model: BaseModel) -> dict[str, tuple[int, int]]:
    """Returns the shape (K, N) of every linear that can take LoRA, by module name."""
    return names.linear_shapes(model.config)


def open_job(job: LoraJob, model: BaseModel, reader: DataReader) -> JobRun:
    """Prepares a job and makes the adapter that it starts from.

    Raises:
        JaxloraError: The data, the targets or the adapter to start from cannot be used.
    """
    return start_job(prepare_job(job, model.config, reader), model)


def start_job(prepared: PreparedJob, model: BaseModel) -> JobRun:
    """Makes the adapter that a job starts from."""
    job, start = prepared.job, prepared.start
    if start is None:
        kernels = {
            name: kernel_of(
                model.params, f"{linear_path(name)}.kernel", model.base_format
            )
            for name in prepared.modules
        }
        start = fresh_adapter(job, prepared.modules, kernels)
    return JobRun(job, start, prepared.train_data, prepared.eval_data)


def decoder_spec(
    config: RunConfig, model: BaseModel, runs: list[JobRun], max_tokens: int
) -> DecoderSpec:
    """Makes the decoder with the slot tables of the run; logs which kernels run."""
    ranks = [{n: w.rank for n, w in run.start.modules.items()} for run in runs]
    train = [run.train_data for run in runs]
    planned = PlannedModel.of(config, model)
    return spec_of(config, planned, ranks, train, max_tokens)


def spec_of(
    config: RunConfig,
    planned: PlannedModel,
    ranks: Sequence[Mapping[str, int]],
    train: Sequence[TokenizedData],
    max_tokens: int,
) -> DecoderSpec:
    """Makes the decoder as `decoder_spec` does, but for a model without weights.

    Args:
        config: The run.
        planned: The base model.
        ranks: For each job, the rank of each module that it adapts.
        train: Training samples of each job.
        max_tokens: Upper bound on the capacity of microbatches.
    """
    model, dtype = planned.config, planned.dtype
    adapted = {linear_path(name) for modules in ranks for name in modules}
    if config.slot_targets is not None:
        slots = LoraJob(
            name="slot_targets",
            data=config.jobs[0].data,
            target_modules=config.slot_targets,
        )
        more = resolve_targets(slots, linear_names(model))
        adapted |= {linear_path(name) for name in more}
    longest = max(job.max_length for job in config.jobs)
    attention = choose_attention(config.attention, dtype, model)
    options = DecoderOptions(
        dtype=dtype,
        base_format=planned.base_format,
        remat=config.least_remat,
        attention=attention.name,
        max_segment_tokens=min(longest, max_tokens),
        mean_segment_tokens=min(map(_mean_tokens, train)),
    )
    shape = SlotShape(
        num_slots=config.max_concurrent_jobs or len(ranks),
        rank=config.slot_rank or max(max(modules.values()) for modules in ranks),
        use_dropout=(
            any(job.dropout > 0 for job in config.jobs)
            if config.slot_dropout is None
            else config.slot_dropout
        ),
        settings=tuple(
            setting
            for setting in tensor_settings()
            if any(getattr(job, setting) for job in config.jobs)
        ),
    )
    spec = DecoderSpec(
        config=model, options=options, slots=shape, adapted=tuple(sorted(adapted))
    )
    kernels = choose_kernels(config.implementation, spec, config.block_tokens)
    log_choices(kernels, attention)
    options = dataclasses.replace(options, implementation=kernels.name)
    return dataclasses.replace(spec, options=options)


def _mean_tokens(data: TokenizedData) -> int:
    return data.num_tokens // len(data.samples)


def check_fits(prepared: PreparedJob, spec: DecoderSpec) -> None:
    """Checks that the slots and a microbatch can hold a job.

    Raises:
        ConfigError: A rank is above the slots', a module has no slots, the job drops
            features and the slots do not, or a sample does not fit into a microbatch.
    """
    assert spec.slots is not None
    name, largest = prepared.job.name, max(prepared.ranks.values())
    if prepared.job.dropout > 0 and not spec.slots.use_dropout:
        raise ConfigError(
            f"job {name!r} has dropout {prepared.job.dropout}, and the slots of this "
            "run were made without dropout. Set slot_dropout: true when the run starts."
        )
    if largest > spec.slots.rank:
        raise ConfigError(
            f"job {name!r} has rank {largest}, above the slots' rank "
            f"{spec.slots.rank}. Lower it, or set slot_rank to at least {largest}."
        )
    for setting in tensor_settings():
        if prepared.is_set(setting) and setting not in spec.slots.settings:
            raise ConfigError(
                f"job {name!r} has {setting}, and the slots of this run were made "
                f"without. Start the run with a job that has {setting}: true."
            )
    for module in prepared.modules:
        if linear_path(module) not in spec.adapted:
            raise ConfigError(
                f"job {name!r} adapts {module}, which has no slots in this run. Add "
                "the module to slot_targets when the run starts."
            )
    longest, limit = longest_sample(prepared), spec.options.max_segment_tokens
    if longest > limit:
        raise ConfigError(
            f"job {name!r} has a sample of {longest} tokens, and this run supports "
            f"samples of at most {limit}. Raise microbatch_tokens (and, for a job that "
            "joins later, the max_length of the jobs it starts with), or lower the "
            "job's max_length."
        )
