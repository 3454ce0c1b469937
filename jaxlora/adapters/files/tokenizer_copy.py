"""The tokenizer beside an adapter, with the chat template that it was trained with.

TRL, Axolotl and Unsloth write these files beside every adapter, trained on chats or
not, and transformers loads the tokenizer from there.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from jaxlora.hf.files import TOKENIZER_FILES, read_json, tokenizer_files

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
# The settings with which a model generates are no part of its tokenizer.
COPIED = tuple(name for name in TOKENIZER_FILES if name != "generation_config.json")

# A template, or several by name.
ChatTemplate = str | dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerCopy:
    """The tokenizer of a job.

    Attributes:
        folder: Folder with the tokenizer's files, such as that of the base model.
        template: Chat template of the job; None: the tokenizer's own, if it has one.
    """

    folder: pathlib.Path
    template: ChatTemplate | None = None

    def write(self, folder: pathlib.Path) -> None:
        """Writes the files into a folder; none if the base model has no tokenizer.

        Raises:
            ModelError: A file of the tokenizer cannot be read.
        """
        paths = tokenizer_files(self.folder, COPIED)
        for path in paths:
            shutil.copyfile(path, folder / path.name)
        if not paths or self.template is None:
            return
        config = folder / CONFIG_FILE
        values: dict[str, Any] = read_json(config) if config.exists() else {}
        values.pop("chat_template", None)
        template = folder / TEMPLATE_FILE
        if isinstance(self.template, str):
            template.write_text(self.template, encoding="utf-8")
        else:
            template.unlink(missing_ok=True)
            named = self.template.items()
            values["chat_template"] = [{"name": n, "template": t} for n, t in named]
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        config.write_text(text, encoding="utf-8")


def template_settings(data: Mapping[str, Any]) -> list[str]:
    """Returns the different `chat_template` settings of a job's data, in order.

    Args:
        data: The setting `data` of a job, as JSON values.
    """
    sets = data.get("datasets") or [data]
    return list(dict.fromkeys(filter(None, (one.get("chat_template") for one in sets))))


def job_template(
    data: Mapping[str, Any], templates: Mapping[str, ChatTemplate]
) -> ChatTemplate | None:
    """Returns the chat template of a job; None: that of the tokenizer.

    Args:
        data: The setting `data` of the job, as JSON values. If its data sets have
            several templates, the first one is taken.
        templates: The templates of the run, by the setting that means them.
    """
    settings = template_settings(data)
    return templates.get(settings[0]) if settings else None


def merged_tokenizer(
    base: pathlib.Path, adapter: pathlib.Path
) -> Iterable[pathlib.Path]:
    """Returns the files beside the weights of a merged model.

    A tokenizer beside the adapter takes the place of the base's, and so does a chat
    template alone.

    Args:
        base: Folder of the base model.
        adapter: PEFT folder.

    Raises:
        ModelError: A file cannot be read.
    """
    files = {path.name: path for path in tokenizer_files(base)}
    beside = {path.name: path for path in tokenizer_files(adapter, COPIED)}
    if "tokenizer.json" in beside:
        files = {n: path for n, path in files.items() if n not in COPIED} | beside
    elif TEMPLATE_FILE in beside:
        files[TEMPLATE_FILE] = beside[TEMPLATE_FILE]
    return files.values()
