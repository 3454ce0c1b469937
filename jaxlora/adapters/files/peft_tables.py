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
from jaxlora.adapters.files.export_record import PREFIX
from jaxlora.adapters.files.peft_export import CONFIG_FILE, WEIGHTS_FILE
from jaxlora.adapters.targets import pattern_value
from jaxlora.common.json_file import shown
from jaxlora.common.patterns import Patterns
from jaxlora.config.rules import row_tokens
from jaxlora.errors import AdapterError
from jaxlora.hf.checkpoint import open_checkpoint
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
            module: files[name].read(name)[0].astype(np.float32)
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

    frozen: np.ndarray | None = None
    copy: np.ndarray | None = None
    rows: np.ndarray | None = None
    lora: tuple[np.ndarray, np.ndarray] | None = None
    magnitude: np.ndarray | None = None


_NOTHING = SavedTable()


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
        parts = {
            key.removeprefix(start).replace("default.", ""): arrays.pop(key)
            for key in [*arrays]
            if key.startswith(start)
        }
        if parts or module in copied:
            found[module] = _saved(folder, module, parts, is_copy=module in copied)
    return found


def _saved(
    folder: pathlib.Path, module: str, parts: dict[str, np.ndarray], *, is_copy: bool
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


@dataclasses.dataclass(frozen=True)
class TableReader:
    """Makes rows and whole copies of what a folder holds of the two modules.

    Attributes:
        folder: The folder, for errors.
        config: Its settings, as `read_config` returns them.
        tables: What it holds of each module.
        size: Size D of a row of the base.
        base: The base's own; None: LoRA on a module is refused.
        patterns: Checks the patterns in the settings.
    """

    folder: pathlib.Path
    config: Mapping[str, Any]
    tables: Mapping[str, SavedTable]
    size: int
    base: BaseTables | None
    patterns: Patterns

    def values(self) -> dict[str, OutsideWeights]:
        """Returns the rows and the whole copies of an adapter, as in `Adapter.outside`.

        `Adapter.check_base` checks the number of tokens.

        Raises:
            AdapterError: The tensors do not fit each other, the settings or the base.
        """
        found: dict[str, OutsideWeights] = {}
        frozen: dict[str, Table] = {}
        for module, ids in self._token_ids().items():
            saved = self.tables.get(module, _NOTHING)
            self._check_rows(module, ids, saved)
            if saved.frozen is not None:
                frozen[module] = self._table(module, saved.frozen)
            own = saved.copy if saved.frozen is None else saved.frozen
            if saved.lora is not None:
                weight = self._trained_on(module, saved, found.get("embed_tokens"))
                found[module] = OutsideWeights(self._with_lora(module, saved, weight))
            elif own is not None:
                found[module] = OutsideWeights(self._table(module, own))
            if saved.rows is None or saved.lora is not None:
                continue
            rows = OutsideWeights(saved.rows.astype(np.float32), ids)
            if module in found:
                self._put(module, found[module].array, rows)
            else:
                found[module] = rows
        return {
            replacement(module, is_whole=not weights.tokens).name: weights
            for module, weights in self._needed(found, frozen).items()
        }

    def _needed(
        self, found: dict[str, OutsideWeights], frozen: Mapping[str, Table]
    ) -> dict[str, OutsideWeights]:
        """Returns the tables without those that the base has itself."""
        base, tables = self.base, self.tables
        if base is None:
            return found
        if base.is_tied:
            # The frozen weight of one of two tied modules is that of the other, too.
            others = _PATHS.keys() - tables.keys()
            found |= {
                m: OutsideWeights(weight) for weight in frozen.values() for m in others
            }
        return {
            module: values
            for module, values in found.items()
            if tables.get(module, _NOTHING).copy is not None
            or values.tokens
            or not np.array_equal(values.array, base.read(module))
        }

    def _table(self, module: str, array: np.ndarray) -> Table:
        """Returns a copy of a weight in float32."""
        if array.ndim != 2 or array.shape[1] != self.size:
            raise AdapterError(
                f"{self.folder}: the weight of {module} has shape {list(array.shape)}, "
                f"and the hidden states of the base model have {self.size} features. "
                "Is it an adapter of another model?"
            )
        return array.astype(np.float32)

    def _put(self, module: str, weight: Table, values: OutsideWeights) -> None:
        """Replaces rows of a weight."""
        if (largest := max(values.tokens, default=-1)) >= len(weight):
            raise AdapterError(
                f"{self.folder} has a row of token {largest} in {module}, whose weight "
                f"has {len(weight)} tokens. The folder is damaged or of another base: "
                "copy it again, or use its own base."
            )
        weight[list(values.tokens)] = values.array

    def _trained_on(
        self, module: str, saved: SavedTable, embedding: OutsideWeights | None
    ) -> Table:
        """Returns the weight on which the LoRA of a module was trained.

        Args:
            module: The module.
            saved: What the folder holds of it.
            embedding: The rows of the embedding, if they are known already.
        """
        if self.base is None:
            raise AdapterError(
                f"{self.folder} has LoRA on {module}, which no job trains here; only "
                "merge and generate read it. Merge it into its base (jaxlora merge), "
                "and train on the merged model."
            )
        if saved.frozen is not None:
            return self._table(module, saved.frozen)
        weight = self._table(module, self.base.read(module))
        is_tied_head = module == "lm_head" and self.base.is_tied
        if is_tied_head and embedding is not None and embedding.tokens:
            # peft puts LoRA of a tied head on the trained rows of tokens.
            self._put(module, weight, embedding)
        return weight

    def _with_lora(self, module: str, saved: SavedTable, weight: Table) -> Table:
        """Returns a weight with LoRA on it, by peft's formulas."""
        assert saved.lora is not None
        folder, config = self.folder, self.config
        a, b = (array.astype(np.float32) for array in saved.lora)
        path = _PATHS[module]
        rank, lora_alpha = (
            pattern_value(config.get(pattern) or {}, path, config[key], self.patterns)
            for pattern, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        is_embedding = module == "embed_tokens"
        sizes = len(weight), self.size
        num, wide = sizes if is_embedding else sizes[::-1]
        shapes = (rank, num), (wide, rank)
        if (a.shape, b.shape) != shapes:
            raise AdapterError(
                f"{folder}: the LoRA of {module} has the shapes {a.shape} and "
                f"{b.shape}; rank {rank} and its weight call for {shapes[0]} and "
                f"{shapes[1]}. Use the base whose vocabulary has the size of the "
                "adapter's."
            )
        scaling = lora_scaling(lora_alpha, rank, bool(config.get("use_rslora")))
        product = (b @ a).T if is_embedding else b @ a
        weight = weight + np.float32(scaling) * product
        if bool(config.get("use_dora")) != (saved.magnitude is not None):
            raise AdapterError(
                f"{folder}: use_dora in {CONFIG_FILE} does not agree with the weights "
                f"of {module}, which {'lack' if saved.magnitude is None else 'have'} "
                f"{_MAGNITUDE}. Correct the file."
            )
        if saved.magnitude is None:
            return weight
        axis = 0 if is_embedding else 1  # a magnitude for each output feature
        norms = np.linalg.norm(weight, axis=axis, keepdims=True)
        factors = saved.magnitude.reshape(norms.shape) / np.where(norms == 0, 1, norms)
        return weight * np.where(norms == 0, 1, factors).astype(np.float32)

    def _token_ids(self) -> dict[str, tuple[int, ...]]:
        """Returns the tokens whose rows are trained, by module."""
        path = self.folder / CONFIG_FILE
        given = self.config.get("trainable_token_indices")
        try:
            tokens = row_tokens(given)
        except ValueError as error:
            raise AdapterError(f"{path}, trainable_token_indices: {error}") from None
        by_module = tokens if isinstance(tokens, dict) else {"embed_tokens": tokens}
        head = self.tables.get("lm_head", _NOTHING)
        if not isinstance(tokens, dict) and head.rows is not None:
            # Those of a tied head, which peft saves again.
            by_module["lm_head"] = tokens
        for ids in by_module.values():
            is_list = isinstance(ids, list | tuple)
            if not is_list or not all(type(i) is int and i >= 0 for i in ids):
                raise AdapterError(
                    f"{path} has trainable_token_indices={shown(given)}; wanted a list "
                    "of tokens, which are whole numbers from 0."
                )
        return {module: tuple(by_module.get(module, ())) for module in _PATHS}

    def _check_rows(self, module: str, ids: tuple[int, ...], saved: SavedTable) -> None:
        rows = saved.rows
        if rows is None and not ids:
            return
        if saved.copy is not None:
            raise AdapterError(
                f"{self.folder / CONFIG_FILE} has {module} in modules_to_save and in "
                "trainable_token_indices; the adapter can have only one of them. "
                "Correct the file."
            )
        if rows is None or rows.shape != (len(ids), self.size):
            there = "lacks it" if rows is None else f"has {list(rows.shape)}"
            raise AdapterError(
                f"{self.folder}: the {len(ids)} trainable_token_indices of {module} "
                f"and the base model call for {PREFIX}{_PATHS[module]}.{_ROWS} of "
                f"shape {[len(ids), self.size]}, and it {there}. Is it an adapter of "
                "another model?"
            )
