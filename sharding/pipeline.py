"""The order of work of a 1F1B pipeline, as the host dispatches it.

A tick is a set of microbatches, one for each device of a stage, which run at the same
time. With one device per stage it is a microbatch. The pipeline runs ticks 0, 1, ...:
each of them forward on the stages 0 to S - 1, then backward on the stages S - 1 to 0.
The last stage runs the forward and backward pass of a tick at once, because nothing
lies between them.

In round i, every stage runs one forward pass, and then the backward pass of tick i. The
forward pass is of tick i + a, where stage 0 is a = W - 1 ticks ahead, the last stage
none, and those between are evenly spaced. W = S is the usual order; with more, stages
also wait less for transfers and for uneven ticks. Every device runs its work in the
order in which it is dispatched. So this order, not the host's timing, decides which
weights a pass reads.

An optimizer step that follows tick k happens on a stage that is a ticks ahead in round
k + W - 1 - a. By then, the stages before it have run the backward pass of tick k, so
norms over all stages are known without a wait. The next forward pass of this stage is
of tick k + W. So the next batch of an adapter may start W ticks after the last tick of
the batch before, and no sooner.

References:
    1F1B: arXiv 2104.04473, section 2.2. Batches of several adapters in one pipeline:
    LoRAFusion, arXiv 2510.00206, section 5.2, and mLoRA, arXiv 2312.02515, section 3.2.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Literal

# Ticks that the host may queue before the devices have finished the tick before them.
# Two keep the devices busy. Every further one would hold memory: the results of queued
# passes, and hidden states that wait for their copy to another stage.
RUN_AHEAD = 2

PassKind = Literal["forward", "backward", "forward_backward"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A pass of a tick through one stage.

    Attributes:
        kind: `forward_backward` is both passes at once, on the last stage.
        stage: Number of the stage.
        tick: Number of the tick.
    """

    kind: PassKind
    stage: int
    tick: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Passes between which no optimizer step happens on any stage.

    Attributes:
        passes: The passes. Each one comes after those that it depends on.
        stepping: Stage and tick of the optimizer steps that may follow the passes.
        finished: The tick whose step has happened on all stages before this round's
            steps; None: there is none.
    """

    passes: tuple[Pass, ...]
    stepping: tuple[tuple[int, int], ...]
    finished: int | None


def one_f_one_b(
    has_tick: Callable[[int], bool], num_stages: int, in_flight: int | None = None
) -> Iterator[Round]:
    """Yields the rounds of a pipeline from its fill to its drain.

    Args:
        has_tick: Whether there is a further tick of this number. It is asked once for
            each tick, in order, just before the tick is needed, until the answer is no.
        num_stages: Number of stages S.
        in_flight: Ticks W that are in flight on the first stage, at least S; None: S.
            More of them hide transfers and uneven ticks, and take more memory.

    Raises:
        ValueError: `in_flight` is smaller than the number of stages.
    """
    width = num_stages if in_flight is None else in_flight
    if width < num_stages:
        raise ValueError(
            f"in_flight={width} must be at least the number of stages, {num_stages}: "
            "with fewer ticks in flight, some stages never work."
        )
    last = num_stages - 1
    ahead = ticks_ahead(num_stages, width)
    num_ticks, has_ended = 0, False
    for number in itertools.count():
        while not has_ended and num_ticks < number + width:
            has_ended = not has_tick(num_ticks)
            num_ticks += not has_ended
        if has_ended and number >= num_ticks + width:
            return
        passes = []
        if number == 0:  # the pipeline fills
            passes = [
                Pass(kind="forward", stage=stage, tick=tick)
                for tick in range(min(width - 1, num_ticks))
                for stage in range(last)
                if tick < ahead[stage]
            ]
        passes += [
            Pass(kind="forward", stage=stage, tick=number + ahead[stage])
            for stage in range(last)
            if number + ahead[stage] < num_ticks
        ]
        if number < num_ticks:
            passes.append(Pass(kind="forward_backward", stage=last, tick=number))
            passes += [
                Pass(kind="backward", stage=stage, tick=number)
                for stage in reversed(range(last))
            ]
        yield Round(
            passes=tuple(passes),
            stepping=tuple(
                (stage, tick)
                for stage in range(num_stages)
                if 0 <= (tick := number - (width - 1 - ahead[stage])) < num_ticks
            ),
            finished=number - width if number >= width else None,
        )


def ticks_ahead(num_stages: int, in_flight: int) -> list[int]:
    """Returns how many ticks the forward passes of each stage are ahead.

    Args:
        num_stages: Number of stages S.
        in_flight: Ticks in flight on the first stage W.
    """
    last = num_stages - 1
    return [
        -(-(in_flight - 1) * (last - stage) // max(last, 1))
        for stage in range(num_stages)
    ]
