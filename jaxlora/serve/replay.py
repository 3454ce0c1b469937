"""Brings models to where they were after a restart, or after an error of the engine.

Each model goes on from its last snapshot: what was queued since then runs again in the
same microbatches. What is on the device when the engine fails, or when the server dies,
gets a strike. With two of them a datum runs alone, one after the other; what fails
alone is the cause, and its operation fails.

When the server dies, nobody can say what was on the device. So after a start all that
an earlier process may have begun has a strike, and as long as it is not done, what the
device is given is noted in the ledger before. In what a process accepts by itself,
nothing is noted.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from jaxlora.errors import JaxloraError
from jaxlora.serve.execution import Execution
from jaxlora.serve.ledger import Contents, DatumKey, LoggedPiece, Part
from jaxlora.serve.model import Model, Promise
from jaxlora.serve.operation import Done, Failed, Pass, Step
from jaxlora.serve.shared import Shared
from jaxlora.session.engine import Call, OpenAdapter, PassCall, Piece, StepCall

logger = logging.getLogger(__name__)

_MOST_FRUITLESS = 4  # errors in a row between which nothing ended
_WHOLE = -1  # in place of the number of a datum
_ALONE = 2  # strikes with which a datum runs alone
# A process may have been killed for another reason. So a datum with which one has died
# alone runs alone once more.
_REFUSED = 4


class Replay:
    """What the device is to do again. Only the engine's thread uses it.

    Attributes:
        left: Operations that are not done, and that an earlier process, or the engine
            before an error, may have begun.
    """

    def __init__(self, shared: Shared):
        """Makes the object, which `use` gives an engine."""
        self._shared, self._models = shared, shared.promises.models
        self._piece: LoggedPiece | None = None  # the device is given it again
        self._strikes: dict[DatumKey, int] = {}  # of what is not done
        self._trying: Promise | None = None  # which is run alone at the moment
        self._num_fruitless = 0
        self.left: set[Promise] = set()
        self._is_replaying = False
        self._noted: set[DatumKey] = set()  # as being on the device

    def use(self, execution: Execution) -> None:
        """Takes an engine, which has done nothing yet."""
        self._execution, self._engine = execution, execution.engine
        self._engine.on_begin, self._engine.on_queued = self._note, self._queued
        self._engine.on_settled = self._settled

    def restore(self, contents: Contents, promises: Sequence[Promise]) -> None:
        """Runs again what the log has.

        Args:
            contents: The log.
            promises: The promises that were remembered with it.

        Raises:
            CannotReplay: A model cannot be brought to where it was.
        """
        if not self._shared.meter.restarts:
            self._refuse(contents, {(one.model, one.seq_id): one for one in promises})
        if self._shared.meter.restarts:
            self.left = {*promises}
        self._is_replaying = True
        for piece in contents.pieces:
            self._replay(piece)
        for call, promise in [*self._execution.calls.items()]:
            self._run_careful(promise, call)
        self._is_replaying = False

    def _refuse(
        self, contents: Contents, promises: Mapping[tuple[str, int], Promise]
    ) -> None:
        """Takes the strikes of earlier processes, and ends operations with too many."""
        known = {k: n for k, n in contents.attempts.items() if k[:2] in promises}
        self._strikes = {key: n for key, n in known.items() if n < _REFUSED}
        refused = {key[:2]: key[2] for key in known.keys() - self._strikes.keys()}
        for (model, seq_id), number in refused.items():
            promise = promises[model, seq_id]
            what = f"datum {number} of it" if promise.size[0] else "it"
            why = (
                f"the server has died several times while {what} was on the device, "
                "the last two times alone."
            )
            if not promise.outcome.done():
                message = (
                    f"operation {seq_id} of model {model} is refused, as {why} The "
                    "model goes on without it. Send it without what it died of."
                )
                failed = Failed(message=message, category="user")
                self._execution.finish(promise, failed)
            elif isinstance(promise.outcome.result(), Done):
                # Its result was told, and the model would be another one without it.
                message = (
                    f"operation {seq_id} of model {model} cannot be done again after a "
                    f"restart, as {why} Load what the model has saved into another one."
                )
                self._execution.fail_model(self._models[model], message)
        if contents.attempts:
            self._shared.ledger.attempt(self._strikes)
            self._shared.ledger.flush()  # so that those that end have their outcomes

    def begin(self, model: Model, promise: Promise) -> None:
        """Begins the next operation of a model; see `Execution.begin`."""
        is_careful = any(key[:2] == _whole(promise)[:2] for key in self._careful())
        if is_careful and model.adapter is not None:
            self._engine.finish(model.adapter)
        self._execution.begin(model, promise)
        if is_careful and (call := model.running.get(promise.seq_id)) is not None:
            self._run_careful(promise, call)

    def _careful(self) -> set[DatumKey]:
        return {key for key, number in self._strikes.items() if number >= _ALONE}

    # ---- what the device has ---------------------------------------------------------

    def _note(self, piece: Piece) -> None:
        """Notes what the device is about to have, if it may be what has ended it."""
        if not (self._is_replaying or self.left):
            return
        self.left = {one for one in self.left if not one.outcome.done()}
        calls = self._execution.calls
        if self._is_replaying or any(
            calls[call] in self.left for call, _ in piece.parts
        ):
            self._noted = self._found()
            now = {key: self._strikes.get(key, 1) + 1 for key in self._noted}
            self._shared.ledger.attempt(self._strikes | now).result()

    def _queued(self, piece: Piece) -> None:
        """Logs a piece of work that changes models."""
        if piece.is_training:
            calls = self._execution.calls
            parts = [(calls[call], call, number) for call, number in piece.parts]
            number = None if self._piece is None else self._piece.number
            self._execution.snapshots.log(piece.rows, parts, number)

    def _settled(self, piece: Piece) -> None:
        """Clears what is done of blame."""
        is_blamed = bool(self._strikes or self._noted)
        done = self._keys(piece) if is_blamed else set()
        self._execution.settled(piece)
        for key in done:
            self._strikes.pop(key, None)
        if self._noted:
            self._noted -= done
            if not self._noted:
                self._shared.ledger.attempt(self._strikes)

    def _found(self) -> set[DatumKey]:
        """Returns what the device has, and the operation that is being begun."""
        begun = self._execution.beginning
        found = set() if begun is None else {_whole(begun)}
        return found.union(*map(self._keys, self._engine.unsettled))

    def _keys(self, piece: Piece) -> set[DatumKey]:
        calls = self._execution.calls
        return {
            (promise.model, promise.seq_id, number)
            for call, number in piece.parts
            if (promise := calls.get(call)) is not None
        }

    # ---- the log ---------------------------------------------------------------------

    def _replay(self, piece: LoggedPiece) -> None:
        """Gives the engine a piece of work again.

        Rows stay empty if a snapshot covers their datum, or its operation has failed.
        """
        found = [(part, self._waiting_call(part)) for part in piece.parts]
        if not any(call is not None for _, call in found):
            return
        self._piece = piece = self._with_alone(piece, found)
        self._shared.meter.replayed += piece.rows > 0
        places: list[tuple[OpenAdapter, PassCall, int] | tuple[str, int]] = []
        are_others = piece.rows not in self._engine.sizes  # or it is a step
        for part, (_, call) in zip(piece.parts, found, strict=True):
            if call is not None and (are_others or part.is_alone):
                self._run_alone(self._execution.calls[call], call, part.number)
            elif isinstance(call, PassCall):
                one = self._execution.opened(self._models[part.model])
                places.append((one, call, part.number))
                continue
            places.append((part.model, part.num_tokens))
        if any(len(place) == 3 for place in places):
            self._engine.run_layout(piece.rows, places)
        self._piece = None

    def _with_alone(
        self, piece: LoggedPiece, found: Sequence[tuple[Part, Call | None]]
    ) -> LoggedPiece:
        """Logs which parts of a microbatch run alone from now on.

        So a further replay has the same layouts, and the same bits. If a part of a
        model does, or has failed, so do its others: empty rows amid those of an adapter
        would move them.
        """
        careful = self._careful()
        broken = {
            part.model
            for part, call in found
            if part.is_alone or part.key in careful or self._has_failed(part, call)
        }
        parts = tuple(
            dataclasses.replace(
                part,
                is_alone=part.is_alone or (call is not None and part.model in broken),
            )
            for part, call in found
        )
        if piece.rows and parts != piece.parts:
            piece = dataclasses.replace(piece, parts=parts)
            self._shared.ledger.queue(piece)
        return piece

    def _has_failed(self, part: Part, call: Call | None) -> bool:
        """Whether a part is not run again although no snapshot covers it."""
        model = self._models.get(part.model)
        return call is None and model is not None and part.seq_id > model.covered_seq

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
        careful = self._careful()
        for number in numbers:
            if (promise.model, promise.seq_id, number) in careful:
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

    # ---- errors ----------------------------------------------------------------------

    def may_go_on(self, error: Exception) -> bool:
        """Finds what has to do with an error of the engine, before it is made anew.

        Returns:
            False: nothing more can be found, or its cause was done before a restart.
        """
        execution, culprit = self._execution, self._trying
        begun = execution.beginning
        if culprit is None and begun is not None and _whole(begun) in self._careful():
            culprit = begun
        is_fruitless = culprit is None and not execution.num_ended
        self._num_fruitless = self._num_fruitless + 1 if is_fruitless else 1
        if culprit is not None:
            if culprit.outcome.done():
                return False
            execution.finish(culprit, Failed(message=_blame(error), category="server"))
        else:
            now = {key: self._strikes.get(key, 0) + 1 for key in self._found()}
            careful = self._careful()
            self._strikes = {key: self._strikes[key] for key in careful} | now
        self._noted, self._trying, self._piece = set(), None, None
        return self._num_fruitless <= _MOST_FRUITLESS


def _whole(promise: Promise) -> DatumKey:
    return promise.model, promise.seq_id, _WHOLE


def _blame(error: Exception) -> str:
    reason = str(error) if isinstance(error, JaxloraError) else type(error).__name__
    return (
        f"the device has failed on this operation, three times, and did not on others: "
        f"{reason} The model goes on without it."
    )
