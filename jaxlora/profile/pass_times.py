"""The time of each pass of a run when nothing else runs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.data.pack import pack_tick
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.profile.tokens import shared_batches
from jaxlora.profile.training import Start, Training, time_steps
from jaxlora.scheduler import AffineCost, CostModel, Limits, StageCost
from jaxlora.scheduler.calibrate import TimePoint, fit_time

# Returns lengths that add up to a job's total, given its slot and total.
Draw = Callable[[int, int, np.random.Generator], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """A microbatch which every lane of a tick runs.

    Attributes:
        packed: The rows of the tick.
        tokens: Tokens of the microbatch, padded to whole blocks.
        squares: Sum of the squared lengths of its samples.
        num_padding: Rows of padding. If there are any, the probe is not of the fit, and
            shows what they cost.
    """

    packed: PackedBatch
    tokens: int
    squares: int
    num_padding: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Measured passes, and the cost model that they determine.

    Attributes:
        points: By the name of the pass ("F0" is the forward pass of stage 0, "B0" its
            backward pass, "FB1" both passes of the last stage 1), the measurements.
        cost: Fitted times in seconds. The passes of the last stage are half of the time
            of both of them each, as nothing can lie between them.
        mape: Largest mean absolute percentage error of a fit, as a fraction.
        padding: Median time of a row of padding on the last stage, as a share of that
            of a token; 1.0 without probes that show it.
    """

    points: dict[str, list[TimePoint]]
    cost: CostModel
    mape: float
    padding: float


def make_probe(
    training: Training, limits: Limits, totals: Sequence[int], draw: Draw
) -> Probe:
    """Makes a microbatch of random tokens.

    Args:
        training: The run.
        limits: Limits of the microbatch.
        totals: Tokens of each job.
        draw: Draws the lengths of a job's samples. They should be ragged like those of
            real jobs: attention takes longer for them than for equal lengths with the
            same sum of squares.
    """
    batches = shared_batches(totals, draw, training.spec.config.vocab_size, seed=0)
    drawn = [len(s.token_ids) for batch in batches.values() for s in batch.samples]
    microbatch = tuple(s for batch in batches.values() for s in batch.to_schedule())
    lanes = [microbatch] * training.layout.num_lanes
    return Probe(
        packed=pack_tick(lanes, batches, limits),
        tokens=limits.padded(sum(drawn)),
        squares=sum(length**2 for length in drawn),
    )


def measure_passes(
    training: Training, probes: Iterable[Probe], repeats: int
) -> PassTimes:
    """Measures all passes of a run and the transfers between its stages.

    Each pass runs several times in a row on one stage, while the others are idle. The
    gradients that the slots have afterwards are discarded.

    Args:
        training: The run.
        probes: Microbatches of different lengths and sizes, which determine a fit.
        repeats: Number of timed calls of each pass.

    Raises:
        ValueError: The probes do not determine a fit.
    """
    timer = _Timer(training, repeats)
    for probe in probes:
        timer.measure(probe)
    training.load()
    fits = {name: fit_time(points) for name, points in timer.points.items()}
    last = len(training.layout.stages) - 1
    both = fits[f"FB{last}"][0] * 0.5
    stages = [
        StageCost(forward=fits[f"F{s}"][0], backward=fits[f"B{s}"][0])
        for s in range(last)
    ]
    cost = CostModel(
        stages=(*stages, StageCost(forward=both, backward=both)),
        communication=float(np.median(timer.transfers)) if timer.transfers else 0.0,
    )
    return PassTimes(
        points=timer.points,
        cost=cost,
        mape=max(mape for _, mape in fits.values()),
        padding=padding_share(timer.padded, fits[f"FB{last}"][0]),
    )


def padding_share(padded: Sequence[tuple[int, TimePoint]], cost: AffineCost) -> float:
    """Returns the time of a row of padding, as a share of that of a token.

    Args:
        padded: Rows of padding and the measurement, of probes that have some.
        cost: Time of both passes, by tokens.
    """
    shares = [
        (p.seconds - cost(p.tokens, p.squares)) / (rows * cost.per_token)
        for rows, p in padded
        if cost.per_token
    ]
    return min(1.0, max(0.0, float(np.median(shares)))) if shares else 1.0


class _Timer:
    """Runs the passes of a probe one by one.

    Attributes:
        points: The measurements of each pass, by name.
        padded: Rows of padding and the measurement of the last stage, of probes with
            padding.
        transfers: Seconds of transfers between neighboring stages.
    """

    def __init__(self, training: Training, repeats: int):
        self._training, self._stages = training, training.layout.stages
        self._repeats = repeats
        self.points: dict[str, list[TimePoint]] = {}
        self.padded: list[tuple[int, TimePoint]] = []
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
        milliseconds = time_steps(start, self._repeats, warm_ups=2)
        point = TimePoint(
            tokens=probe.tokens,
            squares=probe.squares,
            seconds=float(np.median(milliseconds)) / 1000,
        )
        if not probe.num_padding:
            self.points.setdefault(name, []).append(point)
        elif name == f"FB{len(self._stages) - 1}":
            self.padded.append((probe.num_padding, point))

    def _send(self, rows: Any, stage: int) -> Any:
        """Times a transfer to a stage, and returns the rows there."""
        jax.block_until_ready(rows)
        move = functools.partial(self._training.place, rows, stage)
        times = time_steps(lambda: _wait(move()), self._repeats)
        self.transfers.append(float(np.median(times)) / 1000)
        return move()


def _wait(made: Any) -> Callable[[], object]:
    return functools.partial(jax.block_until_ready, made)
