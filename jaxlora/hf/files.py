"""The files of a checkpoint: on this disk, or on the Hugging Face hub."""

import json
import pathlib
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors

from jaxlora.errors import ModelError
from jaxlora.hf.tensor_file import TensorFile

# Weights as safetensors and what describes them; nothing else is fetched.
_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
# Copies of the same weights for other programs, and what lies in subfolders.
_UNWANTED = ("*/*", "consolidated*", "adapter_*")
TOKENIZER_FILES = (*_WANTED[1:6],)
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def model_folder(source: str | pathlib.Path, revision: str | None = None):
    """The folder of a checkpoint, fetched from the hub if need be.

    Args:
        source: A folder, or a hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct`.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelError: There is no such checkpoint, or it cannot be fetched. With
            HF_HUB_OFFLINE=1 only what was fetched before is used.
    """
    folder = pathlib.Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{folder} has no config.json, so it is no Hugging Face checkpoint."
            )
        return folder
    if folder.is_file():
        raise ModelError(
            f"{folder} is a file; a checkpoint is a folder. `jaxlora convert` makes "
            "one of a GGUF file."
        )
    if folder.is_absolute() or str(source).count("/") > 1 or str(source)[:1] == ".":
        raise ModelError(f"{source}: there is no such folder.")
    try:
        fetched = huggingface_hub.snapshot_download(
            str(source),
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except hub_errors.GatedRepoError as error:
        raise ModelError(
            f"{source} is gated: accept its licence on the hub and log in with "
            "`hf auth login`."
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{source} is neither a folder here nor a model on the hub that you may "
            "read."
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{source} has no revision {revision!r} on the hub. Give a branch, tag or "
            "commit that it has."
        ) from error
    except hub_errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{source} is no folder here, and has not been fetched before (or not "
            "whole), and the hub cannot be reached or is switched off by "
            "HF_HUB_OFFLINE."
        ) from error
    # HTTPError: also a connection that breaks while files come in.
    except (hub_errors.HTTPError, OSError, ValueError) as error:
        raise ModelError(f"{source} cannot be fetched from the hub: {error}") from error
    return model_folder(fetched)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: The file is missing or is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value


def safetensor_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Which file holds each tensor, by Hugging Face's name.

    Where there are both one file and an index of several, the one file counts, as in
    transformers.

    Raises:
        ModelError: There are no safetensors, or the index names what is missing.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return dict.fromkeys(TensorFile(single).names(), single)
    index = folder / _INDEX
    if index.is_file():
        return _indexed(folder, index)
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder} holds only pickled weights ({pickled[0]}). Loading a pickle can "
            "run any code that it carries, so only safetensors are read. Convert it: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
        )
    raise ModelError(
        f"{folder} holds neither model.safetensors nor {_INDEX}. Only safetensors are "
        "read, and fetched from the hub; pickled weights (.bin, .pt) can run any code."
    )


def _indexed(folder: pathlib.Path, index: pathlib.Path) -> dict[str, pathlib.Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map.")
    names = sorted(set(weight_map.values()), key=str)
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is no plain file name.")
        if not (folder / name).is_file():
            raise ModelError(f"{index} names {name}, which is missing from {folder}.")
    there = {name: set(TensorFile(folder / name).names()) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in there[name]:
            raise ModelError(
                f"{folder / name} lacks {tensor}, which the index puts there. Fetch or "
                "copy both again."
            )
    return {tensor: folder / name for tensor, name in weight_map.items()}
