"""The thread that owns the engine: whose turn it is, from the start to the end."""

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future

from jaxlora.errors import StorageError
from jaxlora.serve.execution import Execution
from jaxlora.serve.ledger import Contents, Fenced
from jaxlora.serve.limits import Limits
from jaxlora.serve.model import Model, Promise
from jaxlora.serve.operation import CannotReplay, Done, Failed, Pass
from jaxlora.serve.replay import Replay
from jaxlora.serve.sampling import Sampling
from jaxlora.serve.shared import Shared
from jaxlora.serve.snapshots import MOST_SNAPSHOTS
from jaxlora.session.engine import Engine

logger = logging.getLogger(__name__)

_FORGET_SECONDS = 60.0  # between two removals of old operations from the ledger
TICK_SECONDS = 1.0
END_SECONDS = 30.0  # for the database, when the server ends


class EngineThread:
    """The thread that owns the engine. Its other methods are called by the thread.

    Attributes:
        engine: The engine.
        died: Gets the error that has ended the thread for good, if one does.
        is_restored: Whether the models are where they were before a restart.
    """

    def __init__(
        self,
        engine: Engine,
        shared: Shared,
        sampling: Sampling,
        limits: Limits | None,
    ):
        """Makes the thread, which `start` starts.

        Args:
            engine: The first engine.
            shared: What outlives it.
            sampling: Draws samples.
            limits: See `Hub`.
        """
        self.died, self.is_restored = Future[Exception](), False
        self._shared, self._sampling, self._limits = shared, sampling, limits
        self._models, self._tasks = shared.promises.models, shared.tasks
        self._clock, self._replay = shared.meter.clock, Replay(shared)
        self._thread = threading.Thread(target=self._run, name="engine")
        self._limited: set[str] = set()  # models whose tenants must wait for their rate
        self._next_tick = self._next_forgetting = 0.0
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        """Makes all that belongs to an engine, which has no adapters."""
        published = self._sampling.samples.published
        self.engine, self._execution = (
            engine,
            Execution(engine, self._shared, published),
        )
        self._replay.use(self._execution)

    def start(self, left: Iterable[Promise]) -> None:
        """Starts the thread; `left` is what an earlier process has left."""
        self._replay.left = {*left}
        # Nobody could ask for an outcome while the server was down.
        self._next_forgetting = self._clock() + self._shared.settings.keep_seconds
        self._thread.start()

    def join(self) -> bool:
        """Waits a moment in another thread; returns whether this one has ended."""
        if self._thread.is_alive():
            self._thread.join(TICK_SECONDS)
        return not self._thread.is_alive()

    # ---- its life --------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self.is_restored:
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

    def _restore(self) -> None:
        """Brings all models into the engine as the ledger has them.

        Raises:
            CannotReplay: A model cannot be brought to where it was.
        """
        contents, snapshots = self._read(), self._execution.snapshots
        promises = self._shared.promises.remember(contents)
        snapshots.remember(contents)
        self._execution.ready |= self._models.keys()
        for promise in promises:
            self._finish_lost(promise)
        if not self._shared.meter.restarts:
            self._tasks.run(snapshots.remove_old)
            self._tasks.wait()  # no other snapshot is being written
        self._replay.restore(contents, promises)
        self.is_restored = True

    def _read(self) -> Contents:
        """Reads the ledger with all that was handed in, as soon as that is possible."""
        while True:
            self._shared.ledger.flush()
            try:
                return self._shared.ledger.read()
            except StorageError:
                if self._tasks.is_stopping:
                    raise
                time.sleep(TICK_SECONDS)

    def _finish_lost(self, promise: Promise) -> None:
        """Ends an operation whose model was written before a crash, and it was not."""
        model = self._models[promise.model]
        if promise.outcome.done():
            return
        if model.failure is not None:
            self.hold(promise)
        elif promise.seq_id <= model.covered_seq:
            self._execution.finish(promise, Done())

    def _renew(self, error: Exception) -> bool:
        """Makes the engine anew after an error; returns whether the thread goes on."""
        logger.error("the engine has failed, and is made anew", exc_info=error)
        is_hopeless = isinstance(error, CannotReplay | Fenced)
        if not self._replay.may_go_on(error) or is_hopeless or self._tasks.is_stopping:
            return self._die(error)
        self.is_restored = False
        self._shared.meter.restarts += 1
        while self._tasks.is_busy:
            self._tasks.wait()
            try:
                self._tasks.take()
            except Exception as late:  # it needs the engine, and is asked for again
                logger.info("broken off: %s", late)
        try:
            self._use(self.engine.anew())
            self._sampling.samples.renew(self.engine)
        except Exception as again:
            return self._die(again)
        return True

    def _die(self, error: Exception) -> bool:
        """Gives up, until the process is started again."""
        if not self._tasks.is_stopping:
            logger.critical("the server has to be started again: %s", error)
        self.died.set_result(error)
        return False

    def _end(self) -> None:
        """Finishes what the device has, and writes snapshots."""
        self.engine.drain()
        self._shared.ledger.flush(END_SECONDS)
        for model in self._models.values():
            self._execution.snapshots.begin_if_due(model, at_once=True)
            self._tasks.finish(MOST_SNAPSHOTS - 1)  # the copies need memory
        self._tasks.finish()

    # ---- turns -----------------------------------------------------------------------

    def _work(self) -> None:
        """Works until the hub is to stop."""
        is_idle = False
        while True:
            self._tasks.take(TICK_SECONDS if is_idle else None)
            if self._tasks.is_stopping:
                return
            if self._clock() >= self._next_tick:
                self._tick()
            if is_idle:
                self._shared.meter.begin()
            train = self.engine.advance
            is_idle = not (self._begin() or self._sampling.samples.turn(train))

    def hold(self, promise: Promise) -> None:
        """Takes an operation, which begins when those before it have."""
        model = self._shared.promises.model_of(promise)
        if model.failure is not None:
            failed = Failed(message=model.failure, category="user")
            self._execution.finish(promise, failed)
            return
        model.hold(promise)
        self._execution.ready.add(model.id)

    def _begin(self) -> bool:
        """Gives the engine what is next of each model; returns whether it did."""
        has_begun, ready = False, self._execution.ready
        while ready:
            model = self._models[ready.pop()]
            while (promise := model.next_promise()) is not None:
                if not self._has_tokens(promise):
                    self._limited.add(model.id)
                    break
                has_begun = True
                self._replay.begin(model, promise)
        return has_begun

    def _has_tokens(self, promise: Promise) -> bool:
        """Takes the tokens of a pass from its tenant's rate, if there are enough."""
        if self._limits is None or not isinstance(promise.operation, Pass):
            return True
        if promise.outcome.done():
            return True  # it is done again
        if not self._limits.may_run(promise.tenant):
            return False
        self._limits.spend(promise.tenant, promise.size[1])
        return True

    def park(self, id: str) -> None:
        """Lets a model leave its slot, if it has nothing to do."""
        model = self._models.get(id)
        if model is None or model.adapter is None or not self.is_restored:
            return
        if not (model.running or model.held or model.is_blocked):
            self.engine.park(model.adapter)

    def _tick(self) -> None:
        """Does what is to be done from time to time."""
        now, snapshots = self._clock(), self._execution.snapshots
        self._next_tick = now + TICK_SECONDS
        self._execution.ready |= self._limited
        self._limited.clear()
        for model in [*self._models.values()]:
            self._fail_if_gap(model, now)
            snapshots.begin_if_due(model)
        self._shared.promises.drop_ended()
        seconds = self._shared.settings.sampler_seconds
        self._sampling.samples.published.release_unused(seconds)
        if now >= self._next_forgetting and self._shared.ledger.trouble is None:
            self._next_forgetting = now + _FORGET_SECONDS
            for model in [*self._models.values()]:
                snapshots.tidy(model)
            self._shared.ledger.forget(self._shared.settings.keep_seconds)
            self._forget_models(now)

    def _forget_models(self, now: float) -> None:
        """Forgets models without an adapter whose results have been kept long enough.

        They were unloaded, have failed, or could not be made.
        """
        keep = self._shared.settings.keep_seconds

        def is_over(model: Model) -> bool:
            if model.ended_at is None:
                model.ended_at = now
            return not model.has_state and now - model.ended_at >= keep

        for id in self._shared.promises.drop_models(is_over):
            self._execution.ready.discard(id)
            self._shared.ledger.drop(id)

    def _fail_if_gap(self, model: Model, now: float) -> None:
        """Ends a model whose next operation does not come."""
        most = self._shared.settings.gap_seconds
        if not model.held or model.next_seq in model.held:
            model.gap_since = None
        elif model.gap_since is None:
            model.gap_since = now
        elif now - model.gap_since >= most and not (model.running or model.is_blocked):
            self._execution.fail_model(
                model,
                f"operation {model.next_seq} of model {model.id} did not come within "
                f"{most:g} seconds, and later ones did, so the model was ended. Load "
                "what it has saved into another model.",
            )
