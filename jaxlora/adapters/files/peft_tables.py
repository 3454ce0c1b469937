"""Reads what a PEFT folder holds of the embedding and of the head.

peft trains rows of them (`trainable_token_indices`), whole copies (`modules_to_save`),
or LoRA on them (`target_modules`). Beside LoRA, and if the vocabulary was resized, it
also saves the frozen weights that it trained on. An adapter here has rows or a whole
copy, so LoRA, and what is trained beside frozen weights of its own, becomes a copy.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxlora.adapters.adapter import OutsideWeights, lora_scaling
from jaxlora.adapters.files.peft_export import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from jaxlora.adapters.targets import pattern_value
from jaxlora.common.json_file import shown
from jaxlora.common.patterns import Patterns
from jaxlora.config.rules import row_tokens
from jaxlora.errors import AdapterError
from jaxlora.hf.checkpoint import open_checkpoint
from jaxlora.hf.read_tensor import read_tensor
from jaxlora.models.slot_modules import TOKEN_ROWS, replacement

# Hugging Face's paths of the two modules.
_PATHS = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
_ROWS = TOKEN_ROWS.tensor.peft_name
_MAGNITUDE = "lora_magnitude_vector"
_LORA = {
    "embed_tokens": ("lora_embedding_A", "lora_embedding_B"),
    "lm_head": ("lora_A.weight", "lora_B.weight"),
}
# The frozen weight below each wrapper of peft, and the weight of a copy.
_FROZEN = "base_layer.weight", "token_adapter.base_layer.weight"
_ORIGINAL, _COPY, _WEIGHT = "original_module.weight", "modules_to_save.weight", "weight"

Table = Float32[np.ndarray, "V D"]


@dataclasses.dataclass(frozen=True)
class BaseTables:
    """The embedding and the head of a base model, which are read when needed.

    Attributes:
        folder: Folder of its checkpoint.
        is_tied: Whether the head is the embedding.
    """

    folder: pathlib.Path
    is_tied: bool

    def read(self, module: str) -> Table:
        """Returns the weight of `embed_tokens` or `lm_head`.

        Raises:
            ModelError: It cannot be read.
        """
        return self._weights["embed_tokens" if self.is_tied else module]

    @functools.cached_property
    def _weights(self) -> dict[str, Table]:
        files = open_checkpoint(self.folder).files
        names = {module: f"{path}.weight" for module, path in _PATHS.items()}
        return {
            module: read_tensor(files[name], name)[0].astype(np.float32)
            for module, name in names.items()
            if name in files
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedTable:
    """The parts of an adapter folder that change the embedding, or the head.

    Attributes:
        frozen: The weight that was trained on; None: that of the base.
        copy: A whole copy that was trained.
        rows: Rows of tokens that were trained.
        lora: A and B in PEFT's layout, A B and their transposes in the embedding.
        magnitude: Magnitudes of DoRA beside them.
    """

    frozen: np.ndarray | None
    copy: np.ndarray | None
    rows: np.ndarray | None
    lora: tuple[np.ndarray, np.ndarray] | None
    magnitude: np.ndarray | None


def take_tables(
    folder: pathlib.Path, arrays: dict[str, np.ndarray], copied: list[str]
) -> dict[str, SavedTable]:
    """Takes the tensors of the embedding and the head out of those of a folder.

    Args:
        folder: The folder, for errors.
        arrays: Its tensors by name, of which these are removed.
        copied: The modules in `modules_to_save`.

    Raises:
        AdapterError: A tensor is unknown, or one is missing.
    """
    found = {}
    for module, path in _PATHS.items():
        start = f"{PREFIX}{path}."
        own = {key: arrays.pop(key) for key in [*arrays] if key.startswith(start)}
        parts = {
            key.removeprefix(start).replace("default.", ""): array
            for key, array in own.items()
        }
        if parts or module in copied:
            found[module] = _saved(folder, module, parts, is_copy=module in copied)
    return found


def _saved(
    folder: pathlib.Path,
    module: str,
    parts: dict[str, np.ndarray],
    *,
    is_copy: bool,
) -> SavedTable:
    names = _LORA[module]
    known = {*_FROZEN, _ORIGINAL, _COPY, _WEIGHT, _ROWS, _MAGNITUDE, *names}
    if unknown := sorted(parts.keys() - known):
        raise AdapterError(
            f"{folder / WEIGHTS_FILE} holds {PREFIX}{_PATHS[module]}.{unknown[0]}, "
            "which is not known. Merge the adapter into its base with peft."
        )

    def first(*keys: str) -> np.ndarray | None:
        return next((parts[key] for key in keys if key in parts), None)

    copy = first(_COPY, _WEIGHT) if is_copy else None
    if is_copy and copy is None:
        raise AdapterError(
            f"{folder}: {CONFIG_FILE} has a whole copy of {module} (modules_to_save), "
            f"and {WEIGHTS_FILE} does not. Copy the folder again, or merge the adapter "
            "into its base with peft."
        )
    there = [name for name in names if name in parts]
    if len(there) == 1:
        raise AdapterError(f"{folder} has {module}.{there[0]} alone. Copy it again.")
    return SavedTable(
        frozen=None if is_copy else first(*_FROZEN, _ORIGINAL, _WEIGHT),
        copy=copy,
        rows=parts.get(_ROWS),
        lora=(parts[names[0]], parts[names[1]]) if there else None,
        magnitude=parts.get(_MAGNITUDE),
    )


def table_values(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    tables: Mapping[str, SavedTable],
    size: int,
    base: BaseTables | None,
    patterns: Patterns,
) -> dict[str, OutsideWeights]:
    """Returns the rows and the whole copies of an adapter, as in `Adapter.outside`.

    `Adapter.check_base` checks the number of tokens.

    Args:
        folder: The folder, for errors.
        config: Its settings, as `read_config` returns them.
        tables: What it holds of each module.
        size: Size D of a row of the base.
        base: The base's own; None: LoRA on a module is refused.
        patterns: Checks the patterns in the settings.

    Raises:
        AdapterError: The tensors do not fit each other, the settings or the base.
    """
    ids = _token_ids(folder, config, tables)
    found: dict[str, OutsideWeights] = {}
    frozen: dict[str, Table] = {}
    for module in _PATHS:
        saved = tables.get(module)
        _check_rows(folder, module, ids[module], saved, size)
        if saved is None:
            continue
        if saved.lora is not None:
            if base is not None and base.is_tied and module == "lm_head":
                saved = _on_trained_rows(saved, found.get("embed_tokens"), base)
            weight = _with_lora(folder, config, module, saved, base, patterns, size)
            found[module] = OutsideWeights(weight)
        elif saved.copy is not None:
            found[module] = OutsideWeights(_table(folder, module, saved.copy, size))
        elif saved.rows is not None and saved.frozen is None:
            found[module] = OutsideWeights(saved.rows.astype(np.float32), ids[module])
        if saved.frozen is None:
            continue
        frozen[module] = _table(folder, module, saved.frozen, size)
        if saved.lora is None:
            weight = frozen[module].copy()
            if saved.rows is not None:
                _check_largest(folder, module, ids[module], len(weight))
                weight[list(ids[module])] = saved.rows
            found[module] = OutsideWeights(weight)
    return {
        replacement(module, is_whole=not weights.tokens).name: weights
        for module, weights in _needed(found, frozen, tables, base).items()
    }


def _needed(
    found: dict[str, OutsideWeights],
    frozen: Mapping[str, Table],
    tables: Mapping[str, SavedTable],
    base: BaseTables | None,
) -> dict[str, OutsideWeights]:
    """Returns the tables without those that the base has itself.

    The frozen weight of one of two tied modules is that of the other one, too.
    """
    if base is None:
        return found
    if base.is_tied:
        for weight in frozen.values():
            for module in _PATHS.keys() - tables.keys():
                found = found | {module: OutsideWeights(weight)}

    def is_needed(module: str) -> bool:
        saved, values = tables.get(module), found[module]
        is_trained = saved is not None and saved.copy is not None
        if is_trained or values.tokens:
            return True
        return not np.array_equal(values.array, base.read(module))

    return {module: found[module] for module in found if is_needed(module)}


def _on_trained_rows(
    saved: SavedTable, rows: OutsideWeights | None, base: BaseTables
) -> SavedTable:
    """Returns a tied head with LoRA, which peft puts on the trained rows of tokens."""
    if rows is None or not rows.tokens or saved.frozen is not None:
        return saved
    weight = base.read("lm_head").copy()
    if max(rows.tokens) >= len(weight):
        return saved  # which `Adapter.check_base` refuses
    weight[list(rows.tokens)] = rows.array
    return dataclasses.replace(saved, frozen=weight)


def _table(folder: pathlib.Path, module: str, array: np.ndarray, size: int) -> Table:
    if array.ndim != 2 or array.shape[1] != size:
        raise AdapterError(
            f"{folder}: the weight of {module} has shape {list(array.shape)}, and the "
            f"hidden states of the base model have {size} features. Is it an adapter "
            "of another model?"
        )
    return array.astype(np.float32)


def _with_lora(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    module: str,
    saved: SavedTable,
    base: BaseTables | None,
    patterns: Patterns,
    size: int,
) -> Table:
    """Returns the weight with LoRA on it, by peft's formulas."""
    if base is None:
        raise AdapterError(
            f"{folder} has LoRA on {module}, which no job trains here; only merge and "
            "generate read it. Merge it into its base (jaxlora merge), and train on "
            "the merged model."
        )
    assert saved.lora is not None
    a, b = (array.astype(np.float32) for array in saved.lora)
    given = base.read(module) if saved.frozen is None else saved.frozen
    weight = _table(folder, module, given, size)
    rank, lora_alpha = (
        pattern_value(config.get(key) or {}, _PATHS[module], config[common], patterns)
        for key, common in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    is_embedding = module == "embed_tokens"
    num, wide = (len(weight), size) if is_embedding else (size, len(weight))
    shapes = (rank, num), (wide, rank)
    if (a.shape, b.shape) != shapes:
        raise AdapterError(
            f"{folder}: the LoRA of {module} has the shapes {a.shape} and {b.shape}; "
            f"rank {rank} and its weight call for {shapes[0]} and "
            f"{shapes[1]}. Use the base whose vocabulary has the size of the adapter's."
        )
    scaling = lora_scaling(lora_alpha, rank, bool(config.get("use_rslora")))
    product = (b @ a).T if is_embedding else b @ a
    weight = weight + np.float32(scaling) * product
    if bool(config.get("use_dora")) != (saved.magnitude is not None):
        raise AdapterError(
            f"{folder}: use_dora in {CONFIG_FILE} does not agree with the weights of "
            f"{module}, which {'lack' if saved.magnitude is None else 'have'} "
            f"{_MAGNITUDE}. Correct the file."
        )
    if saved.magnitude is not None:
        axis = 0 if is_embedding else 1  # a magnitude for each output feature
        norms = np.linalg.norm(weight, axis=axis, keepdims=True)
        factors = saved.magnitude.reshape(norms.shape) / np.where(norms == 0, 1, norms)
        weight = weight * np.where(norms == 0, 1, factors).astype(np.float32)
    return weight


def _token_ids(
    folder: pathlib.Path, config: Mapping[str, Any], tables: Mapping[str, SavedTable]
) -> dict[str, tuple[int, ...]]:
    """Returns the tokens whose rows are trained, by module."""
    path, given = folder / CONFIG_FILE, config.get("trainable_token_indices")
    try:
        tokens = row_tokens(given)
    except ValueError as error:
        raise AdapterError(f"{path}, trainable_token_indices: {error}") from None
    by_module = tokens if isinstance(tokens, dict) else {"embed_tokens": tokens}
    head = tables.get("lm_head")
    if not isinstance(tokens, dict) and head is not None and head.rows is not None:
        by_module["lm_head"] = tokens  # those of a tied head, which peft saves again
    for ids in by_module.values():
        is_list = isinstance(ids, list | tuple)
        if not is_list or not all(type(i) is int and i >= 0 for i in ids):
            raise AdapterError(
                f"{path} has trainable_token_indices={shown(given)}; wanted a list of "
                "tokens, which are whole numbers from 0."
            )
    return {module: tuple(by_module.get(module, ())) for module in _PATHS}


def _check_rows(
    folder: pathlib.Path,
    module: str,
    ids: tuple[int, ...],
    saved: SavedTable | None,
    size: int,
) -> None:
    rows = None if saved is None else saved.rows
    if rows is None and not ids:
        return
    if saved is not None and saved.copy is not None:
        raise AdapterError(
            f"{folder / CONFIG_FILE} has {module} in modules_to_save and in "
            "trainable_token_indices; the adapter can have only one of them. Correct "
            "the file."
        )
    if rows is None or rows.shape != (len(ids), size):
        there = "lacks it" if rows is None else f"has {list(rows.shape)}"
        raise AdapterError(
            f"{folder}: the {len(ids)} trainable_token_indices of {module} and the "
            f"base model call for {PREFIX}{_PATHS[module]}.{_ROWS} of shape "
            f"{[len(ids), size]}, and it {there}. Is it an adapter of another model?"
        )


def _check_largest(
    folder: pathlib.Path, module: str, ids: tuple[int, ...], num_tokens: int
) -> None:
    if max(ids) >= num_tokens:
        raise AdapterError(
            f"{folder} has a row of token {max(ids)} in {module}, whose weight in the "
            f"folder has {num_tokens} tokens. The folder is damaged: copy it again."
        )
