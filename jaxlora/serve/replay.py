"""Brings models to where they were after a restart, or after an error of the engine.

Each model goes on from its last snapshot: what was queued since then runs again in the
same microbatches. What was on the device at two errors in a row runs alone from then
on, one datum after the other; what fails alone is the cause, and its operation fails.
"""

import logging

from jaxlora.errors import JaxloraError
from jaxlora.serve.execution import Execution
from jaxlora.serve.ledger import Contents, LoggedPiece, Part
from jaxlora.serve.model import Model, Promise
from jaxlora.serve.operation import Failed, Pass, Step
from jaxlora.serve.shared import Shared
from jaxlora.session.engine import Call, OpenAdapter, PassCall, Piece, StepCall

logger = logging.getLogger(__name__)

_MOST_FRUITLESS = 4  # errors in a row between which nothing ended
_WHOLE = -1  # in place of the number of a datum

_Datum = tuple[str, int, int]  # model, operation, number of the datum there


class Replay:
    """What the device is to do again. Only the engine's thread uses it."""

    def __init__(self, shared: Shared):
        """Makes the object, which `use` gives an engine."""
        self._shared, self._models = shared, shared.promises.models
        self._piece: LoggedPiece | None = None  # the device is given it again
        # What the device had at the last error, and what is run alone, as it was among
        # that twice.
        self._suspects: set[_Datum] = set()
        self._careful: set[_Datum] = set()
        self._trying: Promise | None = None  # which is run alone at the moment
        self._num_fruitless = 0

    def use(self, execution: Execution) -> None:
        """Takes an engine, which has done nothing yet."""
        self._execution, self._engine = execution, execution.engine
        self._engine.on_queued = self._queued

    def restore(self, contents: Contents) -> None:
        """Runs again what the log has of the models that were remembered.

        Raises:
            CannotReplay: A model cannot be brought to where it was.
        """
        for piece in contents.pieces:
            self._replay(piece)
        for call, promise in [*self._execution.calls.items()]:
            self._run_careful(promise, call)

    def begin(self, model: Model, promise: Promise) -> None:
        """Begins the next operation of a model; see `Execution.begin`."""
        is_careful = any(key[:2] == _whole(promise)[:2] for key in self._careful)
        if is_careful and model.adapter is not None:
            self._engine.finish(model.adapter)
        self._execution.begin(model, promise)
        if is_careful and (call := model.running.get(promise.seq_id)) is not None:
            self._run_careful(promise, call)

    def _queued(self, piece: Piece) -> None:
        """Logs a piece of work that changes models."""
        if piece.is_training:
            calls = self._execution.calls
            parts = [(calls[call], call, number) for call, number in piece.parts]
            number = None if self._piece is None else self._piece.number
            self._execution.snapshots.log(piece.rows, parts, number)

    # ---- the log ---------------------------------------------------------------------

    def _replay(self, piece: LoggedPiece) -> None:
        """Gives the engine a piece of work again.

        Rows stay empty if a snapshot covers their datum, or its operation has failed.
        """
        found = [(part, self._waiting_call(part)) for part in piece.parts]
        if not any(call is not None for _, call in found):
            return
        self._piece = piece
        self._shared.meter.replayed += piece.rows > 0
        places: list[tuple[OpenAdapter, PassCall, int] | tuple[str, int]] = []
        is_alone = piece.rows not in self._engine.sizes  # they were others
        for part, call in found:
            datum = part.model, part.seq_id, part.number
            if call is not None and (is_alone or datum in self._careful):
                self._run_alone(self._execution.calls[call], call, part.number)
            elif isinstance(call, PassCall):
                one = self._execution.opened(self._models[part.model])
                places.append((one, call, part.number))
                continue
            places.append((part.model, part.num_tokens))
        if any(len(place) == 3 for place in places):
            self._engine.run_layout(piece.rows, places)
        self._piece = None

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
            self._execution.begin(model, promise)
            while model.is_blocked:
                self._shared.tasks.wait()
                self._shared.tasks.take()
        call = model.running.get(part.seq_id)
        if isinstance(call, PassCall) and part.number not in call.waiting:
            return None
        return call

    # ---- one datum after the other ---------------------------------------------------

    def _run_careful(self, promise: Promise, call: Call) -> None:
        """Runs the parts of a call alone that were twice among those of an error."""
        numbers = [*call.waiting] if isinstance(call, PassCall) else [0]
        for number in numbers:
            if (promise.model, promise.seq_id, number) in self._careful:
                self._run_alone(promise, call, number)

    def _run_alone(self, promise: Promise, call: Call, number: int) -> None:
        """Runs a datum or a step by itself, and waits for it."""
        one = self._execution.opened(self._models[promise.model])
        self._engine.drain()
        if isinstance(call, StepCall):
            # A forward pass before it may lack its result, which no log has.
            for earlier in [*one.calls.values()]:
                if isinstance(earlier, PassCall):
                    for left in [*earlier.waiting]:
                        self._run_alone(self._execution.calls[earlier], earlier, left)
        self._trying = promise
        if isinstance(call, StepCall):
            self._engine.run_step(one)
        else:
            rows = self._engine.size_for(len(call.samples[number].token_ids))
            self._engine.run_layout(rows, [(one, call, number)])
        self._engine.drain()
        self._trying = None
        self._careful.discard((promise.model, promise.seq_id, number))

    # ---- errors ----------------------------------------------------------------------

    def may_go_on(self, error: Exception) -> bool:
        """Finds what has to do with an error of the engine, before it is made anew.

        Returns:
            False: nothing more can be found, or its cause was done before a restart.
        """
        execution, culprit = self._execution, self._trying
        begun = execution.beginning
        if culprit is None and begun is not None and _whole(begun) in self._careful:
            culprit = begun
        is_fruitless = culprit is None and not execution.num_ended
        self._num_fruitless = self._num_fruitless + 1 if is_fruitless else 1
        if culprit is not None:
            if culprit.outcome.done():
                return False
            execution.finish(culprit, Failed(message=_blame(error), category="server"))
        found = self._found()
        if culprit is None:
            self._careful |= found & self._suspects
        self._suspects = found
        self._trying = self._piece = None
        return self._num_fruitless <= _MOST_FRUITLESS

    def _found(self) -> set[_Datum]:
        """Returns what the device has, and the operation that is being begun."""
        execution, found = self._execution, set()
        for piece in self._engine.unsettled:
            for call, number in piece.parts:
                if (promise := execution.calls.get(call)) is not None:
                    found.add((promise.model, promise.seq_id, number))
        begun = execution.beginning
        return found | (set() if begun is None else {_whole(begun)})


def _whole(promise: Promise) -> _Datum:
    return promise.model, promise.seq_id, _WHOLE


def _blame(error: Exception) -> str:
    reason = str(error) if isinstance(error, JaxloraError) else type(error).__name__
    return (
        f"the device has failed on this operation, three times, and did not on others: "
        f"{reason} The model goes on without it."
    )
