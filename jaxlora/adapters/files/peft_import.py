"""Reads a PEFT LoRA folder as an adapter."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlora.adapters.adapter import Adapter, LoraWeights, OutsideWeights
from jaxlora.adapters.files.expert_tensors import check_alike, module_name, take_experts
from jaxlora.adapters.files.export_record import PREFIX, read_record
from jaxlora.adapters.files.peft_config import loftq_format, read_config
from jaxlora.adapters.files.peft_export import CONFIG_FILE, WEIGHTS_FILE
from jaxlora.adapters.files.peft_tables import (
    BaseTables,
    TableReader,
    take_tables,
)
from jaxlora.adapters.targets import pattern_value
from jaxlora.common.patterns import Patterns
from jaxlora.errors import AdapterError, ConfigError, ModelError
from jaxlora.hf.tensor_file import TensorFile, check_finite
from jaxlora.models.config import is_of_expert, shared_path
from jaxlora.models.slot_modules import SCORE
from jaxlora.models.structure import linear_path, module_prefix
from jaxlora.modules.trained_tensors import (
    tensors_with,
    trained_tensors,
)
from jaxlora.modules.variants.table import variant_of, variants, variants_with
from jaxlora.modules.variants.variant import TrainedTensor

# Not every linear has a bias that PEFT can train beside LoRA.
_BIAS = TrainedTensor(
    name="bias", peft_name="base_layer.bias", dimensions=("N",), start=None
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeftFolder:
    """The contents of a PEFT folder.

    Attributes:
        adapter: The adapter.
        biases: Trained biases, which replace those of the base, by their names in its
            checkpoint. Only `merge_adapter` uses them, and the next attribute.
        base_format: Format of the base from whose error the adapter started (LoftQ), so
            that it is relative to the quantized weights; None: it did not.
    """

    adapter: Adapter
    biases: dict[str, np.ndarray]
    base_format: str | None


def import_peft(
    folder: str | pathlib.Path,
    linear_shapes: Mapping[str, tuple[int, ...]],
    *,
    score_size: int | None = None,
    base: BaseTables | None = None,
) -> Adapter:
    """Reads a PEFT folder of LoRA, DoRA or VeRA.

    LoRA on the embedding or the head is read as a whole copy of the module, and so is
    a frozen weight of them that peft has saved, if the base has another one.

    Folders with trained biases, and those that started by LoftQ, are refused, as they
    can only be merged.

    Args:
        folder: Folder with adapter_config.json and adapter_model.safetensors.
        linear_shapes: (K, N) of each of the base model's linears, by module name.
        score_size: Size of the score head that the folder may hold; None: it may not.
        base: Embedding and head of the base model; None: a folder with LoRA on them is
            refused.

    Raises:
        AdapterError: The folder is incomplete or damaged, is of another kind or not on
            linears, does not fit the base model, has a weight that is NaN or infinite,
            or has a pattern that takes too long to match.
    """
    found = read_folder(folder, linear_shapes, score_size=score_size, base=base)
    reason = None
    if found.biases:
        reason = "has trained biases (bias: lora_only)"
    elif found.base_format is not None:
        reason = f"started from the error of a base in {found.base_format} (LoftQ)"
    if reason is not None:
        raise AdapterError(
            f"{folder} {reason}, and such an adapter can only be merged. Merge it into "
            "its base (jaxlora merge), and use the merged model."
        )
    return found.adapter


def read_folder(
    folder: str | pathlib.Path,
    linear_shapes: Mapping[str, tuple[int, ...]],
    *,
    score_size: int | None = None,
    base: BaseTables | None = None,
) -> PeftFolder:
    """Reads a PEFT folder as `import_peft` does, with what can only be merged."""
    folder = pathlib.Path(folder)
    try:
        return _read(folder, linear_shapes, score_size, base)
    except (ConfigError, ModelError) as error:  # of a pattern, of the weights' file
        raise AdapterError(str(error)) from error


def _read(
    folder: pathlib.Path,
    linear_shapes: Mapping[str, tuple[int, ...]],
    score_size: int | None,
    base: BaseTables | None,
) -> PeftFolder:
    path = folder / CONFIG_FILE
    patterns = Patterns(str(path))
    config = read_config(path, patterns)
    embedding = f"{PREFIX}{module_prefix(linear_shapes)}embed_tokens."
    arrays = {
        key.replace(embedding, f"{PREFIX}model.embed_tokens."): array
        for key, array in _read_arrays(folder).items()
    }
    score = arrays.pop(f"{PREFIX}{SCORE.peft_name}", None)
    shared = {name for variant in variants() for name in variant.peft_tensors}
    matrices = {name: arrays.pop(name) for name in arrays.keys() & shared}
    tables = take_tables(folder, arrays, config["modules_to_save"])
    experts = take_experts(folder, arrays, config, linear_shapes, patterns)
    found = _by_module(folder / WEIGHTS_FILE, arrays)
    if not found and not experts and not any(table.lora for table in tables.values()):
        raise AdapterError(f"{folder / WEIGHTS_FILE} holds no weights.")
    wanted = tensors_with(config.get)
    if config["bias"] == "lora_only":
        wanted = (*wanted, _BIAS)
    ranks, alphas = config["rank_pattern"] or {}, config["alpha_pattern"] or {}
    modules, biases = dict(experts), {}
    for given, tensors in found.items():
        name = given if given in linear_shapes else module_name(given)
        if name not in linear_shapes:
            has_experts = any(map(is_of_expert, linear_shapes))
            reason = _why_not(given, has_experts)
            raise AdapterError(f"{folder} adapts {given}, {reason}")
        rank, lora_alpha = config["r"], config["lora_alpha"]
        # Newer names of experts, and those of parameters.
        for one in dict.fromkeys((shared_path(name), f"{name}.weight", given)):
            rank = pattern_value(ranks, one, rank, patterns)
            lora_alpha = pattern_value(alphas, one, lora_alpha, patterns)
        own = _checked(folder, name, tensors, wanted, rank, linear_shapes[name])
        if (bias := own.pop(_BIAS.name, None)) is not None:
            biases[f"model.{linear_path(name)}.bias"] = bias
        modules[name] = LoraWeights(
            tensors=own, rank=rank, lora_alpha=float(lora_alpha)
        )
    ordered = {name: modules[name] for name in linear_shapes if name in modules}
    check_alike(folder, ordered, linear_shapes)
    record = read_record(folder)
    size, _ = next(iter(linear_shapes.values()))  # the first reads the hidden states
    outside = TableReader(folder, config, tables, size, base, patterns).values()
    if score is not None:
        outside[SCORE.name] = _checked_score(folder, score, score_size)
    shapes = [linear_shapes[name] for name in ordered]
    frozen = (
        variant.frozen_from_peft(folder, config, matrices, shapes)
        for variant in variants_with(config.get)
    )
    adapter = Adapter(
        modules=ordered,
        use_rslora=bool(config["use_rslora"]),
        dropout=float(config["lora_dropout"] or 0.0),
        outside=outside,
        vera=next(filter(None, frozen), None),
        chat_template_kwargs={} if record is None else record.chat_template_kwargs,
    )
    base_format = loftq_format(path, config)
    return PeftFolder(adapter=adapter, biases=biases, base_format=base_format)


def _why_not(name: str, has_experts: bool) -> str:
    """Returns why the base model does not have a linear, and the cure."""
    if has_experts and name.endswith((".gate", ".shared_expert_gate", ".router.proj")):
        return (
            "and routers and gates of experts stay frozen here. Merge the adapter into "
            "its base with peft."
        )
    return "which the base model does not have. Is it an adapter of another model?"


def _checked_score(
    folder: pathlib.Path, score: np.ndarray, size: int | None
) -> OutsideWeights:
    if size is None:
        raise AdapterError(
            f"{folder} holds the score head of a reward model, which predicts no text. "
            "Only a job with `objective: reward` can start from it."
        )
    if score.shape != (1, size):
        raise AdapterError(
            f"{folder}: {SCORE.peft_name} has shape {list(score.shape)}; a reward "
            f"model on this base has {[1, size]}. Is it a classifier, or of another "
            "model?"
        )
    return OutsideWeights(np.ascontiguousarray(score[0].astype(np.float32)))


def _read_arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a folder, by PEFT's names."""
    path = folder / WEIGHTS_FILE
    has_pickle = os.path.lexists(folder / "adapter_model.bin")
    if has_pickle and not os.path.lexists(path):
        raise AdapterError(
            f"{folder} holds only adapter_model.bin. Loading a pickle can run any code "
            "that it carries, so only safetensors are read. Load it with peft and save "
            "it again."
        )
    file = TensorFile(path)
    arrays = {name: file.array(name) for name in file.names()}
    for name, array in arrays.items():
        check_finite(array, f"{path}: {name}", AdapterError, np.dtype(np.float32))
    return arrays


def _by_module(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the tensors of each module, by PEFT's names of them."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    peft_names = [tensor.peft_name for tensor in trained_tensors()]
    for key, array in arrays.items():
        # Older versions of peft keep the adapter's name in the key.
        name = key.removeprefix(PREFIX).replace(".default.", ".")
        for peft_name in (*peft_names, _BIAS.peft_name):
            if name.endswith(f".{peft_name}"):
                break
        else:
            *others, last = peft_names
            raise AdapterError(
                f"{path} holds {key}, which is no LoRA weight of a linear; only "
                f"{', '.join(others)} and {last} are supported."
            )
        tensors = modules.setdefault(name.removesuffix(f".{peft_name}"), {})
        if peft_name in tensors:
            raise AdapterError(f"{path} holds {key} under two spellings of its name.")
        tensors[peft_name] = array
    return modules


def _checked(
    folder: pathlib.Path,
    name: str,
    tensors: Mapping[str, np.ndarray],
    wanted: Sequence[TrainedTensor],
    rank: int,
    linear_shape: tuple[int, ...],
) -> dict[str, np.ndarray]:
    """Returns a module's tensors in our layout, float32, by our names."""
    checked = {}
    for tensor in (*trained_tensors(), _BIAS):
        place, array = f"{name}.{tensor.peft_name}", tensors.get(tensor.peft_name)
        if array is None:
            if tensor in wanted and tensor is not _BIAS:
                raise AdapterError(f"{folder} lacks {place}.")
            continue
        if tensor not in wanted:
            given = "bias: lora_only"
            if tensor is not _BIAS:
                given = variant_of(tensor).setting or "peft_type: LORA"
            raise AdapterError(
                f"{folder} holds {place}, but its {CONFIG_FILE} does not set {given}. "
                "Correct the file."
            )
        k, n = linear_shape
        shape = tensor.shape(k, n, rank)[::-1]  # PEFT stores the transpose
        if array.shape != shape:
            raise AdapterError(
                f"{folder}: {place} has shape {list(array.shape)}; the base model and "
                f"rank {rank} call for {list(shape)}."
            )
        checked[tensor.name] = np.ascontiguousarray(array.astype(np.float32).T)
    return checked
