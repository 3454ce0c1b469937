"""Writes an adapter as a PEFT folder, at its real ranks, without padding."""

import collections
import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.base_name import BaseName, base_name
from jaxlora.adapters.files.expert_tensors import (
    PEFT_VERSION,
    ExpertLayout,
    FusedLora,
    default_layout,
    fused_experts,
    fused_tensors,
    in_folders,
    mistaken_by_peft,
    unread_layout,
)
from jaxlora.adapters.files.export_record import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    ExportRecord,
    check_replaceable,
    write_record,
)
from jaxlora.adapters.files.model_card import write_card
from jaxlora.adapters.files.peft_config import LoraConfig, PeftConfig
from jaxlora.adapters.files.tokenizer_copy import TokenizerCopy
from jaxlora.common.atomic import replace_folder, sync_files
from jaxlora.errors import AdapterError
from jaxlora.models.config import is_of_expert, shared_path
from jaxlora.models.slot_modules import SCORE, SLOT_MODULES
from jaxlora.models.structure import module_prefix
from jaxlora.modules.variants.table import variants

logger = logging.getLogger(__name__)


def export_peft(
    adapter: Adapter,
    folder: str | pathlib.Path,
    *,
    base_model: str,
    linear_names: Sequence[str],
    revision: str | None = None,
    overwrite: bool = False,
    record: ExportRecord | None = None,
    card: str | None = None,
    tokenizer: TokenizerCopy | None = None,
    expert_layout: ExpertLayout | None = None,
    model_type: str | None = None,
) -> pathlib.Path:
    """Writes adapter_config.json and adapter_model.safetensors, in float32.

    peft and vLLM can load the folder. An earlier export stays complete until the new
    one replaces it.

    Args:
        adapter: The adapter.
        folder: Folder to write.
        base_model: Folder or hub id of the base, which adapter_config.json tells as it
            is given here, as with peft.
        linear_names: Names of the base model's linears. They show whether a suffix such
            as `q_proj` selects exactly the adapted modules.
        revision: Commit (or branch or tag) of a base on the hub, as in
            `FrozenModel.revision`; peft loads this revision of the base.
        overwrite: Whether to replace a folder that holds files other than an export's.
        record: Record to write as jaxlora.json, with the checksums of the files.
        card: Text of a model card to write as README.md; None: there is none.
        tokenizer: Tokenizer to write beside the adapter; None: there is none. Without
            a record, the folder is then not replaced by a later export.
        expert_layout: How the LoRA of experts is written; None: as peft reads it, per
            expert if it reads both.
        model_type: `model_type` of the base (`FrozenModel.config.model_type`), which
            says how others name its experts; None: peft reads them fused.

    Raises:
        AdapterError: The folder holds files that this program did not write, or no
            other program would read the layout.
        StorageError: `folder` is a file or a symbolic link, or cannot be written.
    """
    check_replaceable(folder, overwrite=overwrite)
    if (reason := unread_layout(expert_layout, linear_names)) is not None:
        raise AdapterError(reason)
    adapter = _as_peft_has_experts(adapter, folder)
    experts = _fused_experts(adapter, expert_layout, linear_names, model_type)
    if not experts:
        linear_names = [in_folders(name, model_type) for name in linear_names]
        modules = {in_folders(n, model_type): x for n, x in adapter.modules.items()}
        adapter = dataclasses.replace(adapter, modules=modules)
    tensors = {f"{PREFIX}{n}": x for n, x in fused_tensors(experts).items()}
    for name, weights in adapter.modules.items():
        for tensor in () if experts and is_of_expert(name) else weights.in_order():
            tensors[f"{PREFIX}{name}.{tensor.peft_name}"] = np.ascontiguousarray(
                weights.tensors[tensor.name].T, np.float32
            )
    for variant in adapter.variants:
        for name, array in variant.frozen_to_peft(adapter.vera).items():
            tensors[name] = np.ascontiguousarray(array, np.float32)
    start = module_prefix(linear_names)
    for name, weights in adapter.outside.items():
        place = re.sub(r"^model\.", start, SLOT_MODULES[name].peft_name)
        tensors[f"{PREFIX}{place}"] = np.atleast_2d(weights.array).astype(np.float32)
    scalings = {adapter.scaling(weights) for weights in adapter.modules.values()}
    if len(scalings) > 1:
        logger.warning(
            "%s: the modules have different scalings (%s to %s). peft reads that; vLLM "
            "knows one scaling an adapter: merge it for vLLM.",
            folder,
            min(scalings),
            max(scalings),
        )
    base = base_name(base_model, revision)
    config = _config(adapter, base, linear_names, experts, model_type)
    folder = pathlib.Path(folder)
    with replace_folder(folder) as temporary:
        safetensors.numpy.save_file(
            tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"}
        )
        text = json.dumps(config.model_dump(), indent=2, sort_keys=True) + "\n"
        (temporary / CONFIG_FILE).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.write(temporary)
        if record is not None:
            write_record(temporary, record)
        if card is not None:
            write_card(temporary, card)
        sync_files(temporary)
    return folder


def _as_peft_has_experts(adapter: Adapter, folder: str | pathlib.Path) -> Adapter:
    """Returns the adapter without what peft lacks for experts, which trains the same.

    It has no dropout there, and takes the root of twice the rank of gate and up.
    """
    if not any(map(is_of_expert, adapter.modules)):
        return adapter
    if adapter.dropout:
        logger.info(
            "%s: lora_dropout is 0 there, as peft has none on experts; the adapter was "
            "trained with %s.",
            folder,
            adapter.dropout,
        )
    modules = {
        name: dataclasses.replace(own, lora_alpha=adapter.scaling(own) * own.rank)
        for name, own in adapter.modules.items()
    }
    return dataclasses.replace(adapter, modules=modules, use_rslora=False, dropout=0.0)


def _fused_experts(
    adapter: Adapter,
    layout: ExpertLayout | None,
    linear_names: Sequence[str],
    model_type: str | None,
) -> dict[str, FusedLora]:
    """Returns the fused LoRA of experts, by parameter; empty in the other layout."""
    modules = {n: w for n, w in adapter.modules.items() if is_of_expert(n)}
    if modules and layout is None:
        layout = default_layout(adapter.modules, linear_names, model_type)
    if layout != "fused":
        return {}
    scalings = {name: adapter.scaling(weights) for name, weights in modules.items()}
    return fused_experts(modules, scalings)


def _config(
    adapter: Adapter,
    base: BaseName,
    linear_names: Sequence[str],
    experts: Mapping[str, FusedLora],
    model_type: str | None,
) -> PeftConfig:
    own_modules, there, parameters = list(adapter.modules), list(linear_names), {}
    if experts:
        own_modules, there = (
            [name for name in names if not is_of_expert(name)]
            for names in (own_modules, there)
        )
        mistaken = mistaken_by_peft(own_modules, model_type)
        parameters = {name: f"{name}.weight" for name in mistaken}
    modules = (SLOT_MODULES[name] for name in adapter.outside)
    saved = sorted(one.frozen or one.name for one in modules if not one.has_tokens)
    common: dict[str, Any] = {
        "base_model_name_or_path": base.path,
        "modules_to_save": saved or None,
        "revision": base.revision,
        "target_modules": _target_modules(
            [name for name in own_modules if name not in parameters], there
        ),
        "task_type": "SEQ_CLS" if SCORE.name in adapter.outside else "CAUSAL_LM",
    }
    own: dict[str, Any] = {}
    for variant in adapter.variants:
        own |= variant.to_peft(adapter)
    if own:
        return PeftConfig(**common, **own)
    named = {parameters.get(name, name): adapter.modules[name] for name in own_modules}
    ranks = {name: weights.rank for name, weights in named.items()}
    ranks |= {name: fused.rank for name, fused in experts.items()}
    alphas = {name: weights.lora_alpha for name, weights in named.items()}
    alphas |= {name: fused.scaling * fused.rank for name, fused in experts.items()}
    rank, lora_alpha = _most_common(ranks), _most_common(alphas)
    if one := [n for n in own_modules if is_of_expert(n)][:1]:
        # peft takes that of gate and up from here, whatever the patterns say.
        rank, lora_alpha = ranks[one[0]], alphas[one[0]]
    given: dict[str, Any] = {
        variant.setting: adapter.is_set(variant.setting)
        for variant in variants()
        if variant.setting is not None and variant.peft_type == "LORA"
    }
    if experts:
        of_experts = [name for name in linear_names if is_of_expert(name)]
        targets = _target_parameters(experts, of_experts)
        given["target_parameters"] = [*targets, *sorted(parameters.values())]
        given["peft_version"] = PEFT_VERSION
    if adapter.token_indices:
        given["trainable_token_indices"] = adapter.token_indices
    return LoraConfig(
        alpha_pattern=_pattern(alphas, lora_alpha),
        lora_alpha=_whole(lora_alpha),
        lora_dropout=adapter.dropout,
        r=rank,
        rank_pattern=_pattern(ranks, rank),
        use_rslora=adapter.use_rslora,
        **common,
        **given,
    )


def _most_common[T: float](values: Mapping[str, T]) -> T:
    return collections.Counter(values.values()).most_common(1)[0][0]


def _whole(value: float) -> float | int:
    """Returns a whole number as an int, as vLLM and older versions of peft require."""
    return int(value) if float(value).is_integer() else value


def _pattern(values: Mapping[str, float], common: float) -> dict[str, float]:
    """Returns the values that differ from the common one, by full name as a pattern."""
    return {
        re.escape(shared_path(name)): _whole(value)
        for name, value in values.items()
        if value != common
    }


def _target_parameters(
    experts: Mapping[str, FusedLora], linear_names: Sequence[str]
) -> list[str]:
    """Returns ends of names if they select exactly these parameters, or full names.

    Args:
        experts: What is adapted, by parameter.
        linear_names: Names of the linears of all experts.
    """
    ends = {name.partition(".layers.")[2].partition(".")[2] for name in experts}
    blocks = {shared_path(name).rpartition(".")[0] for name in linear_names}
    is_all = len(experts) == len(ends) * len(blocks)
    return sorted(ends if is_all else experts)


def _target_modules(modules: list[str], linear_names: Sequence[str]) -> list[str]:
    """Returns suffixes if they select exactly these modules, otherwise full names.

    Where the text model is one part of another, other parts may have linears with the
    same suffixes.
    """

    def by_suffix(names: Sequence[str]) -> dict[str, set[str]]:
        out = collections.defaultdict(set)
        for name in names:
            out[name.rsplit(".", 1)[-1]].add(name)
        return out

    adapted, there = by_suffix(modules), by_suffix(linear_names)
    is_whole = module_prefix(linear_names) == "model."
    if is_whole and all(names == there[suffix] for suffix, names in adapted.items()):
        return sorted(adapted)
    return sorted(modules)
