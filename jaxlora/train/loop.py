"""One call of `Trainer.train`: a run from its first event to its last checkpoint.

The microbatches of all running jobs are planned together and follow each other without
a break. A job starts, pauses and ends between two of its own global batches, while the
others go on: the microbatches are then planned anew from the next one on.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.common.background import StopRequest
from jaxlora.distributed import processes
from jaxlora.errors import CheckpointError, DeviceError, JaxloraError
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stream_plan import StreamPlan
from jaxlora.run import events
from jaxlora.run.callback import Callback, JobControl, Listeners
from jaxlora.run.folder import CHECKPOINTS, clean_up
from jaxlora.run.saved_run import SavedStream
from jaxlora.scheduler import Schedule
from jaxlora.train.execute.executor import Executor, Outcomes
from jaxlora.train.execute.feed import TickWork
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from jaxlora.train.execute.run_programs import FurtherPrograms
from jaxlora.train.inbox import Inbox
from jaxlora.train.job_state import JobState
from jaxlora.train.report.run_callbacks import open_callbacks
from jaxlora.train.run import Run
from jaxlora.train.saved.read_checkpoint import newest_checkpoint

logger = logging.getLogger(__name__)

_NO_MEMORY = "RESOURCE_EXHAUSTED"
_ROUNDS = 50  # between checkpoints that do not go by the clock
_NEAR = 0.5  # share of the way to a checkpoint after which memory is reserved for it


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
    ends = "finishing what is in flight, then writing a checkpoint"
    with StopRequest(ends) as stop, contextlib.ExitStack() as opened:
        opened.callback(run.store.close)  # waits for the last checkpoint
        opened.callback(run.ahead.begin, ())  # drops the weights of jobs that wait
        # Everything that could refuse to resume the run came before, so that the folder
        # was left as it was.
        if processes.is_first():
            clean_up(run.folder)
        inbox = Inbox(run.folder, run.live)
        opened.callback(inbox.close)
        run.record()
        run.store.keep_tokenizer(run.model)
        config, latest = run.plan.config, run.store.latest
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
        with FurtherPrograms(run.layout, run.plan.further_limits) as further:
            executor = Executor(
                run.layout,
                run.model.params,
                run.slots,
                config.limits,
                further.wait_for,
                run.further_bases,
                run.plan.lanes.unlike[1:],
            )
            stops = Loop(run, executor, inbox, stop).train(saved)
        run.send_written(waits=True)
        stops = stops and not all(job.progress.is_over for job in run.jobs)
        run.send(events.RunEndEvent(round=run.round, is_interrupted=stops))
        if processes.is_first():
            logger.info("seconds since the start of the run: %s", run.watch)
        run.listeners.raise_failure()
        return stops


class Loop:
    """Trains microbatch after microbatch until all jobs have ended or are paused.

    A round ends when every job that ran at its beginning has taken an optimizer step or
    has left; jobs of lower priority than others, also than those that have started
    since, do not count, as they may take none for long. A checkpoint ends one, too. A
    window is some rounds.
    """

    def __init__(self, run: Run, executor: Executor, inbox: Inbox, stop: StopRequest):
        """Makes the object; nothing is trained yet.

        Args:
            run: The run; jobs may join it, and requests may come, at each border.
            executor: Has the slots, and runs the microbatches.
            inbox: Takes the requests of users from the folder of the run.
            stop: Says whether a signal has asked for the end.
        """
        self._run, self._executor = run, executor
        self._inbox, self._stop = inbox, stop
        self._ticks = StreamPlan(
            run.plan.rules, lambda job, step: run.jobs[job].prepared.lengths(step)
        )
        self._life = JobLifecycle(run, executor, self._ticks)
        self._due: set[str] = set()  # jobs without a step in this round
        self._has_stepped = False  # in this round
        self._stepped: list[JobState] = []  # jobs that are between two batches
        self._window = Window(self._life.clock())
        self._saved_at = time.monotonic()  # the last checkpoint, or the start

    def train(self, saved: SavedStream | None) -> bool:
        """Trains to the end; returns whether a signal or a failure has ended it.

        Args:
            saved: The microbatches that followed the checkpoint; None: there are none.
        """
        run, store = self._run, self._run.store
        self._take_requests()
        with self._ticks:
            self._restore(saved)
            while not (stops := self._must_end()):
                if not self._starts():
                    more = self._suggest()
                    if self._take_requests(waits=True) or more or self._wait():
                        continue
                    break
                with run.watch.on("training"):
                    self._train_microbatches()
                self._take_requests()
            if store.latest != run.round:
                self._save(self._snapshot())
            return stops

    def _restore(self, saved: SavedStream | None) -> None:
        """Takes up the jobs that have a slot, where a checkpoint has left them."""
        run = self._run
        try:
            self._stepped = self._life.restore(saved)
        except JaxloraError:
            raise  # of the data, not of the checkpoint
        except (RuntimeError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {run.round} of {run.folder} is damaged: its microbatches "
                f"break a rule ({error}). Remove its folder to resume from the "
                "checkpoint before."
            ) from error

    def _starts(self) -> bool:
        """Ends, pauses and starts jobs; False if none is left to run.

        Jobs that start for the first time are evaluated.
        """
        if not self._life.active:
            self._ticks.forget_leaving()
        self._life.change(self._stepped)
        if not self._life.active and self._run.has_events:
            self._end_round()  # that of the events above, as no step follows
        return self._life.has_work()

    def _train_microbatches(self) -> None:
        """Trains until no job has samples left, or a signal has ended the run."""
        run, life = self._run, self._life
        if not life.active:
            return  # all jobs ended at their first evaluation
        self._due = self._in_round()
        self._window = Window(self._life.clock())
        for outcomes in self._executor.run(self._ticks, life.by_slot):
            num_rounds = run.round
            self._window.add(outcomes, life.clock())
            self._note_steps(outcomes)
            if not self._due and self._has_stepped:
                self._end_round()
            if outcomes.snapshot is not None:
                life.may_start = True
            self._at_border(outcomes.snapshot, ends_round=run.round > num_rounds)
            if not life.is_settled() or any(not j.has_slot for j in self._stepped):
                life.change([job for job in self._stepped if job.has_slot])
            if run.round > num_rounds:
                self._due = self._in_round()
        self._ticks.forget_leaving()
        if not life.may_start:  # no tick has followed that could be copied after
            life.may_start = True
            self._at_border(self._executor.snapshot(), ends_round=False)
        if run.has_events:
            self._end_round()
        if self._window.work.num_microbatches:
            self._end_window()

    def _in_round(self) -> set[str]:
        """Names of the running jobs whose steps may end a round."""
        active = self._life.active
        first = max((job.settings.priority for job in active), default=0)
        return {job.name for job in active if job.settings.priority == first}

    def _note_steps(self, outcomes: Outcomes) -> None:
        """Handles results of optimizer steps: evaluates and ends the jobs."""
        life = self._life
        self._stepped = stepped = [life.by_slot[slot] for slot in outcomes.steps]
        stepped.sort(key=life.number)  # evaluations are packed in this order
        self._has_stepped |= bool(stepped)
        for job in stepped:
            life.note(job, outcomes.steps[job.slot])
        running = [job for job in stepped if job.progress.status == "running"]
        life.evaluate_due(running)
        life.end_jobs(stepped)
        self._due.difference_update(job.name for job in stepped)
        self._due &= self._in_round()  # a job of higher priority may have started

    def _at_border(self, snapshot: ReadSlot | None, *, ends_round: bool) -> None:
        """Does what is due between two microbatches.

        Jobs that are added here, and requests, take effect when the loop goes on.

        Args:
            snapshot: The states of the slots here, if the executor has promised them.
            ends_round: Whether a round has ended here.
        """
        run = self._run
        ends_window = ends_round and not self._window.num_rounds
        run.send_written()
        if self._suggest():
            run.record()
        if ends_window or processes.count() == 1:
            # Several processes act alike only where they look at the same border.
            if self._must_end():
                self._ticks.stop()
            if ends_window or self._inbox.is_due():
                self._take_requests()
        is_due = ends_round and run.control.wants_checkpoint()
        is_due |= self._checkpoint_is_due
        if snapshot is None and ends_round and is_due:
            snapshot = self._snapshot()
        if snapshot is not None:
            if run.has_events:  # a checkpoint is named by its round
                self._end_round()
            self._save(snapshot)

    def _end_round(self) -> None:
        run = self._run
        run.round += 1
        self._has_stepped = run.has_events = False
        # A checkpoint that is due now gets its memory itself.
        is_near = _NEAR <= self._due_share < 1.0
        run.store.prepare(run.slots if is_near else None)
        self._due = self._in_round()
        self._window.num_rounds += 1
        is_last = run.round % run.plan.config.window_steps == 0
        if is_last and self._window.work.num_microbatches:
            self._end_window()

    def _end_window(self) -> None:
        """Sends the figures of the last rounds."""
        run, window, life = self._run, self._window, self._life
        event = window.event(run.round, run.plan, self._ticks, life.num_changes)
        self._ticks.forget_figures()
        life.num_changes = 0
        self._window = Window(window.end)
        run.send(event)

    # ---- checkpoints ---------------------------------------------------------------

    @property
    def _due_share(self) -> float:
        """How near the next checkpoint is: 0 after one, and 1 when another is due."""
        config, latest = self._run.plan.config, self._run.store.latest
        every = config.checkpoint_every
        if every == "auto":
            # A pipeline lets no job start while it copies its slots, so its bits would
            # depend on the clock; and processes must agree on the round.
            if config.mesh_sizes.stage == 1 and processes.count() == 1:
                return (time.monotonic() - self._saved_at) / config.checkpoint_seconds
            every = _ROUNDS
        if every is None:
            return 0.0
        return self._run.round / every - (latest or 0) // every

    @property
    def _checkpoint_is_due(self) -> bool:
        """Whether the time or the rounds since the last checkpoint ask for another."""
        return self._due_share >= 1.0

    def _snapshot(self) -> ReadSlot | None:
        """Copies the states of all slots, each after the steps reported so far.

        Returns:
            The states; None if a later border has them.
        """
        with self._run.watch.on("checkpoints"):
            found = self._executor.snapshot()
        self._life.may_start = found is not None
        return found

    def _save(self, read_slot: ReadSlot | None) -> None:
        assert read_slot is not None, "steps are in flight"
        here = [job.slot for job in self._stepped if job.has_slot]
        with self._run.watch.on("checkpoints"):
            self._run.save(self._ticks.saved(self._life.describe(), here), read_slot)
        self._saved_at = time.monotonic()

    # ---- requests, signals and suggestions -----------------------------------------

    def _wait(self) -> bool:
        """Waits for a sweep that others decide about; whether jobs may train again.

        A checkpoint is written before, as the jobs may go on in another process.
        """
        run = self._run
        if run.control.wants_checkpoint() and run.store.latest != run.round:
            self._save(self._snapshot())
        run.send_written(waits=True)
        with run.watch.on("waiting for other groups"):
            return run.control.wait(self._must_end)

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


class Window:
    """The work of some rounds.

    Attributes:
        num_rounds: Rounds that have ended.
        end: Time at which its last results came, where the next window begins: the work
            that follows may be done on the device before the window is reported.
    """

    def __init__(self, begin: float):
        """Begins a window; its times are those of `JobLifecycle.clock`."""
        self.num_rounds = 0
        self._begin = self.end = begin
        self._by_replica: dict[int, TickWork] = {}

    def add(self, outcomes: Outcomes, now: float) -> None:
        """Counts an item of the executor."""
        self.end = now
        for number, work in outcomes.work.items():
            self._by_replica[number] = self._by_replica.get(number, TickWork()) + work

    @property
    def work(self) -> TickWork:
        """The work of all replicas."""
        return sum(self._by_replica.values(), TickWork())

    @property
    def seconds(self) -> float:
        """Time of training."""
        return self.end - self._begin

    def event(
        self, number: int, plan: RunPlan, ticks: StreamPlan, num_changes: int
    ) -> events.WindowEvent:
        """Returns the figures of the window.

        Args:
            number: Rounds done in the run.
            plan: The plan of the run.
            ticks: Its microbatches; `forget_figures` follows.
            num_changes: How many jobs have started in slots, or left them.
        """
        seconds, work = self.seconds, self.work
        recent = Schedule(
            microbatches=tuple(m for tick in ticks.recent for m in tick),
            limits=plan.config.limits,
        )
        predicted = plan.seconds(recent, is_part=True, num_changes=num_changes)
        return events.WindowEvent(
            round=number,
            num_rounds=self.num_rounds,
            num_tokens=work.num_tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(work.num_tokens / seconds, 1),
            num_microbatches=work.num_microbatches,
            fill=_fill(work),
            planned_ahead=ticks.num_ahead == ticks.num_stretches,
            planning_seconds=round(ticks.waited_seconds, 4),
            pipeline=plan.pipeline_figures(recent),
            predicted_seconds=predicted,
            replicas=self._replicas(plan),
        )

    def _replicas(self, plan: RunPlan) -> tuple[dict[str, Any], ...]:
        """Returns the work of each replica; nothing if replicas are alike."""
        return tuple(
            {
                "replica": number + 1,
                "microbatch_tokens": replica.capacity,
                "num_microbatches": work.num_microbatches,
                "num_tokens": work.num_tokens,
                "fill": _fill(work),
            }
            for number, replica in enumerate(plan.lanes.replicas)
            for work in [self._by_replica.get(number, TickWork())]
        )


def _fill(work: TickWork) -> float:
    """Returns the share of the rows that hold tokens."""
    return round(work.num_tokens / max(1, work.num_rows), 4)


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
