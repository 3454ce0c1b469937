"""Callbacks: the user's code, and the run's own logs, that follow a run's events."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxlora.run import events
from jaxlora.run.events import Event

if TYPE_CHECKING:  # see `jaxlora.run.events`
    from jaxlora.config import LoraJob

logger = logging.getLogger(__name__)


@runtime_checkable
class JobControl(Protocol):
    """The methods of a `Trainer` by which jobs come and go."""

    def add_job(self, job: "LoraJob") -> None:
        """Adds a job to the run; see `Trainer.add_job`."""

    def clone_job(self, name: str, new_name: str | None = ..., **changes: Any) -> None:
        """Adds a copy of a job to the run; see `Trainer.clone_job`."""

    def stop_job(self, name: str, reason: str = ...) -> None:
        """Stops a job after its current global batch; see `Trainer.stop_job`."""

    def pause_job(self, name: str, reason: str = ...) -> None:
        """Takes a job out of its slot; see `Trainer.pause_job`."""

    def resume_job(self, name: str) -> None:
        """Lets a paused job continue; see `Trainer.resume_job`."""


class Callback:
    """Follows the events of a run: override the methods for the kinds you need.

        class StopWhenGood(jaxlora.Callback):
            def on_eval(self, event):
                if event.eval_loss < 0.5:
                    self.trainer.stop_job(event.job, "good enough")

        jaxlora.Trainer(config).train(callbacks=[StopWhenGood()])

    The thread that trains calls the methods, and waits for them. If several processes
    train the run, each calls its own callbacks. A method may add, stop, pause and
    resume jobs through `trainer`; it must not call `trainer.train`.

    If a method raises an exception, the callback gets no more events. The run finishes
    what is in flight, writes a checkpoint and then raises the exception from
    `Trainer.train`, so no step is lost and `resume=True` continues. All other callbacks
    get all events.

    Attributes:
        trainer: Trainer of the run; it is set before the first event.
    """

    trainer: JobControl

    def on_event(self, event: Event) -> None:
        """Receives every event; calls the method for its kind."""
        getattr(self, f"on_{event.kind}")(event)

    def on_run_start(self, event: events.RunStartEvent) -> None:
        """The run begins, or continues in this process."""

    def on_job_add(self, event: events.JobAddEvent) -> None:
        """A job joins the run while it trains."""

    def on_job_start(self, event: events.JobStartEvent) -> None:
        """A job gets a slot for the first time."""

    def on_job_pause(self, event: events.JobPauseEvent) -> None:
        """A job leaves its slot with all its state."""

    def on_job_resume(self, event: events.JobResumeEvent) -> None:
        """A job that was paused continues."""

    def on_step(self, event: events.StepEvent) -> None:
        """A job has done an optimizer step."""

    def on_eval(self, event: events.EvalEvent) -> None:
        """A job was evaluated on its held-out samples."""

    def on_sample(self, event: events.SampleEvent) -> None:
        """A job has generated a text at an evaluation."""

    def on_job_end(self, event: events.JobEndEvent) -> None:
        """A job has ended."""

    def on_window(self, event: events.WindowEvent) -> None:
        """Some rounds have ended: a report of their work."""

    def on_checkpoint(self, event: events.CheckpointEvent) -> None:
        """A checkpoint is on the disk."""

    def on_export(self, event: events.ExportEvent) -> None:
        """An adapter of a job is on the disk."""

    def on_run_end(self, event: events.RunEndEvent) -> None:
        """The run ends in this process."""


class Listeners:
    """Sends events to callbacks.

    Attributes:
        failure: First exception of a user's callback; None if there was none.
    """

    def __init__(self, own: Sequence[Callback], users: Sequence[Callback] = ()):
        """Makes the object.

        Args:
            own: Callbacks of the run itself, whose errors end the run at once.
            users: Callbacks of the user, which are called after them.
        """
        self._own, self._users = tuple(own), list(users)
        self.failure: BaseException | None = None

    def send(self, event: Event) -> None:
        """Sends an event to every callback that has not failed."""
        for callback in self._own:
            callback.on_event(event)
        for callback in tuple(self._users):
            try:
                callback.on_event(event)
            except (Exception, SystemExit) as error:
                self._users.remove(callback)
                self._note_failure(callback, event, error)

    def _note_failure(
        self, callback: Callback, event: Event, error: BaseException
    ) -> None:
        name = type(callback).__name__
        logger.error(
            "%s.on_%s failed: %r. The run finishes what is in flight, writes a "
            "checkpoint and ends.",
            name,
            event.kind,
            error,
        )
        error.add_note(f"It was raised by {name}.on_{event.kind}.")
        if self.failure is None:
            self.failure = error

    def raise_failure(self) -> None:
        """Raises the first exception of a user's callback, if there was one."""
        if self.failure is not None:
            raise self.failure
