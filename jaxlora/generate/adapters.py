"""The adapters that answer prompts: their names, and the tokenizers beside them."""

import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.tokenizer_copy import (
    COPIED,
    TEMPLATE_FILE,
    ChatTemplate,
)
from jaxlora.common.job_name import BASE
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.data.tokenizer_files import read_template
from jaxlora.errors import ConfigError
from jaxlora.hf.files import tokenizer_files
from jaxlora.hf.load import FrozenModel, OpenedModel

Folder = str | pathlib.Path
# A folder, or several; each has its own name, or the one that it is given.
Adapters = Mapping[str, Folder | Adapter] | Sequence[Folder] | Folder


def named_adapters(adapters: Any) -> dict[str, Folder | Adapter]:
    """Returns adapters by name.

    Args:
        adapters: PEFT folders or adapters, by name; or folders, as for `named_folders`.

    Raises:
        ConfigError: They are of another kind, or a name is `base` or is there twice.
    """
    if isinstance(adapters, str | os.PathLike):
        adapters = [adapters]
    if not isinstance(adapters, Mapping):
        if not isinstance(adapters, list | tuple) or not all(
            isinstance(folder, str | os.PathLike) for folder in adapters
        ):
            raise ConfigError(
                f"adapters is {adapters!r:.80}, of type {type(adapters).__name__}. "
                'Name the adapters: adapters={"mine": "runs/one/adapters/mine"}.'
            )
        return dict(named_folders([os.fspath(folder) for folder in adapters]))
    for name, adapter in adapters.items():
        is_adapter = isinstance(adapter, str | os.PathLike | Adapter)
        if not isinstance(name, str) or not is_adapter:
            raise ConfigError(
                f"adapters has {name!r:.80}: {adapter!r:.80}. Give a name, and a "
                "folder or an Adapter."
            )
        _check_name(name, f"the adapter {name!r}", "Give it another name.")
    return dict(adapters)


def named_folders(folders: Sequence[str]) -> dict[str, str]:
    """Names adapters that are given as `NAME=FOLDER`, or as `FOLDER` by its own name.

    Raises:
        ConfigError: Two adapters have the same name, or one has that of the base model.
    """
    named: dict[str, str] = {}
    for given in folders:
        # The name of a folder may have a `=`, too.
        is_named = "=" in given and not pathlib.Path(given).exists()
        name, folder = given.split("=", 1) if is_named else ("", given)
        name = name or pathlib.Path(folder).resolve().name
        if name in named:
            raise ConfigError(
                f"two adapters are named {name!r}: {named[name]} and {folder}. Give "
                "one of them another name: NAME=FOLDER."
            )
        _check_name(name, folder, "Give it another name: NAME=FOLDER.")
        named[name] = folder
    return named


def _check_name(name: str, what: str, cure: str) -> None:
    if name == BASE:
        raise ConfigError(
            f"{what} is named {BASE!r}, which is the name of the base model. {cure}"
        )


def own_tokenizers(
    model: FrozenModel | OpenedModel,
    base: Tokenizer,
    adapters: Mapping[str, Folder | Adapter],
    templates: Mapping[str, ChatTemplate],
) -> dict[str, Tokenizer]:
    """Returns the tokenizers of the adapters that have another one than the base.

    Args:
        model: The base model.
        base: Its tokenizer.
        adapters: PEFT folders or adapters, by name.
        templates: Chat templates of adapters that are no folders, by name.

    Raises:
        ModelError: A tokenizer cannot be read, or has more tokens than the model.
    """
    loaded = {_digest(model.folder): base}
    found = {}
    for name, adapter in adapters.items():
        if isinstance(adapter, Adapter):
            if name in templates:
                source = f"the chat template of {name}"
                found[name] = base.with_chat_template(templates[name], source)
            continue
        folder = pathlib.Path(adapter)
        if not (folder / "tokenizer.json").exists():
            if (folder / TEMPLATE_FILE).exists():
                template = read_template(folder)
                assert template is not None
                found[name] = base.with_chat_template(template, str(folder))
            continue
        digest = _digest(folder)
        if digest not in loaded:
            loaded[digest] = load_tokenizer(folder, now=base.chat.now)
            loaded[digest].check_fits(model.config.vocab_size)
        found[name] = loaded[digest]
    return found


def _digest(folder: pathlib.Path) -> bytes:
    """Returns a hash of a tokenizer's files."""
    digest = hashlib.sha256()
    for path in tokenizer_files(folder, COPIED):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(path.name.encode() + content)
    return digest.digest()
