"""Drives a job: its batches become operations of its model, as a client's would.

The operations of a job follow from its settings and the results so far, and so do their
numbers. After a crash, a job continues from the last progress that was kept. It submits
the same operations under the same numbers again, and the hub answers those that it had
accepted with their results. So no step is lost, and none is done twice.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.table import ADAMW
from jaxlora.config.session_config import AdamParams
from jaxlora.data.pack import JobBatch
from jaxlora.hf.load import FrozenModel
from jaxlora.objectives.base import next_token_targets
from jaxlora.run.events import EvalEvent, Event, StepEvent, losses_by_set
from jaxlora.serve.hub import Hub, Promise
from jaxlora.serve.jobs.batch_loss import BatchLoss, total
from jaxlora.serve.jobs.record import Copy, Job
from jaxlora.serve.limits import Limits
from jaxlora.serve.operation import (
    Create,
    Done,
    Failed,
    Load,
    Operation,
    Pass,
    Save,
    Step,
    Unload,
)
from jaxlora.serve.storage import Storage
from jaxlora.session.datum import ChosenLoss
from jaxlora.session.operations import write_folder
from jaxlora.train.job_state import JobState

logger = logging.getLogger(__name__)

_CROSS_ENTROPY = ChosenLoss.of("cross_entropy", None)
# Batches that the hub has before the driver waits for the first of them.
_MOST_IN_FLIGHT = 2
# Tokens of an operation that only reads. Those of other tenants come between two.
_MOST_TOKENS = 2**16
_RATE_SECONDS = 0.1  # between looks whether the tenant's tokens a second allow a batch
_POLL_SECONDS = 0.05
_SAVE_SECONDS = 10.0  # before an adapter is written again that could not be written
_RECENT_STEPS = 50  # that the time left is estimated from


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Surroundings:
    """The parts of a server that all drivers use.

    Attributes:
        hub: Runs the operations.
        storage: Has the jobs' files.
        limits: Limits the tenants' tokens a second.
        model: The base model.
    """

    hub: Hub
    storage: Storage
    limits: Limits
    model: FrozenModel


class FailedOperation(Exception):
    """An operation of a job has failed for good."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """A global batch that was submitted.

    Attributes:
        batch: The batch.
        rate: Learning rate of its step.
        values: Loss and metrics, if they are known before the step.
        passed: The promise of its pass.
        stepped: The promise of its step.
        next_seq: Number of the operation after it.
    """

    batch: JobBatch
    rate: float
    values: Mapping[str, float] | None
    passed: Promise
    stepped: Promise
    next_seq: int


class Driver:
    """Drives one job until it ends, or leaves to pause.

    Attributes:
        is_ending: Whether the job does its last operations, which follow its last
            step and its copies. After a crash they are the same ones again.
    """

    def __init__(
        self,
        job: Job,
        state: JobState,
        around: Surroundings,
        note: Callable[[Event | None], None],
        copied: Callable[[Copy], None],
    ):
        """Makes the object; `run` does the work.

        Args:
            job: The job, whose progress the driver changes.
            state: Its samples and settings, with paths that this machine has.
            around: What all drivers use.
            note: Takes events of the job, and None where only its progress changes.
            copied: Is told of a copy that is there.
        """
        self._job, self._state, self._around = job, state, around
        self._note, self._copied = note, copied
        state.progress = job.progress
        state.runs_reference = False  # it would need both adapters in one pass
        self._in_flight: deque[_Batch] = deque()
        self._seq = job.next_seq
        self._times: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._num_submitted = job.progress.step  # batches, or the first part of one
        self.is_ending = False

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the job ends; None: it is not known."""
        if len(self._times) < 2:
            return None
        (began, first), (now, last) = self._times[0], self._times[-1]
        left = self._state.num_steps - last
        return left * (now - began) / max(1, last - first)

    async def run(self) -> None:
        """Does all operations of the job that are left, up to its end or a pause.

        Raises:
            JaxloraError: An operation was not accepted; the job can run again.
        """
        state = self._state
        state.update(status="running", reason="", slot=0)
        try:
            if self._job.next_seq == 1:
                await self._begin()
            self._read_references()
            # Requests made up to here count at this border, and later ones at the next.
            while not await self._has_left():
                if not self._around.limits.may_run(self._job.tenant):
                    await asyncio.sleep(_RATE_SECONDS)
                    continue
                await self._submit_batch()
                if len(self._in_flight) >= _MOST_IN_FLIGHT:
                    await self._settle()
        except FailedOperation as error:
            self._in_flight.clear()
            state.update(status="failed", reason=str(error))
            if self._seq > 1:
                self._submit(Unload())
            self._keep(is_last=True)

    async def catch_up(self) -> int:
        """Waits until no operation of before a crash is left to be submitted again.

        Returns:
            Optimizer steps after which a request that is made now takes effect.
        """
        job, hub = self._job, self._around.hub
        while hub.knows(job.id, self._seq):
            await asyncio.sleep(_POLL_SECONDS)
        return self._num_submitted

    def _keep(self, event: Event | None = None, *, is_last: bool = False) -> None:
        """Keeps the progress, which is that of all operations submitted so far.

        Args:
            event: What happened.
            is_last: Whether the driver has done all that it does. Before, a job that
                ends is still running, so that it ends again after a crash.
        """
        changes: dict[str, Any] = {} if is_last else {"status": "running", "reason": ""}
        self._job.progress = dataclasses.replace(
            self._state.progress, slot=None, **changes
        )
        self._job.next_seq = self._seq
        self._note(event)

    # ---- operations ------------------------------------------------------------------

    def _submit(self, operation: Operation) -> Promise:
        job, hub = self._job, self._around.hub
        promise = hub.submit(job.tenant, job.id, self._seq, operation)
        self._seq += 1
        return promise

    async def _do(self, operation: Operation) -> Any:
        return await _result(self._submit(operation))

    async def _save(self, key: str, kind: Literal["state", "adapter"]) -> None:
        """Writes the adapter into the storage; waits until that has room and works."""
        while True:
            operation = Save(checkpoint=key, kind=kind)
            outcome = await awaited(self._submit(operation).outcome)
            if not isinstance(outcome, Failed):
                return
            if outcome.category == "user":
                raise FailedOperation(outcome.message)
            logger.warning("job %s is not saved yet: %s", self._job.id, outcome.message)
            await asyncio.sleep(_SAVE_SECONDS)

    def _forward(
        self, loss: BatchLoss, submit: Callable[[Operation], Promise] | None = None
    ) -> list[tuple[BatchLoss, Promise]]:
        """Submits forward passes over samples, part by part."""
        submit = self._submit if submit is None else submit
        return [
            (part, submit(Pass(data=part.data, loss=_CROSS_ENTROPY, is_training=False)))
            for part in loss.split(_MOST_TOKENS)
        ]

    async def _values(
        self, passes: Sequence[tuple[BatchLoss, Promise]]
    ) -> dict[str, float]:
        """Returns sums of the loss and metrics, of passes that were submitted."""
        parts = [part.values((await _result(p)).logprobs) for part, p in passes]
        return total(parts)

    async def _baseline(self, batch: JobBatch | None) -> float:
        """Returns the baseline of a global batch, or of the held-out samples."""
        recombined = self._state.baseline_batch(0, batch)
        if recombined is None:
            return 0.0
        found = await self._values(self._forward(BatchLoss.of(recombined)))
        return found["loss"]

    # ---- the start -------------------------------------------------------------------

    async def _begin(self) -> None:
        """Loads the adapter that the job starts from, and computes references."""
        job, state = self._job, self._state
        is_copy = job.progress.step > 0
        if is_copy:
            await self._do(Load(checkpoint=job.file("copied"), with_optimizer=True))
        else:
            await asyncio.to_thread(self._write_adapter, "start", lambda: state.start)
            await self._do(Load(checkpoint=job.file("start"), with_optimizer=False))
            if state.lacks_references:
                await self._refer()
        self._keep()
        for name in ("start", "copied", "reference"):  # the hub has copies of its own
            self._around.storage.delete(job.file(name))

    def _write_adapter(self, name: str, adapter: Callable[[], Adapter]) -> None:
        """Writes an adapter into the storage, unless it is there already."""
        storage, key = self._around.storage, self._job.file(name)
        if storage.has(key):
            return
        with storage.writing(key) as path:
            write_folder(self._model, adapter(), path)

    @property
    def _model(self) -> FrozenModel:
        return self._around.model

    async def _refer(self) -> None:
        """Computes and keeps log-probabilities of the samples by the reference."""
        job, prepared = self._job, self._state.prepared
        submit, other = self._submit, None
        if not prepared.starts_as_reference:
            other = f"{job.id}-reference"
            submit = _Numbers(self._around.hub, job.tenant, other)
            if (
                prepared.reference is None
            ):  # the base, to which a fresh adapter is equal
                submit(Create(rank=1, lora_alpha=1.0, target_modules=None, seed=0))
            else:
                reference, path = prepared.reference, job.file("reference")
                await asyncio.to_thread(
                    self._write_adapter, "reference", lambda: reference
                )
                submit(Load(checkpoint=path, with_optimizer=False))
        passes = {
            which: self._forward(BatchLoss.of(batch), submit)
            for which, batch in self._state.plain_batches(0).items()
        }
        found = {which: await _log_likelihoods(own) for which, own in passes.items()}
        if other is not None:
            await _result(submit(Unload()))
        if not self._around.storage.has(key := job.file("references")):
            with self._around.storage.writing(key) as path:
                safetensors.numpy.save_file(found, path)

    def _read_references(self) -> None:
        if self._state.lacks_references:
            path = self._around.storage.fetch(self._job.file("references"))
            self._state.references = safetensors.numpy.load_file(path)

    # ---- steps -----------------------------------------------------------------------

    async def _submit_batch(self) -> None:
        """Submits the pass and the step of the next global batch."""
        state, step = self._state, self._num_submitted
        self._num_submitted += 1
        batch, values = state.batch(0, step), None
        loss = BatchLoss.of(batch, await self._baseline(batch))
        if loss.is_linear:
            weights = loss.weights()
        else:
            data = loss.data
            found = await self._do(
                Pass(data=data, loss=_CROSS_ENTROPY, is_training=False)
            )
            weights, values = loss.weights(found.logprobs), loss.values(found.logprobs)
        data, rate = loss.weighted(weights), state.learning_rate(step)
        passed = self._submit(Pass(data=data, loss=_CROSS_ENTROPY, is_training=True))
        stepped = self._submit(Step(params=self._params(rate)))
        self._in_flight.append(
            _Batch(
                batch=batch,
                rate=rate,
                values=values,
                passed=passed,
                stepped=stepped,
                next_seq=self._seq,
            )
        )

    def _params(self, rate: float) -> AdamParams:
        job = self._state.settings
        settings = ADAMW.settings_of(job)
        return AdamParams(
            learning_rate=rate,
            betas=(settings["b1"], settings["b2"]),
            eps=settings["eps"],
            lora_plus_ratio=job.lora_plus_ratio,
            weight_decay=job.weight_decay,
            grad_clip_norm=job.max_grad_norm or 0.0,
        )

    async def _settle(self) -> None:
        """Takes the results of the oldest batch that is in flight."""
        state, own = self._state, self._in_flight[0]
        passed, stepped = await _result(own.passed), await _result(own.stepped)
        self._in_flight.popleft()
        values = dict(own.values or {"loss": passed.loss})
        loss, norm = values.pop("loss"), stepped.grad_norm
        if not stepped.is_finite or not math.isfinite(loss):
            state.fail_of_step(loss, norm)
            raise FailedOperation(state.progress.reason)
        batch = own.batch
        state.note_step(loss, batch.num_tokens, batch.num_target_tokens)
        self._times.append((time.monotonic(), state.progress.step))
        names = batch.metric_names
        event = StepEvent(
            **self._of_event(),
            loss=loss,
            grad_norm=norm,
            learning_rate=own.rate,
            num_tokens=batch.num_tokens,
            num_target_tokens=batch.num_target_tokens,
            metrics={name: x for name, x in values.items() if name in names},
        )
        seq, self._seq = self._seq, own.next_seq
        self._keep(event)
        self._seq = seq

    def _of_event(self) -> dict[str, Any]:
        state = self._state
        return {
            "round": state.progress.step,
            "job": state.name,
            "progress": state.progress,
            "num_steps": state.num_steps,
        }

    # ---- between batches -------------------------------------------------------------

    async def _has_left(self) -> bool:
        """Does what is due before the next batch; returns whether none follows."""
        state, job, step = self._state, self._job, self._num_submitted
        asked = [one for one in (job.stop, job.pause) if one is not None]
        is_due = step >= state.num_steps or state.wants_eval(step)
        is_due |= state.has_stalled() or any(one.at <= step for one in asked)
        if not (is_due or any(copy.at <= step for copy in job.copies)):
            return False
        while self._in_flight:
            await self._settle()
        if state.wants_eval() and state.lacks_eval():
            await self._evaluate()
        while copies := [copy for copy in job.copies if copy.at <= step]:
            await self._copy(copies[0])
        state.end_if_due()
        if not state.progress.is_over and job.stop is not None and job.stop.at <= step:
            state.update(status="stopped", reason=job.stop.reason)
        if state.progress.is_over:
            await self._end()
            return True
        if job.pause is not None and job.pause.at <= step:
            state.update(status="paused", reason=job.pause.reason)
            self._keep(is_last=True)
            return True
        return False

    async def _copy(self, copy: Copy) -> None:
        """Writes the whole state of the job for a copy of it."""
        job, storage = self._job, self._around.storage
        await self._save(job.file("copied", copy.job), "state")
        references = job.file("references", copy.job)
        if self._state.references and not storage.has(references):
            path = storage.fetch(job.file("references"))
            with storage.writing(references) as new:
                shutil.copyfile(path, new)
        job.copies = tuple(one for one in job.copies if one is not copy)
        self._keep()
        self._copied(copy)

    async def _evaluate(self) -> None:
        """Evaluates the adapter on the held-out samples."""
        state = self._state
        batch, baseline = state.eval_batch(0), await self._baseline(None)
        ranges = dict(state.eval_ranges) or {"": range(batch.num_groups)}
        passes = {
            name: self._forward(
                BatchLoss(batch=batch, groups=groups, baseline=baseline)
            )
            for name, groups in ranges.items()
        }
        of_sets = {name: await self._values(own) for name, own in passes.items()}
        sums, names = total([*of_sets.values()]), batch.metric_names
        loss = sums["loss"] / batch.num_terms
        if not math.isfinite(loss):
            raise FailedOperation("the evaluation loss is not finite")
        metrics = {name: sums[name] / batch.num_terms for name in names}
        if state.eval_ranges:
            metrics |= {
                f"loss/{name}": of_sets[name]["loss"] / batch.num_terms_of(groups)
                for name, groups in ranges.items()
            }
        by_set = losses_by_set(metrics)
        is_best = state.note_eval(loss, None, is_maximized=False, by_set=by_set)
        if is_best and state.settings.keep_best:
            await self._export()
        event = EvalEvent(
            **self._of_event(), eval_loss=loss, is_best=is_best, metrics=metrics
        )
        self._keep(event)

    async def _export(self) -> None:
        """Writes the adapter, in place of the one that was written before."""
        job = self._job
        key, old = job.file(f"adapter-{self._state.progress.step}"), job.adapter
        await self._save(key, "adapter")
        job.adapter = key
        if old is not None and old != key:
            self._around.storage.delete(old)

    async def _end(self) -> None:
        """Evaluates and exports the adapter of a job that is over, and unloads it."""
        state, job, self.is_ending = self._state, self._job, True
        if state.progress.status == "stopped" and state.lacks_eval():
            await self._evaluate()
        if not state.settings.keep_best:
            await self._export()
        await self._do(Unload())
        self._keep(is_last=True)
        self._around.storage.delete(job.file("references"))


class _Numbers:
    """Submits operations of a model beside the job's own, numbered from 1."""

    def __init__(self, hub: Hub, tenant: str, model: str):
        self._hub, self._tenant, self._model, self._seq = hub, tenant, model, 0

    def __call__(self, operation: Operation) -> Promise:
        self._seq += 1
        return self._hub.submit(self._tenant, self._model, self._seq, operation)


async def _log_likelihoods(
    passes: Sequence[tuple[BatchLoss, Promise]],
) -> np.ndarray:
    """Returns the sum over the targets of each sample, in nats, float64."""
    sums = []
    for part, promise in passes:
        found = iter((await _result(promise)).logprobs)
        for i in part.groups:
            for sample in part.batch.group(i):
                own = next(found) if len(sample.token_ids) > 1 else np.zeros(0)
                is_target = next_token_targets(sample)[:-1]
                sums.append(own[is_target].sum(dtype=np.float64))
    return np.array(sums)


async def _result(promise: Promise) -> Any:
    """Waits for an operation; returns its result.

    Raises:
        FailedOperation: It has failed.
    """
    outcome = await awaited(promise.outcome)
    if isinstance(outcome, Failed):
        raise FailedOperation(outcome.message)
    assert isinstance(outcome, Done)
    return outcome.result


def awaited[T](future: Future[T]) -> asyncio.Future[T]:
    """Returns a future of this loop. To cancel it does not cancel the other one."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def take(done: Future[T]) -> None:
        if found.done():
            return
        if (error := done.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(done.result())

    def tell(done: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(take, done)

    future.add_done_callback(tell)
    return found
