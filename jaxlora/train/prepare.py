"""Prepares a run from its settings: data, targets and the decoder with its slots."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.peft_import import import_peft
from jaxlora.adapters.slots import fresh_adapter
from jaxlora.adapters.targets import check_ranks, resolve_targets
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokenize import TokenizedData, tokenize_job
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.load import BaseModel
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.models.base_format import BaseFormat, kernel_of
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.pallas_kernels import QuantizedWeight
from jaxlora.train.job_run import JobRun
from jaxlora.train.kernel_choice import choose_attention, choose_kernels, log_choices
from jaxlora.train.quantized_base import run_format

logger = logging.getLogger(__name__)

_SCALING_FIELDS = {"lora_alpha", "alpha_pattern", "use_rslora"}


def linear_shapes(model: BaseModel) -> dict[str, tuple[int, ...]]:
    """Returns the shape (K, N) of every linear that can take LoRA, by module name."""
    return {name: kernel.shape for name, kernel in _kernels(model).items()}


def _kernels(model: BaseModel) -> dict[str, jax.Array | QuantizedWeight]:
    """Returns the weight of every linear that can take LoRA, by module name."""
    return {
        name: kernel_of(model.params, f"{linear_path(name)}.kernel", model.base_format)
        for name in linear_names(model.config)
    }


def open_job(job: LoraJob, model: BaseModel, tokenizer: Tokenizer) -> JobRun:
    """Reads a job's data and selects the modules to adapt; logs both.

    Raises:
        JaxloraError: The data, the targets or the adapter to start from cannot be used.
    """
    if job.init_from is None:
        modules = resolve_targets(job, linear_names(model.config))
        check_ranks(job, modules, linear_shapes(model))
        start = fresh_adapter(job, modules, _kernels(model))
    else:
        start = import_peft(job.init_from, linear_shapes(model))
        start = dataclasses.replace(start, dropout=job.dropout)
        _check_stated_settings(job, start, model)
    train, held_out = read_data(job, tokenizer)
    warn_about_positions(job.name, train, held_out, model.config.max_positions)
    ranks = sorted({weights.rank for weights in start.modules.values()})
    logger.info(
        "%s: rank %s on %d modules: %s",
        job.name,
        "/".join(map(str, ranks)),
        len(start.modules),
        ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in start.modules)),
    )
    return JobRun(job, start, train, held_out)


def read_data(
    job: LoraJob, tokenizer: Tokenizer
) -> tuple[TokenizedData, TokenizedData | None]:
    """Reads a job's training samples and its held-out ones, if any; logs both.

    Raises:
        JaxloraError: The data cannot be used.
    """
    train, held_out = tokenize_job(job, tokenizer, "train"), None
    if job.eval_data is not None or job.eval_fraction > 0:
        held_out = tokenize_job(job, tokenizer, "eval")
    for data in filter(None, (train, held_out)):
        logger.info("%s: %s", job.name, data.summary())
    return train, held_out


def warn_about_positions(
    name: str, train: TokenizedData, held_out: TokenizedData | None, positions: int
) -> None:
    """Warns, once, of samples that are longer than the model's position limit.

    Args:
        name: Name of the job.
        train: Training samples of the job.
        held_out: Held-out samples of the job, if any.
        positions: The model's `max_position_embeddings`.
    """
    lengths = _lengths(train, held_out)
    num_beyond = np.count_nonzero(lengths > positions)
    if num_beyond:
        logger.warning(
            "%s: %d of %d samples are longer than the %d positions that the model "
            "supports (max_position_embeddings); the longest has %d tokens. Set "
            "max_length to %d, or expect worse results on them.",
            name,
            num_beyond,
            len(lengths),
            positions,
            lengths.max(),
            positions,
        )


def _lengths(train: TokenizedData, held_out: TokenizedData | None) -> np.ndarray:
    return np.concatenate([d.lengths for d in (train, held_out) if d is not None])


def _check_stated_settings(job: LoraJob, start: Adapter, model: BaseModel) -> None:
    """Checks that a job's settings do not contradict the adapter it starts from."""
    stated = job.model_fields_set
    asked = resolve_targets(job, linear_names(model.config))
    differences = []
    if stated & {"target_modules", "exclude_modules"}:
        for name in sorted(asked.keys() ^ start.modules.keys()):
            verb = "adapts" if name in start.modules else "does not adapt"
            differences.append(f"{verb} {name}")
    for setting in tensor_settings():
        if getattr(job, setting) != start.is_set(setting):
            differences.append(f"has {setting}={str(start.is_set(setting)).lower()}")
    for name, weights in start.modules.items():
        if name not in asked:
            continue
        if stated & {"rank", "rank_pattern"} and asked[name].rank != weights.rank:
            differences.append(f"has rank {weights.rank} on {name}")
        scaling = start.scaling(weights)
        if stated & _SCALING_FIELDS and asked[name].scaling != scaling:
            differences.append(f"has scaling {scaling:g} on {name}")
    if differences:
        raise ConfigError(
            f"job {job.name!r} starts from {job.init_from}, and its settings differ "
            f"from that adapter, which {differences[0]}. Leave out rank, lora_alpha "
            "and targets: they are taken from the folder."
        )


def decoder_spec(
    config: RunConfig, model: BaseModel, runs: list[JobRun], max_tokens: int
) -> DecoderSpec:
    """Makes the decoder with the slot tables of the run; logs which kernels run."""
    ranks = [{n: w.rank for n, w in run.start.modules.items()} for run in runs]
    train = [run.train_data for run in runs]
    base_format = run_format(config, model.config, model.base_format)
    return spec_of(
        config, model.config, model.dtype, base_format, ranks, train, max_tokens
    )


def spec_of(
    config: RunConfig,
    model: ModelConfig,
    dtype: jnp.dtype,
    base_format: BaseFormat | None,
    ranks: Sequence[Mapping[str, int]],
    train: Sequence[TokenizedData],
    max_tokens: int,
) -> DecoderSpec:
    """Makes the decoder as `decoder_spec` does, but for a model without weights.

    Args:
        config: The run.
        model: Architecture of the model.
        dtype: Dtype of the weights that are not quantized.
        base_format: How linears are quantized; None: they are not.
        ranks: For each job, the rank of each module that it adapts.
        train: Training samples of each job.
        max_tokens: Upper bound on the capacity of microbatches.
    """
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
        base_format=base_format,
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


def check_fits(run: JobRun, spec: DecoderSpec) -> None:
    """Checks that the slots and a microbatch can hold a job.

    Raises:
        ConfigError: A rank is above the slots', a module has no slots, the job drops
            features and the slots do not, or a sample does not fit into a microbatch.
    """
    assert spec.slots is not None
    name = run.job.name
    if run.job.dropout > 0 and not spec.slots.use_dropout:
        raise ConfigError(
            f"job {name!r} has dropout {run.job.dropout}, and the slots of this run "
            "were made without dropout. Set slot_dropout: true when the run starts."
        )
    if run.largest_rank > spec.slots.rank:
        raise ConfigError(
            f"job {name!r} has rank {run.largest_rank}, above the slots' rank "
            f"{spec.slots.rank}. Lower it, or set slot_rank to at least "
            f"{run.largest_rank}."
        )
    for setting in tensor_settings():
        if run.start.is_set(setting) and setting not in spec.slots.settings:
            raise ConfigError(
                f"job {name!r} has {setting}, and the slots of this run were made "
                f"without. Start the run with a job that has {setting}: true."
            )
    for module in run.start.modules:
        if linear_path(module) not in spec.adapted:
            raise ConfigError(
                f"job {name!r} adapts {module}, which has no slots in this run. Add "
                "the module to slot_targets when the run starts."
            )
    limit = spec.options.max_segment_tokens
    check_lengths(name, run.train_data, run.eval_data, limit)


def check_lengths(
    name: str, train: TokenizedData, held_out: TokenizedData | None, limit: int
) -> None:
    """Checks that no sample of a job is too long for the run.

    Args:
        name: Name of the job.
        train: Training samples of the job.
        held_out: Held-out samples of the job, if any.
        limit: Largest number of tokens of a sample that the run supports.

    Raises:
        ConfigError: A sample is longer.
    """
    longest = _lengths(train, held_out).max()
    if longest > limit:
        raise ConfigError(
            f"job {name!r} has a sample of {longest} tokens, and this run supports "
            f"samples of at most {limit}. Raise microbatch_tokens (and, for a job that "
            "joins later, the max_length of the jobs it starts with), or lower the "
            "job's max_length."
        )
