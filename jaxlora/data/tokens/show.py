"""Shows samples of a data set, with the tokens that are trained on."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import numpy as np
import tokenizers
from jaxtyping import Int32
from rich.console import Console
from rich.text import Text
from tokenizers import decoders, models, pre_tokenizers

from jaxlora.common import console as consoles
from jaxlora.common.counted import counted
from jaxlora.config import DataConfig
from jaxlora.data.formats.table import format_of
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.read import open_records
from jaxlora.data.templates.known import CHATML
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.dataset import EncodedRecords, Samples
from jaxlora.data.tokens.encode_records import encode_records, without_sample
from jaxlora.data.tokens.marked_text import mark, marked_parts
from jaxlora.printable import printable

# Tokens that are trained on, in turn, so that two neighbours differ; and the others.
_TRAINED = ("black on green", "black on bright_green")
_CONTEXT = ("default", "dim")
_MAX_TOKENS = 2000


def show_data(
    data: DataConfig,
    tokenizer: Tokenizer | None,
    console: Console,
    *,
    max_length: int,
    num_samples: int,
    reads_all: bool,
) -> None:
    """Prints how records are read, and the first samples with their tokens.

    Args:
        data: The data set.
        tokenizer: The base model's tokenizer. None: the text is shown without counts of
            tokens, and chats are rendered as ChatML.
        console: Where to print. If it has no colours, [[ ]] are put around the text
            that is trained on.
        max_length: Largest number of tokens of a sample.
        num_samples: Number of records to show, from the first.
        reads_all: Whether all records are read and counted, not only those that are
            shown.

    Raises:
        DataError: The data cannot be read, or a record cannot be used.
        ModelError: The records are chats, and the tokenizer has no chat template.
    """
    drops_bad = data.bad_records == "drop"
    if not reads_all:
        data = data.replace(limit=min(num_samples, data.limit or 2**62))
    else:
        data = data.replace(bad_records="drop")  # all are counted
    max_length = max_length if tokenizer else 2**31
    used, records = _encode(data, tokenizer or _stand_in(), max_length)
    size = format_of(data.kind).num_samples
    lines = [text for level, text in records.notes if level == logging.INFO]
    line = f"{data.path}: {without_sample(lines[-1])}"
    consoles.show(console, line, soft_wrap=True)
    numbers = np.flatnonzero(~records.is_bad)[: num_samples * size]
    for number in numbers.tolist():
        role = _role(data, records, number)
        title = f"\nrecord {number // size + 1}{f', {role}' if role else ''}"
        if tokenizer:
            title += f": {_counts(records, number, max_length)}"
        consoles.show(console, title, style="bold", soft_wrap=True)
        _print_sample(Samples([records], np.array([number])), used, console)
    if reads_all:
        totals = _totals(records, max_length, size, has_tokens=tokenizer is not None)
        if records.is_bad.any() and not drops_bad:
            totals += " With data.bad_records: error, the first of these ends a run."
        consoles.show(console, f"\n{totals}", soft_wrap=True)
    if tokenizer is None:
        text = "Give --model for the tokens and the chat template of a model."
        consoles.show(console, f"\n{text}", soft_wrap=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShownSample:
    """A sample of a data set as it is trained on.

    Attributes:
        record: Number of its record, from 1.
        role: `chosen` or `rejected` in a pair, `desirable` or `undesirable` if the
            record has a label; else empty.
        num_tokens: Number of its tokens, before it is cut at the longest length.
        num_targets: How many of these are trained on.
        text: Its text, with [[ ]] around the parts that are trained on.
        tokens: Its tokens: id, text, and whether it is trained on. A character of
            several tokens is in the text of the last one.
    """

    record: int
    role: str
    num_tokens: int
    num_targets: int
    text: str
    tokens: tuple[tuple[int, str, bool], ...]


def find_samples(
    data: DataConfig, tokenizer: Tokenizer, *, max_length: int, num_samples: int
) -> list[ShownSample]:
    """Returns the samples of the first records; arguments as for `show_data`.

    Raises:
        JaxloraError: As for `show_data`.
    """
    data = data.replace(limit=min(num_samples, data.limit or 2**62))
    used, records = _encode(data, tokenizer, max_length)
    size, found = format_of(data.kind).num_samples, []
    for number in np.flatnonzero(~records.is_bad).tolist():
        sample = Samples([records], np.array([number]))[0]
        ids, is_target = sample.token_ids[:_MAX_TOKENS], sample.is_target[:_MAX_TOKENS]
        texts = _token_texts(used, ids)
        tokens = zip(ids.tolist(), texts, is_target.tolist(), strict=True)
        found.append(
            ShownSample(
                record=number // size + 1,
                role=_role(data, records, number),
                num_tokens=int(records.lengths[number]),
                num_targets=int(records.num_targets[number]),
                text=mark(list(marked_parts(used, ids, is_target))),
                tokens=tuple(tokens),
            )
        )
    return found


def _encode(
    data: DataConfig, tokenizer: Tokenizer, max_length: int
) -> tuple[Tokenizer, EncodedRecords]:
    """Returns the tokenizer with the data's chat template, and the records."""
    used = tokenizer.with_setting(data.chat_template, data.chat_template_kwargs)
    with _less_log():
        return used, encode_records(data, open_records(data), used, max_length)


def _role(data: DataConfig, records: EncodedRecords, number: int) -> str:
    """Returns the role of a sample among those of its record; empty: it has none."""
    form = format_of(data.kind)
    if form.num_samples == 2:
        return "rejected" if number % 2 else "chosen"
    if form.gives == "unpaired":
        return "desirable" if records.values[number] else "undesirable"
    return ""


@contextlib.contextmanager
def _less_log() -> Iterator[None]:
    """Suppresses the log line about the first sample, which is printed here."""
    logger = logging.getLogger(Notes.__module__)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _counts(records: EncodedRecords, number: int, max_length: int) -> str:
    length, num_targets = records.lengths[number], records.num_targets[number]
    text = f"{counted(int(length), 'token')}, {num_targets:,} of them trained on"
    if length > max_length:
        text += f"; longer than max_length={max_length}, and cut here"
    if (
        weights := Samples([records], np.array([number]))[0].target_weights
    ) is not None:
        text += f", with weights from {weights.min():g} to {weights.max():g}"
    return text + ("" if num_targets else "; such a sample is dropped")


def _totals(
    records: EncodedRecords, max_length: int, size: int, *, has_tokens: bool
) -> str:
    """Counts records, each of so many samples."""
    is_long = (records.lengths > max_length).reshape(-1, size)
    num_long, num_records = int(is_long.any(axis=1).sum()), len(is_long)
    num_targets = int(records.num_targets.sum())
    num_bad = int(records.is_bad.sum()) // size
    tokens = (
        f"{counted(len(records.tokens), 'token')}, {num_targets:,} of them trained on; "
        f"longer than max_length={max_length}: {counted(num_long, 'record')}; "
    )
    return (
        f"{counted(num_records, 'record')}: {tokens if has_tokens else ''}"
        f"{num_bad:,} cannot be used."
    )


def _print_sample(samples: Samples, tokenizer: Tokenizer, console: Console) -> None:
    sample = samples[0]
    ids, is_target = sample.token_ids[:_MAX_TOKENS], sample.is_target[:_MAX_TOKENS]
    if console.color_system is None:
        text = Text(printable(mark(list(marked_parts(tokenizer, ids, is_target)))))
    else:
        text = Text()
        for i, token in enumerate(_token_texts(tokenizer, ids)):
            styles = _TRAINED if is_target[i] else _CONTEXT
            text.append(printable(token), styles[i % 2])
    consoles.show(console, text, soft_wrap=True)
    if len(sample.token_ids) > _MAX_TOKENS:
        num_more = len(sample.token_ids) - _MAX_TOKENS
        consoles.show(console, f"... and {counted(num_more, 'more token')}")


def _token_texts(
    tokenizer: Tokenizer, token_ids: Int32[np.ndarray, " T"]
) -> Iterator[str]:
    """Yields the text of each token; a character of several tokens is in the last."""
    start = 0
    for end in range(1, len(token_ids) + 1):
        # Decoders treat the first token of a text differently, so one is put before.
        before = tokenizer.decode(token_ids[max(0, start - 1) : start])
        text = tokenizer.decode(token_ids[max(0, start - 1) : end])[len(before) :]
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids):
            yield ""
            continue
        start = end
        yield text


def _stand_in() -> Tokenizer:
    """Returns a tokenizer of bytes with ChatML, to show text without a model."""
    marks = ["<|im_start|>", "<|im_end|>", "<|end of text|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*marks, *alphabet))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(marks)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {"eos_token": marks[2]}, CHATML, source="ChatML")
