"""Windows of data sets that are streamed; see `jaxlora.data.tokens.stream`."""

import abc
import dataclasses
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.objectives import smallest_batch
from jaxlora.data.order import StreamPlace, batches_of, permutation
from jaxlora.data.records.files import BadLineError, Record
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.read import Records
from jaxlora.data.records.shards import Shard, read_shards
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.choose import (
    check_enough,
    check_some,
    choose_samples,
    grouped,
    sample_form,
)
from jaxlora.data.tokens.encode_records import RecordEncoder
from jaxlora.data.tokens.mixture import joined
from jaxlora.data.tokens.record_writer import RecordWriter
from jaxlora.data.tokens.tokenized_data import MeasuredData, TokenizedData
from jaxlora.errors import DataError

logger = logging.getLogger(__name__)

# The random stream of the order of shards in the first epoch; no window's number is as
# large, by which its samples are permuted.
_SHARD_ORDER = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Some samples of a stream.

    Attributes:
        place: Its start.
        after: Its end, which is the start of the next one.
        data: Its samples.
        shards: Names of the shards that they come from.
    """

    place: StreamPlace
    after: StreamPlace
    data: TokenizedData
    shards: tuple[str, ...]

    def without_tokens(self) -> "Window":
        """Returns the window with the lengths of its samples only."""
        return dataclasses.replace(self, data=MeasuredData.of(self.data))


class _Reading:
    """Reads records of shards, one shard after another, from a place on."""

    def __init__(self, shards: Sequence[Shard], place: StreamPlace, notes: Notes):
        self._notes = notes
        self.shard, self.record = place.shard, place.record
        self._shards = shards
        self._records: Iterator[Record | BadLineError] | None = None
        self._num_read = 0
        self._begun: list[tuple[int, int]] = []  # records read before, by shard

    def take(self, num: int) -> Iterator[Record | BadLineError]:
        """Yields so many records, or fewer at the end of the last shard."""
        while num and self.shard < len(self._shards):
            if self._records is None:
                self._begun.append((self._num_read - self.record, self.shard))
                self._records = self._shards[self.shard].records(self.record)
            record = self._next(self._shards[self.shard], self._records)
            if record is None:
                self.shard, self.record, self._records = self.shard + 1, 0, None
                continue
            self.record, self._num_read = self.record + 1, self._num_read + 1
            num -= 1
            yield record

    def _next(
        self, shard: Shard, records: Iterator[Record | BadLineError]
    ) -> Record | BadLineError | None:
        """Returns the next record of a shard; None at its end, or if it is damaged.

        Raises:
            DataError: The disk or the network has failed, so it may be there later.
        """
        try:
            return next(records, None)
        except DataError as error:
            # An error of the disk has a number.
            if not shard.is_file or getattr(error.__cause__, "errno", None):
                raise
            why = str(error).rpartition(shard.name)[2].lstrip(":, ")
            self._notes.add_once(
                f"{shard.name} cannot be read after record "
                f"{shard.first + self.record}: {why} What follows in it is left out."
            )
            return None

    def name(self, number: int) -> str:
        """Names a record by its number among those that were read, from 1."""
        before, index = [b for b in self._begun if b[0] < number][-1]
        shard = self._shards[index]
        return f"{shard.name}, record {shard.first + number - before}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the shards that were opened."""
        return tuple(self._shards[index].name for _, index in self._begun)


class Windows(abc.ABC):
    """The windows of streamed data; jobs that want the same ones share them.

    Attributes:
        shards: Fingerprints of the shards, by name.
        num_groups: Groups of samples of a window, a multiple of the batch size.
    """

    shards: dict[str, str]
    num_groups: int

    def __init__(self):
        """Reads no window yet."""
        self._lock, self._reads = threading.Lock(), threading.Lock()
        self._windows: weakref.WeakValueDictionary[StreamPlace, Future[Window]] = (
            weakref.WeakValueDictionary()
        )

    @abc.abstractmethod
    def read(self, place: StreamPlace) -> Window:
        """Reads the window at a place."""

    def start(self, place: StreamPlace) -> "Future[Window]":
        """Starts to read the window at a place, in a thread of its own."""
        with self._lock:
            future = self._windows.get(place)
            if future is None:
                future = self._windows[place] = Future()
                reads = lambda future=future: self._fulfil(future, place)
                # A daemon, so that a read from a slow disk does not delay the exit.
                threading.Thread(target=reads, daemon=True, name="window").start()
            return future

    def _fulfil(self, future: "Future[Window]", place: StreamPlace) -> None:
        try:
            window = self.read(place)
        except BaseException as error:
            future.set_exception(error)
            return
        logger.info("window %d: %s", place.window + 1, window.data.summary())
        future.set_result(window)


class WindowReader(Windows):
    """Reads the windows of a data set.

    Attributes:
        groups_of_record: Groups that a record becomes: 2 of a pair that is taken apart.
    """

    def __init__(
        self,
        data: DataConfig,
        shards: Sequence[Shard],
        tokenizer: Tokenizer,
        job: LoraJob,
    ):
        """Reads no window yet.

        Args:
            data: The data set, with the kind of its records.
            shards: Its shards.
            tokenizer: The base model's tokenizer, with the data's template.
            job: Settings of a job, of which `max_length`, `too_long`, `batch_size`, the
                smallest batch of the objective and the order of the shards count.

        Raises:
            DataError: The first record cannot be read.
        """
        super().__init__()
        self.shards = {shard.name: shard.fingerprint for shard in shards}
        self._data, self._list, self._job = data, shards, job
        self._smallest_batch = smallest_batch(job.objective, job.objective_args)
        self._notes = Notes(data.path)
        read, feed = read_shards(shards, None)
        records = Records(path=data.path, read=read, feed=feed, limit=None)
        self._encoder = RecordEncoder(
            data, records, tokenizer, job.max_length, self._notes
        )
        self.groups_of_record = self._encoder.size // sample_form(job)[0]
        unit = job.batch_size * self.groups_of_record
        self.num_groups = -(-data.shuffle_buffer // unit) * unit

    def read(self, place: StreamPlace) -> Window:
        """Reads the window at a place."""
        with self._reads:
            found = self._read(place, place, self.num_groups)
            if len(found.data.group_lengths) < self._smallest_batch:
                found = self._with_next_pass(found)
            self._note_records(place)
        return found

    def _with_next_pass(self, found: Window) -> Window:
        """Adds the first window of the next pass to one that is no batch alone.

        Raises:
            DataError: The passes have no more samples than that.
        """
        following = self._read(found.after, found.after, self.num_groups)
        check_enough(following.data, self._job)  # it is a whole pass, or a full window
        data = joined([found.data, following.data])
        num = len(data.group_lengths)
        num_batches = batches_of(num, self._job.batch_size, self._smallest_batch)
        return Window(
            place=dataclasses.replace(found.place, digest=data.fingerprint),
            after=dataclasses.replace(
                following.after,
                step=found.place.step + num_batches,
                window=found.after.window,
            ),
            data=dataclasses.replace(data, is_part=True),
            shards=tuple(dict.fromkeys(found.shards + following.shards)),
        )

    def take(self, place: StreamPlace, num_groups: int) -> list[Window]:
        """Reads so many groups from a place on, of several passes if need be.

        A pass over all shards that was read is not read again in the same order.

        Args:
            place: The place.
            num_groups: A multiple of `groups_of_record`.
        """
        found: list[Window] = []
        passes: dict[tuple[str, ...], TokenizedData] = {}
        with self._reads:
            while num_groups:
                order = tuple(shard.name for shard in self._ordered(place.epoch))
                known, is_start = passes.get(order), not (place.shard or place.record)
                if is_start and known and len(known.group_lengths) <= num_groups:
                    after = StreamPlace(window=place.window + 1, epoch=place.epoch + 1)
                    window = Window(place=place, after=after, data=known, shards=order)
                else:
                    window = self._read(place, place, num_groups)
                    if is_start and window.after.epoch == place.epoch + 1:
                        passes[order] = window.data
                found.append(window)
                num_groups -= len(window.data.group_lengths)
                place = window.after
            self._note_records(found[0].place)
        return found

    def _note_records(self, place: StreamPlace) -> None:
        self._encoder.note_thoughts()
        if place.window == 0:
            self._notes.add_counts()
            self._notes.add(f"streamed, as {self._encoder.describe()}", logging.INFO)

    def _read(self, place: StreamPlace, start: StreamPlace, num_groups: int) -> Window:
        """Reads so many groups, or fewer at the end of a pass.

        Args:
            place: Their place.
            start: The same, or the start of the next pass if no samples follow it.
            num_groups: Number of groups.
        """
        writer = RecordWriter(self._data.path, self._job.max_length)
        shards, num = self._ordered(start.epoch), 0
        reading = _Reading(shards, start, self._notes)
        while num < num_groups:
            before, missing = len(writer), (num_groups - num) // self.groups_of_record
            self._encoder.add(reading.take(missing), writer, name=reading.name)
            if len(writer) == before:
                break
            num = len(self._choose(writer).group_lengths)
        is_end = num < num_groups
        if not num and (start.shard or start.record):
            follows = dataclasses.replace(start, epoch=start.epoch + 1)
            follows = dataclasses.replace(follows, shard=0, record=0)
            return self._read(place, follows, num_groups)
        if not len(writer):
            raise DataError(f"{self._data.path}: holds no records. Give some.")
        data = self._choose(writer, whole=True)
        check_some(data, self._job, self._encoder.first_bad)
        return Window(
            place=dataclasses.replace(place, digest=data.fingerprint),
            after=StreamPlace(
                step=place.step
                + batches_of(num, self._job.batch_size, self._smallest_batch),
                window=place.window + 1,
                epoch=start.epoch + is_end,
                shard=0 if is_end else reading.shard,
                record=0 if is_end else reading.record,
            ),
            data=data,
            shards=reading.names,
        )

    def _choose(self, writer: RecordWriter, *, whole: bool = False) -> TokenizedData:
        """Chooses the records that become samples; without tokens, unless `whole`."""
        records = writer.finish() if whole else writer.so_far()
        size = self._encoder.size
        every = np.ones(len(records.lengths) // size, bool)
        found = choose_samples(records, every, self._job, self._data.path, size)
        return dataclasses.replace(grouped(found, self._job), is_part=True)

    def _ordered(self, epoch: int) -> list[Shard]:
        if not self._job.shuffle:
            return list(self._list)
        order = permutation(len(self._list), self._job.seed, _SHARD_ORDER + epoch)
        return [self._list[i] for i in order]
