"""The time of each pass of a pipeline when nothing else runs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.bench.mesh.mesh_training import MeshTraining
from jaxlora.bench.scheduler.lengths import lengths
from jaxlora.bench.tokens import equal_shares, fill, shared_batches
from jaxlora.bench.training import Start, time_steps
from jaxlora.data.pack import PackedBatch, pack_tick
from jaxlora.scheduler import CostModel, StageCost
from jaxlora.scheduler.calibrate import TimePoint, fit_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """A microbatch which every lane of a tick runs.

    Attributes:
        packed: The rows of the tick.
        tokens: Tokens of the microbatch.
        squares: Sum of the squared lengths of its samples.
    """

    packed: PackedBatch
    tokens: int
    squares: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Measured passes, and the cost model that they determine.

    Attributes:
        points: By the name of the pass ("F0" is the forward pass of stage 0, "B0" its
            backward pass, "FB1" both passes of the last stage 1), the measurements.
        cost: Fitted times in seconds. The passes of the last stage are half of the time
            of both of them each, as nothing can lie between them.
        mape: Largest mean absolute percentage error of a fit, as a fraction.
    """

    points: dict[str, list[TimePoint]]
    cost: CostModel
    mape: float


def measure_passes(training: MeshTraining) -> PassTimes:
    """Measures all passes of a pipeline and the transfers between its stages.

    Each pass runs several times in a row on one stage, while the others are idle. The
    gradients that the slots have afterwards are discarded.
    """
    timer = _Timer(training)
    for probe in make_probes(training):
        timer.measure(probe)
    training.load()
    fits = {name: fit_time(points) for name, points in timer.points.items()}
    last = len(training.layout.stages) - 1
    both = fits[f"FB{last}"].cost * 0.5
    stages = [
        StageCost(forward=fits[f"F{s}"].cost, backward=fits[f"B{s}"].cost)
        for s in range(last)
    ]
    cost = CostModel(
        stages=(*stages, StageCost(forward=both, backward=both)),
        communication=float(np.median(timer.transfers)),
    )
    mape = max(fit.mape for fit in fits.values())
    return PassTimes(points=timer.points, cost=cost, mape=mape)


def make_probes(training: MeshTraining) -> list[Probe]:
    """Makes microbatches of different lengths and fills, which determine a fit.

    Their lengths are ragged like those of the jobs, which are cut to different largest
    lengths: attention takes longer for ragged samples than for equal ones with the same
    sum of squares.
    """
    case, longest = training.case, training.case.longest
    half = case.limits.padded(case.capacity // 2)
    return [
        _probe(training, case.capacity, longest),
        _probe(training, case.capacity, longest // 2),
        _probe(training, case.capacity, longest // 4),
        _probe(training, half, longest),
    ]


def full_tick(training: MeshTraining) -> PackedBatch:
    """Makes a tick of full microbatches, with lengths like those of the jobs."""
    case = training.case
    return _probe(training, case.capacity, case.longest).packed


def _probe(training: MeshTraining, num_tokens: int, longest: int) -> Probe:
    case, vocab_size = training.case, training.spec.config.vocab_size

    def draw(slot: int, total: int, rng: np.random.Generator) -> list[int]:
        source = case.data_sets[slot]
        return fill(total, longest, lambda: lengths(source, 1, rng).item())

    totals = equal_shares(num_tokens, max(case.adapters), case.block_tokens)
    batches = shared_batches(totals, draw, vocab_size, seed=0)
    drawn = [len(s.token_ids) for batch in batches.values() for s in batch.samples]
    microbatch = tuple(s for batch in batches.values() for s in batch.to_schedule())
    lanes = [microbatch] * training.layout.num_lanes
    return Probe(
        packed=pack_tick(lanes, batches, case.limits),
        tokens=sum(drawn),
        squares=sum(length**2 for length in drawn),
    )


class _Timer:
    """Runs the passes of a probe one by one.

    Attributes:
        points: The measurements of each pass, by name.
        transfers: Seconds of transfers between neighboring stages.
    """

    def __init__(self, training: MeshTraining):
        self._training, self._stages = training, training.layout.stages
        self.points: dict[str, list[TimePoint]] = {}
        self.transfers: list[float] = []

    def measure(self, probe: Probe) -> None:
        """Runs a probe forward and backward through all stages."""
        h: tuple[Any, ...] = ()
        kept: list[Any] = []
        last = len(self._stages) - 1
        for stage in range(last):
            forward = functools.partial(
                self._stages[stage].steps.forward, *self._inputs(probe, stage), *h
            )
            self._time(f"F{stage}", probe, lambda forward=forward: _wait(forward()))
            out, residuals = forward()
            kept.append(residuals)
            h = (self._send(out, stage + 1),)
        dh = self._both(probe, last, h)
        for stage in reversed(range(last)):
            dh = self._backward(probe, stage, kept.pop(), self._send(dh, stage))

    def _inputs(self, probe: Probe, stage: int) -> tuple[Any, ...]:
        batch = self._training.place(probe.packed, stage)
        return self._training.inputs(stage, batch)

    def _both(self, probe: Probe, stage: int, h: tuple[Any, ...]) -> Any:
        """Times the last stage; returns the gradient of its input."""
        batch, out = self._training.place(probe.packed, stage), []

        def start():
            pending, dh = self._training.accumulate(batch, *h)
            out[:] = [dh]
            return _wait(jnp.copy(pending.is_finite))  # the next call takes the other

        self._time(f"FB{stage}", probe, start)
        return out[0]

    def _backward(self, probe: Probe, stage: int, kept: Any, dh: Any) -> Any:
        """Times a backward pass; returns the gradient of the stage's input."""
        table, base = self._training.slots.tables[stage], self._training.bases[stage]
        run, out = self._stages[stage].steps.backward, []

        def start():
            state = table.state
            pending, before = run(base, state.params, kept, state.pending, dh)
            table.state = dataclasses.replace(state, pending=pending)
            out[:] = [before]
            return _wait(jnp.copy(pending.is_finite))

        self._time(f"B{stage}", probe, start)
        return out[0]

    def _time(self, name: str, probe: Probe, start: Start) -> None:
        milliseconds = time_steps(start, self._training.case.repeats, warm_ups=2)
        point = TimePoint(
            tokens=self._training.case.limits.padded(probe.tokens),
            squares=probe.squares,
            seconds=float(np.median(milliseconds)) / 1000,
        )
        self.points.setdefault(name, []).append(point)

    def _send(self, rows: Any, stage: int) -> Any:
        """Times a transfer to a stage, and returns the rows there."""
        jax.block_until_ready(rows)
        move = functools.partial(self._training.place, rows, stage)
        times = time_steps(lambda: _wait(move()), self._training.case.repeats)
        self.transfers.append(float(np.median(times)) / 1000)
        return move()


def _wait(made: Any) -> Callable[[], object]:
    return functools.partial(jax.block_until_ready, made)
