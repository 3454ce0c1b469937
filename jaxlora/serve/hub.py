"""The hub: the thread that owns the engine, and the promises of its operations."""

import dataclasses
import logging
import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future

from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.serve.operation import (
    Create,
    Done,
    Failed,
    Load,
    Operation,
    Outcome,
    Pass,
    Publish,
    Save,
    Step,
    Unload,
)
from jaxlora.serve.storage import Storage
from jaxlora.session.engine import (
    Call,
    Engine,
    OpenAdapter,
    PassResult,
    StepCall,
    StepResult,
)
from jaxlora.session.operations import (
    new_adapter,
    open_saved,
    pass_call,
    save_folder,
    save_state_file,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class Promise:
    """An operation that was accepted.

    Attributes:
        request_id: Its id, 128 random bits in hexadecimal digits.
        tenant: Whose it is.
        model: The model.
        seq_id: Its number among the operations of the model, from 1.
        operation: The operation.
        outcome: Holds `Done` or `Failed` as soon as it is there and durable.
    """

    request_id: str
    tenant: str
    model: str
    seq_id: int
    operation: Operation
    outcome: Future[Outcome] = dataclasses.field(default_factory=Future)


@dataclasses.dataclass(kw_only=True, eq=False)
class Model:
    """A model of a tenant, whose operations run in the order of their numbers.

    Attributes:
        id: Its id.
        tenant: Whose it is.
        next_seq: The number that is next.
        held: Promises by number, from `next_seq` on; a gap holds those after it.
        adapter: Its adapter in the engine; None: it has none (yet).
        num_running: Operations that the engine has and that are not done.
    """

    id: str
    tenant: str
    next_seq: int = 1
    held: dict[int, Promise] = dataclasses.field(default_factory=dict)
    adapter: OpenAdapter | None = None
    num_running: int = 0


class Hub:
    """Runs operations of many models in one engine.

    All methods may be called by any thread.
    """

    def __init__(self, engine: Engine, storage: Storage):
        """Makes a hub, which `start` starts.

        Args:
            engine: The engine, which only the hub uses from now on.
            storage: Where checkpoints are.
        """
        self._engine, self._storage = engine, storage
        self._lock = threading.Lock()
        self._models: dict[str, Model] = {}
        self._promises: dict[str, Promise] = {}
        self._by_number: dict[tuple[str, int], Promise] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finishes what the engine has, and ends the thread."""
        self._inbox.put(None)
        self._thread.join()

    def submit(
        self, tenant: str, model: str, seq_id: int, operation: Operation
    ) -> Promise:
        """Accepts an operation. A number that was accepted before gives its promise.

        Args:
            tenant: Whose the model is, which the caller has checked.
            model: Id of the model. Its first operation is `Create` or `Load`.
            seq_id: Number of the operation among those of the model, from 1. A gap
                holds those after it.
            operation: The operation.
        """
        with self._lock:
            if (found := self._by_number.get((model, seq_id))) is not None:
                return found
            promise = Promise(
                request_id=secrets.token_hex(16),
                tenant=tenant,
                model=model,
                seq_id=seq_id,
                operation=operation,
            )
            self._promises[promise.request_id] = promise
            self._by_number[model, seq_id] = promise
        self._inbox.put(lambda: self._hold(promise))
        return promise

    @property
    def engine(self) -> Engine:
        """The engine. Others may read its model and its settings."""
        return self._engine

    def knows(self, model: str, seq_id: int) -> bool:
        """Whether an operation of a model was accepted under a number."""
        with self._lock:
            return (model, seq_id) in self._by_number

    def promise(self, tenant: str, request_id: str) -> Promise | None:
        """Returns a promise of a tenant; None: the tenant has no such promise."""
        with self._lock:
            found = self._promises.get(request_id)
        return found if found is not None and found.tenant == tenant else None

    # ---- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        is_idle = False
        while True:
            try:
                while True:
                    message = self._inbox.get(block=is_idle)
                    if message is None:
                        return
                    message()
                    is_idle = False
            except queue.Empty:
                pass
            is_idle = not (self._start() or self._engine.advance())

    def _hold(self, promise: Promise) -> None:
        model = self._models.setdefault(
            promise.model, Model(id=promise.model, tenant=promise.tenant)
        )
        model.held[promise.seq_id] = promise

    def _start(self) -> bool:
        """Gives the engine what is next of each model; returns whether it did."""
        has_started = False
        for model in [*self._models.values()]:
            while (promise := model.held.get(model.next_seq)) is not None:
                is_call = isinstance(promise.operation, Pass | Step)
                if model.num_running and not is_call:
                    break  # it reads or replaces what the calls before it change
                model.next_seq += 1
                del model.held[promise.seq_id]
                has_started = True
                try:
                    self._do(model, promise)
                except JaxloraError as error:
                    self._finish(promise, Failed(message=str(error), category="user"))
        return has_started

    def _do(self, model: Model, promise: Promise) -> None:
        match promise.operation:
            case Create() as create:
                adapter = new_adapter(
                    self._engine, model.id, **dataclasses.asdict(create)
                )
                model.adapter = self._engine.open(model.id, adapter)
            case Load() as load:
                path = self._storage.fetch(load.checkpoint)
                model.adapter = open_saved(self._engine, model.id, path)
            case Pass() | Step() as call:
                self._call(model, promise, call)
                return
            case Save() as save:
                one = _opened(model)
                with self._storage.writing(save.checkpoint) as path:
                    if save.kind == "state":
                        save_state_file(self._engine, one, path)
                    else:
                        save_folder(self._engine, one, path)
            case Publish():
                raise ConfigError("this server does not sample yet.")
            case Unload():
                self._engine.close(_opened(model))
                model.adapter = None
        self._finish(promise, Done())

    def _call(self, model: Model, promise: Promise, given: Pass | Step) -> None:
        """Gives the engine a pass or a step, whose result finishes its promise."""
        one = _opened(model)

        def finish(result: PassResult | StepResult) -> None:
            model.num_running -= 1
            self._finish(promise, Done(result=result))

        if isinstance(given, Step):
            call: Call = StepCall(params=given.params, on_result=finish)
        else:
            call = pass_call(
                self._engine, given.data, given.loss, is_training=given.is_training
            )
            call.on_result = finish
        model.num_running += 1
        self._engine.submit(one, call)

    def _finish(self, promise: Promise, outcome: Outcome) -> None:
        promise.outcome.set_result(outcome)


def _opened(model: Model) -> OpenAdapter:
    if model.adapter is None:
        raise ConfigError(
            f"model {model.id} has no adapter, as it could not be created, or was "
            "unloaded. Create another."
        )
    return model.adapter
