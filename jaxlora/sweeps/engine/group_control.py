"""A group's part of a sweep: it trains what it is given, and asks how to go on."""

import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxlora.config import RunConfig
from jaxlora.config.sweep_config import ExitRule
from jaxlora.errors import JaxloraError
from jaxlora.run import events
from jaxlora.run.callback import Callback
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.control import point_of, report_sweep
from jaxlora.sweeps.decisions import compared_steps
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.transport import Link
from jaxlora.sweeps.ranking import SweepReport
from jaxlora.train.control import Control
from jaxlora.train.job_state import JobState
from jaxlora.train.report.summary import RunResult
from jaxlora.train.saved.read_checkpoint import newest_checkpoint, read_newest
from jaxlora.train.trainer import RunTrainer

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_MEMINFO = pathlib.Path("/proc/meminfo")
MOVED = "moved"  # the rule by which a job ends here because another group has it


class GroupControl(Control[SweepReport], Callback):
    """Decides about the jobs of a group's run as the driver of the sweep says.

    It is the run's `Control` and one of its callbacks. The thread that listens to
    the driver calls `receive` and `end`; the thread that trains calls the others. The
    driver's ledger has all decisions, so a checkpoint has none, and the driver decides
    where jobs wait.

    Attributes:
        has_begun: Whether the run has begun, so that it ends by a checkpoint.
    """

    def __init__(self, link: Link, rules: Sequence[ExitRule]):
        """Makes the object; the rules say where jobs are compared."""
        self._link, self._rules = link, tuple(rules)
        self.version, self.has_begun = 0, False
        self._changed = threading.Condition()
        # The thread that listens has received these:
        self._inbox: list[m.ToWorker] = []
        self._verdicts: dict[str, m.Verdict] = {}
        self._num_judged, self._is_finishing, self._is_over = 0, False, False
        self._noted: set[str] = set()  # copies that may start
        # The thread that trains keeps these:
        self._jobs: dict[str, JobState] = {}
        self._gives: dict[str, m.Give] = {}
        self._adding: dict[str, Future[bool]] = {}  # until they join or are refused
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="add")
        self._asks: list[m.Ask] = []
        self._given: set[str] = set()
        self._moving: set[str] = set()
        self._saves: set[str] = set()  # of those, a checkpoint was asked for
        self._dropped: set[str] = set()
        self._unsaved: set[str] = set()  # no checkpoint here has them yet
        self._copies: set[str] = set()  # they start from other jobs, and have not yet
        self._ends = _Ends(link)
        self._num_asked, self._undecided = 0, set[str]()
        self._reviewed = 0
        self._progress: dict[str, JobProgress] = {}
        self._sent = 0.0
        self._speed: float | None = None

    @property
    def _trainer(self) -> RunTrainer:
        assert isinstance(self.trainer, RunTrainer)
        return self.trainer

    # ---- the thread that listens ---------------------------------------------------

    def receive(self, message: m.ToWorker) -> None:
        """Takes a message of the driver."""
        with self._changed:
            match message:
                case m.Verdict(name=name):
                    self._verdicts[name] = message
                case m.Judged(number=number):
                    self._num_judged = number
                case m.Ask(action="begin", name=name):
                    self._noted.add(name)
                case m.Finish():
                    self._is_finishing = True
                case m.Give() | m.Ask():
                    self._inbox.append(message)
            self.version += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Notes that the driver has ended."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # ---- decisions -----------------------------------------------------------------

    def wants_eval(self, job: JobState) -> bool:
        """Whether a job is to be evaluated here because a rule compares it here."""
        if job.prepared.eval_data is None:
            return False
        return job.progress.step in compared_steps(self._rules, job.num_steps)

    def note(self, jobs: Sequence[JobState], evaluated: Sequence[JobState]) -> bool:
        """Asks the driver to decide; see `Control.note`."""
        if evaluated:
            self._ask_about(evaluated)
        return bool(evaluated)

    def _ask_about(self, jobs: Sequence[JobState]) -> None:
        """Sends evaluations, and waits for what is decided about them."""
        points = tuple(map(point_of, jobs))
        self._undecided |= {job.name for job in jobs}
        self._num_asked += 1
        self._link.send(m.Evaluated(number=self._num_asked, points=points))
        with self._changed:
            is_judged = self._changed.wait_for(
                lambda: self._num_judged >= self._num_asked or self._is_over
            )
            if is_judged and not self._is_over:
                self._undecided.clear()

    def stop_of(self, job: JobState) -> tuple[str, str] | None:
        """Returns the rule by which a job ends, and the reason; None if it goes on."""
        if job.name in self._dropped and not job.has_slot:
            return MOVED, "another group trains it"
        verdict = self._verdicts.get(job.name)
        if verdict is None or not verdict.stop or job.progress.step < verdict.step:
            return None
        rule, reason = verdict.stop
        return rule, reason

    def waiting_reason(self, job: JobState) -> str | None:
        """Returns why a job is not to train now; None if it may."""
        name, step = job.name, job.progress.step
        if name not in self._given:
            return "it waits for its turn, or another group trains it"
        if name in self._moving:
            return "it moves to another group"
        if name in self._undecided:
            return f"it waits at step {step} for a decision"
        verdict = self._verdicts.get(name)
        if verdict is not None and verdict.waits and verdict.step == step:
            return f"it waits at step {step} until all configurations have come as far"
        return None

    def wants_checkpoint(self) -> bool:
        """Whether jobs are ready to move to another group, or copies have started."""
        begun = {name for name in self._copies if self._jobs[name].has_begun}
        self._copies -= begun
        self._unsaved |= begun
        jobs = [job for name, job in self._jobs.items() if name in self._moving]
        new = {job.name for job in jobs if job.parked is not None} - self._saves
        self._saves |= new
        return bool(new or begun)

    def wait(self, is_asked_to_end: Callable[[], bool]) -> bool:
        """Waits for the driver, and tells it that this process is alive."""
        self._tell()
        while not is_asked_to_end():
            with self._changed:
                if self._is_over or self._is_finishing:
                    return False
                if self.version != self._reviewed:
                    return True
                self._changed.wait(_LOOK_SECONDS)
            if any(future.done() for future in self._adding.values()):
                return True
            if time.monotonic() - self._sent > _PROGRESS_SECONDS:
                self._tell()
        return False

    def report(
        self,
        result: RunResult[SweepReport],
        jobs: Sequence[JobState],
        config: RunConfig,
    ) -> RunResult[SweepReport]:
        """Ranks the configurations that the group has trained; see `report_sweep`."""
        return report_sweep(result, config)

    # ---- jobs come and go ----------------------------------------------------------

    def review(self, jobs: Sequence[JobState]) -> None:
        """Does what the driver has asked for since the last call."""
        for job in jobs[len(self._jobs) :]:
            self._jobs[job.name] = job
            self._ends.begin(job.name, job.progress.best_step)
            self._adding.pop(job.name, None)
        with self._changed:
            self._reviewed = self.version
            inbox, self._inbox = self._inbox, []
        for message in inbox:
            match message:
                case m.Give(name=name):
                    self._gives[name] = message
                case m.Ask(action="release", name=name):
                    self._release(name)
                case m.Ask(action="drop", name=name):
                    self._dropped.add(name)
                case m.Ask():
                    self._asks.append(message)
        for name, give in list(self._gives.items()):
            if name in self._jobs:
                del self._gives[name]
                self._take(give)
            elif name not in self._adding and not self._is_early(give):
                self._adding[name] = self._opener.submit(self._add, give)
        for name, future in list(self._adding.items()):
            if future.done() and not future.result():
                del self._adding[name]
        asks, self._asks = self._asks, []
        for ask in asks:
            if ask.name in self._jobs:
                self._ask(ask)
            elif ask.name in self._gives.keys() | self._adding.keys():
                self._asks.append(ask)  # its data is being read

    def _is_early(self, give: m.Give) -> bool:
        """Whether a copy comes before the data of the other job have been read."""
        origin = None if give.settings is None else give.settings.clone_of
        return origin is not None and origin.job in self._gives

    def _release(self, name: str) -> None:
        """Lets a job leave for another group: at once if there is nothing to save."""
        self._moving.add(name)
        self._gives.pop(name, None)
        job = self._jobs.get(name)
        if job is None or (job.progress.status == "waiting" and job.parked is None):
            self._link.send(m.Saved(name=name, is_released=True))

    def _ask(self, ask: m.Ask) -> None:
        if ask.action == "stop":
            self._trainer.stop_job(ask.name, ask.reason)
        elif ask.action == "pause":
            self._trainer.pause_job(ask.name, ask.reason)
        else:
            self._trainer.resume_job(ask.name)

    def _add(self, give: m.Give) -> bool:
        """Reads the data of a job that this run does not know; in another thread."""
        assert give.settings is not None, "the run has the others"
        try:
            self._trainer.add_job(give.settings)
        except JaxloraError as error:
            self._gives.pop(give.name, None)
            self._refuse(give.name, str(error))
            return False
        return True

    def _refuse(self, name: str, reason: str) -> None:
        progress = JobProgress(status="failed", reason=reason)
        self._link.send(m.Ended(name=name, progress=progress))

    def _take(self, give: m.Give) -> None:
        """Lets a job train from its newest state, or anew if it has none."""
        name, job = give.name, self._jobs[give.name]
        if name in self._moving | self._dropped:  # it comes back from another group
            job.progress, job.parked = JobProgress(), None
            self._ends.begin(name, None)
            self._trainer.resume_job(name)  # it may have been paused when it left
            for names in (self._moving, self._saves, self._dropped):
                names.discard(name)
        for source in map(pathlib.Path, give.sources):
            if self._finds(name, source):
                break
        if name in self._ends:
            return
        if (origin := job.awaits) is not None:
            if origin.job not in self._given:
                reason = f"{origin.job} has ended, and its copy has no state"
                self._refuse(name, reason)
                return
            self._copies.add(name)
        self._given.add(name)
        progress = job.progress
        if progress.step and progress.last_eval_step == progress.step:
            self._ask_about([job])  # the driver may have ended before it was told

    def _finds(self, name: str, source: pathlib.Path) -> bool:
        """Whether a run has the state of a job, or its end, which are taken over."""
        if newest_checkpoint(source / CHECKPOINTS) is None:
            return False
        found = read_newest(source / CHECKPOINTS)
        if name in found.run.adapters:
            progress = self._trainer.continue_job_from(name, source)
            logger.info("%s: goes on from step %d of %s", name, progress.step, source)
            self._ends.begin(name, progress.best_step, source)
            self._unsaved.add(name)
            return True
        progress = found.run.progress.get(name, JobProgress())
        if not progress.is_over or progress.stopped_by == MOVED:
            return False
        self._ends.find(name, progress, source)
        return True

    # ---- events --------------------------------------------------------------------

    def on_event(self, event: events.Event) -> None:
        """Tells the driver what it needs to know."""
        if isinstance(event, events.JobEvent):
            self._progress[event.job] = event.progress
            is_step = isinstance(event, events.StepEvent)
            if not is_step or time.monotonic() - self._sent > _PROGRESS_SECONDS:
                self._tell()
        super().on_event(event)

    def on_run_start(self, event: events.RunStartEvent) -> None:
        """The data of all jobs were read."""
        self.has_begun = True
        self._link.send(m.Ready(jobs=tuple(map(_facts, self._trainer.jobs))))

    def on_job_add(self, event: events.JobAddEvent) -> None:
        """A job that the driver gave has joined."""
        name = event.info.settings.name
        (job,) = (job for job in self._trainer.jobs if job.name == name)
        self._link.send(m.Ready(jobs=(_facts(job),)))
        with self._changed:
            if job.settings.clone_of is not None:
                # The step at which a copy starts is in the ledger before it does.
                self._changed.wait_for(lambda: name in self._noted or self._is_over)
            self.version += 1  # it can be given now

    def on_window(self, event: events.WindowEvent) -> None:
        """Takes note of the speed."""
        self._speed = event.tokens_per_second

    def on_job_end(self, event: events.JobEndEvent) -> None:
        """Reports the end when the adapter is on the disk."""
        if event.progress.stopped_by != MOVED:
            job = self._jobs[event.job]
            self._ends.note_end(job, event.progress, self._trainer.output_dir)

    def on_export(self, event: events.ExportEvent) -> None:
        """Takes note of an adapter on the disk."""
        job = self._jobs[event.job]
        self._ends.note_export(job, event.step, self._trainer.output_dir)

    def on_checkpoint(self, event: events.CheckpointEvent) -> None:
        """Reports which states are safe here."""
        awaited = self._unsaved | self._moving
        if not awaited:
            return
        found = read_newest(event.folder.parent)
        for name in awaited & found.run.adapters.keys():
            is_released = name in self._moving
            if is_released and found.run.progress[name].status != "paused":
                continue
            self._unsaved.discard(name)
            self._link.send(m.Saved(name=name, is_released=is_released))

    def _tell(self) -> None:
        """Sends the progress of jobs, which also shows that this process is alive."""
        jobs, self._progress = self._progress, {}
        self._sent = time.monotonic()
        memory = _used_memory()
        self._link.send(
            m.Progress(jobs=jobs, tokens_per_second=self._speed, memory=memory)
        )


def _facts(job: JobState) -> m.JobFacts:
    origin = job.settings.clone_of
    return m.JobFacts(
        name=job.name,
        num_steps=job.num_steps,
        rank=job.largest_rank,
        trained_rank=job.trained_rank,
        num_modules=len(job.like.modules),
        batch_tokens=job.batch_tokens,
        is_evaluated=job.prepared.eval_data is not None,
        clone_step=None if origin is None else origin.step,
    )


def _used_memory() -> float | None:
    """Returns the share of the host's memory that is in use; None: it is not known."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (x.partition(":") for x in lines)
    }
    if not {"MemTotal", "MemAvailable"} <= kib.keys():
        return None
    return 1 - kib["MemAvailable"] / kib["MemTotal"]


class _Ends:
    """Reports the ends of jobs to the driver, when their weights are on the disk."""

    def __init__(self, link: Link):
        """Makes the object; no job has ended."""
        self._link = link
        self._ended: dict[str, JobProgress] = {}
        self._exported: dict[str, int] = {}  # steps of the adapter on the disk
        self._came_with: dict[str, int | None] = {}  # the step of their best weights
        self._sources: dict[str, pathlib.Path] = {}  # the run that they come from

    def __contains__(self, name: object) -> bool:
        return name in self._ended

    def begin(
        self, name: str, best_step: int | None, source: pathlib.Path | None = None
    ) -> None:
        """Notes a job that begins, or goes on.

        Args:
            name: The job.
            best_step: The step of its best weights so far; None: there are none.
            source: Folder of the run that it comes from; None: it is as before.
        """
        self._came_with[name] = best_step
        if source is not None:
            self._sources[name] = source

    def find(self, name: str, progress: JobProgress, source: pathlib.Path) -> None:
        """Reports a job that has ended in another run, whose folder is `source`."""
        self._ended[name] = progress
        self._send(name, source / ADAPTERS / name)

    def note_end(self, job: JobState, progress: JobProgress, run: pathlib.Path) -> None:
        """Notes a job that has ended in this run, whose folder is `run`."""
        self._ended[job.name] = progress
        self._report(job, run)

    def note_export(self, job: JobState, step: int, run: pathlib.Path) -> None:
        """Notes an adapter on the disk."""
        self._exported[job.name] = step
        if job.name in self._ended:
            self._report(job, run)

    def _report(self, job: JobState, run: pathlib.Path) -> None:
        """Reports an end, if nothing is still to be written."""
        name, progress = job.name, self._ended[job.name]
        step = progress.exported_step(keep_best=job.settings.keep_best)
        folder = run / ADAPTERS / name
        if step is None:
            self._send(name, None)
        elif self._exported.get(name, -1) >= step:
            self._send(name, folder)
        elif job.settings.keep_best and step == self._came_with[name]:
            # Nothing is written here, but a copy of those weights may be.
            source = self._sources.get(name)
            is_here = source is None or folder.is_dir()
            self._send(name, folder if is_here else source / ADAPTERS / name)

    def _send(self, name: str, folder: pathlib.Path | None) -> None:
        text = None if folder is None else str(folder.absolute())
        ended = m.Ended(name=name, progress=self._ended[name], folder=text)
        self._link.send(ended)
