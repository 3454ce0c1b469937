"""Finds the passes of a pipeline in the kernels that the devices ran."""

from collections import defaultdict
from collections.abc import Sequence

from jaxlora.profile.device_trace import Kernel
from jaxlora.scheduler import Schedule
from jaxlora.scheduler.lanes import ticks_of
from jaxlora.scheduler.timeline import Kind, TimedPass, Timeline

# The compiled functions of a stage. The last stage runs a tick forward and backward in
# one of them.
_KINDS: dict[str, Kind] = {
    "jit_forward": "F",
    "jit_backward": "B",
    "jit_accumulate": "B",
    "jit_optimizer_step": "step",
}


def measured_timeline(
    kernels: Sequence[Kernel],
    devices: Sequence[int],
    schedule: Schedule,
    num_lanes: int = 1,
) -> Timeline:
    """Returns the passes that the devices ran, in seconds.

    A device runs the passes of a kind in the order of their ticks, so the i-th run of a
    program belongs to the i-th tick that is not a no-op.

    Args:
        kernels: The kernels of one run of the schedule.
        devices: For each stage, the device that stands for it.
        schedule: The schedule.
        num_lanes: Number of microbatches in a tick.

    Raises:
        ValueError: The kernels are not those of this schedule.
    """
    ticks = ticks_of(schedule.microbatches, num_lanes)
    real = [number for number, tick in enumerate(ticks) if any(tick)]
    of_kind = {"F": real, "B": real, "step": _stepping(schedule, num_lanes)}
    passes = []
    for stage, device in enumerate(devices):
        for module, own in _by_module(kernels, device).items():
            kind = _KINDS[module]
            spans = runs_of_program(own, len(of_kind[kind]))
            passes += [
                TimedPass(stage=stage, kind=kind, tick=tick, start=start, end=end)
                for tick, (start, end) in zip(of_kind[kind], spans, strict=True)
            ]
    return Timeline(passes=tuple(passes), num_stages=len(devices))


def _stepping(schedule: Schedule, num_lanes: int) -> list[int]:
    """Returns the ticks that complete global batches."""
    last: dict[tuple[int, int], int] = {}
    for number, tick in enumerate(ticks_of(schedule.microbatches, num_lanes)):
        last |= {(s.owner, s.batch): number for m in tick for s in m}
    return sorted(set(last.values()))


def _by_module(kernels: Sequence[Kernel], device: int) -> dict[str, list[Kernel]]:
    """Returns the kernels of each pass on a device, by the name of the program."""
    out: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        module = kernel.module.split("(")[0]
        if kernel.device == device and module in _KINDS:
            out[module].append(kernel)
    return out


def runs_of_program(
    kernels: Sequence[Kernel], num_runs: int
) -> list[tuple[float, float]]:
    """Returns the start and end of each run of one program on one device, in seconds.

    A profile does not say where a run ends and the next one begins. But many kernels
    run exactly once in each run, and the first of them to start divides the others.

    Args:
        kernels: The kernels of the program, in any order.
        num_runs: Number of runs.

    Raises:
        ValueError: No kernel ran as many times as the program.
    """
    found: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in sorted(kernels, key=lambda k: k.start_ms):
        found[kernel.instruction, kernel.name].append(kernel)
    once = [same for same in found.values() if len(same) == num_runs]
    if not once:
        counts = sorted({len(same) for same in found.values()})
        raise ValueError(
            f"the profile has no kernel that ran {num_runs} times, as often as its "
            f"program; kernels ran {counts[:10]} times. Profile a shorter window."
        )
    first = once[0]  # as they are in the order of their first start
    borders = [kernel.start_ms for kernel in first[1:]] + [float("inf")]
    spans = [(kernel.start_ms, kernel.start_ms + kernel.ms) for kernel in first]
    for same in once:
        is_inside = all(
            start <= kernel.start_ms < border
            for kernel, (start, _), border in zip(same, spans, borders, strict=True)
        )
        # Others ran several times in some runs, and in others not at all.
        if is_inside:
            spans = [
                (start, max(end, kernel.start_ms + kernel.ms))
                for kernel, (start, end) in zip(same, spans, strict=True)
            ]
    return [(start / 1000, end / 1000) for start, end in spans]
