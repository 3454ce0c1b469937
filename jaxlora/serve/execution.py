"""Runs the operations of models in an engine, up to their outcomes on the disk."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from jaxlora.errors import ConfigError, DeviceError, JaxloraError
from jaxlora.serve.ledger import EVERYTHING
from jaxlora.serve.model import Model, Promise
from jaxlora.serve.operation import (
    CannotReplay,
    Create,
    Done,
    Failed,
    Load,
    Pass,
    Publish,
    Refused,
    Save,
    Step,
    Unload,
)
from jaxlora.serve.shared import Shared
from jaxlora.serve.snapshots import Snapshots
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
from jaxlora.session.published import Published

logger = logging.getLogger(__name__)

# An operation runs in the engine's thread, and gives what another thread is to do.
_Work = Generator[Callable[[], Any], Any, None]


class Execution:
    """The operations of one engine. Only its thread uses it.

    Attributes:
        engine: The engine.
        snapshots: The snapshots of its models.
        ready: Ids of models whose next operation may begin.
        calls: The promises of calls that have no results.
        beginning: The operation that is being begun; None: none is.
        num_ended: Operations that have ended for the first time.
    """

    def __init__(self, engine: Engine, shared: Shared, published: Published):
        """Makes the object.

        Args:
            engine: The engine, without adapters.
            shared: What outlives it.
            published: Where adapters are copied for sampling.
        """
        self.engine, self.snapshots = engine, Snapshots(engine, shared)
        self._shared, self._published = shared, published
        self._models = shared.promises.models
        self.ready: set[str] = set()
        self.calls: dict[Call, Promise] = {}
        self.beginning: Promise | None = None
        self.num_ended = 0

    # ---- from the beginning to the outcome -------------------------------------------

    def begin(self, model: Model, promise: Promise) -> None:
        """Begins the next operation of a model.

        Raises:
            CannotReplay: It was done before, and cannot be done again.
        """
        assert promise.seq_id == model.next_seq
        model.next_seq += 1
        del model.held[promise.seq_id]
        if promise.outcome.done():
            is_failed = isinstance(promise.outcome.result(), Failed)
            if is_failed or not promise.changes_weights:
                return
        self._go_on(model, promise, self._work(model, promise))

    def _go_on(
        self, model: Model, promise: Promise, work: _Work, found: Any = None
    ) -> None:
        """Does an operation up to its end, or up to what another thread is to do.

        Args:
            model: The model, which waits for that thread.
            promise: The operation.
            work: What is left of it.
            found: What that thread has found.
        """
        self.beginning, model.is_blocked = promise, False
        try:
            part = work.send(found)
        except StopIteration:
            if not isinstance(promise.operation, Pass | Step):
                self.finish(promise, Done())
        except DeviceError:
            raise
        except JaxloraError as error:
            if promise.outcome.done():
                raise CannotReplay(
                    f"operation {promise.seq_id} of model {model.id} was done before "
                    f"the restart, and cannot be done again: {error} Start the server "
                    "with the settings that it had."
                ) from error
            self._fail(promise, error)
        else:
            model.is_blocked = True

            def fail(error: Exception) -> None:
                model.is_blocked = False
                self._fail(promise, error)

            go_on = functools.partial(self._go_on, model, promise, work)
            self._shared.tasks.elsewhere(part, go_on, fail)
        self.beginning = None

    def finish(self, promise: Promise, outcome: Done | Failed) -> None:
        """Ends an operation, whose outcome is told when it is on disk."""
        model = self._models[promise.model]
        if model.failure is None:  # else none of its operations are pending
            model.end(promise)
        model.ended_at = self._shared.meter.clock()
        self.ready.add(model.id)
        if promise.outcome.done():
            _compare(promise, outcome)
            return
        self.num_ended += 1

        def tell(written: Future[None]) -> None:
            if written.exception() is None and not promise.outcome.done():
                promise.outcome.set_result(outcome)

        written = self._shared.ledger.finish(
            *(promise.model, promise.seq_id, outcome),
            keeps_data=isinstance(outcome, Done) and promise.changes_weights,
        )
        written.add_done_callback(tell)

    def _fail(self, promise: Promise, error: Exception) -> None:
        self.finish(promise, Failed.of(error, f"operation {promise.request_id}"))

    def fail_model(self, model: Model, message: str) -> None:
        """Ends a model, which does nothing now; its operations all fail from now on."""
        held, model.held, model.failure = [*model.held.values()], {}, message
        model.pending_datums = model.pending_tokens = 0
        self._close(model)
        for promise in held:
            if not promise.outcome.done():
                self.finish(promise, Failed(message=message, category="user"))
        pieces = self.snapshots.needed_by(model)
        self.snapshots.cover(model, EVERYTHING, None, 0, pieces)

    # ---- kinds of operations ---------------------------------------------------------

    def _work(self, model: Model, promise: Promise) -> _Work:
        match promise.operation:
            case Pass() | Step() as given:
                self._call(model, promise, given)
            case Create() as create:
                self._create(model, create)
            case Load() as load:
                yield from self._load(model, promise, load)
            case Save() as save:
                yield from self._save(model, promise, save)
            case Publish() as publish:
                yield from self._publish(model, promise, publish)
            case Unload():
                self.opened(model)
                self._close(model)
                model.is_unloaded = True
                self.snapshots.cover(model, promise.seq_id, None, 0, model.pieces)
            case Refused() as refused:
                raise ConfigError(refused.message)

    def opened(self, model: Model) -> OpenAdapter:
        """Returns the adapter of a model; opens its snapshot if a restart came before.

        Raises:
            ConfigError: The model has none.
            CannotReplay: The snapshot cannot be opened.
        """
        if model.adapter is None and model.snapshot is not None:
            try:
                path = self._shared.storage.fetch(model.snapshot)
                model.adapter = open_saved(
                    *(self.engine, model.id, path), tenant=model.tenant
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

    def _close(self, model: Model) -> None:
        if model.adapter is not None:
            self.engine.close(model.adapter)
        model.adapter, model.last_step = None, None

    def _create(self, model: Model, create: Create) -> None:
        name = model.id.replace(":", "-")  # that of a job, which is a folder's
        adapter = new_adapter(self.engine, name, **dataclasses.asdict(create))
        self.engine.check_fits(model.id, adapter)
        self._close(model)
        model.adapter = self.engine.open(model.id, adapter, tenant=model.tenant)
        model.is_unloaded = False

    def _call(self, model: Model, promise: Promise, given: Pass | Step) -> None:
        """Gives the engine a pass or a step, whose result finishes its promise."""
        one = self.opened(model)

        def finish(result: PassResult | StepResult) -> None:
            del model.running[promise.seq_id]
            if isinstance(result, StepResult):
                model.steps = result.step
                self._shared.meter.steps += result.is_finite
            elif count := result.metrics["tokens:sum"]:
                model.loss_per_token = result.loss / count
            self.finish(promise, Done(result=result))

        if isinstance(given, Step):
            call: Call = StepCall(params=given.params, on_result=finish)
        else:
            call = pass_call(
                self.engine, given.data, given.loss, is_training=given.is_training
            )
            call.on_result = finish
        model.running[promise.seq_id] = call
        self.calls[call] = promise
        self.engine.submit(one, call)

    def settled(self, piece: Piece) -> None:
        """Counts a piece of work that is done."""
        total = 0
        for call, number in piece.parts:
            model = self._models[self.calls[call].model]
            if isinstance(call, PassCall):
                tokens = len(call.samples[number].token_ids)
                model.recent.add(self._shared.meter.clock(), tokens)
                total += tokens
        for call in {call for call, _ in piece.parts if call.result is not None}:
            del self.calls[call]
        if piece.rows:
            self._shared.meter.end_microbatch(piece.rows, total)

    def _load(self, model: Model, promise: Promise, load: Load) -> _Work:
        """Opens a saved adapter. It is done when its state is a snapshot of its own.

        So the checkpoint may be deleted then.
        """
        path = yield functools.partial(self._shared.storage.fetch, load.checkpoint)
        one = open_saved(  # an error leaves the earlier one
            self.engine,
            f"{model.id} as loaded",
            path,
            with_optimizer=load.with_optimizer,
            tenant=model.tenant,
        )
        self._close(model)
        self.engine.rename(one, model.id)
        model.adapter, model.is_unloaded = one, False
        steps = model.steps = one.num_steps
        copy, pieces = self.engine.begin_copy(one), {*model.pieces}
        given = model, promise.seq_id, one, copy, steps
        key = yield functools.partial(self.snapshots.write, *given)
        self.snapshots.cover(model, promise.seq_id, key, steps, pieces)

    def _save(self, model: Model, promise: Promise, save: Save) -> _Work:
        """Writes a checkpoint, which is immutable: what is there is not replaced.

        After a crash, what is there may be what this operation has written.
        """
        one, key = self.opened(model), save.checkpoint
        begin = begin_state_file if save.kind == "state" else begin_folder
        write = begin(self.engine, one)

        def work() -> None:
            is_there = self._shared.storage.has(key)
            if is_there and promise.has_begun:
                return
            if is_there:
                raise ConfigError(f"{key} is there already. Choose another name.")
            if not promise.has_begun:
                self._shared.ledger.begin(promise.model, promise.seq_id).result()
                promise.has_begun = True
            with self._shared.storage.writing(key) as path:
                write(path)

        yield work

    def _publish(self, model: Model, promise: Promise, publish: Publish) -> _Work:
        """Copies an adapter for sampling, after its files are written if it has some.

        So a version is never another one than that of its files.
        """
        if (key := publish.checkpoint) is not None:
            save = Save(checkpoint=key, kind="adapter")
            yield from self._save(model, promise, save)
        one = self.opened(model)
        self._published.publish(publish.sampler, one, promise.request_id)


def _compare(promise: Promise, outcome: Done | Failed) -> None:
    """Says so if what was run again has another result: other programs have run."""
    known = promise.outcome.result()
    if isinstance(promise.operation, Step) and known != outcome:
        logger.warning(
            "step %d of model %s has other bits after the restart: %s, and was %s",
            *(promise.seq_id, promise.model, outcome, known),
        )
