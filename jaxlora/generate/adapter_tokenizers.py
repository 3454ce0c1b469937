"""The tokenizers that lie beside adapters, with their chat templates."""

import hashlib
import pathlib
from collections.abc import Mapping

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.tokenizer_copy import (
    COPIED,
    TEMPLATE_FILE,
    ChatTemplate,
)
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.data.tokenizer_files import read_template
from jaxlora.generate.adapter_names import Folder
from jaxlora.hf.files import tokenizer_files
from jaxlora.hf.load import FrozenModel, OpenedModel


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
