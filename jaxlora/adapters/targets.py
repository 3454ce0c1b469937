"""Selects the linears that a job adapts, and their ranks, by PEFT's rules."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence

from jaxlora.adapters.adapter import lora_scaling
from jaxlora.common.patterns import Patterns
from jaxlora.config import LoraJob
from jaxlora.errors import ConfigError
from jaxlora.models.config import is_of_expert, shared_path
from jaxlora.models.structure import linear_path
from jaxlora.modules.variants.table import replaces_lora

Wanted = str | Sequence[str]
_ALL_EXPERTS = ".*experts.*"
_FROZEN = ("model.embed_tokens", "lm_head")
_ROUTER_HINT = (
    " Routers and gates of experts stay frozen, as no loss here keeps the experts' "
    "loads balanced: it would tie the jobs of a microbatch to each other. Leave it out."
)
_MIXTRAL_HINT = " Mixtral's w1, w2 and w3 are gate_proj, down_proj and up_proj here."
# Hints for models with experts, by the last part of a name.
_MIXTURE_HINTS = {
    **dict.fromkeys(("gate", "router", "proj", "shared_expert_gate"), _ROUTER_HINT),
    **dict.fromkeys(("w1", "w2", "w3"), _MIXTRAL_HINT),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModuleLora:
    """LoRA settings of one linear.

    Attributes:
        rank: LoRA rank r.
        lora_alpha: Numerator of the scaling.
        scaling: Factor of A B.
    """

    rank: int
    lora_alpha: float
    scaling: float

    def doubled(self, job: LoraJob) -> "ModuleLora":
        """Returns the settings of twice the rank with the same scaling."""
        factor = 2**0.5 if job.use_rslora else 2
        return dataclasses.replace(
            self, rank=2 * self.rank, lora_alpha=factor * self.lora_alpha
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Names the linears that an adapter is for, by PEFT's rules.

    Attributes:
        where: What has these settings, for errors.
        target_modules: See `LoraJob`, as for the others.
        target_parameters: Further linears, of experts.
        exclude_modules: Linears that are left out.
        layers_to_transform: Numbers of the layers; empty: all.
        layers_pattern: Name of the list of layers.
    """

    where: str
    target_modules: Wanted
    target_parameters: Sequence[str] = ()
    exclude_modules: Wanted = ()
    layers_to_transform: Sequence[int] = ()
    layers_pattern: Wanted = ()


def resolve_targets(
    job: LoraJob, linear_names: Sequence[str], *, chosen_experts: int = 1
) -> dict[str, ModuleLora]:
    """Selects the linears that a job adapts, in the model's order.

    The first pattern that matches the end of a name sets its rank or alpha.

    Args:
        job: The job's settings.
        linear_names: Names of the model's linears.
        chosen_experts: How many experts a token chooses, if there are any.

    Raises:
        ConfigError: As for `choose_linears`, or a pattern matches nothing, or not all
            experts of a layer are adapted in the same way.
    """
    where = f"job {job.name!r}"
    patterns = Patterns(where)
    targets = Targets(
        where=where,
        target_modules=job.target_modules,
        target_parameters=job.target_parameters,
        exclude_modules=job.exclude_modules,
        layers_to_transform=job.layers_to_transform,
        layers_pattern=job.layers_pattern,
    )
    chosen = choose_linears(targets, linear_names, patterns)
    for key in ("rank_pattern", "alpha_pattern"):
        _check_pattern(where, key, getattr(job, key), chosen, patterns)
    modules = {name: _module(job, name, patterns, chosen_experts) for name in chosen}
    _check_experts(job, modules, linear_names)
    return modules


def choose_linears(
    targets: Targets, linear_names: Sequence[str], patterns: Patterns
) -> list[str]:
    """Selects linears, in the model's order.

    The rules are those of PEFT. A list matches complete names, or suffixes after a dot.
    A string is `all-linear` or a regular expression for the complete name. Linears that
    match `exclude_modules` are removed, and so are those in other layers than
    `layers_to_transform`.

    Args:
        targets: Names the linears.
        linear_names: Names of the model's linears.
        patterns: Matcher, with its time budget.

    Raises:
        ConfigError: A target or an exclusion matches nothing, is not a valid regular
            expression, takes too long to match, or names an embedding or the head,
            which have no LoRA.
    """
    where, excluding = targets.where, targets.exclude_modules
    for key in ("target_modules", "exclude_modules"):
        if isinstance(getattr(targets, key), str):
            patterns.check(key, getattr(targets, key))
    chosen = [
        name
        for name in linear_names
        if _matches(targets.target_modules, name, patterns)
        or _matches(targets.target_parameters, _parameter(name), patterns)
    ]
    _check_targets(targets, linear_names, chosen, patterns)
    if targets.layers_to_transform:
        _check_layers(targets, linear_names, patterns)
        here = [n for n in chosen if _layer(n) in targets.layers_to_transform]
        if not here:
            raise ConfigError(
                f"{where}: the targets are in no layer of "
                f"layers_to_transform={list(targets.layers_to_transform)}; the first "
                f"is {chosen[0]}. Correct one of the two."
            )
        chosen = here
    if excluding:
        _check_exclusions(targets, linear_names)
        excluded = [n for n in chosen if _matches(excluding, n, patterns)]
        # PEFT users often exclude lm_head, which is never adapted here.
        is_habit = any(_matches(excluding, n, patterns) for n in _FROZEN)
        if len(excluded) == len(chosen) or not (excluded or is_habit):
            what = "everything" if excluded else "nothing"
            raise ConfigError(
                f"{where}: exclude_modules={excluding!r} excludes {what} of the "
                f"{len(chosen)} targets. Correct or remove it."
            )
        chosen = [n for n in chosen if n not in set(excluded)]
    return chosen


def _layer(name: str) -> int:
    """Number of a linear's layer, of `layers.N.` in its name."""
    return int(linear_path(name).split(".")[1])


def _check_layers(
    targets: Targets, linear_names: Sequence[str], patterns: Patterns
) -> None:
    last = max(map(_layer, linear_names))
    if (wrong := max(targets.layers_to_transform)) > last:
        raise ConfigError(
            f"{targets.where}: layers_to_transform has {wrong}, and the model's "
            f"layers are 0 to {last}."
        )
    pattern = targets.layers_pattern
    given = [pattern] if isinstance(pattern, str) else pattern
    for one in given:
        patterns.check("layers_pattern", one)
    if given and not any(patterns.fullmatch(one, "layers") for one in given):
        raise ConfigError(
            f"{targets.where}: layers_pattern={pattern!r} does not match the name of "
            "the list of layers, which is 'layers'. Correct it, or leave it out."
        )


def check_ranks(
    job: LoraJob,
    modules: Mapping[str, ModuleLora],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Refuses ranks that no adapted linear can use, before memory is taken for them.

    The product A B has at most rank min(K, N). A rank above that of some linears is
    allowed, as one rank is often given for linears of different sizes. So is any rank
    of a variant that trains no A and B.

    Args:
        job: The job.
        modules: The modules that the job adapts.
        shapes: (K, N) of each linear, by module name.

    Raises:
        ConfigError: A rank is above min(K, N) of every adapted linear.
    """
    if replaces_lora(job.is_set):
        return
    most = max(min(shapes[name]) for name in modules)
    for name, module in modules.items():
        if module.rank > most:
            raise ConfigError(
                f"job {job.name!r} has rank {module.rank} on {name}, and the weights "
                f"that it adapts have at most rank {most}. Lower rank (or its entry in "
                f"rank_pattern) to {most} or less."
            )


def _module(
    job: LoraJob, name: str, patterns: Patterns, chosen_experts: int
) -> ModuleLora:
    if replaces_lora(job.is_set):
        return ModuleLora(rank=job.rank, lora_alpha=job.rank, scaling=1.0)
    rank = pattern_value(job.rank_pattern, name, None, patterns)
    lora_alpha = pattern_value(job.alpha_pattern, name, job.lora_alpha, patterns)
    if rank is None:
        rank = _expert_rank(job, chosen_experts) if is_of_expert(name) else job.rank
        part = rank / job.rank  # with which the scaling stays
        lora_alpha *= part**0.5 if job.use_rslora else part
    return ModuleLora(
        rank=rank,
        lora_alpha=lora_alpha,
        scaling=lora_scaling(lora_alpha, rank, job.use_rslora),
    )


def _expert_rank(job: LoraJob, chosen_experts: int) -> int:
    if job.expert_rank == "scaled":
        return max(1, job.rank // chosen_experts)
    return job.rank if job.expert_rank == "full" else job.expert_rank


def _check_experts(
    job: LoraJob, modules: Mapping[str, ModuleLora], linear_names: Sequence[str]
) -> None:
    """Checks that the experts of a layer are adapted alike, and by LoRA alone."""
    ranks: dict[str, set[ModuleLora | None]] = {}
    for name in filter(is_of_expert, linear_names):
        ranks.setdefault(shared_path(name), set()).add(modules.get(name))
    adapted = {name: own for name, own in ranks.items() if own != {None}}
    for name, own in adapted.items():
        if len(own) > 1:
            raise ConfigError(
                f"job {job.name!r}: the experts of {name} differ in rank or alpha, or "
                "only some are adapted. Give all experts of a layer the same."
            )
    kinds = {
        "use_dora": job.use_dora,
        "use_vera": job.use_vera,
        "init_lora_weights": job.keeps_start,
    }
    if adapted and (setting := next((k for k, x in kinds.items() if x), None)):
        raise ConfigError(
            f"job {job.name!r} has {setting}={getattr(job, setting)} and adapts "
            f"{next(iter(adapted))}: experts take LoRA only, with a start that does "
            "not depend on their weights. Leave it out, or give target_modules that "
            "are not of experts, such as [q_proj, k_proj, v_proj, o_proj]."
        )
    odd = [own.rank for (own,) in adapted.values() if own is not None and own.rank % 2]
    if job.init_lora_weights == "orthogonal" and odd:
        raise ConfigError(
            f"job {job.name!r}: init_lora_weights=orthogonal needs even ranks, and "
            f"that of experts is {odd[0]}. Set expert_rank to an even number."
        )


def pattern_value[V](
    pattern: Mapping[str, V],
    name: str,
    default: V,
    patterns: Patterns | None = None,
) -> V:
    """Returns the value of the first key that matches the end of `name`, as in PEFT.

    Args:
        pattern: Values by regular expression; the expressions must be valid.
        name: Name of a module.
        default: The value if no key matches.
        patterns: Matcher, with its time budget; None: a new one.

    Raises:
        ConfigError: The time budget is spent.
    """
    patterns = patterns or Patterns("a pattern")
    for key, value in pattern.items():
        if patterns.match_suffix(key, name):
            return value
    return default


def _matches(wanted: Wanted, name: str, patterns: Patterns) -> bool:
    if isinstance(wanted, str):
        return _is_all_linear(wanted) or patterns.fullmatch(wanted, name)
    return any(name == w or name.endswith(f".{w}") for w in wanted)


def _parameter(name: str) -> str:
    """Returns PEFT's name of the weight that has the linear of an expert, if any.

    PEFT knows the weights of all experts as one parameter, with gate and up in one.
    """
    if not is_of_expert(name):
        return ""
    path, _, linear = shared_path(name).rpartition(".")
    return f"{path}.{'down_proj' if linear == 'down_proj' else 'gate_up_proj'}"


def _is_all_linear(wanted: Wanted) -> bool:
    return isinstance(wanted, str) and wanted.lower() == "all-linear"


def _suffixes(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))


def _check_targets(
    targets: Targets,
    linear_names: Sequence[str],
    chosen: Sequence[str],
    patterns: Patterns,
) -> None:
    where, wanted = f"{targets.where}: target_modules", targets.target_modules
    entries = [wanted] if isinstance(wanted, str) else wanted
    exist = _suffixes(linear_names)
    parameters = list(filter(None, map(_parameter, linear_names)))
    if targets.target_parameters and not parameters:
        raise ConfigError(
            f"{targets.where}: target_parameters={list(targets.target_parameters)} are "
            "weights of experts, and the model has no experts. Leave them out."
        )
    for entry in targets.target_parameters:
        _check_entry(
            f"{targets.where}: target_parameters",
            entry,
            parameters,
            sorted({linear_path(n).split(".", 2)[2] for n in parameters}),
        )
    for entry in entries:
        if frozen := _frozen_module(targets, entry, patterns):
            raise ConfigError(
                f"{where} names {entry!r}, which matches {frozen}. Adapters go on the "
                f"linears: {', '.join(exist)}. To train a whole copy of the embedding "
                "or the head beside them, set modules_to_save."
            )
        if not isinstance(wanted, str):
            _check_entry(where, entry, linear_names, exist)
    if not chosen:
        raise ConfigError(
            f"{where}={wanted!r} matches no linear of the model. A string is a regular "
            f"expression for the whole name, such as {linear_names[0]!r}; suffixes go "
            f"in a list: {exist}."
        )


def _frozen_module(targets: Targets, entry: str, patterns: Patterns) -> str | None:
    """Returns the frozen module that a target names, if any."""
    for name in _FROZEN:
        if entry.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]:
            return name
    if isinstance(targets.target_modules, str) and not _is_all_linear(entry):
        for name in _FROZEN:
            is_excluded = _matches(targets.exclude_modules, name, patterns)
            if patterns.fullmatch(entry, name) and not is_excluded:
                return name
    return None


def _check_exclusions(targets: Targets, linear_names: Sequence[str]) -> None:
    if not isinstance(targets.exclude_modules, str):
        where = f"{targets.where}: exclude_modules"
        for entry in targets.exclude_modules:
            there = (*linear_names, *_FROZEN)
            _check_entry(where, entry, there, _suffixes(linear_names))


def _check_entry(
    where: str, entry: str, names: Iterable[str], exist: Sequence[str]
) -> None:
    if any(name == entry or name.endswith(f".{entry}") for name in names):
        return
    near = difflib.get_close_matches(entry, exist, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if any(map(is_of_expert, names)):
        hint = _MIXTURE_HINTS.get(entry.rpartition(".")[2], hint)
    raise ConfigError(
        f"{where} entry {entry!r} matches no linear of the model.{hint} There are: "
        f"{', '.join(exist)}.{_of_experts(names) if 'experts' in entry else ''}"
    )


def _of_experts(names: Iterable[str]) -> str:
    """Returns how to name a linear of all experts, if there are any."""
    name = next(filter(is_of_expert, names), None)
    if name is None:
        return ""
    return (
        f" Experts have a number, as in {name}: the regular expression "
        f"{_ALL_EXPERTS!r} matches all linears of all of them."
    )


def _check_pattern(
    where: str,
    key: str,
    pattern: Mapping[str, object],
    chosen: Sequence[str],
    patterns: Patterns,
) -> None:
    for expression in pattern:
        patterns.check(f"{key} key", expression, is_end=True)
        if not any(patterns.match_suffix(expression, name) for name in chosen):
            raise ConfigError(
                f"{where}: {key} key {expression!r} matches none of the job's "
                f"targets: {', '.join(_suffixes(chosen))}.{_of_experts(chosen)}"
            )
