"""The hub: accepts operations of models, and keeps its promises.

An operation is accepted when it is in the ledger, and its outcome is told when the
device has settled it and the ledger has it. `EngineThread` does all that is between.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable

from jaxlora.config.session_config import SamplingConfig
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.serve import engine_thread
from jaxlora.serve.database import Database
from jaxlora.serve.engine_thread import EngineThread
from jaxlora.serve.ids import ONLY, Ids
from jaxlora.serve.ledger import EVERYTHING, Ledger, Logged
from jaxlora.serve.limits import Limits
from jaxlora.serve.model import Promise
from jaxlora.serve.operation import Encoded, Operation, Waiting, encode
from jaxlora.serve.promises import Promises
from jaxlora.serve.sampling import Asked, Outcome, Sampling
from jaxlora.serve.shared import HubSettings, Shared
from jaxlora.serve.status import Health, HubStatus, Meter
from jaxlora.serve.storage import Storage
from jaxlora.serve.tasks import Tasks
from jaxlora.session.engine import Engine
from jaxlora.session.samples import OnTokens, SampleCall


class SeqConflict(ConfigError):
    """Another operation has the number of this one."""


class Unavailable(JaxloraError):
    """Nothing is accepted at the moment; the same request is to be sent again later."""


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
        ids: Ids = ONLY,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes a hub, which `start` starts.

        Args:
            engine: The engine, which only the hub uses from now on.
            storage: Where checkpoints and snapshots are.
            database: Where the ledger is.
            settings: Settings; None: the defaults.
            sampling: Settings of sampling; None: the defaults.
            limits: Hold passes and samples of tenants that have used their tokens a
                second, and refuse samples beyond the pending tokens; None: nothing
                does.
            folder: See `Published`.
            ids: Makes the ids of promises; the models are those with ids of its engine.
            clock: Returns seconds, for gaps and snapshots.

        Raises:
            ConfigError: Another server uses the database.
            StorageError: The database cannot be written.
        """
        self._limits, self._ledger = limits, Ledger(database, ids)
        self._tasks, self._meter = Tasks(), Meter(clock)
        self._promises = Promises(self._ledger, clock)
        config = sampling or SamplingConfig()
        self._sampling = Sampling(engine, config, folder, storage, self._tasks, limits)
        shared = Shared(
            settings=settings or HubSettings(),
            storage=storage,
            ledger=self._ledger,
            promises=self._promises,
            tasks=self._tasks,
            meter=self._meter,
        )
        self._thread = EngineThread(engine, shared, self._sampling, limits)
        self.died, self.listeners = self._thread.died, self._promises.listeners
        self.sample_listeners = self._sampling.listeners

    @property
    def engine(self) -> Engine:
        """The engine, of which other threads may read the model and the settings."""
        return self._thread.engine

    # ---- life ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compiles or loads the programs of training, before `start`.

        Those of samples begin then, so that the first sampler waits for less.
        """
        self.engine.prepare()
        self._sampling.samples.prepare()

    def start(self) -> None:
        """Reads what was accepted before, and starts the thread.

        Raises:
            StorageError: The database cannot be read.
        """
        self._thread.start(self._promises.remember(self._ledger.read()))

    def stop(self) -> None:
        """Finishes what the device has, writes snapshots, and ends the threads.

        What was accepted and is not done is done after the next start.
        """
        self._tasks.stop()
        end = time.monotonic() + engine_thread.END_SECONDS
        while not self._thread.join():
            if self._ledger.trouble is not None and time.monotonic() > end:
                self._ledger.give_up()  # the thread may wait for it
        self._ledger.close()  # what waits for a database that is away ends with it
        self._tasks.close()

    def waiting(self, tenant: str) -> Waiting:
        """Returns why promises of a tenant that have no outcome have none."""
        if self._health()[0] not in ("running", "starting"):
            return Waiting(state="paused_capacity")
        if self._limits is not None and not self._limits.may_run(tenant):
            return Waiting(state="paused_rate_limit")
        return Waiting(state="active")

    def status(self) -> HubStatus:
        """Returns the numbers of the hub."""
        with self._promises.lock:
            models = [*self._promises.models.values()]
        now = self._meter.clock()
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
        if self._tasks.is_stopping:
            return "stopping", None
        if self._ledger.trouble is not None:
            return "paused", self._ledger.trouble
        return ("running" if self._thread.is_restored else "starting"), None

    def _check_accepts(self) -> None:
        health, reason = self._health()
        if health not in ("running", "starting"):
            why = "" if reason is None else f": {reason.rstrip('.')}"
            raise Unavailable(
                f"nothing is accepted at the moment, as the server is {health}{why}. "
                "Send the request again later."
            )

    # ---- operations ------------------------------------------------------------------

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
            Misdirected: Another engine has the model.
            SeqConflict: Another operation was taken by this number.
            ConfigError: The number is none, or its operation ended so long ago that
                nothing is known of it.
            Unavailable: Nothing can be accepted at the moment.
        """
        if not 1 <= seq_id < EVERYTHING:
            raise ConfigError(f"seq_id={seq_id} must be at least 1.")
        encoded = encode(operation)
        with self._promises.lock:
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
        with self._promises.lock:
            # A model that has failed has no number after all others.
            seq_id = min(self._promises.last(model) + 1, EVERYTHING - 1)
            return self._take(tenant, model, seq_id, operation, encoded)

    def _take(
        self,
        tenant: str,
        model: str,
        seq_id: int,
        operation: Operation,
        encoded: Encoded,
    ) -> Promise:
        """Takes an operation by a number; see `submit`."""
        self._ledger.ids.check(model)
        found = self._promises.find(model, seq_id)
        if found is None:
            self._check_accepts()
            logged = Logged(
                model=model,
                seq_id=seq_id,
                request_id=self._ledger.ids.new(),
                tenant=tenant,
                encoded=encoded,
                digest=encoded.digest,
            )
            new = found = self._promises.add(Promise.of(logged, operation))
            self._ledger.accept(logged).add_done_callback(new.accept)
            self._tasks.ask(lambda: self._thread.hold(new))
        if found.digest != encoded.digest:
            raise SeqConflict(
                f"seq_id={seq_id} of model {model} belongs to another request, with "
                "another body. Give each request a number of its own."
            )
        return found

    def knows(self, model: str, seq_id: int) -> bool:
        """Whether an operation of a model was taken by a number."""
        return self._promises.has(model, seq_id)

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
        found = self._promises.of_id(request_id, only_in_memory=only_in_memory)
        return found if found is not None and found.tenant == tenant else None

    def park(self, model: str) -> None:
        """Lets a model leave its slot, if it has nothing to do.

        It comes back with its next operation.
        """
        self._tasks.ask(lambda: self._thread.park(model))

    def sample(
        self,
        tenant: str,
        call: SampleCall,
        key: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Outcome:
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
            OverQuota: The tenant has too many pending tokens.
        """
        self._check_accepts()
        call = dataclasses.replace(call, tenant=tenant)
        asked = Asked(call=call, key=key, on_tokens=on_tokens)
        self._sampling.ask(asked)
        return asked.outcome
