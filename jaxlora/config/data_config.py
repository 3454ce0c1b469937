"""The user's settings of a job's data."""

import math
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator

from jaxlora.config.aliases import DATA_HINTS, DATA_NAMES
from jaxlora.config.strict import (
    Bool,
    InputPath,
    NonNegativeFloat,
    PositiveInt,
    StrictModel,
    Wrong,
)

_OF_SEVERAL = ("mix", "probabilities", "stopping_strategy")
# `rng.choice` and `datasets` allow the sum of probabilities this distance from 1.
_ROUNDING = 1e-8


def _one_or_several(data: Any, wrong: Wrong) -> None:
    if not data.path and not data.datasets:
        wrong["path"] = (
            "give path: a file, a folder or a hub id. Or list several in datasets."
        )
    for name in _OF_SEVERAL:
        if data.changes(name) and not data.datasets:
            wrong[name] = (
                f"{name} is for several data sets: list them in datasets, or leave "
                f"{name} out."
            )
    for name in DataConfig.model_fields if data.datasets else ():
        if name not in ("datasets", *_OF_SEVERAL) and data.changes(name):
            wrong[name] = f"{name} belongs to each item of datasets. Put it there."
    if any(one.datasets for one in data.datasets):
        wrong["datasets"] = (
            "an item of datasets has a path, and no datasets of its own. Put all of "
            "them in one list."
        )
    for name in ("probabilities", "stopping_strategy"):
        if data.datasets and data.mix != "interleave" and data.changes(name):
            wrong[name] = (
                f"{name} needs `mix: interleave`. Set it, or leave {name} out."
            )


def _shares(data: Any, wrong: Wrong) -> None:
    shares, num = data.probabilities, len(data.datasets)
    if shares is None or not num:
        return
    total = sum(shares)
    if len(shares) != num:
        wrong["probabilities"] = (
            f"there are {len(shares)} probabilities and {num} datasets. Give one for "
            "each, in the same order."
        )
    elif abs(total - 1) > _ROUNDING:
        cure = "Give positive numbers."
        if total > 0:
            cure = f"Give [{', '.join(f'{share / total:.4g}' for share in shares)}]."
        wrong["probabilities"] = f"their sum is {total:g}, and must be 1. {cure}"
    elif 0 in shares and data.stopping_strategy != "first_exhausted":
        wrong["probabilities"] = (
            f"a data set of probability 0 is never read, so {data.stopping_strategy} "
            "would never end. Leave the data set out."
        )


# Variables of chat templates that do not come from settings.
_OWN_VARIABLES = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize"),
        *("raise_exception", "strftime_now"),
        *(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls")),
        *("mask_token", "additional_special_tokens"),
    )
)


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """Returns values for variables of a chat template, if they can be that.

    Raises:
        ValueError: A name is no name or is given by the program, or a value is not
            plain.
    """
    if not isinstance(kwargs, Mapping):
        raise ValueError(
            f"expected names with values, such as {{enable_thinking: false}}, not "
            f"{kwargs!r:.80}."
        )
    for name, value in kwargs.items():
        if not isinstance(name, str) or not name.isidentifier() or name[0] == "_":
            raise ValueError(
                f"{name!r:.80} is not the name of a variable. Write names such as "
                "enable_thinking."
            )
        if name in _OWN_VARIABLES:
            raise ValueError(
                f"{name!r} is given to chat templates by the program itself, from the "
                "records and the tokenizer. Leave it out."
            )
        if not _is_plain(value):
            raise ValueError(
                f"{name} is {value!r:.80}, and must be true, false, null, a number, a "
                "text, or a list or mapping of these."
            )
    return dict(kwargs)


def common_template_kwargs(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `chat_template_kwargs` of all data sets; none if they differ.

    Args:
        data: The settings of a job's data, as `DataConfig` writes them.
    """
    sets = data.get("datasets") or [data]
    first, *others = (one.get("chat_template_kwargs", {}) for one in sets)
    return first if all(one == first for one in others) else {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(
            map(_is_plain, value.values())
        )
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


class DataConfig(StrictModel):
    """The location of a job's records, and how a record becomes tokens.

    There is one data set, which has a `path`, or there are several in `datasets`, each
    with settings of its own. A record is a prompt with its completion (both texts, or
    both lists of messages), a list of chat messages, plain text, or an instruction with
    its input and output.

    Attributes:
        path: A .jsonl, .json, .parquet, .csv, .arrow or .feather file, a folder written
            by `datasets.save_to_disk`, or a dataset id on the Hugging Face hub. Also a
            folder of such files or a glob, whose files are read by name.
        split: Split of a Hugging Face dataset.
        subset: Configuration name of a dataset on the hub.
        revision: Branch, tag or commit of a dataset on the hub.
        kind: Which fields to read; `auto` decides by the first record's fields, and
            refuses records that can be read in two ways. `alpaca` reads `instruction`,
            `input` and `output`; `preference` a chosen and a rejected answer, and
            `unpaired` one answer with a label, and `distill` tokens with a teacher's
            log-probabilities, which `auto` does for objectives that learn from them.
            Others are registered with `jaxlora.register_format`.
        prompt: Field of the prompt, or a Jinja template over the record's fields
            (anything that contains `{{`).
        completion: Field of the completion, or a Jinja template.
        messages: Field of the list of messages, {role, content} or {from, value}; with
            its default, also `conversations`.
        text: Field of the plain text, or a Jinja template.
        chosen: Field of the better answer of a preference: text or a list of messages.
        rejected: Field of the worse answer of a preference.
        margin: Field of a preference that says by how much the reward of the better
            answer should be higher, a number; None: `margin`, if there is one. Only for
            reward models.
        label: Field that says whether the answer of an unpaired record is desirable:
            true or false, or 1 or 0. With its default, also `kto_tag`.
        weight: Field with the weight of a record, a number above 0, by which the losses
            of its tokens are multiplied; the loss of a global batch is their weighted
            mean. None: all are 1.
        chat: Wrap prompt and completion as a user's and an assistant's message in
            the chat template.
        chat_template: Template of chats in place of the tokenizer's own, which a base
            may not have: a file, the folder of a model that has one, `chatml`,
            `llama3`, or the template itself.
        chat_template_kwargs: Values of variables that the chat template has for its
            users, such as {enable_thinking: false}. Generation with the adapter has
            them, too.
        system: System message of chats: a field, if it is one word or the first record
            has a field of this name; a Jinja template over the fields; or the text for
            all records. Null or empty is none. Records that have one keep it.
        roles: Role of the chat template, such as `assistant`, for each role or speaker
            that the messages call otherwise.
        loss_on: Train on the completion's (assistant's) tokens only, on those of the
            `last` answer of a chat only, or on all.
        append_eos: End plain text and completions outside chat templates with the
            tokenizer's end-of-sequence token.
        limit: Number of records to use, from the first; None: all. Of a dataset on the
            hub, the others are not downloaded.
        bad_records: What to do with a record that cannot be used, such as one without
            the field or one that the chat template refuses: `error` ends the run
            before it trains and names the record; `drop` leaves it out and counts it.
        datasets: Several data sets, each a mapping of these settings or a path.
        mix: How several data sets become one, in the words of the package `datasets`:
            `concat` is one after the other, as in `concatenate_datasets`; `interleave`
            takes samples in turn, or by `probabilities`, as in `interleave_datasets`
            with the job's `seed`. The job shuffles the result if it has `shuffle`.
        probabilities: Share of the samples of each data set, with the sum 1, for
            `interleave`; None: one of each in turn.
        stopping_strategy: When `interleave` ends: with the first data set of which all
            samples were taken (the others are cut), with the last one (the others begin
            again), or with the last one, each sample once.
    """

    aliases, hints = DATA_NAMES, DATA_HINTS
    rules = (_one_or_several, _shares)

    path: InputPath = ""
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    kind: str = "auto"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    text: str = "text"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None
    label: str = "label"
    weight: str | None = None
    chat: Bool = False
    chat_template: str | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any], BeforeValidator(check_template_kwargs)
    ] = {}
    system: str | None = None
    roles: dict[str, str] = {}
    loss_on: Literal["completion", "last", "all"] = "completion"
    append_eos: Bool = True
    limit: PositiveInt | None = None
    bad_records: Literal["error", "drop"] = "error"
    datasets: tuple["DataConfig", ...] = ()
    mix: Literal["concat", "interleave"] = "concat"
    probabilities: tuple[NonNegativeFloat, ...] | None = None
    stopping_strategy: Literal[
        "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"
    ] = "first_exhausted"

    @property
    def sets(self) -> tuple["DataConfig", ...]:
        """The data sets, each of which has a path."""
        return self.datasets or (self,)

    @property
    def set_names(self) -> tuple[str, ...]:
        """Short and different names of the data sets, for logs and metrics."""
        paths = [one.path for one in self.sets]
        stems = [pathlib.PurePath(path).stem for path in paths]
        parts = [(one.subset, one.split) for one in self.sets]
        join = lambda name, more: ".".join(filter(None, (name, *more)))
        for found in (stems, map(join, stems, parts), map(join, paths, parts)):
            if len(set(names := tuple(found))) == len(paths):
                return names
        return tuple(f"{stem}-{i}" for i, stem in enumerate(stems, start=1))

    @pydantic.field_validator("datasets", mode="before")
    @classmethod
    def _paths_are_data_sets(cls, given: object) -> object:
        if not isinstance(given, list | tuple):
            return given
        return [{"path": one} if isinstance(one, str) else one for one in given]

    @pydantic.field_validator("path", mode="before")
    @classmethod
    def _path_is_one(cls, path: object) -> object:
        if isinstance(path, list | tuple):
            raise ValueError(
                "expected one file, folder or hub id, not a list. List several in "
                "datasets, in place of path."
            )
        return path

    @pydantic.field_validator("weight", mode="before")
    @classmethod
    def _weight_is_a_field(cls, weight: object) -> object:
        if isinstance(weight, int | float):
            raise ValueError(
                "expected the field of the records that has their weights. A share of "
                "a data set is set by `mix: interleave` and probabilities beside "
                "datasets."
            )
        return weight
