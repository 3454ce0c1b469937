"""A data set that is streamed, as a sequence of windows.

A window is an ordinary data set of so many samples (`data.shuffle_buffer`), the next
ones of the shards in the order of the pass. Its global batches are those that a job
would have of it alone. So the batch of a step is a function of the seed and the step,
and a data set of one window has the same batches whether it is streamed or not. Only a
few windows are in memory: that which is trained on, those that are planned, and the
next one, which is read in the meantime.
"""

import bisect
import hashlib
import threading
from concurrent.futures import Future

import numpy as np
from jaxtyping import Int

from jaxlora.common.counted import counted
from jaxlora.config import LoraJob
from jaxlora.data.objectives import smallest_batch
from jaxlora.data.order import JobOrder, StreamPlace, batches_of
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.data.tokens.windows import Window, Windows
from jaxlora.errors import DataError

# Steps behind the last one that was taken of which lengths are kept: a plan that is
# made again looks back so far at most.
_KEPT_STEPS = 128


class SampleStream:
    """The global batches of a job whose data are streamed.

    Its methods may be called from several threads.

    Attributes:
        first: The samples of the first window without their tokens, from which figures
            about all of the data are estimated.
        shards: The fingerprint of each shard, by name.
        fingerprint: A hash of the first window, and of the size of windows.
    """

    def __init__(self, reader: Windows, job: LoraJob):
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
        fewest = smallest_batch(job.objective, job.objective_args)
        num_batches = batches_of(num, job.batch_size, fewest)
        return JobOrder(
            num_samples=num,
            batch_size=job.batch_size,
            seed=job.seed,
            shuffle=job.shuffle,
            steps=(window.place.window + 1) * num_batches,
            smallest_batch=fewest,
        )
