"""Reads prompts from a file."""

import logging
import pathlib
from typing import Any

from jaxlora.common.json_file import check_regular_file
from jaxlora.data.formats import alpaca
from jaxlora.data.records.files import READERS, Record, read_file
from jaxlora.data.records.tool_calls import read_tools
from jaxlora.data.records.values import is_columnar
from jaxlora.errors import DataError
from jaxlora.generate.prompt import Message, Prompt, errors_in, read_chat

logger = logging.getLogger(__name__)

_FIELDS = ("prompt", "messages", "conversations", "instruction")


def read_prompts(path: str | pathlib.Path, *, chat: bool = False) -> list[Prompt]:
    """Reads a text file of one prompt a line, or a file of records.

    Files of records are those that hold training data: .jsonl, .json, .csv, .parquet,
    .arrow and .feather. A record has `prompt`, a text or a chat; `messages` or
    `conversations`, a chat; or `instruction` and maybe `input`, as in Alpaca. It may
    also have `tools`; `adapter`, the name of the adapter that answers; and `seed`.
    Other keys have no effect. So a file of training records can be used: the messages
    of the assistant that end a chat are left out, and the log says so.

    Args:
        path: The file.
        chat: Whether the prompts will be messages of a chat, where an instruction of
            Alpaca stands without Alpaca's text around it.

    Raises:
        DataError: The file cannot be read, holds no prompts, or has a wrong record.
    """
    path = pathlib.Path(path)
    try:
        check_regular_file(path)
        if path.suffix in READERS:
            prompts = _RecordFile(path, chat=chat).read()
        else:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            prompts = [Prompt(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error  # without the path
        raise DataError(f"{path} cannot be read as text: {why}.") from error
    if not prompts:
        raise DataError(f"{path} holds no prompts. Write one a line.")
    return prompts


class _RecordFile:
    """Reads the prompts of a file of records, and counts the answers left out."""

    def __init__(self, path: pathlib.Path, *, chat: bool):
        self._path = path
        self._is_columnar = is_columnar(path)
        self._chat = chat
        self._num_answered = 0

    def read(self) -> list[Prompt]:
        """Returns the prompts of all records."""
        prompts = []
        records = read_file(self._path, keeps_bad=False)
        for number, record in enumerate(records, 1):
            assert isinstance(record, dict), "bad lines are errors"
            with errors_in(f"{self._path}, record {number}"):
                prompts.append(self._prompt(record))
        if self._num_answered:
            logger.info(
                "%s: %d of %d chats end with messages of the assistant, which are left "
                "out: the model is to answer.",
                self._path,
                self._num_answered,
                len(prompts),
            )
        return prompts

    def _prompt(self, record: Record) -> Prompt:
        absent = (None, "") if self._path.suffix == ".csv" else (None,)
        fields = {key: value for key, value in record.items() if value not in absent}
        given = [key for key in _FIELDS if key in fields]
        if len(given) != 1:
            raise DataError(
                f"has the fields {', '.join(map(str, record)) or 'none'}, and exactly "
                f"one of {', '.join(_FIELDS)} is the prompt. Rename or remove fields."
            )
        tools = fields.get("tools")
        return Prompt(
            self._text(given[0], fields),
            adapter=_check(fields, "adapter", str),
            seed=_check(fields, "seed", int),
            tools=read_tools(tools, "tools", is_columnar=self._is_columnar),
        )

    def _text(self, key: str, fields: Record) -> str | list[Message]:
        if key == "instruction":
            return alpaca.make_prompt(fields, chat=self._chat)
        if key == "prompt" and not isinstance(fields[key], list):
            return str(_check(fields, key, str))
        return self._question(_check(fields, key, list))

    def _question(self, messages: list[Any]) -> list[Message]:
        """Returns the messages of a chat before the assistant's last answer."""
        read = read_chat(messages, is_columnar=self._is_columnar)
        end = len(read)
        while end and read[end - 1]["role"] == "assistant":
            end -= 1
        if not end:
            raise DataError(
                "all messages are the assistant's own, so there is nothing to answer. "
                "Put a message of the user before them."
            )
        self._num_answered += end < len(read)
        return read[:end]


def _check(fields: Record, key: str, kind: type) -> Any:
    """Returns a field's value if it is absent or of a type."""
    value = fields.get(key)
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 20
    if kind is int and is_number:
        return int(value)  # as a .csv file has it
    if value is not None and type(value) is not kind:
        kinds: dict[type, str] = {
            str: "a text",
            int: "an integer",
            list: "a list of messages",
        }
        raise DataError(f"{key} is {value!r:.80}; write {kinds[kind]}.")
    return value
