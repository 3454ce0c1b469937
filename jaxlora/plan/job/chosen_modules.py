"""The modules that a job adapts, its start and its reference."""

import dataclasses
import json
import logging
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence

from jaxlora.adapters.adapter import Adapter, lora_scaling
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.fresh import fresh_outside
from jaxlora.adapters.targets import (
    ModuleLora,
    check_ranks,
    resolve_targets,
)
from jaxlora.config import LoraJob
from jaxlora.config.rules import NOT_OF_VERA
from jaxlora.errors import AdapterError, ConfigError
from jaxlora.models.config import ModelConfig, is_of_expert
from jaxlora.models.slot_modules import SCORE, Tokens, asked_modules
from jaxlora.models.structure import (
    chosen_experts,
    linear_names,
    linear_shapes,
)
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.objectives.base import reference_of
from jaxlora.objectives.table import find_objective, smallest_batch

logger = logging.getLogger(__name__)

# Settings that say what a folder says, unless they are left out.
_TARGET_FIELDS = (
    *("target_modules", "target_parameters", "exclude_modules"),
    *("layers_to_transform", "layers_pattern"),
)
_RANK_FIELDS = "rank", "rank_pattern", "expert_rank"
_SCALING_FIELDS = "lora_alpha", "alpha_pattern", "use_rslora"
_NO_FOLDERS = None, "base", "start"  # references that are no further adapter


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChosenModules:
    """The modules that a job adapts.

    Attributes:
        modules: Rank and scaling of each linear that it adapts, by module name.
        start: Adapter of `init_from`; None: the job starts from fresh weights.
        reference: Adapter with which the objective compares; None: it is the base, or
            there is no reference.
        asked: What its settings ask for outside the linears, as `Adapter.tokens`.
    """

    modules: Mapping[str, ModuleLora]
    start: Adapter | None
    reference: Adapter | None = None
    asked: Mapping[str, Tokens] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> Mapping[str, Tokens]:
        """The modules outside the linears that the job trains; see `Adapter.tokens`."""
        return self.asked if self.start is None else self.start.tokens


def choose_modules(
    job: LoraJob,
    model: ModelConfig,
    token_id: Callable[[str], int | None] = lambda text: None,
) -> ChosenModules:
    """Chooses the modules that a job adapts, by its targets or those of `init_from`.

    Args:
        job: The job.
        model: The base model.
        token_id: Returns the id of a token of its tokenizer by text; None: there is no
            such token.

    Raises:
        JaxloraError: They do not fit the model.
    """
    job, shapes = _with_new_tokens(job, model, token_id), linear_shapes(model)
    _check_tokens(job, model)
    _check_whole(job, model)
    if job.init_from is None:
        chosen = chosen_experts(model)
        modules = resolve_targets(job, tuple(shapes), chosen_experts=chosen)
        check_ranks(job, modules, shapes)
        _check_expert_rank(job, modules)
        if job.keeps_start:
            modules = {name: module.doubled(job) for name, module in modules.items()}
        reference = _read_reference(job, model, None)
        asked = asked_modules(job, find_objective(job.objective))
        return ChosenModules(
            modules=modules, start=None, reference=reference, asked=asked
        )
    has_score = find_objective(job.objective).has_score
    size = model.hidden_size if has_score else None
    start = import_peft(job.init_from, shapes, score_size=size)
    start.check_base(model)
    start = dataclasses.replace(start, dropout=job.dropout)
    _check_start(job, start, model)
    if has_score and SCORE.name not in start.outside:
        score = fresh_outside(job, {SCORE.name: ()}, model, {})
        start = dataclasses.replace(start, outside=start.outside | score)
    _check_stated_settings(job, start, model)
    modules = {
        name: ModuleLora(
            rank=weights.rank,
            lora_alpha=weights.lora_alpha,
            scaling=start.scaling(weights),
        )
        for name, weights in start.modules.items()
    }
    reference = _read_reference(job, model, start)
    return ChosenModules(modules=modules, start=start, reference=reference)


def _with_new_tokens(
    job: LoraJob, model: ModelConfig, token_id: Callable[[str], int | None]
) -> LoraJob:
    """Returns the job with its new tokens among `trainable_token_indices`."""
    if not job.new_special_tokens:
        return job
    ids = {text: token_id(text) for text in job.new_special_tokens}
    if missing := [text for text, number in ids.items() if number is None]:
        raise ConfigError(
            f"job {job.name!r} has new_special_tokens {missing[0]!r}, which the base's "
            "tokenizer lacks. Add it: `jaxlora convert MODEL OUT --new-tokens "
            f"{shlex.join(missing)}` writes a base with it."
        )
    rows, new = job.token_ids, [i for i in ids.values() if i is not None]
    has_score = find_objective(job.objective).has_score
    for module in ("embed_tokens", "lm_head"):
        is_used = module == "embed_tokens" or not (model.tie_embeddings or has_score)
        if is_used and module not in job.modules_to_save:
            rows[module] = tuple(dict.fromkeys((*rows[module], *new)))
    return job.replace(trainable_token_indices=rows)


def _check_expert_rank(job: LoraJob, modules: Mapping[str, ModuleLora]) -> None:
    if job.changes("expert_rank") and not any(map(is_of_expert, modules)):
        raise ConfigError(
            f"job {job.name!r} has expert_rank={job.expert_rank} and adapts no linears "
            "of experts. Leave it out, or name some in target_modules."
        )


def _check_tokens(job: LoraJob, model: ModelConfig) -> None:
    of_embedding, of_head = job.token_ids["embed_tokens"], job.token_ids["lm_head"]
    if wrong := [t for t in (*of_embedding, *of_head) if t >= model.vocab_size]:
        raise ConfigError(
            f"job {job.name!r}: trainable_token_indices has {wrong[0]}, and the base "
            f"model has {model.vocab_size} tokens. Resize its embedding first, as "
            "transformers' resize_token_embeddings does, and save it."
        )
    if of_head and model.tie_embeddings:
        raise ConfigError(
            f"job {job.name!r}: trainable_token_indices has tokens of lm_head, and the "
            "head of this base is tied to its embedding, whose rows it follows. Give "
            "a list of tokens."
        )
    if of_embedding and not of_head and not model.tie_embeddings:
        logger.info(
            "job %r trains the rows of its trainable_token_indices in the embedding; "
            "the head of this base is not tied to it and stays frozen. To train rows "
            "of both, give {embed_tokens: [...], lm_head: [...]}.",
            job.name,
        )


def _check_whole(job: LoraJob, model: ModelConfig) -> None:
    whole = job.modules_to_save
    if "lm_head" in whole and find_objective(job.objective).has_score:
        raise ConfigError(
            f"job {job.name!r}: modules_to_save has lm_head, which objective "
            f"{job.objective} does not use. Leave it out."
        )
    if not (whole and model.tie_embeddings) or job.init_from is not None:
        return
    if job.trainable_token_indices:
        raise ConfigError(
            f"job {job.name!r}: the head of this base is tied to its embedding, so "
            "trainable_token_indices train rows of both, and modules_to_save copies "
            f"{whole[0]} alone. Keep one of the two settings."
        )
    logger.info(
        "job %r: the head of this base is tied to its embedding, and modules_to_save "
        "copies each by itself, as in PEFT: %s trained, and the merged model has a "
        "head of its own.",
        job.name,
        f"only {whole[0]} is" if len(whole) == 1 else "both are",
    )


def _check_start(job: LoraJob, start: Adapter, model: ModelConfig) -> None:
    """Checks that there is a job that can start from an adapter.

    Raises:
        ConfigError: There is none.
    """
    of_rows, whole = start.token_indices, start.modules_to_save
    reason = None
    if "lm_head" in whole and find_objective(job.objective).has_score:
        reason = f"has a copy of lm_head, which objective {job.objective} does not use"
    if of_rows and whole and model.tie_embeddings:
        reason = (
            f"has rows of tokens beside a copy of {whole[0]}, and the head of this "
            "base is tied to its embedding"
        )
    if reason is not None:
        raise ConfigError(
            f"job {job.name!r} cannot start from {job.init_from}, which {reason}. "
            "Merge it into its base (jaxlora merge), and train on the merged model "
            "without init_from."
        )


def _check_stated_settings(job: LoraJob, start: Adapter, model: ModelConfig) -> None:
    """Checks that a job's settings do not contradict the adapter it starts from.

    Ranks, scalings and targets are those of the folder unless they are stated. What a
    job trains besides A and B has to be stated.

    Raises:
        ConfigError: They do. The text names all the settings to change, after which the
            job starts from the folder.
    """
    of_model = linear_names(model), chosen_experts(model)
    found = {**_other_tensors(job, start), **_other_modules(job, start, *of_model)}
    if found:
        raise ConfigError(
            f"job {job.name!r} starts from {job.init_from}, and its settings differ "
            f"from that adapter, which {next(iter(found.values()))}. To start from it, "
            f"{'; '.join(found)}."
        )


def _other_tensors(job: LoraJob, start: Adapter) -> dict[str, str]:
    """Returns the kinds of tensors that a job and its start do not share, by cure."""
    found = {}
    for setting, own in (
        *((name, start.is_set(name)) for name in tensor_settings()),
        ("trainable_token_indices", start.token_indices),
        ("modules_to_save", start.modules_to_save),
    ):
        if getattr(job, setting) != own:
            value = json.dumps(own)
            cure = f"set {setting}: {value}" if own else f"leave out {setting}"
            found[cure] = f"has {setting}={value}"
    if start.vera is not None:
        for setting in NOT_OF_VERA:
            if job.changes(setting):
                found[f"leave out {setting}"] = f"is of VeRA, which has no {setting}"
    key, asked = start.vera and start.vera.key, job.projection_prng_key
    if "projection_prng_key" in job.model_fields_set and asked != (key or 0):
        found["leave out projection_prng_key"] = f"has projection_prng_key={key}"
    return found


def _other_modules(
    job: LoraJob, start: Adapter, linear_names: Sequence[str], num_chosen: int
) -> dict[str, str]:
    """Returns the stated targets, ranks and scalings that are not those, by cure."""
    stated, found = job.model_fields_set, {}
    asked = resolve_targets(job, linear_names, chosen_experts=num_chosen)

    def add(fields: Sequence[str], difference: str) -> None:
        cure = f"leave out {', '.join(f for f in fields if f in stated)}"
        found.setdefault(cure, difference)

    if not stated.isdisjoint(_TARGET_FIELDS):
        for name in sorted(asked.keys() ^ start.modules.keys()):
            verb = "adapts" if name in start.modules else "does not adapt"
            add(_TARGET_FIELDS, f"{verb} {name}")
    # Where they would be after the targets are left out.
    all_linears = dict.fromkeys(_TARGET_FIELDS, ()) | {"target_modules": "all-linear"}
    job = job.replace(**all_linears)
    ways = [job]
    if "expert_rank" not in stated and not job.use_vera:  # which has no such rank
        ways = [job.replace(expert_rank=rank) for rank in ("full", "scaled")]
    resolved = [
        resolve_targets(x, linear_names, chosen_experts=num_chosen) for x in ways
    ]
    for name, weights in start.modules.items():
        may_be = [modules[name] for modules in resolved]
        asked = next((x for x in may_be if x.rank == weights.rank), may_be[0])
        if not stated.isdisjoint(_RANK_FIELDS) and asked.rank != weights.rank:
            add(_RANK_FIELDS, f"has rank {weights.rank} on {name}")
        if start.vera is not None or stated.isdisjoint(_SCALING_FIELDS):
            continue
        alpha, scaling = asked.lora_alpha, start.scaling(weights)
        if lora_scaling(alpha, weights.rank, job.use_rslora) != scaling:
            add(_SCALING_FIELDS, f"has scaling {scaling:g} on {name}")
    return found


# ---- the objective and its reference -------------------------------------------------


def check_objective(job: LoraJob) -> None:
    """Checks the objective of a job before its data are read.

    Raises:
        ConfigError: There is no such objective, it has no such settings, its batches
            are too small, or the reference cannot be had.
        AdapterError: The folder of its reference is not there.
    """
    settings = find_objective(job.objective).settings_of(job.objective_args)
    reference = reference_of(settings)
    if reference == "start" and job.init_from is None:
        raise ConfigError(
            f"objective_args: reference=start is the adapter of init_from, and job "
            f"{job.name!r} has none: an adapter starts as the base. Set init_from, or "
            "leave reference out."
        )
    fewest = smallest_batch(job.objective, job.objective_args)
    if job.batch_size < fewest:
        raise ConfigError(
            f"batch_size={job.batch_size} of job {job.name!r} must be {fewest} or more "
            f"with {job.objective}: its baseline joins the prompt of each sample in a "
            "batch to the answer of another one. Raise batch_size, which may be any "
            "number of microbatches, or choose a loss_type without a baseline."
        )
    if reference not in _NO_FOLDERS:
        _check_folder(job, str(reference))


def _check_folder(job: LoraJob, folder: str) -> None:
    """Checks that the folder of a job's reference is there, without reading it."""
    if (pathlib.Path(folder) / "adapter_config.json").is_file():
        return
    cure = f"looked in {pathlib.Path.cwd()}"
    if folder.startswith("job:"):
        cure = (
            "an adapter that trains is no reference, as it moves; when that job has "
            "ended, give its folder in adapters of its output_dir to a job that is "
            "added, or to another run"
        )
    raise AdapterError(
        f"objective_args: reference={folder!r} of job {job.name!r} is neither `base` "
        f"nor `start`, and there is no PEFT folder with adapter_config.json ({cure})."
    )


def _read_reference(
    job: LoraJob, model: ModelConfig, start: Adapter | None
) -> Adapter | None:
    """Returns the adapter with which the objective of a job compares.

    It is None if that is the base, or if the objective compares with nothing.
    """
    settings = find_objective(job.objective).settings_of(job.objective_args)
    reference = reference_of(settings)
    if reference in _NO_FOLDERS:
        return start if reference == "start" else None
    try:
        found = import_peft(str(reference), linear_shapes(model))
        found.check_base(model)
    except AdapterError as error:
        raise AdapterError(
            f"objective_args: the reference of job {job.name!r} cannot be used. {error}"
        ) from error
    return found
