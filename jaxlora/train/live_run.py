"""A run that trains: it sends events, and writes adapters and checkpoints."""

import logging
import time

from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.distributed import processes
from jaxlora.run import events
from jaxlora.run.callback import Listeners
from jaxlora.run.folder import ADAPTERS
from jaxlora.run.lock import RunLock
from jaxlora.run.saved_stream import SavedStream
from jaxlora.train.control import Control
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.open_run import OpenedRun
from jaxlora.train.report.summary import TrainingTime
from jaxlora.train.saved.continue_job import copy_best_export
from jaxlora.train.saved.describe_run import resolved_settings, saved_run
from jaxlora.train.saved.job_states import JobStates
from jaxlora.train.saved.references import write_references
from jaxlora.train.saved.run_store import RunStore

logger = logging.getLogger(__name__)


class LiveRun:
    """A run from its first event to its last: its jobs, where it is, and its files.

    Attributes:
        opened: The run, whose plan fits the devices.
        plan: Its plan.
        live: Its jobs; more may join at any time.
        requests: Requests to stop and to pause them.
        control: Decides about the jobs, and adds further ones.
        store: The files.
        lock: Lock of the run's folder, which is held.
        round: Rounds done; see `Rounds`.
        listeners: What the events are sent to.
        time: Time of the windows so far, predicted and measured.
    """

    def __init__(
        self,
        opened: OpenedRun,
        live: LiveJobs,
        control: Control,
        store: RunStore,
        lock: RunLock,
        first_round: int,
    ):
        """Makes the object; no file is changed yet."""
        self.opened, self.plan, self.live = opened, opened.plan, live
        self.requests, self.control = live.requests, control
        self.store, self.lock = store, lock
        self.round, self.time = first_round, TrainingTime()
        self.listeners = Listeners([])
        self._referenced: set[str] = set()  # jobs whose references were written
        self._checked = 0.0  # when the folder was looked at last

    def send(self, event: events.Event) -> None:
        """Sends an event to the callbacks."""
        if isinstance(event, events.WindowEvent):
            self.time.add(event)
        # Callbacks would make a removed folder again. Steps may follow each other in a
        # millisecond, so not every one of them asks the file system.
        now = time.monotonic()
        if not isinstance(event, events.StepEvent) or now > self._checked + 0.1:
            self.lock.check_folder()
            self._checked = now
        self.listeners.send(event)

    def send_written(self, *, waits: bool = False) -> None:
        """Sends events for the checkpoints and adapters that are on the disk."""
        for event in self.store.written(waits=waits):
            self.send(event)

    def record(self) -> None:
        """Writes the run's record if it has changed."""
        live, run = self.live, self.opened
        self.requests.agree()
        if not processes.is_first():
            return
        for job in live.jobs:
            copy_best_export(job, self.opened.folder / ADAPTERS / job.name)
        record = run.record(
            live.jobs,
            requests=self.requests.saved([job.name for job in live.jobs]),
            added=list(live.added),
            suggested=[n for n in self.control.suggested() if n in live.added],
            chat_templates=self.store.chat_templates([j.settings for j in live.jobs]),
        )
        self.store.write_record(record, lambda: resolved_settings(run.plan, live.jobs))

    def save(self, stream: SavedStream, read_slot: ReadSlot) -> None:
        """Writes a checkpoint while the run goes on.

        Args:
            stream: The microbatches that follow.
            read_slot: Reads the states of slots as they are now.
        """
        store, jobs = self.store, self.live.jobs
        if store.is_saving:  # the disk is slower than `checkpoint_every`
            logger.warning("round %d: waiting for the checkpoint before", self.round)
            self.send_written(waits=True)
        saved = saved_run(
            self.opened.identity(jobs),
            jobs,
            self.opened.model,
            stream,
            self.control.saved(),
            self.control.suggested(),
        )
        for job in jobs:  # copies of jobs, and jobs of other runs, have them already
            if job.has_begun and job.references and job.name not in self._referenced:
                self.keep_references(job)
        store.save(self.round, JobStates.of(jobs, read_slot), saved)

    def keep_references(self, job: JobState) -> None:
        """Writes the log-probabilities of a job's samples by its reference."""
        self.lock.check_folder()
        self._referenced.add(job.name)
        if processes.is_first():
            write_references(self.opened.folder, job, self.opened.model.fingerprint)

    def export(self, job: JobState) -> None:
        """Writes a job's adapter while the run goes on."""
        if job.parked is not None:
            adapter = job.parked.adapter(job.like)
        else:
            adapter = self.opened.slots.read(job.slot, job.like)
        self.store.export(self.round, job, adapter, self.opened.model)
