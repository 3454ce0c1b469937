"""One call of `Trainer.train`: a run from its first event to its last checkpoint."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence

import jax

from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.distributed import processes
from jaxlora.errors import CheckpointError, DeviceError, JaxloraError
from jaxlora.run import events
from jaxlora.run.callback import Callback, JobControl, Listeners
from jaxlora.run.folder import CHECKPOINTS, clean_up
from jaxlora.run.saved_stream import SavedStream
from jaxlora.train.execute.run_programs import FurtherPrograms
from jaxlora.train.execute.staged_executor import StagedExecutor
from jaxlora.train.execute.stream import Border, Stream
from jaxlora.train.inbox import Inbox
from jaxlora.train.report.run_callbacks import open_callbacks
from jaxlora.train.run import Run
from jaxlora.train.saved.read_checkpoint import newest_checkpoint

logger = logging.getLogger(__name__)

_NO_MEMORY = "RESOURCE_EXHAUSTED"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager in which the first SIGINT or SIGTERM only sets `requested`.

    A second signal is handled as it was before. Outside the main thread, where Python
    cannot install signal handlers, the context manager does nothing.

    Attributes:
        requested: Whether a signal has arrived.
    """

    def __init__(self):
        self.requested = False
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
        return self

    def _note(self, number: int, frame) -> None:
        self.requested = True
        self.__exit__()
        logger.warning(
            "%s: finishing what is in flight, then writing a checkpoint. Send it again "
            "to quit immediately.",
            signal.Signals(number).name,
        )

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def train_run(
    run: Run,
    saved: SavedStream | None,
    callbacks: Sequence[Callback],
    trainer: JobControl,
    *,
    is_resumed: bool,
) -> bool:
    """Trains the jobs until all have ended; returns whether a signal ended it early.

    Args:
        run: The run, which has begun; those of its jobs that are in the checkpoint have
            its progress and states. Its files are closed at the end.
        saved: The microbatches of the checkpoint that it resumes from, if any.
        callbacks: Callbacks of the user.
        trainer: Lets them add, stop, pause and resume jobs.
        is_resumed: Whether the run goes on from what is on the disk.
    """
    # Signals take effect between microbatches, and interrupt no checkpoint.
    with StopRequest() as stop, contextlib.ExitStack() as opened:
        opened.callback(run.store.close)  # waits for the last checkpoint
        # What could refuse to resume the run comes before, and leaves the folder as it
        # was.
        if processes.is_first():
            clean_up(run.folder)
        inbox = Inbox(run.folder, run.live)
        opened.callback(inbox.close)
        run.record()
        run.store.keep_tokenizer(run.model)
        config, latest = run.plan.config, run.store.latest()
        own = open_callbacks(config, run.folder, latest, opened)
        for callback in callbacks:
            callback.trainer = trainer
        run.listeners = Listeners(own, callbacks)
        run.send(
            events.RunStartEvent(
                round=run.round,
                jobs=tuple(job.info() for job in run.jobs),
                output_dir=run.folder,
                num_slots=run.plan.num_slots,
                is_resumed=is_resumed,
            )
        )
        stops = _Loop(run, inbox, stop).train(saved)
        run.send_written(waits=True)
        stops = stops and not all(job.progress.is_over for job in run.jobs)
        run.send(events.RunEndEvent(round=run.round, is_interrupted=stops))
        run.listeners.raise_failure()
        return stops


class _Loop:
    """Trains microbatch after microbatch, and does what is due between them."""

    def __init__(self, run: Run, inbox: Inbox, stop: StopRequest):
        self._run, self._inbox, self._stop = run, inbox, stop

    def train(self, saved: SavedStream | None) -> bool:
        """Trains to the end; returns whether a signal or a failure has ended it."""
        self._take_requests()
        run, store = self._run, self._run.store
        further = FurtherPrograms(run.layout, run.plan.further_limits)
        with further, self._open_stream(saved, further) as stream:
            while not (stops := self._must_end()):
                if not stream.start():
                    more = self._suggest()
                    if self._take_requests(waits=True) or more or self._wait(stream):
                        continue
                    break
                if run.plan.config.checkpoint_every:
                    store.prepare(run.slots)
                for border in stream.run():
                    self._at_border(stream, border)
                self._take_requests()
            if store.latest() != run.round:
                self._save(stream, stream.snapshot())
            return stops

    def _at_border(self, stream: Stream, border: Border) -> None:
        """Does what is due between two microbatches."""
        run = self._run
        run.send_written()
        if self._suggest():
            run.record()
        if border.ends_window or processes.count() == 1:
            # Several processes act alike only where they look at the same border.
            if self._must_end():
                stream.stop()
            if border.ends_window or self._inbox.is_due():
                self._take_requests()
        found = border.snapshot
        is_due = border.ends_round and run.control.wants_checkpoint()
        if found is None and border.ends_round and (is_due or self._is_save_due()):
            found = stream.snapshot()
        if found is not None:
            stream.end_round()
            self._save(stream, found)

    def _is_save_due(self) -> bool:
        """Whether `checkpoint_every` asks for a checkpoint after the newest one."""
        every, latest = self._run.plan.config.checkpoint_every, self._run.store.latest()
        return bool(every) and self._run.round // every > (latest or 0) // every

    def _wait(self, stream: Stream) -> bool:
        """Waits for a sweep that others decide about; whether jobs may train again.

        A checkpoint is written before, as the jobs may go on in another process.
        """
        run = self._run
        if run.control.wants_checkpoint() and run.store.latest() != run.round:
            self._save(stream, stream.snapshot())
        run.send_written(waits=True)
        return run.control.wait(self._must_end)

    def _save(self, stream: Stream, read_slot: ReadSlot | None) -> None:
        assert read_slot is not None, "steps are in flight"
        self._run.save(stream.saved(), read_slot)

    def _must_end(self) -> bool:
        """Whether a signal or a failed callback, on any process, ends the run."""
        has_failed = self._run.listeners.failure is not None
        return processes.any_of(self._stop.requested or has_failed)

    def _take_requests(self, *, waits: bool = False) -> bool:
        """Takes users' requests, and records and answers them; see `Inbox.poll`."""
        self._run.lock.check_folder()
        has_taken = self._inbox.poll(waits=waits)
        self._run.record()
        self._inbox.deliver()
        return has_taken

    def _suggest(self) -> bool:
        """Adds the jobs that the control suggests now; whether there are any.

        One that does not fit the run is left out, with a warning.
        """
        run, before = self._run, len(self._run.jobs)
        while (found := run.control.suggest(run.jobs, run.plan.num_slots)) is not None:
            try:
                run.live.add(found)
            except JaxloraError as error:
                logger.warning("sweep: %s is left out: %s", found.name, error)
                continue
            run.take_added()
            if processes.is_first():
                logger.info("sweep: Optuna suggests %s", found.name)
        return len(run.jobs) > before

    def _open_stream(
        self, saved: SavedStream | None, further: FurtherPrograms
    ) -> Stream:
        run = self._run
        executor = StagedExecutor(
            run.layout,
            run.model.params,
            run.slots,
            run.plan.config.limits,
            further.wait_for,
            run.further_bases,
            run.plan.lanes.unlike[1:],
        )
        stream = Stream(run, executor)
        try:
            stream.restore(saved)
        except JaxloraError:
            raise  # of the data, not of the checkpoint
        except (RuntimeError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {run.round} of {run.folder} is damaged: its microbatches "
                f"break a rule ({error}). Remove its folder to resume from the "
                "checkpoint before."
            ) from error
        return stream


@contextlib.contextmanager
def explained(run: Run) -> Iterator[None]:
    """Raises errors of devices as `DeviceError`, which says what to do.

    An error of the system or of the run's files, if the folder was removed meanwhile,
    becomes one that says so.

    Args:
        run: The run, whose folder is locked.
    """
    try:
        yield
    except (OSError, JaxloraError) as error:
        try:
            run.lock.check_folder()
        except CheckpointError as removed:
            raise removed from error
        raise
    except jax.errors.JaxRuntimeError as error:
        where = ", ".join(getattr(error, "__notes__", ()))
        what, cure = "a device failed", "See whether all devices work (nvidia-smi)."
        if _NO_MEMORY in str(error):
            what = "a device is out of memory"
            cure = (
                "Lower microbatch_tokens, set remat: elementwise, mlp or layer, or "
                "choose a mesh with more stages or a larger fsdp."
            )
        number = newest_checkpoint(run.folder / CHECKPOINTS)
        kept = (
            "Nothing was saved yet, so the run starts anew"
            if number is None
            else f"The checkpoint after round {number} is whole; continue with --resume"
        )
        reason = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
        raise DeviceError(
            f"{what}{' (' + where + ')' if where else ''}: {reason}. {cure} {kept}."
        ) from error
