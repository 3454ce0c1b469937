"""Reads the files of a Hugging Face tokenizer, and checks their values."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import tokenizers

from jaxlora.common.json_file import parse_json, read_regular_file, shown
from jaxlora.errors import ModelError

# A lone surrogate, which JSON can spell but UTF-8 cannot encode.
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPECIAL = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenizerFiles:
    """The contents of a tokenizer's files, with checked values.

    Attributes:
        backend: The tokenizer of tokenizer.json.
        config: Contents of tokenizer_config.json; empty if there is none.
        special_tokens: Text of each special token, by `bos_token`, `eos_token`, ...
        template: The chat template, or several by name; None if there is none.
    """

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    special_tokens: dict[str, str]
    template: str | dict[str, str] | None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads the files of a tokenizer.

    Raises:
        ModelError: tokenizer.json is missing, or a file is damaged.
        BaseException: The library may raise anything on a damaged tokenizer.json; see
            `wrap_errors`.
    """
    backend = _backend(folder)
    config = _object(folder / "tokenizer_config.json")
    return TokenizerFiles(
        backend=backend,
        config=config,
        special_tokens=_special_tokens(folder, config, backend),
        template=_template(folder, config),
    )


def _read(path: Path) -> bytes | None:
    """Reads a file; None if there is none."""
    try:
        return read_regular_file(path)
    except FileNotFoundError as error:
        if not path.is_symlink():
            return None
        why = f"it links to {path.readlink()}, which is missing"
        raise _unreadable(path, why) from error
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from error


def _unreadable(path: Path, why: object) -> ModelError:
    return ModelError(
        f"{path}: cannot be read ({why}). Fetch the file again, or check its "
        "permissions."
    )


def _backend(folder: Path) -> tokenizers.Tokenizer:
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder. Give a model's folder.")
    content = _read(folder / "tokenizer.json")
    if content is None:
        raise ModelError(
            f"{folder}: has no tokenizer.json (a tokenizer.model alone is not enough). "
            "Convert it once with transformers: AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder)."
        )
    return tokenizers.Tokenizer.from_buffer(content)


def _object(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file; an empty one if there is no file."""
    text = _read(path)
    if text is None:
        return {}
    try:
        content = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise ModelError(
            f"{path}: is not valid JSON ({error}). Fetch the file again."
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold an object. Fetch the file again.")
    return content


def _special_tokens(folder: Path, config: dict[str, Any], backend) -> dict[str, str]:
    if "added_tokens_decoder" not in config:
        config = config | _object(folder / "special_tokens_map.json")
    texts = {name: _text(config, f"{name}_token", folder) for name in _SPECIAL}
    special = {
        f"{name}_token": text for name, text in texts.items() if text is not None
    }
    if "eos_token" not in special:
        special |= _eos_of_model(folder, backend)
    return special


def _text(config: dict[str, Any], key: str, folder: Path) -> str | None:
    """Reads a special token, given as its text or as an object with its `content`."""
    token = config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if token is None or (isinstance(text, str) and not _SURROGATE.search(text)):
        return text
    raise ModelError(
        f"{folder}: {key} is {shown(token)} in tokenizer_config.json or "
        "special_tokens_map.json; expected a string, an object with content, or null."
    )


def model_eos_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end a model's texts, of generation_config.json or config.json.

    Raises:
        ModelError: A file is damaged, or an id is none.
    """
    for name in ("generation_config.json", "config.json"):
        if ids := _eos_ids(folder / name):
            return ids
    return ()


def _eos_ids(path: Path) -> tuple[int, ...]:
    values = _object(path)
    text = values.get("text_config")  # of a model of which the text is one part
    given = values.get("eos_token_id")
    if given is None and isinstance(text, dict):
        given = text.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for value in ids:
        is_id = isinstance(value, int) and not isinstance(value, bool)
        if not (is_id and 0 <= value < 2**31):
            raise ModelError(
                f"{path}: eos_token_id is {shown(given)}; expected the id of a token "
                "or a list of ids."
            )
    return tuple(ids)


def _eos_of_model(folder: Path, backend) -> dict[str, str]:
    for name in ("generation_config.json", "config.json"):
        ids = _eos_ids(folder / name)
        text = backend.id_to_token(ids[0]) if ids else None
        if text is not None:
            return {"eos_token": text}
    return {}


def read_template(folder: Path) -> str | dict[str, str] | None:
    """Returns the chat template of a folder, or several by name; None if it has none.

    Raises:
        ModelError: A file is damaged.
    """
    return _template(folder, _object(folder / "tokenizer_config.json"))


def _template(folder: Path, config: dict[str, Any]) -> Any:
    """Returns the template of chat_template.jinja, else that of the config."""
    path = folder / "chat_template.jinja"
    try:
        if (text := _read(path)) is not None:
            return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8. Save it as UTF-8.") from error
    template = given = config.get("chat_template")
    if isinstance(template, list):
        entries = [e if isinstance(e, dict) else {} for e in template]
        template = {e.get("name"): e.get("template") for e in entries}
    texts = (
        [*template, *template.values()] if isinstance(template, dict) else [template]
    )
    if template is not None and not all(isinstance(text, str) for text in texts):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {shown(given)}; "
            "expected a string, or a list of objects with a name and a template."
        )
    return template
