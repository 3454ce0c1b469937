"""One call of `Trainer.train`: a run from its first event to its last checkpoint."""

import contextlib
import logging
import time
from collections.abc import Sequence

from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.config import LoraJob
from jaxlora.distributed import processes
from jaxlora.errors import CheckpointError, JaxloraError
from jaxlora.run import events
from jaxlora.run.callback import Callback, JobControl, Listeners
from jaxlora.run.folder import clean_up
from jaxlora.run.saved_stream import SavedStream
from jaxlora.train.ending import StopRequest
from jaxlora.train.execute.executor import Executor
from jaxlora.train.execute.rounds import Border, Rounds
from jaxlora.train.execute.run_programs import FurtherPrograms
from jaxlora.train.inbox import Inbox
from jaxlora.train.live_run import LiveRun
from jaxlora.train.report.run_callbacks import open_callbacks

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between looks for requests, if only one process trains


class Loop:
    """Trains the jobs of a run until every job has ended, or a signal ends it."""

    def __init__(self, run: LiveRun, saved: SavedStream | None):
        """Makes the object; no file is changed yet.

        Args:
            run: The run; those of its jobs that are in the checkpoint have its progress
                and states. `train` closes its files.
            saved: The microbatches of the checkpoint that it resumes from, if any.
        """
        self._run, self._live, self._saved = run, run.live, saved
        self._config, self._folder = run.plan.config, run.opened.folder
        self._num_saved = self._num_due(run.round)  # checkpoints due so far
        self._looked = 0.0

    def train(
        self, callbacks: Sequence[Callback], trainer: JobControl, *, is_resumed: bool
    ) -> bool:
        """Runs the jobs to their ends; returns whether a signal ended it early.

        Args:
            callbacks: Callbacks of the user.
            trainer: Lets them add, stop, pause and resume jobs.
            is_resumed: Whether the run goes on from what is on the disk.
        """
        run, store = self._run, self._run.store
        # Signals take effect between microbatches, and interrupt no checkpoint.
        with StopRequest() as stop, contextlib.ExitStack() as opened:
            opened.callback(store.close)  # waits for the last checkpoint
            self._open_inbox(opened)
            own = open_callbacks(self._config, self._folder, store.latest(), opened)
            for callback in callbacks:
                callback.trainer = trainer
            run.listeners = Listeners([*own, self._inbox], callbacks)
            run.send(
                events.RunStartEvent(
                    round=self._run.round,
                    jobs=tuple(job.info() for job in self._live.jobs),
                    output_dir=self._folder,
                    num_slots=run.plan.num_slots,
                    is_resumed=is_resumed,
                )
            )
            self._take_requests()
            stops = self._train(stop)
            run.send_written(waits=True)
            stops = stops and not all(job.progress.is_over for job in self._live.jobs)
            run.send(events.RunEndEvent(round=self._run.round, is_interrupted=stops))
            run.listeners.raise_failure()
            return stops

    def _train(self, stop: StopRequest) -> bool:
        """Trains to the end; returns whether a signal or a failure has ended it."""
        run, store = self._run.opened, self._run.store
        further = FurtherPrograms(run.layout, run.plan.further_limits)
        with further, self._open_stream(further) as stream:
            while not (stops := self._must_end(stop)):
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
            if store.latest() != self._run.round:
                self._save(stream, stream.snapshot())
            return stops

    def _at_border(self, stream: Rounds, border: Border, stop: StopRequest) -> None:
        """Does what is due between two microbatches."""
        self._run.send_written()
        if self._suggest():
            self._record()
        if border.ends_window or processes.count() == 1:
            # Several processes act alike only where they look at the same border.
            if self._must_end(stop):
                stream.stop()
            if border.ends_window or self._is_time_to_look():
                self._take_requests()
        found = border.snapshot
        is_due = self._num_due(self._run.round) > self._num_saved
        is_due |= border.ends_round and self._run.control.wants_checkpoint()
        if found is None and border.ends_round and is_due:
            found = stream.snapshot()
        if found is not None:
            stream.end_round()
            self._num_saved = self._num_due(self._run.round)
            self._save(stream, found)

    def _wait(self, stream: Rounds, stop: StopRequest) -> bool:
        """Waits for a sweep that others decide about; whether jobs may train again.

        A checkpoint is written before, as the jobs may go on in another process.
        """
        run = self._run
        if run.control.wants_checkpoint() and run.store.latest() != run.round:
            self._save(stream, stream.snapshot())
        run.send_written(waits=True)
        return run.control.wait(lambda: self._must_end(stop))

    def _save(self, stream: Rounds, read_slot: ReadSlot | None) -> None:
        assert read_slot is not None, "steps are in flight"
        self._run.save(stream.saved(), read_slot)

    def _num_due(self, number: int) -> int:
        """Returns how many checkpoints are due by a round."""
        every = self._config.checkpoint_every
        return number // every if every else 0

    def _must_end(self, stop: StopRequest) -> bool:
        """Whether a signal or a failed callback, on any process, ends the run."""
        has_failed = self._run.listeners.failure is not None
        return processes.any_of(stop.requested or has_failed)

    def _open_stream(self, further: FurtherPrograms) -> Rounds:
        run = self._run.opened
        executor = Executor(
            run.layout,
            run.model.params,
            run.slots,
            self._config.limits,
            further.wait_for if run.plan.further_limits else None,
            run.further_bases,
            run.plan.lanes.unlike[1:],
        )
        stream = Rounds(self._run, executor)
        try:
            stream.restore(self._saved)
        except JaxloraError:
            raise  # of the data, not of the checkpoint
        except (RuntimeError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {self._run.round} of {self._folder} is damaged: its "
                f"microbatches break a rule ({error}). Remove its folder to resume "
                "from the checkpoint before."
            ) from error
        return stream

    # ---- jobs and requests ---------------------------------------------------------

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
        self._run.store.keep_tokenizer(self._run.opened.model)

    def _is_time_to_look(self) -> bool:
        """Whether to look for requests before the window ends."""
        now = time.monotonic()
        if self._live.num_waiting or now - self._looked > _LOOK_SECONDS:
            self._looked = now
            return True
        return False

    def _take_requests(self, *, waits: bool = False) -> bool:
        """Takes users' requests, and records and answers them; see `Inbox.poll`."""
        self._run.lock.check_folder()
        has_taken = self._inbox.poll(waits=waits)
        self._record()
        self._inbox.deliver()
        return has_taken

    def _record(self) -> None:
        """Adds the jobs that have joined, and writes the run's record if it changed."""
        self._take_added()
        self._run.record()

    def _take_added(self) -> None:
        for job in self._live.take():
            self._run.send(events.JobAddEvent(round=self._run.round, info=job.info()))

    def _suggest(self) -> bool:
        """Adds the jobs that the control suggests now; whether there are any."""

        def add(settings: LoraJob) -> None:
            self._live.add(settings)
            self._take_added()
            if processes.is_first():
                logger.info("sweep: Optuna suggests %s", settings.name)

        return self._run.control.suggest(self._live.jobs, self._run.plan.num_slots, add)
