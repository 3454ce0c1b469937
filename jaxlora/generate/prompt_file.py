"""Reads prompts from a file."""

import json
import pathlib
from typing import Any

from jaxlora.errors import DataError
from jaxlora.generate.prompt import Prompt
from jaxlora.json_file import check_regular_file


def read_prompts(path: str | pathlib.Path) -> list[Prompt]:
    """Reads a text file of one prompt a line, or a .jsonl file of records.

    A record has `prompt`, a text, or `messages`, a chat. It may also have `adapter`,
    the name of the adapter that answers, and `seed`. Other keys have no effect, so that
    a file of training records can be used.

    Raises:
        DataError: The file cannot be read, holds no prompts, or has a wrong record.
    """
    path = pathlib.Path(path)
    try:
        check_regular_file(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}.") from error
    read = _record if path.suffix == ".jsonl" else _text
    prompts = [
        read(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise DataError(f"{path} holds no prompts. Write one a line.")
    return prompts


def _text(line: str, where: str) -> Prompt:
    return Prompt(line)


def _record(line: str, where: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}. Correct the line.") from None
    fields = record if isinstance(record, dict) else {}
    given = [key for key in ("prompt", "messages") if key in fields]
    if len(given) != 1:
        raise DataError(
            f"{where} must be an object with either prompt or messages; got {line:.80}."
        )
    text, adapter, seed = fields[given[0]], fields.get("adapter"), fields.get("seed")
    is_chat = given[0] == "messages"
    _check(where, given[0], text, list if is_chat else str)
    if is_chat:
        for message in text:
            _check(where, "messages", message, dict)
    _check(where, "adapter", adapter, str | None)
    _check(where, "seed", seed, int | None)
    return Prompt(text, adapter=adapter, seed=seed)


def _check(where: str, key: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"{where}: {key} is {value!r:.80}, which is of a wrong kind.")
