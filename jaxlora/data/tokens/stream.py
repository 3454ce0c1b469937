"""A data set that is streamed, as a sequence of windows.

A window is an ordinary data set of so many samples (`data.shuffle_buffer`), the next
ones of the shards in the order of the pass. Its global batches are those that a job
would have of it alone. So the batch of a step is a function of the seed and the step,
and a data set of one window has the same batches whether it is streamed or not. Only a
few windows are in memory: that which is trained on, those that are planned, and the
next one, which is read in the meantime.
"""

import bisect
import dataclasses
import hashlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np
from jaxtyping import Int

from jaxlora.common.counted import counted
from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.order import JobOrder, StreamPlace, permutation
from jaxlora.data.records.files import Record
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.read import Records
from jaxlora.data.records.shards import Shard, read_shards
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.choose import (
    check_some,
    choose_samples,
    grouped,
    sample_form,
)
from jaxlora.data.tokens.encode_records import RecordEncoder
from jaxlora.data.tokens.record_writer import RecordWriter
from jaxlora.data.tokens.tokenized_data import MeasuredData, TokenizedData
from jaxlora.errors import DataError

logger = logging.getLogger(__name__)

# The random stream of the order of shards in the first epoch; no window's number is as
# large, by which its samples are permuted.
_SHARD_ORDER = 2**62
# Steps behind the last one that was taken of which lengths are kept: a plan that is
# made again looks back so far at most.
_KEPT_STEPS = 128


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
        self._records: Iterator[Record] | None = None
        self._num_read = 0
        self._begun: list[tuple[int, int]] = []  # records read before, by shard

    def take(self, num: int) -> Iterator[Record]:
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

    def _next(self, shard: Shard, records: Iterator[Record]) -> Record | None:
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
            self._notes.add_once(
                f"{shard.name} cannot be read after record "
                f"{shard.first + self.record}: {error} What follows in it is left out."
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


class WindowReader:
    """Reads the windows of a data set; jobs that want the same ones share them.

    Attributes:
        shards: The shards, by name.
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
            job: Settings of a job, of which `max_length`, `too_long`, `batch_size` and
                the order of the shards count.

        Raises:
            DataError: The first record cannot be read.
        """
        self.shards = {shard.name: shard.fingerprint for shard in shards}
        self._data, self._list, self._job = data, shards, job
        self._notes = Notes(data.path)
        read, feed = read_shards(shards, None)
        records = Records(path=data.path, read=read, feed=feed, limit=None)
        self._encoder = RecordEncoder(
            data, records, tokenizer, job.max_length, self._notes
        )
        # A record may become several groups, such as a pair that is taken apart.
        self._in_record = self._encoder.size // sample_form(job)[0]
        unit = job.batch_size * self._in_record
        self.num_groups = -(-data.shuffle_buffer // unit) * unit
        self._lock, self._reads = threading.Lock(), threading.Lock()
        self._windows: weakref.WeakValueDictionary[StreamPlace, Future[Window]] = (
            weakref.WeakValueDictionary()
        )

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
            with self._reads:
                window = self._read(place, place)
        except BaseException as error:
            future.set_exception(error)
            return
        if place.window == 0:
            self._notes.add(f"streamed, as {self._encoder.describe()}", logging.INFO)
        logger.info("window %d: %s", place.window + 1, window.data.summary())
        future.set_result(window)

    def _read(self, place: StreamPlace, start: StreamPlace) -> Window:
        """Reads a window.

        Args:
            place: Its place.
            start: The same, or the start of the next pass if no samples follow it.
        """
        writer = RecordWriter(self._data.path, self._job.max_length)
        shards, num = self._ordered(start.epoch), 0
        reading = _Reading(shards, start, self._notes)
        while num < self.num_groups:
            before, missing = len(writer), (self.num_groups - num) // self._in_record
            self._encoder.add(reading.take(missing), writer, name=reading.name)
            if len(writer) == before:
                break
            num = len(self._choose(writer).group_lengths)
        is_end = num < self.num_groups
        if not num and (start.shard or start.record):
            follows = dataclasses.replace(start, epoch=start.epoch + 1)
            return self._read(place, dataclasses.replace(follows, shard=0, record=0))
        if not len(writer):
            raise DataError(f"{self._data.path}: holds no records. Give some.")
        data = self._choose(writer, whole=True)
        check_some(data, self._job, self._encoder.first_bad)
        return Window(
            place=dataclasses.replace(place, digest=data.fingerprint),
            after=StreamPlace(
                step=place.step + -(-num // self._job.batch_size),
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


class SampleStream:
    """The global batches of a job whose data are streamed.

    Its methods may be called from several threads.

    Attributes:
        first: The samples of the first window without their tokens, from which figures
            about all of the data are estimated.
        shards: The fingerprint of each shard, by name.
        fingerprint: A hash of the first window, and of the size of windows.
    """

    def __init__(self, reader: WindowReader, job: LoraJob):
        """Reads the first window.

        Args:
            reader: Reads the windows.
            job: Settings of the job.

        Raises:
            DataError: It cannot be read.
        """
        self._reader, self._job, self.shards = reader, job, reader.shards
        self._lock = threading.Lock()
        self._places = [StreamPlace()]  # of windows, in ascending order
        self._held: dict[int, Future[Window]] = {}
        # Windows without tokens, and their orders: a plan that is made anew asks for
        # lengths once more.
        self._known: dict[int, tuple[Window, JobOrder]] = {}
        window, _ = self._find(self._places[0])
        self.first = window.data
        text = f"{window.place.digest} {reader.num_groups}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def summary(self) -> str:
        """Says in which order the samples come, and what is estimated."""
        shards, window = len(self.shards), f"{self._reader.num_groups:,}"
        order = "in their order"
        if self._job.shuffle:
            order = "in another order in each pass, samples are shuffled in each window"
        return (
            f"{self.first.source}: {counted(shards, 'shard')} read while training, in "
            f"windows of {window} {self.first.noun}s; shards are read {order}. Times "
            "and capacity are estimated by the first window."
        )

    def lengths(self, step: int) -> tuple[TokenizedData, Int[np.ndarray, " B"]]:
        """Returns samples without tokens, and the groups of a global batch in them."""
        window, groups = self._batch(step)
        return window.data, groups

    def take(self, step: int) -> tuple[TokenizedData, Int[np.ndarray, " B"]]:
        """Returns samples, and the groups of a global batch in them.

        Windows before are let go. If the samples of one are asked for again, it is read
        again.
        """
        window, groups = self._batch(step)
        with self._lock:
            for number, (known, _) in list(self._known.items()):
                if known.after.step <= step:
                    self._held.pop(number, None)
                if known.after.step <= step - _KEPT_STEPS:
                    del self._known[number]
        return self._read(window.place).data, groups

    def release(self) -> None:
        """Lets all tokens go; `take` reads them again."""
        with self._lock:
            self._held.clear()

    def place(self, step: int) -> StreamPlace:
        """Returns the last known place at or before a step, from which to go on."""
        with self._lock:
            at = bisect.bisect_right(self._places, step, key=lambda p: p.step)
            return self._places[at - 1]

    def follow(self, place: StreamPlace) -> None:
        """Adds a place that another process, or the parent of a copy, has found."""
        with self._lock:
            self._add(place)

    def _add(self, *places: StreamPlace) -> None:
        known = {place.step: place for place in self._places}
        # A place at which a window was read has its digest.
        known |= {p.step: p for p in places if p.digest or p.step not in known}
        self._places = [known[step] for step in sorted(known)]

    def _batch(self, step: int) -> tuple[Window, Int[np.ndarray, " B"]]:
        """Returns a window without tokens, and the groups of a global batch in it."""
        window, order = self._find(self.place(step))
        while step >= window.after.step:
            window, order = self._find(window.after)
        with self._lock:
            is_held = window.place.window in self._held
        if is_held and window.after.step < (self._job.steps or 0):
            self._start(window.after)  # for a later call
        first = window.place.window * order.batches_per_epoch
        return window, order.batch(first + step - window.place.step)

    def _find(self, place: StreamPlace) -> tuple[Window, JobOrder]:
        """Returns the window at a place without tokens, and the order in it."""
        with self._lock:
            found = self._known.get(place.window)
        if found is None:
            window = self._read(place)
            found = window.without_tokens(), self._order(window)
            with self._lock:
                self._add(window.place, window.after)
                self._known[place.window] = found
        return found

    def _start(self, place: StreamPlace) -> "Future[Window]":
        with self._lock:
            if place.window not in self._held:
                self._held[place.window] = self._reader.start(place)
            return self._held[place.window]

    def _read(self, place: StreamPlace) -> Window:
        """Returns the window at a place, and checks that its tokens are the same.

        Raises:
            DataError: They have changed since the run read them.
        """
        window, before = self._start(place).result(), self.place(place.step)
        if before == place and before.digest not in ("", window.place.digest):
            raise DataError(
                f"{window.data.source}: the records of {', '.join(window.shards)} are "
                "not those that the run has read before: they have changed, or the "
                "libraries that turn them into tokens have. Restore them, or train "
                "into another output_dir."
            )
        return window

    def _order(self, window: Window) -> JobOrder:
        """Returns the order of a window's samples: an epoch's of its number."""
        job, num = self._job, len(window.data.group_lengths)
        return JobOrder(
            num_samples=num,
            batch_size=job.batch_size,
            seed=job.seed,
            shuffle=job.shuffle,
            steps=(window.place.window + 1) * -(-num // job.batch_size),
        )
