"""The files by which a run is resumed: record, checkpoints, exported adapters.

Checkpoints and adapters are written by threads of their own while training goes on. A
checkpoint waits for the adapters that were asked for before it. So when it says that a
job has ended, the adapter of that job is on the disk. After a failure, nothing more is
written.
"""

import collections
import functools
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.tokenizer_copy import (
    COPIED,
    ChatTemplate,
    TokenizerCopy,
    template_settings,
)
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.common.atomic import new_folder, sync_files, write_text
from jaxlora.common.yaml_file import dump_yaml
from jaxlora.config import LoraJob
from jaxlora.data.templates.known import find_template
from jaxlora.distributed import processes
from jaxlora.hf.files import tokenizer_files
from jaxlora.hf.load import FrozenModel
from jaxlora.run.events import CheckpointEvent, Event, ExportEvent
from jaxlora.run.folder import (
    ADAPTERS,
    CHECKPOINTS,
    SETTINGS_FILE,
    TOKENIZER,
    prepare_export_folder,
    write_run_record,
)
from jaxlora.run.lock import RunLock
from jaxlora.run.saved_run import RunRecord, SavedRun
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.export import run_tokenizer, write_adapter
from jaxlora.train.saved.read_checkpoint import (
    ReadCheckpoint,
    newest_checkpoint,
    read_newest,
)
from jaxlora.train.saved.resume import FoundRun

if TYPE_CHECKING:  # orbax, which it imports, takes a second
    from jaxlora.train.saved.checkpoint import Checkpoints

logger = logging.getLogger(__name__)

_MOST_PENDING = 16  # checkpoints and adapters that are not written yet
_EXPORTERS = 8  # threads, which mostly wait for the disk and for checksums


# The event to send when a file is written, and the end of writing it; None on processes
# that do not write.
_Pending = tuple[Event, Future[None] | None]


class RunStore:
    """Writes the files of a run in the background, and finds them on resume.

    Of several processes only the first writes; the others make the same calls.

    Attributes:
        record: Record of the run as it is on the disk; None if there is none yet.
        latest: Rounds done at the newest checkpoint, which may still be being written.
    """

    def __init__(
        self, folder: pathlib.Path, lock: RunLock, found: FoundRun | None, *, keep: int
    ):
        """Opens the files of a run; changes none of them.

        Args:
            folder: Folder of the run.
            lock: Lock of the folder, which is held.
            found: What the folder holds since the lock is held; None: a new run starts.
            keep: Number of checkpoints to keep.

        Raises:
            ConfigError: Processes see different checkpoints.
        """
        self._folder, self._lock, self._keep = folder, lock, keep
        self._found = found
        self.record = None if found is None else found.record
        self.latest = newest_checkpoint(folder / CHECKPOINTS)
        processes.check_same(
            {f"the newest checkpoint in {folder / CHECKPOINTS}": self.latest},
            "To resume, every process reads the checkpoint, so output_dir must be on a "
            "file system that all hosts share.",
        )
        if found is not None and self.latest is None:
            logger.warning("there is no complete checkpoint: training from the start")
        self._checkpoints: Checkpoints | None = None
        self._pending: collections.deque[_Pending] = collections.deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._exporters = ThreadPoolExecutor(_EXPORTERS, thread_name_prefix="export")
        self._has_failed = threading.Event()
        self._is_prepared = self._has_reserved = False

    def restore(self, now: RunRecord) -> ReadCheckpoint | None:
        """Reads the newest checkpoint; None if there is none.

        Args:
            now: Record of this run; what has changed in it is logged.

        Raises:
            CheckpointError: It is damaged.
        """
        if self._found is None or self.latest is None:
            return None
        if self._found.checkpoint is None:  # only the first process has read it
            return read_newest(self._folder / CHECKPOINTS, has_tensors=True)
        found = self._found.checkpoint.with_tensors()
        assert self.record is not None
        for change in now.changes(self.record):
            logger.warning("changed since the run was last started: %s", change)
        return found

    def write_record(self, record: RunRecord) -> None:
        """Writes the run's record, and its settings as a run file, if it changed."""
        if processes.is_first() and record != self.record:
            write_run_record(self._folder, record)
            settings = record.config | {"jobs": list(record.jobs.values())}
            write_text(self._folder / SETTINGS_FILE, dump_yaml(settings))
            self.record = record

    def keep_tokenizer(self, model: FrozenModel) -> None:
        """Keeps the tokenizer of the base for exports without the base, once.

        Args:
            model: The base model.
        """
        folder = self._folder / TOKENIZER
        is_wanted = processes.is_first() and not os.path.lexists(folder)
        if is_wanted and tokenizer_files(model.folder, COPIED):
            with new_folder(folder) as temporary:
                TokenizerCopy(folder=model.folder).write(temporary)
                sync_files(temporary)

    def chat_templates(self, jobs: Iterable[LoraJob]) -> dict[str, ChatTemplate]:
        """Returns the chat templates that the data of jobs name, by their settings.

        Each is read once, as the file may change or vanish while the run trains.

        Args:
            jobs: The jobs of the run.

        Raises:
            DataError: A template cannot be read.
        """
        known = {} if self.record is None else self.record.chat_templates
        named = (s for job in jobs for s in template_settings(job.data.model_dump()))
        return known | {s: find_template(s) for s in {*named} - known.keys()}

    # ---- in the background ---------------------------------------------------------

    def prepare(self, slots: StagedSlots | None) -> None:
        """Prepares for the first checkpoint, in the thread that writes.

        It opens the library that writes checkpoints, which takes a second of Python's
        lock. Before the first steps, it would delay them; after the last, the end of
        the run would wait for it. If it fails, the checkpoint fails and says so.

        Args:
            slots: The slots of the run, if a checkpoint on the way is near: then the
                allocator gets memory for a snapshot from the system, once.
        """
        if not processes.is_first():
            return
        if not self._is_prepared:
            self._is_prepared = True
            self._writer.submit(self._opened)
        if slots is not None and not self._has_reserved:
            self._has_reserved = True
            self._writer.submit(slots.reserve_snapshot())

    def _opened(self) -> "Checkpoints":
        """Returns the folder of checkpoints, which is opened once."""
        # A second, in which the folder may be removed: it must not be made again.
        from jaxlora.train.saved.checkpoint import Checkpoints

        self._lock.check()
        if self._checkpoints is None:
            folder = self._folder / CHECKPOINTS
            make = functools.partial(self._lock.make_folder, CHECKPOINTS)
            self._checkpoints = Checkpoints(folder, keep=self._keep, make=make)
        return self._checkpoints

    def save(
        self,
        number: int,
        read_states: Callable[[], dict[str, ParkedSlot]],
        run: SavedRun,
    ) -> None:
        """Starts writing a checkpoint; the one before must be written.

        Args:
            number: Rounds done.
            read_states: Returns the states of the jobs that have begun and not ended,
                as they are now, by name; training may go on before it is called.
            run: State of the run to save with them.
        """
        self.latest = number

        def write() -> None:
            states = read_states()  # first, as a removed folder would be made again
            self._opened().save(number, states, run)

        folder = self._folder / CHECKPOINTS / str(number)
        event = CheckpointEvent(round=number, folder=folder)
        self._start(self._writer, write, event, after=self._pending)

    def export(self, number: int, job: JobState, read: Callable[[], Adapter]) -> None:
        """Starts writing a job's adapter, unless the folder has one of more steps.

        Args:
            number: Rounds done.
            job: The job.
            read: Returns its weights as they are now; another thread calls it.
        """
        name, progress, record = job.name, job.progress, self.record
        target = self._folder / ADAPTERS / name

        def write() -> None:
            assert record is not None
            self._lock.check()
            if prepare_export_folder(target, progress.step):
                tokenizer = run_tokenizer(self._folder, record, name)
                write_adapter(read(), target, record, name, progress, tokenizer)

        event = ExportEvent(round=number, job=name, step=progress.step, folder=target)
        earlier = [
            (other, future)
            for other, future in self._pending
            if isinstance(other, ExportEvent) and other.job == name
        ]
        self._start(self._exporters, write, event, after=earlier)

    def _start(
        self,
        pool: ThreadPoolExecutor,
        write: Callable[[], None],
        event: Event,
        *,
        after: Iterable[_Pending],
    ) -> None:
        """Starts writing once others are written; what waits is bounded, as is memory.

        The others have begun before, so that threads that wait for them cannot keep
        them from being written.
        """
        future = None
        if processes.is_first():
            before = [future for _, future in after if future]
            future = pool.submit(self._unless_failed, write, before)
        self._pending.append((event, future))
        while True:
            left = [f for _, f in self._pending if f and not f.done()]
            if len(left) < _MOST_PENDING:
                break
            wait(left, return_when=FIRST_COMPLETED)

    def _unless_failed(
        self, write: Callable[[], None], before: Sequence[Future[None]]
    ) -> None:
        wait(before)
        if self._has_failed.is_set():
            return
        try:
            write()
        except BaseException:
            self._has_failed.set()
            raise

    @property
    def is_saving(self) -> bool:
        """Whether the event of a checkpoint has not been taken yet."""
        return any(isinstance(event, CheckpointEvent) for event, _ in self._pending)

    def written(self, *, waits: bool = False) -> list[Event]:
        """Returns an event for each file that was written since the last call.

        All processes get the same events.

        Args:
            waits: Whether to wait until everything is written.

        Raises:
            JaxloraError: A checkpoint or an adapter could not be written.
        """
        if not self._pending:
            return []
        count = processes.from_first(lambda: self._num_written(waits=waits))
        return [self._pending.popleft()[0] for _ in range(count)]

    def _num_written(self, *, waits: bool) -> int:
        count = 0
        for _, future in self._pending:
            assert future is not None
            if not waits and not future.done():
                break
            try:
                future.result()
            except BaseException:
                self._pending.clear()  # so that it is raised once
                raise
            count += 1
        return count

    def close(self) -> None:
        """Waits until everything is written.

        Raises:
            JaxloraError: A checkpoint or an adapter could not be written.
        """
        try:
            if processes.is_first():
                self._num_written(waits=True)
        finally:
            self._writer.shutdown()
            self._exporters.shutdown()
            if self._checkpoints is not None:
                self._checkpoints.close()
