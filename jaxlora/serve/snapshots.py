"""Snapshots of models, and the log of what the device has done since then.

Each training microbatch and each optimizer step is logged, so that a restart can run
them again in the same layouts. A snapshot of a model covers its operations up to some
number, and the log is cut behind those that no model needs any more.
"""

import functools
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxlora.serve.ledger import Contents, LoggedModel, LoggedPiece, Part
from jaxlora.serve.model import Model, Promise
from jaxlora.serve.operation import Done
from jaxlora.serve.shared import Shared
from jaxlora.session.engine import Call, Engine, OpenAdapter, PassCall, StepResult
from jaxlora.session.residence import WholeState
from jaxlora.session.state_file import write_state

logger = logging.getLogger(__name__)

MOST_SNAPSHOTS = 2  # whose copies are in memory


class Snapshots:
    """The snapshots of the models of one engine. Only its thread uses it."""

    def __init__(self, engine: Engine, shared: Shared):
        """Makes the object, which `remember` fills.

        Args:
            engine: The engine.
            shared: What outlives it.
        """
        self._engine, self._shared = engine, shared
        self._models, self._clock = shared.promises.models, shared.meter.clock
        self._num_writing = 0
        self._next_number = shared.ledger.ids.pieces.start  # of pieces of work
        self._needed: dict[int, set[str]] = {}  # models without a snapshot, by piece

    def remember(self, contents: Contents) -> None:
        """Takes the log as the ledger has it."""
        for piece in contents.pieces:
            self._next_number = max(self._next_number, piece.number + 1)
            for part in piece.parts:
                found = self._models.get(part.model)
                if found is not None and part.seq_id > found.covered_seq:
                    self._needed.setdefault(piece.number, set()).add(found.id)

    def needed_by(self, model: Model) -> list[int]:
        """Returns the numbers of the logged pieces of work that a model needs."""
        return [one for one, models in self._needed.items() if model.id in models]

    def remove_old(self) -> None:
        """Removes snapshots that a crash has left beside those of models."""
        for model in [*self._models.values()]:
            for key in self._shared.storage.list(_folder(model)):
                if key != model.snapshot:
                    self._shared.storage.delete(key)

    # ---- the log ---------------------------------------------------------------------

    def log(
        self,
        rows: int,
        parts: Sequence[tuple[Promise, Call, int]],
        number: int | None = None,
    ) -> None:
        """Logs a piece of work that changes models, which the device was given.

        Args:
            rows: Rows of the microbatch; 0: it is an optimizer step.
            parts: Its parts, as those of a `Piece`, with their promises.
            number: The number by which it is in the log; None: it is new.
        """
        if number is None:
            number, self._next_number = self._next_number, self._next_number + 1
            logged = tuple(_part(*part) for part in parts)
            self._shared.ledger.queue(
                LoggedPiece(number=number, rows=rows, parts=logged)
            )
        for promise, *_ in parts:
            model = self._models[promise.model]
            model.pieces.add(number)
            model.last_step = None if rows else promise
            model.steps_since += not rows
            if model.changed_at is None:
                model.changed_at = self._clock()
            self._needed.setdefault(number, set()).add(model.id)
        if not rows:
            self.begin_if_due(self._models[parts[0][0].model])

    def cover(
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
        written = self._shared.ledger.cover(logged, unneeded)
        if old is not None and old != key:
            written.add_done_callback(
                lambda done: None if done.exception() else self._delete(old)
            )

    # ---- files -----------------------------------------------------------------------

    def begin_if_due(self, model: Model, *, at_once: bool = False) -> None:
        """Begins a snapshot of a model, if it is time for one and a step came last.

        Right after a step, no gradients are pending and no pass has begun.
        """
        if model.changed_at is None or (step := model.last_step) is None:
            return
        if at_once or (self._is_due(model) and self._is_free(model)):
            steps = lambda: _steps_behind(step)
            self._begin(model, step.seq_id, steps, after=step.outcome)

    def tidy(self, model: Model) -> None:
        """Cuts the log of a model that does nothing at the moment.

        The log of one that is evaluated, and not trained, would only grow.
        """
        last, steps = model.next_seq - 1, model.steps
        if model.running or model.is_blocked or last <= model.covered_seq:
            return
        is_unchanged = not model.pieces
        if model.is_unloaded or (is_unchanged and model.snapshot is not None):
            self.cover(model, last, model.snapshot, steps, ())
            return
        is_due = is_unchanged or self._is_due(model)
        # The creation alone is as short a log as there can be.
        if model.adapter is not None and last > 1 and is_due and self._is_free(model):
            self._begin(model, last, lambda: steps)

    def _is_due(self, model: Model) -> bool:
        settings, changed_at = self._shared.settings, model.changed_at
        is_old = (
            changed_at is not None
            and self._clock() - changed_at >= settings.snapshot_seconds
        )
        return is_old or model.steps_since >= settings.snapshot_steps

    def _is_free(self, model: Model) -> bool:
        return not model.is_snapshotting and self._num_writing < MOST_SNAPSHOTS

    def _begin(
        self,
        model: Model,
        seq_id: int,
        steps: Callable[[], int],
        after: Future[Any] | None = None,
    ) -> None:
        """Begins a snapshot of a model as it is now.

        Args:
            model: The model, which has begun its operations up to `seq_id` and no
                other.
            seq_id: The number.
            steps: Returns the optimizer steps behind it; any thread may call it.
            after: Is done when the outcomes of all these operations are on disk; None:
                they have been handed in.
        """
        one, pieces = model.adapter, {*model.pieces}
        assert one is not None
        copy = self._engine.begin_copy(one)
        model.changed_at, model.steps_since = None, 0
        model.is_snapshotting = True
        self._num_writing += 1

        def write() -> tuple[str, int]:
            return self.write(model, seq_id, one, copy, steps()), steps()

        def fail(error: Exception) -> None:
            logger.warning("no snapshot of model %s: %s", model.id, error)
            self._end(model)
            if model.changed_at is None and model.pieces:
                model.changed_at = self._clock()  # it is tried again then

        def then(written: tuple[str, int]) -> None:
            key, num_steps = written
            self._end(model)
            # It may have been unloaded or loaded meanwhile. Or the engine was made
            # anew, and the model is being brought from its earlier snapshot to where it
            # was, and this one would skip a part of that.
            is_same = self._models.get(model.id) is model
            if is_same and model.covered_seq < seq_id:
                self.cover(model, seq_id, key, num_steps, pieces)
            else:
                self._delete(key)

        start = functools.partial(self._shared.tasks.elsewhere, write, then, fail)
        if after is None:
            start()
        else:
            after.add_done_callback(lambda _: start())

    def _end(self, model: Model) -> None:
        model.is_snapshotting = False
        self._num_writing -= 1

    def write(
        self,
        model: Model,
        seq_id: int,
        one: OpenAdapter,
        copy: Callable[[], WholeState],
        steps: int,
    ) -> str:
        """Writes a snapshot; returns its key. Any thread may call this.

        Args:
            model: The model.
            seq_id: The last operation in it.
            one: The adapter.
            copy: Brings its state to the host.
            steps: Optimizer steps behind it.

        Raises:
            StorageError: It cannot be written.
        """
        key = f"{_folder(model)}/{seq_id}-{secrets.token_hex(4)}"
        base = self._engine.model.fingerprint
        with self._shared.storage.writing(key) as path:
            write_state(path, one.like, copy(), steps, base)
        self._shared.meter.snapshots += 1
        return key

    def _delete(self, key: str) -> None:
        self._shared.tasks.run(functools.partial(self._shared.storage.delete, key))


def _folder(model: Model) -> str:
    return f"{model.tenant}/{model.id}/snapshots"


def _steps_behind(step: Promise) -> int:
    """Returns the number of a step, whose outcome is there."""
    outcome = step.outcome.result()
    assert isinstance(outcome, Done) and isinstance(outcome.result, StepResult)
    return outcome.result.step


def _part(promise: Promise, call: Call, number: int) -> Part:
    is_pass = isinstance(call, PassCall)
    return Part(
        model=promise.model,
        seq_id=promise.seq_id,
        number=number,
        num_tokens=len(call.samples[number].token_ids) if is_pass else 0,
    )
