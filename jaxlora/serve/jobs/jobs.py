"""The jobs of all tenants: those that run, those that wait, and requests for them."""

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxlora.adapters.optimizers.table import ADAMW
from jaxlora.config import LoraJob
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError, DataError, JaxloraError, StorageError
from jaxlora.plan.job.prepared_job import PreparedJob, prepare_job
from jaxlora.run.clone_settings import clone_settings
from jaxlora.run.events import Event
from jaxlora.run.job_progress import Status
from jaxlora.serve.database import Database
from jaxlora.serve.hub import Hub, Unavailable
from jaxlora.serve.ids import ONLY, Ids
from jaxlora.serve.jobs.batch_loss import check_objective
from jaxlora.serve.jobs.driver import Driver, Surroundings
from jaxlora.serve.jobs.record import Asked, Copy, Job, JobTable
from jaxlora.serve.jobs.tenant_data import LocalJob, TenantData
from jaxlora.serve.limits import Limits, OverQuota
from jaxlora.serve.registry import Conflict, NotFound, Registry, Taken
from jaxlora.serve.storage import Storage
from jaxlora.train.job_state import JobState, progress_of_copy
from jaxlora.train.live_jobs import PAUSED, STOPPED
from jaxlora.train.open_run import start_job

logger = logging.getLogger(__name__)

_KEEP_SECONDS = 1.0  # between writes of the progress of jobs
_RETRY_SECONDS = 10.0  # before a job goes on whose operation was not accepted
_DATA_LOGGER = "jaxlora.data"  # it shows samples, and tenants' texts are not for logs


class Jobs:
    """The jobs of a server.

    A thread with a loop of its own runs the drivers and all coroutines here, so nothing
    of it needs a lock. Another one reads data.

    Attributes:
        data: The uploads of tenants.
        listeners: Called in the thread with each new line of a job's metrics.
    """

    def __init__(
        self,
        *,
        hub: Hub,
        storage: Storage,
        database: Database,
        registry: Registry,
        limits: Limits,
        ids: Ids = ONLY,
    ):
        """Makes the object, which `start` starts.

        Args:
            hub: Runs the operations of jobs.
            storage: Has uploads and adapters.
            database: Has the jobs and their metrics.
            registry: Has the entries of uploads, and the bytes of adapters.
            limits: Limits and quotas; its settings say how many jobs run at once, and
                which data sets tenants share.
            ids: Makes ids of jobs, which tell their engine.
        """
        config = limits.config
        self.data = TenantData(storage, registry, limits, config.datasets)
        self.listeners: list[Callable[[Job, Mapping[str, Any]], None]] = []
        self._hub, self._storage, self._limits = hub, storage, limits
        self._registry = registry
        self._num_places = config.running_jobs or config.session.num_slots
        self._table, self._ids = JobTable(database, ids), ids
        self._jobs: dict[tuple[str, str], Job] = {}
        self._drivers: dict[str, Driver] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._prepared: dict[str, PreparedJob] = {}  # of jobs that start at once
        self._changed: dict[str, Job] = {}
        self._lines: list[tuple[Job, int, str]] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="jobs-data")
        self._thread = threading.Thread(target=self._work, name="jobs")
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self._ended: asyncio.Event | None = None

    # ---- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; jobs that were running go on. The hub runs already.

        Raises:
            StorageError: The jobs cannot be read.
        """
        self._log_level = logging.getLogger(_DATA_LOGGER).level
        logging.getLogger(_DATA_LOGGER).setLevel(logging.ERROR)
        self._thread.start()
        self._begun.result()

    def stop(self) -> None:
        """Leaves all jobs where they are, and ends the thread."""
        if not self._thread.is_alive():
            return
        assert self._ended is not None
        self._begun.result().call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._reader.shutdown(cancel_futures=True)
        logging.getLogger(_DATA_LOGGER).setLevel(self._log_level)

    def submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine of this object in its thread."""
        return asyncio.run_coroutine_threadsafe(work, self._begun.result())

    def _work(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            if self._begun.done():
                raise
            self._begun.set_exception(error)

    async def _live(self) -> None:
        self._ended = asyncio.Event()
        for job in self._table.load():
            self._jobs[job.key] = job
            if job.progress.status == "running" or self._owes_copies(job):
                self._start(job)
        self._fill_places()
        self._begun.set_result(asyncio.get_running_loop())
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _KEEP_SECONDS)
            try:
                self._keep()
            except StorageError as error:
                logger.warning("the progress of jobs is not kept yet: %s", error)
            except Exception:
                logger.exception("the progress of jobs is not kept yet")
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._keep()

    def _keep(self, *jobs: Job, new: Sequence[Job] = ()) -> None:
        """Writes what has changed, and jobs that are new.

        Raises:
            Taken: The tenant of a new job has another one by its name.
            StorageError: It cannot be written. Changes are kept for the next time.
        """
        self._changed |= {job.id: job for job in jobs}
        if self._changed or self._lines or new:
            self._table.write(self._changed.values(), self._lines, new)
            self._changed, self._lines = {}, []

    # ---- the queue -------------------------------------------------------------------

    def _fill_places(self) -> None:
        """Starts jobs that wait, while there are places."""
        while len(self._running) < self._num_places and (queue := self._queue()):
            self._start(queue[0])

    def _queue(self) -> list[Job]:
        """Returns the jobs that wait for a place, in the order in which they get one.

        The tenant with the fewest running jobs is first. Among its jobs those of higher
        priority are, and of equal ones the older.
        """
        busy = collections.Counter(
            job.tenant for job in self.every() if job.id in self._running
        )
        waiting = collections.defaultdict(list)
        for job in self.every():
            is_waiting = job.progress.status == "waiting" and job.is_ready
            if is_waiting and job.id not in self._running:
                waiting[job.tenant].append(job)
        for jobs in waiting.values():
            jobs.sort(key=lambda job: (-job.settings.priority, job.created_at))
        queue = []
        while waiting:
            tenant = min(waiting, key=lambda t: (busy[t], waiting[t][0].created_at))
            queue.append(waiting[tenant].pop(0))
            busy[tenant] += 1
            if not waiting[tenant]:
                del waiting[tenant]
        return queue

    def _owes_copies(self, job: Job) -> bool:
        return job.progress.status == "paused" and bool(job.copies)

    def _start(self, job: Job) -> None:
        self._running[job.id] = asyncio.create_task(self._drive(job))

    async def _drive(self, job: Job) -> None:
        """Runs a job until it ends or pauses."""
        try:
            while not await self._has_run(job):
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            del self._running[job.id]
            self._drivers.pop(job.id, None)
        self._changed[job.id] = job
        if job.progress.is_over:
            self._fail_copies(job)
            try:
                self._count_bytes(job)
            except StorageError as error:
                logger.warning("bytes of job %s are not counted: %s", job.id, error)
        self._fill_places()

    def _count_bytes(self, job: Job) -> None:
        """Counts the bytes of a job's adapter among those of its tenant."""
        if job.adapter is None:
            return
        num_bytes = self._storage.size(job.adapter)
        with contextlib.suppress(Taken):  # it has ended before a crash, too
            self._registry.add("job", job.tenant, job.id, num_bytes=num_bytes)

    async def _has_run(self, job: Job) -> bool:
        """Runs a job; returns False if it has to go on later."""
        try:
            state = await self._open(job)
            around = Surroundings(
                hub=self._hub,
                storage=self._storage,
                limits=self._limits,
                model=self._hub.engine.model,
            )
            driver = Driver(
                job,
                state,
                around,
                note=lambda event: self._note(job, event),
                copied=lambda copy: self._copied(job, copy),
            )
            self._drivers[job.id] = driver
            job.update(status="running", reason="")
            self._changed[job.id] = job
            await driver.run()
        except (StorageError, Unavailable) as error:
            logger.warning("job %s goes on later: %s", job.id, error)
            return False
        except JaxloraError as error:
            job.update(status="failed", reason=str(error))
        except Exception:
            logger.exception("job %s has failed", job.id)
            job.update(status="failed", reason="the server failed; its log says more")
        return True

    def _note(self, job: Job, event: Event | None) -> None:
        """Takes an event of a job, and that its progress has changed."""
        self._changed[job.id] = job
        if event is not None:
            now = round(time.time(), 3)
            line = {"event": event.kind, "time": now, **event.values()}
            self._lines.append((job, job.num_lines, json.dumps(line, allow_nan=False)))
            job.num_lines += 1
            for listener in self.listeners:
                listener(job, line)

    # ---- copies ----------------------------------------------------------------------

    def _copied(self, job: Job, copy: Copy) -> None:
        """Lets the copy of a job wait for a place, as its state is there."""
        for other in self._jobs.values():
            if other.id == copy.job and not other.progress.is_over:
                progress = progress_of_copy(job.name, job.progress)
                if other.pause is None:
                    progress = dataclasses.replace(progress, status="waiting")
                other.progress, other.is_ready = progress, True
                self._changed[other.id] = other
        self._fill_places()

    def _fail_copies(self, job: Job) -> None:
        """Ends the copies of a job that has ended before it could be copied."""
        waiting, job.copies = {copy.job: copy for copy in job.copies}, ()
        for other in self._jobs.values():
            if other.id in waiting and not other.progress.is_over:
                at = waiting[other.id].at
                reason = f"{job.name} ended at step {job.progress.step}, and not at"
                other.update(status="failed", reason=f"{reason} {at}")
                self._changed[other.id] = other

    # ---- reading data ----------------------------------------------------------------

    def tokenizer(self, created_at: float) -> Tokenizer:
        """Returns the model's tokenizer, whose chat templates see a time."""
        now = datetime.datetime.fromtimestamp(created_at)
        return load_tokenizer(self._hub.engine.model.folder, now=now)

    async def _open(self, job: Job) -> JobState:
        """Reads the data of a job.

        Raises:
            JaxloraError: They cannot be read, or are others than before.
        """
        prepared = self._prepared.pop(job.id, None)
        if prepared is None:
            local = self._local(job.tenant, job.settings)
            prepared = await self._prepare(local, job.created_at)
        if prepared.fingerprints["data_fingerprint"] != job.fingerprint:
            raise DataError(
                "its data are others than when the job was made. Put the old ones "
                "back, or make another job."
            )
        return start_job(prepared, self._hub.engine.model)

    def _local(self, tenant: str, settings: LoraJob) -> LocalJob:
        adapters = {
            job.name.lower(): job.adapter
            for job in self._of(tenant)
            if job.progress.is_over and job.adapter
        }
        return self.data.local(tenant, settings, adapters)

    async def _prepare(self, local: LocalJob, created_at: float) -> PreparedJob:
        loop = asyncio.get_running_loop()

        def read() -> PreparedJob:
            reader = DataReader(self.tokenizer(created_at))
            with local.named_errors():
                model = self._hub.engine.model.config
                return prepare_job(local.settings, model, reader)

        return await loop.run_in_executor(self._reader, read)

    def _check(self, prepared: PreparedJob) -> JobState:
        """Checks that the engine can train a job; returns its state.

        Raises:
            JaxloraError: It cannot.
        """
        job, engine = prepared.settings, self._hub.engine
        check_objective(prepared.objective)
        cure = "Train it with jaxlora train."
        if job.optimizer != ADAMW.name:
            raise ConfigError(
                f"optimizer={job.optimizer!r} must be {ADAMW.name} here, as all models "
                f"of a server share the tables of its moments. {cure}"
            )
        if job.dropout:
            raise ConfigError(
                f"dropout={job.dropout:g} must be 0 here, as a pass of a server "
                f"drops nothing. {cure}"
            )
        longest = max(int(data.lengths.max()) for data in prepared.data)
        if longest - 1 > engine.most_tokens:
            raise ConfigError(
                f"the longest sample has {longest} tokens, and this server trains up "
                f"to {engine.most_tokens + 1}. Lower max_length."
            )
        state = start_job(prepared, engine.model)
        engine.check_fits(job.name, state.like)
        return state

    # ---- requests --------------------------------------------------------------------

    def every(self) -> list[Job]:
        """Returns the jobs of all tenants, the oldest first. Any thread may call it."""
        return [*self._jobs.values()]

    def find(self, tenant: str, name: str) -> Job:
        """Returns a tenant's job. One on another engine is only to be read.

        Raises:
            NotFound: The tenant has no such job.
        """
        if (job := self._jobs.get((tenant, name.lower()))) is not None:
            return job
        if (other := self._table.find(tenant, name)) is not None:
            return other
        raise NotFound(f"there is no job {name!r:.120}. GET /jobs/v1/jobs lists yours.")

    def _own(self, tenant: str, name: str) -> Job:
        """Returns a tenant's job, which this engine may change.

        Raises:
            NotFound: The tenant has no such job.
            Misdirected: Another engine has it.
        """
        job = self.find(tenant, name)
        self._ids.check(job.id)
        return job

    def _of(self, tenant: str) -> list[Job]:
        """Returns a tenant's jobs on all engines."""
        own = [job for job in self._jobs.values() if job.tenant == tenant]
        return [*self._table.others(tenant), *own]

    def adapter(self, tenant: str, name: str) -> tuple[Job, str]:
        """Returns a tenant's job, and the key in the storage of its adapter.

        Raises:
            NotFound: The tenant has no such job.
            Conflict: The job has no adapter.
        """
        job = self.find(tenant, name)
        if job.adapter is None:
            raise Conflict(
                f"job {name!r} has no adapter: it is {job.progress.status}. It is "
                "written when the job ends, or with keep_best after an evaluation."
            )
        return job, job.adapter

    def with_adapters(self, tenant: str) -> list[Job]:
        """Returns a tenant's jobs that have an adapter, the newest first."""
        found = [job for job in self._of(tenant) if job.adapter]
        return sorted(found, key=lambda job: -job.created_at)

    async def add(self, tenant: str, settings: LoraJob) -> dict[str, Any]:
        """Adds a job, and returns its description.

        Raises:
            JaxloraError: The name is taken, the tenant has as many jobs as it may have,
                a setting or the data cannot be used, or this server cannot train it.
        """
        if settings.continue_from is not None:
            raise ConfigError(
                "continue_from names the folder of a run, which a server has not. Set "
                "init_from to the name of a job, or clone one."
            )
        if settings.clone_of is not None:
            raise ConfigError("clone_of is not set by hand here: clone the other job.")
        self._check_new(tenant, settings.name)
        self._limits.check_storage(tenant)
        job, prepared = await self._made(tenant, settings)
        self._check_new(tenant, settings.name)  # others may have come meanwhile
        self._keep(new=[job])
        self._jobs[job.key] = job
        if len(self._running) < self._num_places:
            self._prepared[job.id] = prepared
        self._fill_places()
        if job.id not in self._running:
            self._prepared.pop(job.id, None)
        return self.describe(job)

    def _check_new(self, tenant: str, name: str) -> None:
        if self._table.id_of(tenant, name) is not None:
            raise Taken(f"you have a job {name!r} already. Choose another name.")
        if (most := self._limits.quota(tenant).models) is None:
            return
        self._keep()  # as some may have ended just now
        if (live := [*self._table.live().values()].count(tenant)) >= most:
            raise OverQuota(
                f"you have {live} jobs that have not ended, and your quota is "
                f"{most} models. Stop one first."
            )

    async def _made(self, tenant: str, settings: LoraJob) -> tuple[Job, PreparedJob]:
        now = time.time()
        prepared = await self._prepare(self._local(tenant, settings), now)
        state = self._check(prepared)
        job = Job(
            id=self._ids.new(),
            tenant=tenant,
            settings=settings,
            created_at=now,
            num_steps=state.num_steps,
            batch_tokens=state.batch_tokens,
            rank=state.trained_rank,
            num_modules=len(state.like.modules),
            fingerprint=prepared.fingerprints["data_fingerprint"],
        )
        return job, prepared

    async def preview(
        self, tenant: str, settings: LoraJob, num_samples: int
    ) -> list[dict[str, Any]]:
        """Returns the first samples of each data set of a job; see `TenantData`."""
        local = self._local(tenant, settings)
        return await asyncio.get_running_loop().run_in_executor(
            self._reader,
            lambda: self.data.preview(local, self.tokenizer(time.time()), num_samples),
        )

    async def stop_job(self, tenant: str, name: str, reason: str) -> dict[str, Any]:
        """Stops a job after its current batch: it is evaluated and exported.

        One that has not begun ends at once.

        Raises:
            JaxloraError: There is no such job, or it has ended.
        """
        job = self._live_job(tenant, name)
        reason = reason or STOPPED
        if not self._has_begun(job):
            job.update(status="stopped", reason=reason)
            self._fail_copies(job)
        else:
            job.stop = Asked(reason=reason, at=await self._border(job))
            self._resume(job)
        self._keep(job)
        return self.describe(job)

    async def pause_job(self, tenant: str, name: str, reason: str) -> dict[str, Any]:
        """Pauses a job after its current batch. It stays paused until it is resumed.

        Raises:
            JaxloraError: As for `stop_job`.
        """
        job = self._live_job(tenant, name)
        at = await self._border(job)
        self._live_job(tenant, name)  # it may have ended meanwhile
        job.pause = Asked(reason=reason or PAUSED, at=at)
        if job.id not in self._running:
            job.update(status="paused", reason=job.pause.reason)
        self._keep(job)
        return self.describe(job)

    async def resume_job(self, tenant: str, name: str) -> dict[str, Any]:
        """Lets a paused job wait for a place again.

        Raises:
            JaxloraError: As for `stop_job`.
        """
        job = self._live_job(tenant, name)
        self._resume(job)
        self._keep(job)
        return self.describe(job)

    def _resume(self, job: Job) -> None:
        job.pause = None
        if job.progress.status == "paused" and job.id not in self._running:
            job.update(status="waiting", reason="")
        self._fill_places()

    async def clone_job(
        self, tenant: str, name: str, changes: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Adds a copy of a job, which takes its whole state after its current batch.

        Args:
            tenant: The tenant.
            name: The job.
            changes: Settings that differ, and the `name` of the copy; None: that of the
                job with what changes.

        Raises:
            JaxloraError: As for `stop_job` and `add`, or a setting cannot change.
        """
        parent, changes = self._live_job(tenant, name), dict(changes)
        own = changes.pop("name", None)
        settings = clone_settings(parent.settings, changes, own)
        self._check_new(tenant, settings.name)
        job, _ = await self._made(tenant, settings)
        parent = self._live_job(tenant, name)
        at = max(1, await self._border(parent))
        self._live_job(tenant, name)  # it may have ended meanwhile
        if parent.progress.status == "paused" and not parent.progress.step:
            raise Conflict(
                f"job {name!r} is paused before its first step, so there is no state "
                "to copy. Resume it first, or add a new job."
            )
        driver = self._drivers.get(parent.id)
        if driver is not None and driver.is_ending:
            raise Conflict(
                f"job {name!r} has done its last step and is being exported, so its "
                "state cannot be copied any more. When it has ended, set init_from to "
                "it in a new job."
            )
        if at > job.num_steps:
            raise ConfigError(
                f"job {name!r} has done {at} steps, and the copy is to have "
                f"{job.num_steps}. Raise steps or epochs."
            )
        self._check_new(tenant, settings.name)  # others may have come meanwhile
        origin = {"job": parent.name, "step": at}
        job.settings = settings.replace(clone_of=origin)
        job.update(reason=f"it starts as a copy of {parent.name} at step {at}")
        copies, job.is_ready = parent.copies, False
        parent.copies = (*copies, Copy(job=job.id, at=at))
        try:
            self._keep(parent, new=[job])
        except BaseException:
            parent.copies = copies
            raise
        self._jobs[job.key] = job
        if parent.id not in self._running and self._owes_copies(parent):
            self._start(parent)
        return self.describe(job)

    async def delete_job(self, tenant: str, name: str) -> None:
        """Deletes a job that has ended, with its adapter and metrics.

        Raises:
            JaxloraError: There is no such job, it has not ended, or another job needs
                its adapter.
        """
        job = self._own(tenant, name)
        if not job.progress.is_over:
            raise Conflict(f"job {name!r} has not ended. Stop it first.")
        self._check_unused(tenant, name, "init_from")
        with contextlib.suppress(NotFound):  # it has no adapter
            self._registry.delete(tenant, "job", job.id)
        self._table.delete(job)
        self._changed.pop(job.id, None)
        self._lines = [line for line in self._lines if line[0] is not job]
        del self._jobs[job.key]
        for file in (job.adapter, job.file("copied"), job.file("references")):
            if file is not None:
                self._storage.delete(file)

    async def delete_upload(self, tenant: str, name: str) -> None:
        """Deletes an upload.

        Raises:
            JaxloraError: There is no such upload, or a job needs it.
        """
        self.data.find(tenant, name)
        self._check_unused(tenant, name, "data")
        self.data.delete(tenant, name)

    def _check_unused(self, tenant: str, name: str, setting: str) -> None:
        for job in self._of(tenant):
            is_live = not job.progress.is_over
            if is_live and name.lower() in _names(job.settings)[setting]:
                raise Conflict(
                    f"job {job.name!r} has {name!r} as {setting}, and has not ended. "
                    "Stop it first."
                )

    def _live_job(self, tenant: str, name: str) -> Job:
        job = self._own(tenant, name)
        if job.progress.is_over:
            status, reason = job.progress.status, job.progress.reason
            raise Conflict(f"job {name!r} has ended already ({status}): {reason}.")
        return job

    def _has_begun(self, job: Job) -> bool:
        return job.id in self._running or job.next_seq > 1

    async def _border(self, job: Job) -> int:
        """Returns the optimizer steps after which a request for a job takes effect."""
        while job.id in self._running and job.id not in self._drivers:
            await asyncio.sleep(0.05)  # its data are read
        driver = self._drivers.get(job.id)
        if driver is None:
            return job.progress.step
        return await driver.catch_up()

    # ---- descriptions ----------------------------------------------------------------

    async def listing(
        self, tenant: str, status: Status | None, limit: int, offset: int
    ) -> dict[str, Any]:
        """Returns a page of a tenant's jobs, the newest first."""
        own = [job for job in self._of(tenant) if status in (None, job.progress.status)]
        own.sort(key=lambda job: -job.created_at)
        places = self.places()
        shown = [self.describe(job, places) for job in own[offset : offset + limit]]
        return {"jobs": shown, "total": len(own)}

    async def queue(self, tenant: str) -> dict[str, Any]:
        """Returns a tenant's places in the queue, beside the counts of all jobs."""
        queue = self._queue()
        own = [
            {"name": job.name, "place": place}
            for place, job in enumerate(queue, 1)
            if job.tenant == tenant
        ]
        running = [job for job in self._jobs.values() if job.id in self._running]
        return {
            "running": [job.name for job in running if job.tenant == tenant],
            "waiting": own,
            "all_running": len(running),
            "all_waiting": len(queue),
            "places": self._num_places,
        }

    async def job(self, tenant: str, name: str) -> dict[str, Any]:
        """Returns the description of a job.

        Raises:
            NotFound: There is no such job.
        """
        return self.describe(self.find(tenant, name))

    async def metrics(
        self, tenant: str, name: str, after: int, limit: int
    ) -> list[dict[str, Any]]:
        """Returns the lines of a job's metrics from a number on.

        Raises:
            NotFound: There is no such job.
        """
        job = self.find(tenant, name)
        if self._lines:
            self._keep()
        return [json.loads(line) for line in self._table.lines(job, after, limit)]

    def places(self) -> dict[str, int]:
        """Returns the places in the queue, from 1, by the ids of jobs.

        Any thread may call it, and `seconds_left`.
        """
        return {job.id: place for place, job in enumerate(self._queue(), 1)}

    def seconds_left(self, job: Job) -> float | None:
        """Returns the estimated time until a job ends; None: it is not known."""
        driver = self._drivers.get(job.id)
        return None if driver is None else driver.seconds_left

    def describe(
        self, job: Job, places: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """Returns the JSON values that describe a job.

        Args:
            job: The job.
            places: The places in the queue, if they are known already.
        """
        places = self.places() if places is None else places
        progress = dataclasses.asdict(job.progress)
        for key in ("slot", "stopped_by", "last_metric", "best_metric"):
            del progress[key]
        created, left = job.created_at, self.seconds_left(job)
        return {
            "name": job.name,
            "id": job.id,
            "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC)
            .isoformat(timespec="seconds")
            .replace("+00:00", "Z"),
            **progress,
            "place": places.get(job.id),
            "num_steps": job.num_steps,
            "batch_tokens": round(job.batch_tokens, 1),
            "rank": job.rank,
            "num_modules": job.num_modules,
            "seconds_left": None if left is None else round(left, 1),
            "num_metrics": job.num_lines,
            "has_adapter": job.adapter is not None,
            "settings": job.settings.model_dump(mode="json", exclude_unset=True),
        }


def _names(job: LoraJob) -> dict[str, set[str]]:
    """Returns what a job names of the tenant's, in small letters, by the setting."""
    sets = [*job.data.sets, *(job.eval_data.sets if job.eval_data else ())]
    adapters = job.init_from, job.objective_args.get("reference")
    return {
        "data": {one.path.lower() for one in sets},
        "init_from": {str(name).lower() for name in adapters if name},
    }
