"""The promises that clients can still ask for, and the models that they are of."""

import collections
import re
import threading
from collections.abc import Callable

from jaxlora.errors import ConfigError
from jaxlora.serve.ledger import Contents, Ledger, Logged
from jaxlora.serve.model import Model, Promise
from jaxlora.serve.operation import decode

# Operations that ended so long ago are looked up in the ledger.
_SECONDS_KEPT = 60.0
_REQUEST_ID = re.compile(r"[0-9a-z-]{32}")


class Promises:
    """Promises by their ids and numbers. Those that ended a while ago are on disk.

    Attributes:
        lock: Is held by whoever calls `find`, `last` or `add`, or adds models.
        models: The models by their ids. Only the engine's thread changes one.
        listeners: Are called with each promise that gets its outcome, by any thread.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]):
        """Starts empty; `clock` returns seconds."""
        self._ledger, self._clock = ledger, clock
        self.lock = threading.Lock()
        self.models: dict[str, Model] = {}
        self.listeners: list[Callable[[Promise], None]] = []
        self._by_id: dict[str, Promise] = {}
        self._by_number: dict[tuple[str, int], Promise] = {}
        self._ended: collections.deque[tuple[float, Promise]] = collections.deque()

    def has(self, model: str, seq_id: int) -> bool:
        """Whether an operation of a model was taken by a number."""
        with self.lock:
            known = self.models.get(model)
            has_begun = known is not None and seq_id < known.next_seq
            return has_begun or (model, seq_id) in self._by_number

    def last(self, model: str) -> int:
        """Returns the largest number that was taken, or 0. The lock is held."""
        known = self.models.get(model)
        begun = 0 if known is None else known.next_seq - 1
        return max([begun, *(seq for one, seq in self._by_number if one == model)])

    def find(self, model: str, seq_id: int) -> Promise | None:
        """Finds the promise of a number that was taken before.

        Raises:
            ConfigError: It ended so long ago that nothing is known of it.
            StorageError: It may be in the database, which cannot be read.
        """
        if (found := self._by_number.get((model, seq_id))) is not None:
            return found
        known = self.models.get(model)
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

    def of_id(self, request_id: str, *, only_in_memory: bool) -> Promise | None:
        """Finds the promise of an id, which is any text that a client has sent.

        Raises:
            StorageError: It may be in the database, which cannot be read.
        """
        with self.lock:
            found = self._by_id.get(request_id)
        is_id = _REQUEST_ID.fullmatch(request_id) is not None
        if found is None and is_id and not only_in_memory:
            logged = self._ledger.find_request(request_id)
            if logged is not None and logged.outcome is not None:
                with self.lock:
                    found = self._by_id.get(request_id) or self._recall(logged)
        return found

    def add(self, promise: Promise) -> Promise:
        """Takes a promise."""
        self._by_id[promise.request_id] = promise
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
        return self.add(promise)

    def remember(self, contents: Contents) -> list[Promise]:
        """Takes models and operations as the ledger has them; returns the promises."""
        with self.lock:
            old, found = {**self.models}, []
            self.models.clear()
            self.models |= {one.id: Model.of(one) for one in contents.models}
            for logged in contents.operations:
                key = logged.model, logged.seq_id
                promise = self._by_number.get(key) or self._recall(logged)
                promise.has_begun |= logged.has_begun
                self._model_of(promise).hold(promise)
                found.append(promise)
            for id, model in self.models.items():
                if id in old:
                    model.recent = old[id].recent
                    model.loss_per_token = old[id].loss_per_token
        return found

    def model_of(self, promise: Promise) -> Model:
        """Returns the model of a promise, which is made if this is its first."""
        with self.lock:
            return self._model_of(promise)

    def _model_of(self, promise: Promise) -> Model:
        own = Model(id=promise.model, tenant=promise.tenant)
        return self.models.setdefault(promise.model, own)

    def drop_models(self, is_over: Callable[[Model], bool]) -> list[str]:
        """Forgets models that are over and have no promise here; returns their ids."""
        with self.lock:
            asked = {model for model, _ in self._by_number}
            over = [
                id
                for id, model in self.models.items()
                if id not in asked and is_over(model)
            ]
            for id in over:
                del self.models[id]
        return over

    def drop_ended(self) -> None:
        """Forgets promises that ended a while ago, which the ledger has."""
        with self.lock:
            while self._ended and self._ended[0][0] < self._clock() - _SECONDS_KEPT:
                _, promise = self._ended.popleft()
                self._by_id.pop(promise.request_id, None)
                self._by_number.pop((promise.model, promise.seq_id), None)
