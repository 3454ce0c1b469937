"""The LoRA of experts in PEFT's folders, of which there are two layouts.

Per expert, each linear of an expert has A and B of its own, under the names that it has
in checkpoints (`mlp.experts.3.gate_proj`). Here, adapters have this form, but for some
names (`in_folders`). peft converts it for some models (`_CONVERTED`), and then takes
the names of other linears for those of experts, too.

Fused, A and B are of the parameters that transformers holds, `mlp.experts.gate_up_proj`
and `mlp.experts.down_proj`, each of all experts. A is [E R, K] with the ranks of an
expert together; B is [N, R E], where column j is of expert j % E. Gate and up have one
A. The first parameter of a module that is adapted has the inner one of peft's wrappers,
so the name of its tensors has a `base_layer` more if there are two. Up to 0.18, peft
took the sides of these parameters for each other, as if they were [E, K, N]. Those of
gpt-oss are, and its `gate_up_proj` is one linear here, too.
"""

import dataclasses
import logging
import pathlib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jaxlora.adapters.adapter import LoraWeights, lora_scaling
from jaxlora.adapters.files.export_record import PREFIX
from jaxlora.adapters.targets import pattern_value
from jaxlora.common.patterns import Patterns
from jaxlora.errors import AdapterError
from jaxlora.models.config import is_of_expert, shared_path
from jaxlora.modules.variants.lora import LORA_A, LORA_B

logger = logging.getLogger(__name__)

_PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_NAME = re.compile(r"(.*\.experts)(\.base_layer)?\.(lora_[AB])\.weight")
ExpertLayout = Literal["per_expert", "fused"]
# Models whose LoRA on single experts peft 0.21 converts, by model_type.
_CONVERTED = ("mixtral", "olmoe", "qwen3_moe", "qwen3_next")
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_OF_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(experts\.\d+)\.(w[123])")
# The first version of peft that knows which side is which.
_FIRST_VERSION = (0, 19)
# Fused folders state this version, so that peft and this library need not guess.
PEFT_VERSION = "0.21.2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedLora:
    """The LoRA of a parameter that all experts of a layer share.

    Attributes:
        a: A of each expert, E K R.
        b: B of each expert, E R N.
        scaling: Factor of A B.
    """

    a: Float[np.ndarray, "E K R"]
    b: Float[np.ndarray, "E R N"]
    scaling: float

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[2]

    def to_peft(self) -> dict[str, np.ndarray]:
        """Returns A and B in PEFT's layout, by name."""
        (e, k, r), n = self.a.shape, self.b.shape[2]
        a = self.a.swapaxes(1, 2).reshape(e * r, k)
        b = self.b.transpose(2, 1, 0).reshape(n, r * e)
        arrays = {"lora_A": a, "lora_B": b}
        return {n: np.ascontiguousarray(x, np.float32) for n, x in arrays.items()}

    @staticmethod
    def of_peft(
        tensors: Mapping[str, np.ndarray],
        num_experts: int,
        scaling: float,
        *,
        is_swapped: bool,
    ) -> "FusedLora":
        """Returns the LoRA of A and B in PEFT's layout.

        Args:
            tensors: A and B, by name.
            num_experts: E.
            scaling: Factor of A B.
            is_swapped: Whether A has the output features, as up to peft 0.18.
        """
        first, second = tensors["lora_A"], tensors["lora_B"]
        first = first.astype(np.float32).reshape(num_experts, -1, first.shape[1])
        second = second.astype(np.float32).reshape(second.shape[0], -1, num_experts)
        if is_swapped:
            return FusedLora(a=second.transpose(2, 0, 1), b=first, scaling=scaling)
        return FusedLora(
            a=first.swapaxes(1, 2), b=second.transpose(2, 1, 0), scaling=scaling
        )


def _linears(parameter: str, there: Container[str]) -> tuple[str, ...]:
    """Returns the linears of an expert that a parameter has; one may be all of it.

    Args:
        parameter: Path of the parameter.
        there: Names of linears.
    """
    block, _, last = parameter.rpartition(".")
    return (last,) if f"{block}.0.{last}" in there else _PARAMETERS[last]


# ---- to a folder ---------------------------------------------------------------------


def default_layout(
    modules: Mapping[str, LoraWeights],
    linear_names: Sequence[str],
    model_type: str | None,
) -> ExpertLayout:
    """Returns the layout that peft can read: per expert, if it converts that.

    It does so for some models, if all experts of the model have one rank and alpha,
    gate is adapted with up, and no linear that is not of experts has such a name.

    Args:
        modules: The weights of each adapted linear, by module name.
        linear_names: Names of the base model's linears.
        model_type: The base's; None: it is not known.
    """
    own = {name: weights for name, weights in modules.items() if is_of_expert(name)}
    adapted = {shared_path(name) for name in own}
    kinds = {name.rpartition(".")[2] for name in adapted}
    there = {shared_path(name) for name in filter(is_of_expert, linear_names)}
    is_all = adapted == {name for name in there if name.rpartition(".")[2] in kinds}
    is_one = len({(one.rank, one.lora_alpha) for one in own.values()}) == 1
    has_both = len(kinds & {*_PARAMETERS["gate_up_proj"]}) != 1
    is_read = model_type in _CONVERTED and is_all and is_one and has_both
    is_read = is_read and not mistaken_by_peft(modules, model_type)
    return "per_expert" if is_read else "fused"


def unread_layout(layout: str | None, linear_names: Iterable[str]) -> str | None:
    """Returns why no other program reads a layout; None: some do.

    Args:
        layout: The layout.
        linear_names: Names of the base model's linears.
    """
    experts = filter(is_of_expert, linear_names)
    if layout != "per_expert" or not any(x.endswith(".gate_up_proj") for x in experts):
        return None
    return (
        "expert_layout=per_expert: no other program reads LoRA on single experts of "
        "this model, whose gate and up are one linear. Leave it out, or set fused."
    )


def mistaken_by_peft(names: Iterable[str], model_type: str | None) -> list[str]:
    """Returns linears that peft takes for those of experts, by their names alone.

    It reads the parameters of such a linear right.

    Args:
        names: Names of the adapted linears.
        model_type: The base's; None: it is not known.
    """
    if model_type is not None and model_type not in _CONVERTED:
        return []
    linears = {linear for own in _PARAMETERS.values() for linear in own}
    dense = (name for name in names if not is_of_expert(name))
    return [name for name in dense if name.rpartition(".")[2] in linears]


def in_folders(name: str, model_type: str | None) -> str:
    """Returns the name of a linear in folders with a tensor for each expert's.

    For Mixtral it is that in its checkpoints, and for Gemma 4 that in vLLM, which alone
    reads such folders for it.

    Args:
        name: Its module name.
        model_type: The base's.
    """
    if is_of_expert(name) and model_type == "mixtral":
        start, _, last = name.partition(".mlp.experts.")
        number, linear = last.split(".")
        return f"{start}.block_sparse_moe.experts.{number}.{_MIXTRAL[linear]}"
    if model_type == "gemma4_text":
        return re.sub(r"(\.layers\.\d+)\.experts\.", r"\1.moe.experts.", name)
    return name


def module_name(name: str) -> str:
    """Returns the module name of a linear, by its name in a folder of any model."""
    if (match := _OF_MIXTRAL.fullmatch(name)) is not None:
        start, expert, last = match.groups()
        linear = next(own for own, other in _MIXTRAL.items() if other == last)
        return f"{start}.mlp.{expert}.{linear}"
    return re.sub(r"(\.layers\.\d+)\.moe\.experts\.", r"\1.experts.", name)


def fused_experts(
    modules: Mapping[str, LoraWeights], scalings: Mapping[str, float]
) -> dict[str, FusedLora]:
    """Fuses the LoRA of experts, by PEFT's names of the parameters.

    That of gate and up has the ranks of both, and a B of two blocks.

    Args:
        modules: The weights of each linear of the experts, by module name.
        scalings: Factor of A B of each.
    """
    experts: dict[str, list[str]] = {}
    for name in modules:
        experts.setdefault(shared_path(name), []).append(name)
    found = {}
    for block in dict.fromkeys(name.rpartition(".")[0] for name in experts):
        for parameter in _PARAMETERS:
            linears = _linears(f"{block}.{parameter}", modules)
            names = {x: experts.get(f"{block}.{x}", []) for x in linears}
            if parts := {x: own for x, own in names.items() if own}:
                fused = _fused(linears, parts, modules, scalings)
                found[f"{block}.{parameter}"] = fused
    return found


def _fused(
    linears: Sequence[str],
    parts: Mapping[str, Sequence[str]],
    modules: Mapping[str, LoraWeights],
    scalings: Mapping[str, float],
) -> FusedLora:
    """Fuses linears of experts that share their input.

    Args:
        linears: The linears of an expert, in the order of their output features.
        parts: Names of the modules of those that are adapted, expert by expert.
        modules: The weights.
        scalings: Factor of A B of each module.
    """
    scaling = scalings[next(iter(parts.values()))[0]]
    a = {x: np.stack([modules[n].a for n in own]) for x, own in parts.items()}
    b = {
        x: np.stack([modules[n].b * (scalings[n] / scaling) for n in own])
        for x, own in parts.items()
    }
    rank, (e, _, n) = sum(x.shape[2] for x in a.values()), next(iter(b.values())).shape
    whole, start = np.zeros((e, rank, n * len(linears)), np.float32), 0
    for x, own in b.items():
        place, stop = linears.index(x) * n, start + own.shape[1]
        whole[:, start:stop, place : place + n] = own
        start = stop
    return FusedLora(a=np.concatenate([*a.values()], 2), b=whole, scaling=scaling)


def fused_tensors(experts: Mapping[str, FusedLora]) -> dict[str, np.ndarray]:
    """Returns the tensors of fused LoRA, by PEFT's names without their prefix."""
    tensors = {}
    for name, fused in experts.items():
        block, _, parameter = name.rpartition(".")
        is_inner = parameter == "gate_up_proj" and f"{block}.down_proj" in experts
        wrapper = ".base_layer" if is_inner else ""
        for tensor, array in fused.to_peft().items():
            tensors[f"{block}{wrapper}.{tensor}.weight"] = array
    return tensors


# ---- from a folder -------------------------------------------------------------------


def take_experts(
    folder: pathlib.Path,
    arrays: dict[str, np.ndarray],
    config: Mapping[str, Any],
    linear_shapes: Mapping[str, tuple[int, ...]],
    patterns: Patterns,
) -> dict[str, LoraWeights]:
    """Takes fused LoRA out of the tensors of a folder, and divides it by expert.

    Args:
        folder: The folder.
        arrays: Its tensors, by PEFT's names; those of fused LoRA are removed.
        config: Its settings.
        linear_shapes: (K, N) of each of the base model's linears, by module name.
        patterns: Matcher, with its time budget.

    Returns:
        The weights of each linear of the experts, by module name.

    Raises:
        AdapterError: They do not fit the base model.
    """
    layers: dict[str, dict[bool, dict[str, np.ndarray]]] = {}
    for key in list(arrays):
        name = key.removeprefix(PREFIX).replace(".default.", ".")
        if (match := _NAME.fullmatch(name)) is not None:
            block, wrapper, tensor = match.groups()
            own = layers.setdefault(block, {}).setdefault(bool(wrapper), {})
            own[tensor] = arrays.pop(key)
    found: dict[str, dict[str, np.ndarray]] = {}
    for block, wrappers in layers.items():
        if f"{block}.0.down_proj" not in linear_shapes:
            raise AdapterError(
                f"{folder} adapts {block}, which the base model does not have. Is it "
                "an adapter of another model?"
            )
        for is_inner, tensors in wrappers.items():
            if tensors.keys() != {"lora_A", "lora_B"}:
                raise AdapterError(f"{folder} lacks A or B of {block}.")
            parameter = "gate_up_proj" if is_inner else "down_proj"
            if len(wrappers) == 1:
                parameter = _only_parameter(folder, config, block)
            found[f"{block}.{parameter}"] = tensors
    is_swapped = _are_swapped(folder, config, found, linear_shapes)
    modules = {}
    for name, tensors in found.items():
        e, _, _ = _sizes(name, linear_shapes)
        rank = len(tensors["lora_A"]) // e
        ranks, alphas = config["rank_pattern"] or {}, config["alpha_pattern"] or {}
        stated = pattern_value(ranks, name, config["r"], patterns)
        if stated != rank:
            raise AdapterError(
                f"{folder}: the LoRA of {name} has rank {rank}, and the settings state "
                f"{stated}. Correct r or rank_pattern."
            )
        alpha = pattern_value(alphas, name, config["lora_alpha"], patterns)
        is_rslora = bool(config["use_rslora"])
        scaling = lora_scaling(alpha, rank, is_rslora)
        fused = FusedLora.of_peft(tensors, e, scaling, is_swapped=is_swapped)
        linears = _linears(name, linear_shapes)
        modules |= _divided(name, linears, fused, use_rslora=is_rslora)
    return modules


def _only_parameter(folder: pathlib.Path, config: Mapping[str, Any], block: str) -> str:
    """Returns the parameter of a layer's experts that alone is adapted."""
    targets = config.get("target_parameters") or ()
    names = [
        parameter
        for parameter in _PARAMETERS
        if any(f".{block}.{parameter}".endswith(f".{target}") for target in targets)
    ]
    if len(names) != 1:
        raise AdapterError(
            f"{folder} has LoRA on one parameter of {block}, and target_parameters="
            f"{list(targets)} do not say on which. Correct them."
        )
    return names[0]


def _sizes(
    parameter: str, linear_shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int, int]:
    """Returns E, K and N of a parameter."""
    block = parameter.rpartition(".")[0]
    linears = _linears(parameter, linear_shapes)
    e = 0
    while f"{block}.{e}.{linears[0]}" in linear_shapes:
        e += 1
    k, n = linear_shapes[f"{block}.0.{linears[0]}"]
    return e, k, n * len(linears)


def _are_swapped(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    found: Mapping[str, Mapping[str, np.ndarray]],
    linear_shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Returns whether A has the output features, in the folders of an older peft.

    Never where gate and up are one linear, as the parameters of these are [E, K, N].
    """
    blocks = {name.rpartition(".")[0] for name in found}
    is_kn = any(f"{block}.0.gate_up_proj" in linear_shapes for block in blocks)
    fits = {False: True, True: not is_kn}
    for name, tensors in found.items():
        e, k, n = _sizes(name, linear_shapes)
        a, b = tensors["lora_A"], tensors["lora_B"]
        is_whole = a.ndim == b.ndim == 2 and len(a) == b.shape[1] and len(a) % e == 0
        sides = (a.shape[1:], b.shape[:1]) if is_whole else ()
        here = {False: sides == ((k,), (n,)), True: sides == ((n,), (k,)) and not is_kn}
        if not any(here.values()):
            raise AdapterError(
                f"{folder}: A and B of {name} have the shapes {list(a.shape)} and "
                f"{list(b.shape)}, which {e} experts of {[n, k]} do not call for. Is "
                "it an adapter of another model?"
            )
        fits = {swapped: fits[swapped] and fit for swapped, fit in here.items()}
    if not found or not fits[True]:
        if found and not fits[False]:
            raise AdapterError(
                f"{folder}: some tensors of experts have the sides of peft 0.18 and "
                "others those of later versions. Save the adapter again with peft."
            )
        return False
    if not fits[False]:
        return True
    # Each of the parameters that are adapted has as many input as output features.
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or ""))
    if version is None:
        raise AdapterError(
            f"{folder} does not state its peft_version, and peft changed the meaning "
            "of A and B of experts in 0.19, which their shapes do not tell here. Add "
            'peft_version to adapter_config.json, such as "0.18.0" or "0.19.0".'
        )
    return (int(version[1]), int(version[2])) < _FIRST_VERSION


def _divided(
    name: str, linears: Sequence[str], fused: FusedLora, *, use_rslora: bool
) -> dict[str, LoraWeights]:
    """Divides the LoRA of a parameter by expert and linear.

    Where gate and up have ranks of their own, each takes these. If B of one of the two
    is zero, the other alone is adapted; otherwise both take A.
    """
    block = name.rpartition(".")[0]
    rank, n = fused.rank, fused.b.shape[2] // len(linears)
    ranks = {linear: slice(rank) for linear in linears}
    half = rank // 2
    if len(linears) == 2:
        others = fused.b[:, half:, :n], fused.b[:, :half, n:]
        is_changed = fused.b[:, :, :n].any(), fused.b[:, :, n:].any()
        if any(is_changed) and not all(is_changed):
            ranks = {linears[is_changed.index(True)]: slice(rank)}
        elif rank % 2 == 0 and fused.b.any() and not any(map(np.any, others)):
            ranks = dict(zip(linears, (slice(half), slice(half, rank)), strict=True))
        else:
            logger.info("%s: gate and up get the same A, each its own copy.", name)
    modules = {}
    for linear, own in ranks.items():
        place = linears.index(linear) * n
        a, b = fused.a[:, :, own], fused.b[:, own, place : place + n]
        size = a.shape[2]
        alpha = fused.scaling * (size**0.5 if use_rslora else size)
        for i in range(len(a)):
            tensors = {
                LORA_A.name: np.ascontiguousarray(a[i]),
                LORA_B.name: np.ascontiguousarray(b[i]),
            }
            weights = LoraWeights(tensors=tensors, rank=size, lora_alpha=alpha)
            modules[f"{block}.{i}.{linear}"] = weights
    return modules


def check_alike(
    folder: pathlib.Path,
    modules: Mapping[str, LoraWeights],
    linear_shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Checks that all experts of a layer have the same rank and alpha, and LoRA only.

    Raises:
        AdapterError: They differ.
    """
    kinds: dict[str, set[tuple | None]] = {}
    for name in filter(is_of_expert, linear_shapes):
        own = modules.get(name)
        kind = None if own is None else (own.rank, own.lora_alpha, own.tensors.keys())
        kinds.setdefault(shared_path(name), set()).add(
            None if kind is None else (*kind[:2], *sorted(kind[2]))
        )
    for name, own in kinds.items():
        if len(own) > 1:
            raise AdapterError(
                f"{folder}: the experts of {name} differ in rank or alpha, or only "
                "some are adapted. Merge it into its base with peft."
            )
        tensors = {x for kind in own if kind is not None for x in kind[2:]}
        if tensors - {LORA_A.name, LORA_B.name}:
            raise AdapterError(
                f"{folder} has {', '.join(sorted(tensors))} on {name}, and experts "
                "take LoRA only. Merge it into its base with peft."
            )
