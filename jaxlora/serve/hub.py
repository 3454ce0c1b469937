"""The hub: the thread that owns the engine, and the promises of its operations.

An operation is accepted when it is in the ledger, and its outcome is told when the
device has settled it and the ledger has it. After a crash, or an error of the engine,
each model goes on from its last snapshot: `replay` runs what was queued since then in
the same microbatches, and the rest follows as if nothing had happened.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import pathlib
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
    wait,
)

from jaxlora.common.job_name import BASE
from jaxlora.config.session_config import SamplingConfig
from jaxlora.errors import ConfigError, DeviceError, JaxloraError, StorageError
from jaxlora.serve.database import Database
from jaxlora.serve.ledger import (
    EVERYTHING,
    Contents,
    Fenced,
    Ledger,
    Logged,
    LoggedModel,
    LoggedPiece,
    Part,
)
from jaxlora.serve.limits import Limits
from jaxlora.serve.model import Model, Promise
from jaxlora.serve.operation import (
    Create,
    Done,
    Encoded,
    Failed,
    Load,
    Operation,
    Pass,
    Publish,
    Refused,
    Save,
    Step,
    Unload,
    Waiting,
    decode,
    encode,
)
from jaxlora.serve.status import Health, HubStatus, Meter
from jaxlora.serve.storage import Storage
from jaxlora.session.engine import (
    Call,
    Engine,
    OpenAdapter,
    PassCall,
    PassResult,
    Piece,
    StepCall,
    StepResult,
)
from jaxlora.session.operations import (
    begin_folder,
    begin_state_file,
    new_adapter,
    open_saved,
    pass_call,
)
from jaxlora.session.published import Version
from jaxlora.session.residence import WholeState
from jaxlora.session.samples import OnTokens, SampleCall, SampleResult, Samples
from jaxlora.session.state_file import write_state

logger = logging.getLogger(__name__)

# Operations that ended so long ago are looked up in the ledger.
_SECONDS_KEPT = 60.0
_FORGET_SECONDS = 60.0  # between two removals of old operations from the ledger
_TICK_SECONDS = 1.0
_MOST_SNAPSHOTS = 2  # whose copies are in memory
_MOST_FRUITLESS = 4  # errors in a row between which nothing ended
_END_SECONDS = 30.0  # for the database, when the server ends

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")

_Datum = tuple[str, int, int]  # model, operation, number of the datum there


class SeqConflict(ConfigError):
    """Another operation has the number of this one."""


class CannotReplay(ConfigError):
    """The work that was done before a restart cannot be done again."""


class Unavailable(JaxloraError):
    """Nothing is accepted at the moment; the same request is to be sent again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubSettings:
    """Settings of a hub.

    Attributes:
        snapshot_steps: A model gets a snapshot after so many optimizer steps ...
        snapshot_seconds: ... or so many seconds after its first change since the last.
            What came after a snapshot is computed again after a crash.
        gap_seconds: A missing number of an operation is waited for so long.
        keep_seconds: Outcomes are kept so long.
        sampler_seconds: Published versions are kept so long after their last use. Those
            that are in the storage, too, are opened again.
    """

    snapshot_steps: int = 50
    snapshot_seconds: float = 120.0
    gap_seconds: float = 600.0
    keep_seconds: float = 3600.0
    sampler_seconds: float = 3600.0


class Hub:
    """Runs operations of many models in one engine.

    All public methods may be called by any thread.

    Attributes:
        died: Gets the error that has ended the hub for good, if one does: the process
            has to be restarted then. Nothing that was accepted is lost.
        listeners: Are called with each promise that gets its outcome, by any thread.
        sample_listeners: Are called with each call for samples that has its result, by
            any thread.
    """

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        database: Database,
        settings: HubSettings | None = None,
        sampling: SamplingConfig | None = None,
        *,
        limits: Limits | None = None,
        folder: pathlib.Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes a hub, which `start` starts.

        Args:
            engine: The engine, which only the hub uses from now on.
            storage: Where checkpoints and snapshots are.
            database: Where the ledger is.
            settings: Settings; None: the defaults.
            sampling: Settings of sampling; None: the defaults.
            limits: Hold passes of tenants that have used their tokens a second; None:
                nothing does.
            folder: See `Published`.
            clock: Returns seconds, for gaps and snapshots.

        Raises:
            ConfigError: Another server uses the database.
            StorageError: The database cannot be written.
        """
        self._engine, self._storage = engine, storage
        self._settings, self._clock = settings or HubSettings(), clock
        self._limits, self._ledger = limits, Ledger(database)
        self._samples = Samples(engine, sampling or SamplingConfig(), folder)
        self.died: Future[Exception] = Future()
        self.listeners: list[Callable[[Promise], None]] = []
        self.sample_listeners: list[Callable[[SampleCall, SampleResult], None]] = []
        self._lock = threading.Lock()
        self._models: dict[str, Model] = {}
        self._promises: dict[str, Promise] = {}
        self._by_number: dict[tuple[str, int], Promise] = {}
        self._ended: collections.deque[tuple[float, Promise]] = collections.deque()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine")
        self._others = ThreadPoolExecutor(2, thread_name_prefix="hub")
        self._working: set[Future[None]] = set()  # what these do
        self._is_stopping = self._is_restored = False
        self._meter = Meter(clock)
        # The rest is the thread's own.
        self._ready: set[str] = set()  # models whose next operation may begin
        self._limited: set[str] = set()  # those whose tenants must wait for their rate
        self._calls: dict[Call, Promise] = {}
        self._next_number = 0  # of pieces of work
        self._needed: dict[int, set[str]] = {}  # models without a snapshot, by piece
        self._replayed: LoggedPiece | None = None  # the device is given it again
        self._num_snapshots = 0
        self._next_tick = self._next_forgetting = 0.0
        # After an error: what the device had, what is run alone as it was among that
        # twice, and the operation that is run alone at the moment.
        self._suspects: set[_Datum] = set()
        self._careful: set[_Datum] = set()
        self._trying: Promise | None = None
        self._beginning: Promise | None = None
        self._num_fruitless = 0

    @property
    def engine(self) -> Engine:
        """The engine, of which other threads may read the model and the settings."""
        return self._engine

    def prepare(self) -> None:
        """Compiles or loads the programs of training, before `start`.

        Those of samples begin then, so that the first sampler waits for less.
        """
        self._engine.prepare()
        self._samples.prepare()

    def start(self) -> None:
        """Reads what was accepted before, and starts the thread.

        Raises:
            StorageError: The database cannot be read.
        """
        self._remember(self._ledger.read())
        # Nobody could ask for an outcome while the server was down.
        self._next_forgetting = self._clock() + self._settings.keep_seconds
        self._thread.start()

    def stop(self) -> None:
        """Finishes what the device has, writes snapshots, and ends the threads.

        What was accepted and is not done is done after the next start.
        """
        self._is_stopping = True
        self._inbox.put(None)
        end = time.monotonic() + _END_SECONDS
        while self._thread.is_alive():
            self._thread.join(_TICK_SECONDS)
            if self._ledger.trouble is not None and time.monotonic() > end:
                self._ledger.give_up()  # the thread may wait for it
        self._ledger.close()  # what waits for a database that is away ends with it
        self._others.shutdown()

    def submit(
        self, tenant: str, model: str, seq_id: int, operation: Operation
    ) -> Promise:
        """Takes an operation. One that was taken before gives its promise.

        Args:
            tenant: The tenant that owns the model, which the caller has checked.
            model: Id of the model. Its first operation is `Create` or `Load`.
            seq_id: Number of the operation among those of the model, from 1. A gap
                holds those after it.
            operation: The operation.

        Returns:
            The promise. The client may be told of it when `accepted` is done.

        Raises:
            SeqConflict: Another operation was taken by this number.
            ConfigError: The number is none, or its operation ended so long ago that
                nothing is known of it.
            Unavailable: Nothing can be accepted at the moment.
        """
        if not 1 <= seq_id < EVERYTHING:
            raise ConfigError(f"seq_id={seq_id} must be at least 1.")
        encoded = encode(operation)
        with self._lock:
            return self._take(tenant, model, seq_id, operation, encoded)

    def submit_last(self, tenant: str, model: str, operation: Operation) -> Promise:
        """Accepts an operation that comes after all that were accepted before.

        Args:
            tenant: Whose the model is, which the caller has checked.
            model: Id of the model.
            operation: The operation.

        Raises:
            Unavailable: Nothing can be accepted at the moment.
        """
        encoded = encode(operation)
        with self._lock:
            known = self._models.get(model)
            last = 0 if known is None else known.next_seq - 1
            numbers = [seq_id for one, seq_id in self._by_number if one == model]
            # A model that has failed has no number after all others.
            seq_id = min(max([last, *numbers]) + 1, EVERYTHING - 1)
            return self._take(tenant, model, seq_id, operation, encoded)

    def knows(self, model: str, seq_id: int) -> bool:
        """Whether an operation of a model was taken by a number."""
        with self._lock:
            known = self._models.get(model)
            has_begun = known is not None and seq_id < known.next_seq
            return has_begun or (model, seq_id) in self._by_number

    def promise(
        self, tenant: str, request_id: str, *, only_in_memory: bool = False
    ) -> Promise | None:
        """Returns a promise of a tenant; None: the tenant has no such promise.

        Args:
            tenant: The tenant.
            request_id: The id, which is any text that a client has sent.
            only_in_memory: Whether to leave out those that only the database has.

        Raises:
            StorageError: It may be in the database, which cannot be read.
        """
        with self._lock:
            found = self._promises.get(request_id)
        is_id = _REQUEST_ID.fullmatch(request_id) is not None
        if found is None and is_id and not only_in_memory:
            logged = self._ledger.find_request(request_id)
            if logged is not None and logged.outcome is not None:
                with self._lock:
                    found = self._promises.get(request_id) or self._recall(logged)
        return found if found is not None and found.tenant == tenant else None

    def sample(
        self,
        tenant: str,
        call: SampleCall,
        key: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Future[SampleResult | Failed]:
        """Draws samples. They are in no ledger, and gone when the server ends.

        Args:
            tenant: The tenant that asks, whose version it is.
            call: The call.
            key: Key in the storage of the version's folder, from which it is opened if
                it is not there; None: it has none.
            on_tokens: Called in the engine's thread with new tokens; see `Samples`.

        Returns:
            The result. To cancel it ends the call.

        Raises:
            Unavailable: Nothing can be accepted at the moment.
        """
        call = dataclasses.replace(call, tenant=tenant)
        outcome: Future[SampleResult | Failed] = Future()
        outcome.add_done_callback(functools.partial(self._note_samples, call))
        with self._lock:
            self._check_accepts()
        begin = functools.partial(self._begin_sampling, call, outcome, on_tokens)
        self._inbox.put(lambda: self._open_version(call, key, outcome, begin))
        return outcome

    def _note_samples(
        self, call: SampleCall, outcome: Future[SampleResult | Failed]
    ) -> None:
        if outcome.cancelled() or outcome.exception() is not None:
            return
        if not isinstance(result := outcome.result(), Failed):
            for listener in self.sample_listeners:
                listener(call, result)

    def park(self, model: str) -> None:
        """Lets a model leave its slot, if it has nothing to do.

        It comes back with its next operation.
        """

        def park() -> None:
            own = self._models.get(model)
            if own is None or own.adapter is None or not self._is_restored:
                return
            if not (own.running or own.held or own.is_blocked):
                self._engine.park(own.adapter)

        self._inbox.put(park)

    def waiting(self, tenant: str) -> Waiting:
        """Returns why promises of a tenant that have no outcome have none."""
        if self._health()[0] not in ("running", "starting"):
            return Waiting(state="paused_capacity")
        if self._limits is not None and not self._limits.may_run(tenant):
            return Waiting(state="paused_rate_limit")
        return Waiting(state="active")

    def status(self) -> HubStatus:
        """Returns the numbers of the hub."""
        with self._lock:
            models = [*self._models.values()]
        now = self._clock()
        shown = [one.status(now) for one in models if not one.is_unloaded]
        return dataclasses.replace(
            self._meter.status(shown, *self._health()),
            commits=self._ledger.commits,
            commits_seconds=self._ledger.commits_seconds,
            commit_seconds=self._ledger.last_seconds,
        )

    def _health(self) -> tuple[Health, str | None]:
        if self.died.done():
            return "failed", str(self.died.result())
        if self._ledger.is_fenced:
            return "failed", self._ledger.trouble
        if self._is_stopping:
            return "stopping", None
        if self._ledger.trouble is not None:
            return "paused", self._ledger.trouble
        return ("running" if self._is_restored else "starting"), None

    # ---- promises, under the lock ----------------------------------------------------

    def _check_accepts(self) -> None:
        health, reason = self._health()
        if health not in ("running", "starting"):
            why = "" if reason is None else f": {reason.rstrip('.')}"
            raise Unavailable(
                f"nothing is accepted at the moment, as the server is {health}{why}. "
                "Send the request again later."
            )

    def _take(
        self,
        tenant: str,
        model: str,
        seq_id: int,
        operation: Operation,
        encoded: Encoded,
    ) -> Promise:
        """Takes an operation by a number; see `submit`."""
        found = self._find(model, seq_id)
        if found is None:
            self._check_accepts()
            logged = Logged(
                model=model,
                seq_id=seq_id,
                request_id=secrets.token_hex(16),
                tenant=tenant,
                encoded=encoded,
                digest=encoded.digest,
            )
            new = found = self._add(Promise.of(logged, operation))
            self._ledger.accept(logged).add_done_callback(new.accept)
            self._inbox.put(lambda: self._hold(new))
        if found.digest != encoded.digest:
            raise SeqConflict(
                f"seq_id={seq_id} of model {model} belongs to another request, with "
                "another body. Give each request a number of its own."
            )
        return found

    def _find(self, model: str, seq_id: int) -> Promise | None:
        """Finds the promise of a number that was taken before."""
        if (found := self._by_number.get((model, seq_id))) is not None:
            return found
        known = self._models.get(model)
        if known is None or seq_id >= known.next_seq:
            return None
        if (logged := self._ledger.find(model, seq_id)) is not None:
            return self._recall(logged)
        if known.failure is not None:
            return None  # it is taken, and fails
        raise ConfigError(
            f"seq_id={seq_id} of model {model} ended long ago, and its result is not "
            f"kept any more. The next number is {known.next_seq}."
        )

    def _add(self, promise: Promise) -> Promise:
        self._promises[promise.request_id] = promise
        self._by_number[promise.model, promise.seq_id] = promise
        if promise.outcome.done():
            self._ended.append((self._clock(), promise))
        else:
            promise.outcome.add_done_callback(lambda _: self._note_end(promise))
        return promise

    def _note_end(self, promise: Promise) -> None:
        self._ended.append((self._clock(), promise))
        for listener in self.listeners:
            listener(promise)

    def _recall(self, logged: Logged) -> Promise:
        """Makes the promise of an operation that is in the ledger."""
        promise = Promise.of(logged, decode(logged.encoded))
        promise.accepted.set_result(None)
        if logged.outcome is not None:
            promise.outcome.set_result(logged.outcome)
        return self._add(promise)

    def _remember(self, contents: Contents) -> None:
        """Takes models, operations and pieces of work as the ledger has them."""
        with self._lock:
            models = {one.id: Model.of(one) for one in contents.models}
            for logged in contents.operations:
                key = logged.model, logged.seq_id
                promise = self._by_number.get(key) or self._recall(logged)
                promise.has_begun |= logged.has_begun
                own = Model(id=promise.model, tenant=promise.tenant)
                models.setdefault(own.id, own).hold(promise)
            for model in models.values():
                if (old := self._models.get(model.id)) is not None:
                    model.recent, model.loss_per_token = old.recent, old.loss_per_token
            self._models = models
        self._ready, self._calls, self._needed = {*models}, {}, {}
        self._num_snapshots = 0
        for piece in contents.pieces:
            self._next_number = max(self._next_number, piece.number + 1)
            for part in piece.parts:
                found = models.get(part.model)
                if found is not None and part.seq_id > found.covered_seq:
                    self._needed.setdefault(piece.number, set()).add(found.id)

    def _drop_ended(self) -> None:
        """Forgets promises that ended a while ago, which the ledger has."""
        with self._lock:
            while self._ended and self._ended[0][0] < self._clock() - _SECONDS_KEPT:
                _, promise = self._ended.popleft()
                self._promises.pop(promise.request_id, None)
                self._by_number.pop((promise.model, promise.seq_id), None)

    # ---- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._is_restored:
                    self._restore()
                self._work()
                break
            except Exception as error:
                if not self._renew(error):
                    return
        try:
            self._end()
        except Exception:
            logger.exception("the server has not ended in order; nothing is lost")

    def _work(self) -> None:
        """Works until the hub is to stop."""
        is_idle = False
        while self._take_messages(_TICK_SECONDS if is_idle else None):
            if self._is_stopping:
                return
            if self._clock() >= self._next_tick:
                self._tick()
            if is_idle:
                self._meter.begin()
            train = self._engine.advance
            is_idle = not (self._start() or self._samples.turn(train))

    def _take_messages(self, timeout: float | None = None) -> bool:
        """Does what other threads have asked for; returns whether to go on.

        Args:
            timeout: Seconds to wait for the first message; None: it does not.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get(timeout is not None, timeout)
                if message is None:
                    return False
                message()
                timeout = None
        return True

    def _tick(self) -> None:
        """Does what is to be done from time to time."""
        now = self._clock()
        self._next_tick = now + _TICK_SECONDS
        self._ready |= self._limited
        self._limited.clear()
        for model in [*self._models.values()]:
            if not model.held or model.next_seq in model.held:
                model.gap_since = None
            elif model.gap_since is None:
                model.gap_since = now
            elif now - model.gap_since >= self._settings.gap_seconds:
                self._fail_model(model)
            self._snapshot_if_due(model)
        self._drop_ended()
        self._samples.published.release_unused(self._settings.sampler_seconds)
        if now >= self._next_forgetting and self._ledger.trouble is None:
            self._next_forgetting = now + _FORGET_SECONDS
            for model in [*self._models.values()]:
                self._cover_if_unchanged(model)
            self._ledger.forget(self._settings.keep_seconds)

    def _hold(self, promise: Promise) -> None:
        with self._lock:
            own = Model(id=promise.model, tenant=promise.tenant)
            model = self._models.setdefault(promise.model, own)
        if model.failure is not None:
            self._finish(promise, Failed(message=model.failure, category="user"))
            return
        model.hold(promise)
        self._ready.add(model.id)

    def _start(self) -> bool:
        """Gives the engine what is next of each model; returns whether it did."""
        has_started = False
        while self._ready:
            model = self._models[self._ready.pop()]
            while (promise := model.next_promise()) is not None:
                if not self._has_tokens(promise):
                    self._limited.add(model.id)
                    break
                has_started = True
                self._begin(model, promise)
        return has_started

    def _has_tokens(self, promise: Promise) -> bool:
        """Takes the tokens of a pass from its tenant's rate, if there are enough."""
        if self._limits is None or not isinstance(promise.operation, Pass):
            return True
        if promise.outcome.done() or not self._is_restored:
            return True  # it is done again
        if not self._limits.may_run(promise.tenant):
            return False
        self._limits.spend(promise.tenant, promise.size[1])
        return True

    def _begin(self, model: Model, promise: Promise) -> None:
        """Begins the next operation of a model.

        Raises:
            CannotReplay: It was done before, and cannot be done again.
        """
        assert promise.seq_id == model.next_seq
        was_done = promise.outcome.done()
        model.next_seq += 1
        del model.held[promise.seq_id]
        if was_done:
            is_failed = isinstance(promise.outcome.result(), Failed)
            if is_failed or not promise.changes_weights:
                return
        self._beginning = promise
        if _whole(promise) in self._careful:
            self._trying = promise
        try:
            self._do(model, promise)
        except DeviceError:
            raise
        except JaxloraError as error:
            if was_done:
                raise CannotReplay(
                    f"operation {promise.seq_id} of model {model.id} was done before "
                    f"the restart, and cannot be done again: {error} Start the server "
                    "with the settings that it had."
                ) from error
            self._fail(promise, error)
        self._beginning = self._trying = None

    def _do(self, model: Model, promise: Promise) -> None:
        match promise.operation:
            case Create() as create:
                name = model.id.replace(":", "-")  # that of a job, which is a folder's
                adapter = new_adapter(self._engine, name, **dataclasses.asdict(create))
                self._engine.check_fits(model.id, adapter)
                self._close(model)
                model.adapter = self._engine.open(
                    model.id, adapter, tenant=model.tenant
                )
                model.is_unloaded = False
            case Load() as load:
                self._fetch(model, promise, load)
                return
            case Pass() | Step() as call:
                self._call(model, promise, call)
                return
            case Save() as save:
                self._save(model, promise, save)
                return
            case Publish() as publish:
                self._publish(model, promise, publish)
                return
            case Refused() as refused:
                raise ConfigError(refused.message)
            case Unload():
                self._opened(model)
                self._unload(model, promise)
                return
        self._finish(promise, Done())

    def _opened(self, model: Model) -> OpenAdapter:
        """Returns the adapter of a model; opens its snapshot if a restart came before.

        Raises:
            ConfigError: The model has none.
            CannotReplay: The snapshot cannot be opened.
        """
        if model.adapter is None and model.snapshot is not None:
            try:
                path = self._storage.fetch(model.snapshot)
                model.adapter = open_saved(
                    *(self._engine, model.id, path), tenant=model.tenant
                )
            except DeviceError:
                raise
            except JaxloraError as error:
                raise CannotReplay(
                    f"the snapshot of model {model.id} cannot be opened: {error} Start "
                    "the server with the settings and files that it had."
                ) from error
        if model.adapter is None:
            raise ConfigError(
                f"model {model.id} has no adapter, as it could not be created, or was "
                "unloaded. Create another."
            )
        return model.adapter

    def _call(self, model: Model, promise: Promise, given: Pass | Step) -> None:
        """Gives the engine a pass or a step, whose result finishes its promise."""
        one = self._opened(model)

        def finish(result: PassResult | StepResult) -> None:
            del model.running[promise.seq_id]
            self._note_result(model, result)
            self._finish(promise, Done(result=result))

        if isinstance(given, Step):
            call: Call = StepCall(params=given.params, on_result=finish)
        else:
            call = pass_call(
                self._engine, given.data, given.loss, is_training=given.is_training
            )
            call.on_result = finish
        if self._is_restored and (*_whole(promise)[:2], 0) in self._careful:
            self._engine.finish(one)
        model.running[promise.seq_id] = call
        self._calls[call] = promise
        self._engine.submit(one, call)
        if self._is_restored:
            self._run_careful(promise, call)

    def _note_result(self, model: Model, result: PassResult | StepResult) -> None:
        if isinstance(result, StepResult):
            model.steps = result.step
            self._meter.steps += result.is_finite
        elif count := result.metrics["tokens:sum"]:
            model.loss_per_token = result.loss / count

    # ---- outcomes --------------------------------------------------------------------

    def _finish(self, promise: Promise, outcome: Done | Failed) -> None:
        """Ends an operation, whose outcome is told when it is on disk."""
        model = self._models[promise.model]
        if model.failure is None:  # else none of its operations are pending
            model.end(promise)
        self._ready.add(model.id)
        if promise.outcome.done():
            _compare(promise, outcome)
            return
        self._num_fruitless = 0

        def tell(written: Future[None]) -> None:
            if written.exception() is None and not promise.outcome.done():
                promise.outcome.set_result(outcome)

        written = self._ledger.finish(promise.model, promise.seq_id, outcome)
        written.add_done_callback(tell)

    def _fail(self, promise: Promise, error: Exception) -> None:
        """Ends an operation by an error."""
        self._finish(promise, _failure(error, f"operation {promise.request_id}"))

    def _fail_model(self, model: Model) -> None:
        """Ends a model whose next operation does not come."""
        if model.running or model.is_blocked:
            return
        message = (
            f"operation {model.next_seq} of model {model.id} did not come within "
            f"{self._settings.gap_seconds:g} seconds, and later ones did, so the model "
            "was ended. Load what it has saved into another model."
        )
        held, model.held, model.failure = [*model.held.values()], {}, message
        model.pending_datums = model.pending_tokens = 0
        self._close(model)
        for promise in held:
            self._finish(promise, Failed(message=message, category="user"))
        self._cover(model, EVERYTHING, None, 0, model.pieces)

    # ---- work of other threads -------------------------------------------------------

    def _elsewhere(
        self,
        model: Model,
        promise: Promise,
        work: Callable[[], Callable[[], None]],
    ) -> None:
        """Lets another thread do a part of an operation; the model waits for it.

        Args:
            model: The model.
            promise: The operation.
            work: The part. It returns what this thread does then.
        """
        model.is_blocked = True

        def run() -> None:
            try:
                then = work()
            except Exception as error:
                then = functools.partial(self._fail, promise, error)

            def go_on() -> None:
                model.is_blocked = False
                self._ready.add(model.id)
                self._beginning = promise
                try:
                    then()
                except DeviceError:
                    raise
                except JaxloraError as error:
                    self._fail(promise, error)
                self._beginning = None

            self._inbox.put(go_on)

        self._work_on(run)

    def _open_version(
        self,
        call: SampleCall,
        key: str | None,
        outcome: Future[SampleResult | Failed],
        begin: Callable[[], None],
    ) -> None:
        """Begins a call for samples after its version is opened."""
        published = self._samples.published
        if call.version == BASE or published.knows(call.version) or key is None:
            begin()
            return

        def read() -> None:
            try:
                version = published.read_folder(self._storage.fetch(key))
            except Exception as error:
                _end_sampling(outcome, error)
            else:
                self._inbox.put(lambda: add(version))

        def add(version: Version) -> None:
            try:
                if published.knows(call.version):  # another call has opened it
                    published.drop(version)
                else:
                    published.add(call.version, version)
            except Exception as error:
                _end_sampling(outcome, error)
            else:
                begin()

        self._work_on(read)

    def _begin_sampling(
        self,
        call: SampleCall,
        outcome: Future[SampleResult | Failed],
        on_tokens: OnTokens | None,
    ) -> None:
        end = functools.partial(_end_sampling, outcome)
        try:
            self._samples.submit(call, end, end, on_tokens)
        except Exception as error:  # nothing was queued, so the engine goes on
            end(error)
        cancel = lambda: self._samples.cancel(call)
        outcome.add_done_callback(
            lambda done: self._inbox.put(cancel) if done.cancelled() else None
        )

    def _work_on(self, run: Callable[[], None]) -> None:
        """Runs a function in another thread."""
        with contextlib.suppress(RuntimeError):  # the hub has ended
            task = self._others.submit(run)
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    def _publish(self, model: Model, promise: Promise, publish: Publish) -> None:
        """Copies an adapter for sampling, after its files are written if it has some.

        So a version is never another one than that of its files.
        """

        def copy() -> None:
            published, one = self._samples.published, self._opened(model)
            published.publish(publish.sampler, one, promise.request_id)
            self._finish(promise, Done())

        if publish.checkpoint is None:
            self._opened(model)
            copy()
        else:
            save = Save(checkpoint=publish.checkpoint, kind="adapter")
            self._save(model, promise, save, then=copy)

    def _save(
        self,
        model: Model,
        promise: Promise,
        save: Save,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Writes a checkpoint, which is immutable: what is there is not replaced.

        After a crash, what is there may be what this operation has written.

        Args:
            model: The model.
            promise: The operation.
            save: What to write.
            then: What this thread does at the end; None: it finishes the operation.
        """
        one, key = self._opened(model), save.checkpoint
        begin = begin_state_file if save.kind == "state" else begin_folder
        write = begin(self._engine, one)

        def work() -> Callable[[], None]:
            if not (promise.has_begun and self._is_there(key)):
                if not promise.has_begun:
                    if self._is_there(key):
                        raise ConfigError(
                            f"{key} is there already. Choose another name."
                        )
                    self._ledger.begin(promise.model, promise.seq_id).result()
                    promise.has_begun = True
                with self._storage.writing(key) as path:
                    write(path)
            return then or (lambda: self._finish(promise, Done()))

        self._elsewhere(model, promise, work)

    def _is_there(self, key: str) -> bool:
        try:
            self._storage.fetch(key)
        except ConfigError:
            return False
        return True

    def _fetch(self, model: Model, promise: Promise, load: Load) -> None:
        """Opens a saved adapter. It is done when its state is a snapshot of its own.

        So the checkpoint may be deleted then.
        """

        def work() -> Callable[[], None]:
            path = self._storage.fetch(load.checkpoint)
            return lambda: self._load(model, promise, load, path)

        self._elsewhere(model, promise, work)

    def _load(
        self, model: Model, promise: Promise, load: Load, path: pathlib.Path
    ) -> None:
        one = open_saved(  # an error leaves the earlier one
            self._engine,
            f"{model.id} as loaded",
            path,
            with_optimizer=load.with_optimizer,
            tenant=model.tenant,
        )
        self._close(model)
        self._engine.rename(one, model.id)
        model.adapter = one
        steps = model.steps = one.num_steps
        model.is_unloaded = False
        copy, pieces = self._engine.begin_copy(one), {*model.pieces}

        def work() -> Callable[[], None]:
            key = self._write_snapshot(model, promise.seq_id, one, copy, steps)

            def then() -> None:
                self._cover(model, promise.seq_id, key, steps, pieces)
                self._finish(promise, Done())

            return then

        self._elsewhere(model, promise, work)

    def _close(self, model: Model) -> None:
        if model.adapter is not None:
            self._engine.close(model.adapter)
        model.adapter, model.last_step = None, None

    def _unload(self, model: Model, promise: Promise) -> None:
        self._close(model)
        self._finish(promise, Done())
        model.is_unloaded = True
        self._cover(model, promise.seq_id, None, 0, model.pieces)

    # ---- the log of what the device does, and snapshots ------------------------------

    def _queued(self, piece: Piece) -> None:
        """Logs a piece of work that changes models."""
        if not piece.is_training:
            return
        promises = [self._calls[call] for call, _ in piece.parts]
        if self._replayed is not None:
            number = self._replayed.number
        else:
            number = self._next_number
            self._next_number += 1
            parts = tuple(map(_part, promises, piece.parts))
            logged = LoggedPiece(number=number, rows=piece.rows, parts=parts)
            self._ledger.queue(logged)
        for promise in promises:
            model = self._models[promise.model]
            model.pieces.add(number)
            model.last_step = None if piece.rows else promise
            model.steps_since += not piece.rows
            if model.changed_at is None:
                model.changed_at = self._clock()
            self._needed.setdefault(number, set()).add(model.id)
        if not piece.rows:
            self._snapshot_if_due(self._models[promises[0].model])

    def _settled(self, piece: Piece) -> None:
        """Counts a piece of work that is done."""
        now, total = self._clock(), 0
        for call, number in piece.parts:
            model = self._models[self._calls[call].model]
            if isinstance(call, PassCall):
                tokens = len(call.samples[number].token_ids)
                model.recent.add(now, tokens)
                total += tokens
        for call in {call for call, _ in piece.parts if call.result is not None}:
            del self._calls[call]
        if piece.rows:
            self._meter.end_microbatch(piece.rows, total)

    def _snapshot_if_due(self, model: Model, *, at_once: bool = False) -> None:
        """Begins a snapshot of a model, if it is time for one and a step came last.

        Right after a step, no gradients are pending and no pass has begun.
        """
        if model.changed_at is None or model.last_step is None:
            return
        is_due = (
            model.steps_since >= self._settings.snapshot_steps
            or self._clock() - model.changed_at >= self._settings.snapshot_seconds
        )
        is_free = not model.is_snapshotting and self._num_snapshots < _MOST_SNAPSHOTS
        if not (at_once or (is_due and is_free)):
            return
        one, step, pieces = self._opened(model), model.last_step, {*model.pieces}
        copy = self._engine.begin_copy(one)
        model.changed_at, model.steps_since = None, 0
        model.is_snapshotting = True
        self._num_snapshots += 1

        def write() -> None:
            try:
                outcome = step.outcome.result()
                assert isinstance(outcome, Done)
                assert isinstance(outcome.result, StepResult)
                steps = outcome.result.step
                key = self._write_snapshot(model, step.seq_id, one, copy, steps)
            except Exception as error:
                logger.warning("no snapshot of model %s: %s", model.id, error)
                self._inbox.put(lambda: end(None, 0))
            else:
                self._inbox.put(lambda: end(key, steps))

        def end(key: str | None, steps: int) -> None:
            if self._models[model.id] is not model:
                # The engine was made anew, and the model is being brought from its
                # earlier snapshot to where it was. This one would skip a part of that.
                if key is not None:
                    self._work_on(functools.partial(self._storage.delete, key))
                return
            model.is_snapshotting = False
            self._num_snapshots -= 1
            if key is not None and model.covered_seq < step.seq_id:
                self._cover(model, step.seq_id, key, steps, pieces)
            elif key is not None:  # it was unloaded or loaded meanwhile
                self._work_on(functools.partial(self._storage.delete, key))
            elif model.changed_at is None:
                model.changed_at = self._clock()  # it is tried again then

        # The outcomes of all that it covers are on disk before it is.
        step.outcome.add_done_callback(lambda _: self._work_on(write))

    def _write_snapshot(
        self,
        model: Model,
        seq_id: int,
        one: OpenAdapter,
        copy: Callable[[], WholeState],
        steps: int,
    ) -> str:
        """Writes a snapshot; returns its key. Any thread may call this."""
        key = f"{_snapshots(model)}/{seq_id}-{secrets.token_hex(4)}"
        base = self._engine.model.fingerprint
        with self._storage.writing(key) as path:
            write_state(path, one.like, copy(), steps, base)
        self._meter.snapshots += 1
        return key

    def _cover(
        self,
        model: Model,
        seq_id: int,
        key: str | None,
        steps: int,
        pieces: Iterable[int],
    ) -> None:
        """Cuts the log behind what a model does not need any more.

        Args:
            model: The model.
            seq_id: Its operations up to this one are covered.
            key: Key of the snapshot that covers them; None: none is needed.
            steps: Optimizer steps behind it.
            pieces: Numbers of the pieces of work up to it.
        """
        unneeded, pieces = [], {*pieces}
        for number in pieces:
            self._needed.get(number, set()).discard(model.id)
            if not self._needed.get(number):
                self._needed.pop(number, None)
                unneeded.append(number)
        model.pieces -= pieces
        old, model.snapshot, model.covered_seq = model.snapshot, key, seq_id
        if not model.pieces:
            model.changed_at, model.steps_since = None, 0
        logged = LoggedModel(
            id=model.id,
            tenant=model.tenant,
            covered_seq=seq_id,
            snapshot=key,
            steps=steps,
            is_unloaded=model.is_unloaded,
            failure=model.failure,
        )
        written = self._ledger.cover(logged, unneeded)
        if old is not None and old != key:
            delete = functools.partial(self._storage.delete, old)
            written.add_done_callback(
                lambda done: None if done.exception() else self._work_on(delete)
            )

    def _cover_if_unchanged(self, model: Model) -> None:
        """Cuts the log behind operations that changed nothing since a snapshot.

        The log of a model that is evaluated, and not trained, would only grow.
        """
        is_quiet = not (model.pieces or model.running or model.is_blocked)
        has_state = model.snapshot is not None or model.is_unloaded
        last = model.next_seq - 1
        if is_quiet and has_state and last > model.covered_seq:
            self._cover(model, last, model.snapshot, model.steps, ())

    # ---- restarts --------------------------------------------------------------------

    def _restore(self) -> None:
        """Brings all models into the engine as the ledger has them.

        Raises:
            CannotReplay: A model cannot be brought to where it was.
        """
        engine = self._engine
        engine.on_queued, engine.on_settled = self._queued, self._settled
        contents = self._read()
        self._remember(contents)
        for logged in contents.operations:
            if self._models[logged.model].failure is not None:
                # It was accepted after the model had failed, and its failure was lost.
                self._hold(self._by_number[logged.model, logged.seq_id])
        if not self._meter.restarts:
            own = [*self._models.values()]
            self._work_on(lambda: self._remove_old_snapshots(own))
            wait([*self._working])  # no other snapshot is being written
        for piece in contents.pieces:
            self._replay(piece)
        self._is_restored = True
        for call, promise in [*self._calls.items()]:
            self._run_careful(promise, call)

    def _read(self) -> Contents:
        """Reads the ledger with all that was handed in, as soon as that is possible."""
        while True:
            self._ledger.flush()
            try:
                return self._ledger.read()
            except StorageError:
                if self._is_stopping:
                    raise
                time.sleep(_TICK_SECONDS)

    def _remove_old_snapshots(self, models: Sequence[Model]) -> None:
        """Removes snapshots that a crash has left beside those of models."""
        for model in models:
            for key in self._storage.list(_snapshots(model)):
                if key != model.snapshot:
                    self._storage.delete(key)

    def _replay(self, piece: LoggedPiece) -> None:
        """Gives the engine a piece of work again.

        Rows stay empty if a snapshot covers their datum, or its operation has failed.
        """
        found = [(part, self._waiting_call(part)) for part in piece.parts]
        if not any(call is not None for _, call in found):
            return
        self._replayed = piece
        self._meter.replayed += piece.rows > 0
        places: list[tuple[OpenAdapter, PassCall, int] | tuple[str, int]] = []
        for part, call in found:
            one = None if call is None else self._opened(self._models[part.model])
            is_alone = piece.rows not in self._engine.sizes  # they were others
            if call is not None and (is_alone or _datum(part) in self._careful):
                self._run_alone(self._calls[call], call, part.number)
            elif one is not None and isinstance(call, PassCall):
                places.append((one, call, part.number))
                continue
            places.append((part.model, part.num_tokens))
        if any(len(place) == 3 for place in places):
            self._engine.run_layout(piece.rows, places)
        self._replayed = None

    def _waiting_call(self, part: Part) -> Call | None:
        """Returns the call of a part, if the part is still to be run.

        The operations of the model up to it are begun.
        """
        model = self._models.get(part.model)
        if model is None or part.seq_id <= model.covered_seq:
            return None
        while model.next_seq <= part.seq_id:
            promise = model.held[model.next_seq]
            if model.running and not isinstance(promise.operation, Pass | Step):
                self._engine.drain()
            self._begin(model, promise)
            while model.is_blocked:
                wait([*self._working])
                self._take_messages()
        call = model.running.get(part.seq_id)
        if isinstance(call, PassCall) and part.number not in call.waiting:
            return None
        return call

    def _run_alone(self, promise: Promise, call: Call, number: int) -> None:
        """Runs a datum or a step by itself, and waits for it."""
        one = self._opened(self._models[promise.model])
        self._engine.drain()
        if isinstance(call, StepCall):
            # A forward pass before it may lack its result, which no log has.
            for earlier in [*one.calls.values()]:
                if isinstance(earlier, PassCall):
                    for left in [*earlier.waiting]:
                        self._run_alone(self._calls[earlier], earlier, left)
        self._trying = promise
        if isinstance(call, StepCall):
            self._engine.run_step(one)
        else:
            rows = self._engine.size_for(len(call.samples[number].token_ids))
            self._engine.run_layout(rows, [(one, call, number)])
        self._engine.drain()
        self._trying = None
        self._careful.discard((promise.model, promise.seq_id, number))

    def _run_careful(self, promise: Promise, call: Call) -> None:
        """Runs the parts of a call alone that were twice among those of an error."""
        numbers = [*call.waiting] if isinstance(call, PassCall) else [0]
        for number in numbers:
            if (promise.model, promise.seq_id, number) in self._careful:
                self._run_alone(promise, call, number)

    def _renew(self, error: Exception) -> bool:
        """Makes the engine anew after an error; returns whether the hub goes on.

        What the device had when it failed twice is run alone from then on, one datum
        after the other. What fails alone is the cause, and its operation fails.
        """
        logger.error("the engine has failed, and is made anew", exc_info=error)
        self._num_fruitless += 1
        if (culprit := self._trying) is not None:
            if culprit.outcome.done():
                return self._die(error)
            self._finish(culprit, Failed(message=_blame(error), category="server"))
        found = self._found_at_error()
        if culprit is None:
            self._careful |= found & self._suspects
        self._suspects = found
        is_hopeless = isinstance(error, CannotReplay | Fenced) or self._is_stopping
        if is_hopeless or self._num_fruitless > _MOST_FRUITLESS:
            return self._die(error)
        self._trying = self._beginning = self._replayed = None
        self._is_restored = False
        self._meter.restarts += 1
        while self._working or not self._inbox.empty():
            wait([*self._working])
            self._take_late_messages()
        try:
            self._engine = self._engine.anew()
            self._samples.renew(self._engine)
        except Exception as again:
            return self._die(again)
        return True

    def _found_at_error(self) -> set[_Datum]:
        """Returns what the device had, and the operation that was being begun."""
        found = set()
        for piece in self._engine.unsettled:
            for call, number in piece.parts:
                if (promise := self._calls.get(call)) is not None:
                    found.add((promise.model, promise.seq_id, number))
        return found | ({_whole(self._beginning)} if self._beginning else set())

    def _take_late_messages(self) -> None:
        """Does what was asked for before the engine failed, as far as it can be."""
        messages: list[Callable[[], None] | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get(block=False))
        for message in messages:
            if message is None:
                continue  # `_is_stopping` says so
            try:
                message()
            except Exception as error:  # it needs the engine, and is asked for again
                logger.info("broken off: %s", error)

    def _die(self, error: Exception) -> bool:
        """Gives up, until the process is started again."""
        if not self._is_stopping:
            logger.critical("the server has to be started again: %s", error)
        self.died.set_result(error)
        return False

    def _end(self) -> None:
        """Finishes what the device has, and writes snapshots."""
        self._engine.drain()
        self._ledger.flush(_END_SECONDS)
        for model in self._models.values():
            self._snapshot_if_due(model, at_once=True)
            self._finish_working(_MOST_SNAPSHOTS - 1)  # the copies need memory
        self._finish_working(0)

    def _finish_working(self, most: int) -> None:
        """Waits until the other threads have no more than so much to do."""
        while len(working := [*self._working]) > most:
            wait(working, return_when=FIRST_COMPLETED)
            self._take_messages()


def _failure(error: Exception, what: str) -> Failed:
    """Returns what a client is told of an error, which may be ours."""
    if not isinstance(error, JaxloraError):
        logger.error("%s has failed", what, exc_info=error)
        message = "the server has made an error, which its log tells."
        return Failed(message=message, category="server")
    is_ours = isinstance(error, StorageError | DeviceError | CannotReplay)
    return Failed(message=str(error), category="server" if is_ours else "user")


def _end_sampling(
    outcome: Future[SampleResult | Failed], found: SampleResult | Exception
) -> None:
    """Ends a call for samples by its result, or by an error."""
    is_error = isinstance(found, Exception)
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        outcome.set_result(_failure(found, "a sample") if is_error else found)


def _snapshots(model: Model) -> str:
    return f"{model.tenant}/{model.id}/snapshots"


def _whole(promise: Promise) -> _Datum:
    return promise.model, promise.seq_id, -1


def _datum(part: Part) -> _Datum:
    return part.model, part.seq_id, part.number


def _part(promise: Promise, part: tuple[Call, int]) -> Part:
    call, number = part
    tokens = 0
    if isinstance(call, PassCall):
        tokens = len(call.samples[number].token_ids)
    return Part(
        model=promise.model, seq_id=promise.seq_id, number=number, num_tokens=tokens
    )


def _blame(error: Exception) -> str:
    reason = str(error) if isinstance(error, JaxloraError) else type(error).__name__
    return (
        f"the device has failed on this operation, three times, and did not on others: "
        f"{reason} The model goes on without it."
    )


def _compare(promise: Promise, outcome: Done | Failed) -> None:
    """Says so if what was run again has another result: other programs have run."""
    known = promise.outcome.result()
    if isinstance(promise.operation, Step) and known != outcome:
        logger.warning(
            "step %d of model %s has other bits after the restart: %s, and was %s",
            *(promise.seq_id, promise.model, outcome, known),
        )
