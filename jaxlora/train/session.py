"""One call of `Trainer.train`: a run from its first event to its last checkpoint."""

import contextlib
import logging
import pathlib
import time
from collections.abc import Mapping, Sequence

from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.config import LoraJob, RunConfig
from jaxlora.distributed import processes
from jaxlora.errors import CheckpointError, JaxloraError
from jaxlora.run import events
from jaxlora.run.callback import Callback, JobControl, Listeners
from jaxlora.run.folder import ADAPTERS, clean_up
from jaxlora.run.lock import RunLock
from jaxlora.run.saved_run import SavedRequests
from jaxlora.train.control import Control
from jaxlora.train.ending import StopRequest
from jaxlora.train.execute.run_programs import FurtherPrograms
from jaxlora.train.execute.run_services import RunServices
from jaxlora.train.execute.staged_executor import StagedExecutor
from jaxlora.train.execute.stream import Border, Stream
from jaxlora.train.inbox import Inbox
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.open_run import OpenedRun
from jaxlora.train.report.run_callbacks import open_callbacks
from jaxlora.train.report.summary import TrainingTime
from jaxlora.train.saved.continue_job import copy_best_export
from jaxlora.train.saved.describe_run import resolved_settings, saved_run
from jaxlora.train.saved.job_states import JobStates
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint
from jaxlora.train.saved.references import write_references
from jaxlora.train.saved.run_store import RunStore

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between looks for requests, if only one process trains


class Session:
    """Trains the jobs of a run until every job has ended, or a signal ends it.

    Attributes:
        round: Rounds done; see `Stream`.
        time: Time of the windows so far, predicted and measured.
        memory: Memory of the devices, predicted and measured.
    """

    def __init__(
        self,
        run: OpenedRun,
        live: LiveJobs,
        control: Control,
        store: RunStore,
        found: ReadCheckpoint | None,
        lock: RunLock,
    ):
        """Makes the object; no file is changed yet.

        Args:
            run: The run, whose plan fits the devices.
            live: Its jobs; those in the checkpoint have its progress and states.
            control: Decides about the jobs, and adds further ones.
            store: Files of the run; `train` closes them.
            found: The checkpoint that it resumes from; None: it starts from the start.
            lock: Lock of the run's folder, which is held.
        """
        self._run, self._live, self._store, self._lock = run, live, store, lock
        self._referenced: set[str] = set()  # jobs whose references were written
        self._control = control
        self._folder = pathlib.Path(run.plan.config.output_dir)
        self.round = 0 if found is None else found.number
        self._saved_stream = None if found is None else found.run.stream
        self._num_saved = self._num_due(self.round)  # checkpoints due so far
        self._listeners, self._looked = Listeners([]), 0.0
        self._checked = 0.0  # when the folder was looked at last
        self.time = TrainingTime()

    @property
    def _config(self) -> RunConfig:
        return self._run.plan.config

    def train(
        self, callbacks: Sequence[Callback], control: JobControl, *, is_resumed: bool
    ) -> bool:
        """Runs the jobs to their ends; returns whether a signal ended it early.

        Args:
            callbacks: Callbacks of the user.
            control: Lets them add, stop, pause and resume jobs.
            is_resumed: Whether the run goes on from what is on the disk.
        """
        store = self._store
        # Signals take effect between microbatches, and interrupt no checkpoint.
        with StopRequest() as stop, contextlib.ExitStack() as opened:
            opened.callback(store.close)  # waits for the last checkpoint
            self._open_inbox(opened)
            own = open_callbacks(self._config, self._folder, store.latest(), opened)
            for callback in callbacks:
                callback.trainer = control
            self._listeners = Listeners([*own, self._inbox], callbacks)
            self._send_start(is_resumed)
            self._take_requests()
            stops = self._train(stop)
            self._send_written(waits=True)
            stops = stops and not all(job.progress.is_over for job in self._live.jobs)
            end = events.RunEndEvent(round=self.round, is_interrupted=stops)
            self._send(end)
            self._listeners.raise_failure()
            return end.is_interrupted

    def _train(self, stop: StopRequest) -> bool:
        """Trains to the end; returns whether a signal or a failure has ended it."""
        run, store = self._run, self._store
        further = FurtherPrograms(run.layout, run.slots, run.plan.further_limits)
        with further, self._open_stream(further) as stream:
            while not (stops := self._must_end(stop.requested)):
                if not stream.start():
                    more = self._suggest()
                    if self._take_requests(waits=True) or more:
                        continue
                    if not self._wait(stream, stop):
                        break
                    continue
                if self._config.checkpoint_every:
                    store.prepare(run.slots)
                for border in stream.run():
                    self._at_border(stream, border, stop)
                self._take_requests()
            self.round = stream.round
            if store.latest() != self.round:
                self._save(stream, stream.snapshot())
            return stops

    def _at_border(self, stream: Stream, border: Border, stop: StopRequest) -> None:
        """Does what is due between two microbatches."""
        self._send_written()
        if self._suggest():
            self._record()
        if border.ends_window or processes.count() == 1:
            # Several processes act alike only where they look at the same border.
            if self._must_end(stop.requested):
                stream.stop()
            if border.ends_window or self._is_time_to_look():
                self._take_requests()
        found = border.snapshot
        is_due = self._num_due(stream.round) > self._num_saved
        is_due |= border.ends_round and self._control.wants_checkpoint()
        if found is None and border.ends_round and is_due:
            found = stream.snapshot()
        if found is not None:
            stream.end_round()
            self._num_saved = self._num_due(stream.round)
            self._save(stream, found)
        self.round = stream.round

    def _wait(self, stream: Stream, stop: StopRequest) -> bool:
        """Waits for a sweep that others decide about; whether jobs may train again.

        A checkpoint is written before, as the jobs may go on in another process.
        """
        self.round = stream.round
        if self._control.wants_checkpoint() and self._store.latest() != self.round:
            self._save(stream, stream.snapshot())
        self._send_written(waits=True)
        return self._control.wait(lambda: self._must_end(stop.requested))

    def _is_time_to_look(self) -> bool:
        """Whether to look for requests before the window ends."""
        now = time.monotonic()
        if self._live.num_waiting or now - self._looked > _LOOK_SECONDS:
            self._looked = now
            return True
        return False

    def _num_due(self, number: int) -> int:
        """Returns how many checkpoints are due by a round."""
        every = self._config.checkpoint_every
        return number // every if every else 0

    def _must_end(self, is_asked: bool) -> bool:
        """Whether a signal or a failed callback, on any process, ends the run."""
        return processes.any_of(is_asked or self._listeners.failure is not None)

    def _open_stream(self, further: FurtherPrograms) -> Stream:
        run, limits = self._run, self._config.limits
        executor = StagedExecutor(
            run.layout,
            run.model.params,
            run.slots,
            limits,
            further.wait_for,
            run.further_bases,
            run.plan.lanes.unlike[1:],
        )
        services = RunServices(
            plan=run.plan,
            jobs=self._live.jobs,
            executor=executor,
            requests=self._live.requests,
            early_exit=self._control,
            export=self._export,
            keep_references=self._keep_references,
            send=self._send,
            make_samples=None if run.sampler is None else self._make_samples,
            measure=None if run.meter is None else self._measure,
        )
        stream = Stream(services, first_round=self.round)
        try:
            stream.restore(self._saved_stream)
        except JaxloraError:
            raise  # of the data, not of the checkpoint
        except (RuntimeError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {self.round} of {self._folder} is damaged: its "
                f"microbatches break a rule ({error}). Remove its folder to resume "
                "from the checkpoint before."
            ) from error
        return stream

    def _make_samples(self, slots: Mapping[str, int]) -> dict[str, list[dict]]:
        assert self._run.sampler is not None
        return self._run.sampler.generate(slots, self._run.slots.tables)

    def _measure(self, jobs: Sequence[JobState]) -> dict[str, float]:
        assert self._run.meter is not None
        return self._run.meter.measure(jobs, self._run.slots.tables)

    # ---- events and requests -------------------------------------------------------

    def _send_start(self, is_resumed: bool) -> None:
        event = events.RunStartEvent(
            round=self.round,
            jobs=tuple(job.info() for job in self._live.jobs),
            output_dir=self._folder,
            num_slots=self._run.plan.num_slots,
            is_resumed=is_resumed,
        )
        self._send(event)

    def _send(self, event: events.Event) -> None:
        if isinstance(event, events.WindowEvent):
            self.round = event.round
            self.time.add(event)
        # Callbacks would make a removed folder again. Steps may follow each other in a
        # millisecond, so not every one of them asks the file system.
        now = time.monotonic()
        if not isinstance(event, events.StepEvent) or now > self._checked + 0.1:
            self._lock.check_folder()
            self._checked = now
        self._listeners.send(event)

    def _open_inbox(self, opened: contextlib.ExitStack) -> None:
        """Opens the folder of requests, and writes the first record of the run.

        What could refuse to resume the run comes before, and leaves the folder as it
        was.
        """
        if processes.is_first():
            clean_up(self._folder)
        self._inbox = Inbox(self._folder, self._live)
        opened.callback(self._inbox.close)
        self._record()
        self._store.keep_tokenizer(self._run.model)

    def _take_requests(self, *, waits: bool = False) -> bool:
        """Takes users' requests, and records and answers them; see `Inbox.poll`."""
        self._lock.check_folder()
        has_taken = self._inbox.poll(waits=waits)
        self._record()
        self._inbox.deliver()
        return has_taken

    def _record(self) -> None:
        """Adds the jobs that have joined, and writes the run's record if it changed."""
        live, run = self._live, self._run
        self._take_added()
        live.requests.agree()
        if not processes.is_first():
            return
        for job in live.jobs:
            copy_best_export(job, self._folder / ADAPTERS / job.name)
        record = run.record(
            live.jobs,
            requests=live.requests.saved([job.name for job in live.jobs]),
            added=list(live.added),
            suggested=[n for n in self._control.suggested() if n in live.added],
            chat_templates=self._store.chat_templates([j.settings for j in live.jobs]),
        )
        self._store.write_record(record, lambda: resolved_settings(run.plan, live.jobs))

    def _take_added(self) -> None:
        for job in self._live.take():
            self._send(events.JobAddEvent(round=self.round, info=job.info()))

    def _suggest(self) -> bool:
        """Adds the configurations that a search suggests now; whether there are any."""

        def add(settings: LoraJob) -> None:
            self._live.add(settings)
            self._take_added()
            if processes.is_first():
                logger.info("sweep: Optuna suggests %s", settings.name)

        num_slots = self._run.plan.num_slots
        return self._control.suggest(self._live.jobs, num_slots, add)

    # ---- checkpoints and adapters --------------------------------------------------

    def _save(self, stream: Stream, read_slot: ReadSlot | None) -> None:
        assert read_slot is not None, "steps are in flight"
        store, jobs = self._store, self._live.jobs
        self.round = stream.round
        if store.is_saving:  # the disk is slower than `checkpoint_every`
            logger.warning("round %d: waiting for the checkpoint before", self.round)
            self._send_written(waits=True)
        # Requests that were made after the record was written are in the next one.
        requests = SavedRequests() if store.record is None else store.record.requests
        saved = saved_run(
            self._run.identity(jobs),
            jobs,
            self._run.model,
            requests,
            stream.saved(),
            self._control.saved(),
            self._control.suggested(),
        )
        for job in jobs:  # copies of jobs, and jobs of other runs, have them already
            if job.has_begun and job.references and job.name not in self._referenced:
                self._keep_references(job)
        store.save(self.round, JobStates.of(jobs, read_slot), saved)

    def _send_written(self, *, waits: bool = False) -> None:
        """Sends events for the checkpoints and adapters that are on the disk."""
        for event in self._store.written(waits=waits):
            self._send(event)

    def _keep_references(self, job: JobState) -> None:
        self._lock.check_folder()
        self._referenced.add(job.name)
        if processes.is_first():
            write_references(self._folder, job, self._run.model.fingerprint)

    def _export(self, job: JobState) -> None:
        if job.parked is not None:
            adapter = job.parked.adapter(job.like)
        else:
            adapter = self._run.slots.read(job.slot, job.like)
        self._store.export(self.round, job, adapter, self._run.model)
