"""The user's settings of a job's data."""

from typing import Literal

import pydantic

from jaxlora.config.aliases import OF_DATA
from jaxlora.config.strict import Bool, PositiveInt, StrictModel


class DataConfig(StrictModel):
    """The location of a job's records, and how a record becomes tokens.

    A record is a prompt with its completion (both texts, or both lists of messages), a
    list of chat messages, plain text, or an instruction with its input and output.

    Attributes:
        path: A .jsonl, .json, .parquet, .csv, .arrow or .feather file, a folder written
            by `datasets.save_to_disk`, or a dataset id on the Hugging Face hub.
        split: Split of a Hugging Face dataset.
        subset: Configuration name of a dataset on the hub.
        revision: Branch, tag or commit of a dataset on the hub.
        kind: Which fields to read; `auto` decides by the first record's fields, and
            refuses records that can be read in two ways. `alpaca` reads `instruction`,
            `input` and `output`; `preference` a chosen and a rejected answer, and
            `unpaired` one answer with a label, which `auto` does for objectives that
            learn from them.
        prompt: Field of the prompt, or a Jinja template over the record's fields
            (anything that contains `{{`).
        completion: Field of the completion, or a Jinja template.
        messages: Field of the list of messages, {role, content} or {from, value}; with
            its default, also `conversations`.
        text: Field of the plain text.
        chosen: Field of the better answer of a preference: text or a list of messages.
        rejected: Field of the worse answer of a preference.
        margin: Field of a preference that says by how much the reward of the better
            answer should be higher, a number; None: `margin`, if there is one. Only for
            reward models.
        label: Field that says whether the answer of an unpaired record is desirable:
            true or false. With its default, also `kto_tag`.
        chat: Wrap prompt and completion as a user's and an assistant's message in
            the tokenizer's own chat template.
        system: System message put before the prompt (with `chat`).
        loss_on: Train on the completion's (assistant's) tokens only, or on all.
        append_eos: End plain text and completions outside chat templates with the
            tokenizer's end-of-sequence token.
        limit: Number of records to use, from the first; None: all.
        bad_records: What to do with a record that cannot be used, such as one without
            the field or one that the chat template refuses: `error` ends the run
            before it trains and names the record; `drop` leaves it out and counts it.
    """

    aliases = OF_DATA

    path: str
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    kind: Literal[
        "auto",
        "prompt_completion",
        "messages",
        "text",
        "alpaca",
        "preference",
        "unpaired",
    ] = "auto"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    text: str = "text"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None
    label: str = "label"
    chat: Bool = False
    system: str | None = None
    loss_on: Literal["completion", "all"] = "completion"
    append_eos: Bool = True
    limit: PositiveInt | None = None
    bad_records: Literal["error", "drop"] = "error"

    @pydantic.field_validator("path", mode="before")
    @classmethod
    def _path_is_one(cls, path: object) -> object:
        if isinstance(path, list | tuple):
            raise ValueError(
                "expected one file, folder or hub id, not a list. Join the files into "
                "one, or give each file a job."
            )
        return path
