"""The modules that a job adapts, by its targets or the adapter that it starts from."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.fresh import fresh_score
from jaxlora.adapters.targets import (
    ModuleLora,
    check_biases,
    check_ranks,
    resolve_targets,
)
from jaxlora.config import LoraJob
from jaxlora.data.objectives import find_objective
from jaxlora.errors import ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.names import linear_shapes
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.train.plan.reference import read_reference, refers_to_start

logger = logging.getLogger(__name__)

_SCALING_FIELDS = {"lora_alpha", "alpha_pattern", "use_rslora"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChosenModules:
    """The modules that a job adapts.

    Attributes:
        modules: Rank and scaling of each linear that it adapts, by module name.
        start: Adapter of `init_from`; None: the job starts from fresh weights.
        reference: Adapter with which the objective compares; None: it is the base, or
            there is no reference.
    """

    modules: Mapping[str, ModuleLora]
    start: Adapter | None
    reference: Adapter | None = None


def choose_modules(job: LoraJob, model: ModelConfig) -> ChosenModules:
    """Chooses the modules that a job adapts, by its targets or those of `init_from`.

    Raises:
        JaxloraError: They do not fit the model.
    """
    shapes = linear_shapes(model)
    _check_tokens(job, model)
    _check_whole(job, model)
    if job.init_from is None:
        modules = resolve_targets(job, tuple(shapes))
        check_ranks(job, modules, shapes)
        check_biases(job, modules, model)
        if job.keeps_start:
            modules = {name: module.doubled(job) for name, module in modules.items()}
        reference = read_reference(job, model)
        return ChosenModules(modules=modules, start=None, reference=reference)
    has_score = find_objective(job.objective).has_score
    size = model.hidden_size if has_score else None
    start = import_peft(job.init_from, shapes, score_size=size)
    start.check_base(model)
    start = dataclasses.replace(start, dropout=job.dropout)
    if has_score and start.score is None:
        start = dataclasses.replace(start, score=fresh_score(job, model.hidden_size))
    _check_stated_settings(job, start, tuple(shapes))
    modules = {
        name: ModuleLora(
            rank=weights.rank,
            lora_alpha=weights.lora_alpha,
            scaling=start.scaling(weights),
        )
        for name, weights in start.modules.items()
    }
    reference = start if refers_to_start(job) else read_reference(job, model)
    return ChosenModules(modules=modules, start=start, reference=reference)


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
    if not (whole and model.tie_embeddings):
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


def _check_stated_settings(
    job: LoraJob, start: Adapter, linear_names: Sequence[str]
) -> None:
    """Checks that a job's settings do not contradict the adapter it starts from."""
    stated = job.model_fields_set
    asked = resolve_targets(job, linear_names)
    differences = []
    if stated & {"target_modules", "exclude_modules"}:
        for name in sorted(asked.keys() ^ start.modules.keys()):
            verb = "adapts" if name in start.modules else "does not adapt"
            differences.append(f"{verb} {name}")
    for setting in tensor_settings():
        if getattr(job, setting) != start.is_set(setting):
            differences.append(f"has {setting}={str(start.is_set(setting)).lower()}")
    ids = start.token_indices
    if job.trainable_token_indices != ids:
        shown = ids if isinstance(ids, dict) else list(ids)
        differences.append(f"has trainable_token_indices={shown}")
    if job.modules_to_save != start.modules_to_save:
        differences.append(f"has modules_to_save={list(start.modules_to_save)}")
    key = None if start.vera is None else start.vera.key
    if "projection_prng_key" in stated and key not in (None, job.projection_prng_key):
        differences.append(f"has projection_prng_key={key}")
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
