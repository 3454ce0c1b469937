"""Reads, renders and encodes all records of a data set."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlora.common.counted import counted
from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Rendered
from jaxlora.data.formats.table import choose_reading, has_kind
from jaxlora.data.records.files import BadLineError, Record
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.read import Records
from jaxlora.data.rendering.render import Renderer, attempt_all
from jaxlora.data.templates.template import shared_pool
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.dataset import EncodedRecords, RecordWriter
from jaxlora.data.tokens.encode import Encoder
from jaxlora.data.tokens.marked_text import describe_sample
from jaxlora.errors import DataError
from jaxlora.objectives.sample import TokenizedSample

logger = logging.getLogger(__name__)

# For each record the texts of its samples, or why it cannot be used.
_Rendered = list[tuple[Rendered, ...] | DataError]

_SAMPLE = "; the first, with what is trained on in [[ ]]: "
_NO_SAMPLE = "; none has a token to predict"
# Limits of the records, and of their text, that are rendered at a time.
_CHUNK_RECORDS = 500
_CHUNK_CHARS = 2**18  # the tokenizer takes about 200 bytes for each
# Progress is logged when this many records or seconds have passed.
_LOG_RECORDS = 100_000
_LOG_SECONDS = 10.0
# So many records that are left out are named in the log.
_NUM_NAMED = 5


def encode_records(
    data: DataConfig, records: Records, tokenizer: Tokenizer, max_length: int
) -> EncodedRecords:
    """Reads, renders and encodes the records of a data set.

    Chat templates and templates over fields render several chunks of records at once,
    while the chunks before them are encoded.

    Args:
        data: Settings of the data set.
        records: Its records.
        tokenizer: The base model's tokenizer.
        max_length: Number of first tokens of each record that are needed.

    Raises:
        DataError: A record cannot be used (the error names it), or there is none.
        ModelError: The records are chats, and the tokenizer has no chat template.
    """
    notes = Notes(data.path)
    encoder = _RecordEncoder(data, records, tokenizer, notes)
    writer = RecordWriter(data.path, max_length)
    progress = _Progress(writer, data.path)
    encoder.add(records, writer, on_chunk=progress.log)
    notes.add_counts()
    num_records = len(writer) // encoder.size
    verb = "is" if num_records == 1 else "are"
    notes.add(
        f"{counted(num_records, 'record')} {verb} read as {encoder.describe()}",
        logging.INFO,
    )
    return writer.finish(first_bad=encoder.first_bad, notes=notes.lines)


def without_sample(note: str) -> str:
    """Returns how records are read, as `_RecordEncoder.describe` says it first."""
    return note.partition(_SAMPLE)[0].removesuffix(_NO_SAMPLE)


class _RecordEncoder:
    """Renders and encodes the records of a data set, all as its first one is read.

    Attributes:
        size: Samples of a record.
    """

    def __init__(
        self,
        data: DataConfig,
        records: Records,
        tokenizer: Tokenizer,
        notes: Notes,
    ):
        """Makes an encoder.

        Args:
            data: Settings of the data set.
            records: Its records, of which the first one says how all are read.
            tokenizer: The base model's tokenizer.
            notes: Takes lines for the log.

        Raises:
            DataError: The first record cannot be read.
            ModelError: The records are chats, and the tokenizer has no chat template.
        """
        first = _representative(data, records)
        try:
            self._reading = choose_reading(data, first)
            self._render = Renderer(self._reading, tokenizer, notes)
        except DataError as error:
            raise DataError(f"{data.path}: {error}") from error
        self.size = self._reading.format.num_samples
        self._tokenizer, self._bad = tokenizer, _BadRecords(data, notes)
        self._notes, self._num_cut, self._num_thoughtless = notes, 0, 0
        self._encode = Encoder(data, tokenizer)
        self._first: TokenizedSample | None = None  # with a target

    @property
    def first_bad(self) -> str:
        """Describes the first record that was left out; "" if there is none."""
        return self._bad.first

    def describe(self) -> str:
        """Says how records are read, and shows the first one."""
        if self._first is None:
            return f"{self._reading}{_NO_SAMPLE}"
        shown = describe_sample(
            self._tokenizer, self._first.token_ids, self._first.is_target
        )
        return f"{self._reading}{_SAMPLE}{shown}"

    def add(
        self,
        records: Iterable[Record | BadLineError],
        writer: RecordWriter,
        *,
        on_chunk: Callable[[], object],
    ) -> None:
        """Adds the tokens of records, and logs what was done with their thoughts.

        Args:
            records: The records.
            writer: Takes their tokens.
            on_chunk: Is called from time to time.

        Raises:
            DataError: A record cannot be used.
        """
        with contextlib.closing(_render_ahead(self._render, _chunks(records))) as made:
            for chunk in made:
                self._add_chunk(chunk, writer)
                on_chunk()
        self._note_thoughts()

    def _note_thoughts(self) -> None:
        if self._num_cut:
            self._notes.add(
                "the chat template leaves out the thoughts of "
                f"{counted(self._num_cut, 'answer')} that other messages "
                "follow, as it does when the model is served. None of them is trained "
                "on. To keep them, set chat_template to a template that prints them."
            )
        if self._num_thoughtless:
            self._notes.add(
                "the chat template prints an empty thought before "
                f"{counted(self._num_thoughtless, 'answer')} without thoughts, which "
                "counts as prompt. Generation has the same prompt only with thinking "
                "off: set chat_template_kwargs, such as {enable_thinking: false}.",
                logging.INFO,
            )

    def _add_chunk(self, rendered: _Rendered, writer: RecordWriter) -> None:
        for record in attempt_all(self._tokens, rendered):
            if isinstance(record, DataError):
                self._bad.add(len(writer) // self.size + 1, record)
                for _ in range(self.size):
                    writer.add_bad()
                continue
            # The samples of a record have a prompt in common.
            self._num_cut += record[0][0].num_cut
            self._num_thoughtless += record[0][0].num_thoughtless
            for text, sample in record:
                if text.weight != 1:
                    weights = sample.weights
                    if weights is None:
                        weights = np.ones(len(sample.token_ids))
                    weights = (weights * text.weight).astype(np.float32)
                    sample = dataclasses.replace(sample, weights=weights)
                if text.value:
                    sample = dataclasses.replace(sample, value=text.value)
                if self._first is None and sample.is_target.any():
                    self._first = sample
                writer.add(sample)

    def _tokens(
        self, records: Sequence[tuple[Rendered, ...]]
    ) -> Iterator[list[tuple[Rendered, TokenizedSample]] | DataError]:
        """Encodes the texts of records; the result of one is a text's first error."""
        texts = [text for record in records for text in record]
        samples = zip(texts, self._encode(texts), strict=True)
        for record in itertools.batched(samples, self.size):
            good = [(text, m) for text, m in record if not isinstance(m, DataError)]
            yield next((m for _, m in record if isinstance(m, DataError)), good)


def _representative(data: DataConfig, records: Records) -> Record:
    """Returns the record that determines the kind: the first valid one."""
    first = next(records.readable())
    if data.bad_records == "error":
        return first
    good = (record for record in records.readable() if has_kind(data, record))
    return next(good, first)


def _render_ahead(
    render: Callable[[list[Record | BadLineError]], _Rendered],
    chunks: Iterable[list[Record | BadLineError]],
) -> Generator[_Rendered]:
    """Renders chunks of records in several threads, and yields them in order.

    Most of the time the threads wait for the processes that run the templates.
    """
    num_threads = shared_pool().num
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    threads: list[int] = []
    note_thread = lambda: threads.append(threading.get_ident())
    with concurrent.futures.ThreadPoolExecutor(
        num_threads, initializer=note_thread
    ) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(render, chunk))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            # Nobody wants the other chunks, whose templates may take long.
            for future in waiting:
                future.cancel()
            shared_pool().abort(threads)
            raise


def _chunks(
    records: Iterable[Record | BadLineError],
) -> Iterator[list[Record | BadLineError]]:
    """Groups records into chunks that are rendered together and hold little text."""
    chunk: list[Record | BadLineError] = []
    num_chars = 0
    for record in records:
        chunk.append(record)
        num_chars += _num_chars(record)
        if len(chunk) == _CHUNK_RECORDS or num_chars > _CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def _num_chars(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 1


class _BadRecords:
    """Applies the setting `data.bad_records` and counts the dropped records.

    Attributes:
        first: Describes the first record that was left out; "" if there is none.
        num: Records that were left out.
    """

    def __init__(self, data: DataConfig, notes: Notes):
        self._data, self._notes = data, notes
        self.first = ""
        self.num = 0

    def add(self, number: int, error: DataError) -> None:
        """Leaves out a record, by its number from 1; the log names the first few.

        Raises:
            DataError: `data.bad_records` is `error`.
        """
        what = f"record {number}: {error}"
        if isinstance(error, BadLineError):
            is_file = error.path == Path(self._data.path).expanduser()
            what = error.text if is_file else str(error)
        if self._data.bad_records == "error":
            raise DataError(
                f"{self._data.path}: {what} (data.bad_records: drop leaves out such "
                "records.)"
            ) from error
        self.num += 1
        self.first = self.first or what
        if self.num <= _NUM_NAMED:
            self._notes.add(f"dropped {what}")
        if self.num == _NUM_NAMED:
            self._notes.add("further records that are dropped are only counted.")


class _Progress:
    """Logs at intervals how many records were read."""

    def __init__(self, writer: RecordWriter, path: str):
        self._writer, self._path = writer, path
        self._logged_at, self._num_logged = time.monotonic(), 0

    def log(self) -> None:
        """Logs the progress, if it is time to."""
        now, num_records = time.monotonic(), len(self._writer)
        since = num_records - self._num_logged
        if since < _LOG_RECORDS and now - self._logged_at < _LOG_SECONDS:
            return
        self._logged_at, self._num_logged = now, num_records
        logger.info(
            "%s: %s records read so far, %s tokens",
            self._path,
            f"{num_records:,}",
            f"{self._writer.num_tokens:,}",
        )
