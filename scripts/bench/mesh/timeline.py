"""Pictures of profiled windows and steps, from the kernels that each device ran."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxlora.scheduler.timeline import Kind, TimedPass, Timeline
from scripts.bench.device_trace import Kernel, is_exchange

# The programs of a stage, and the passes that they run. The last stage runs both passes
# of a tick in one program.
_PROGRAMS: Mapping[str, Kind] = {
    "jit_forward": "F",
    "jit_backward": "B",
    "jit_accumulate": "B",
}


def measured(
    kernels: Sequence[Kernel], devices: Sequence[int], ticks: Sequence[int]
) -> Timeline:
    """Returns the passes of a profiled window, in seconds.

    Args:
        kernels: The kernels of a window.
        devices: The first device of each stage.
        ticks: Numbers of the ticks that run, in the order of the window.
    """
    passes = tuple(
        TimedPass(stage=stage, kind=kind, tick=tick, start=start, end=end)
        for stage, device in enumerate(devices)
        for name, kind in _PROGRAMS.items()
        for tick, (start, end) in zip(
            ticks, _runs(kernels, device, name, len(ticks)), strict=False
        )
    )
    return Timeline(passes=passes, num_stages=len(devices))


def _runs(
    kernels: Sequence[Kernel], device: int, program: str, number: int
) -> Iterator[tuple[float, float]]:
    """Yields start and end of each run of a program on a device.

    A profile says which program a kernel belongs to, and not which run of it. So runs
    are told apart by the kernels that run once in each of them.

    Args:
        kernels: The kernels of all devices.
        device: The device.
        program: Name of the program.
        number: How often it ran; other programs yield nothing.
    """
    own = [k for k in kernels if k.device == device and k.module == program]
    own.sort(key=lambda k: k.start_ms)
    counts = Counter((k.name, k.instruction) for k in own)
    once = [k for k in own if counts[k.name, k.instruction] == number]
    if not once:
        return
    first, last = once[0], once[-1]
    of = lambda one: [
        k for k in once if (k.name, k.instruction) == (one.name, one.instruction)
    ]
    for begin, end in zip(of(first), of(last), strict=True):
        yield begin.start_ms / 1000, (end.start_ms + end.ms) / 1000


def draw_step(kernels: Sequence[Kernel], path: Path) -> None:
    """Draws when each device computes in a part of a step, and when it exchanges data.

    The part is a tenth of the step, about two layers of a decoder of 32.

    Args:
        kernels: The kernels of a step.
        path: Image file to write.
    """
    from matplotlib.figure import Figure

    devices = sorted({k.device for k in kernels})
    origin = min(k.start_ms for k in kernels)
    whole = max(k.start_ms + k.ms for k in kernels) - origin
    figure = Figure(figsize=(14, 1 + 0.8 * len(devices)), layout="constrained")
    axes = figure.subplots()
    rows = {(d, x): 2 * i + x for i, d in enumerate(devices) for x in (False, True)}
    for (device, exchanges), row in rows.items():
        own = [k for k in kernels if k.device == device]
        spans = [
            (k.start_ms - origin, k.ms) for k in own if is_exchange(k) == exchanges
        ]
        color = "C1" if exchanges else "C0"
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color)
    names = [f"GPU {d}: {'exchanges' if x else 'compute'}" for d, x in rows]
    axes.set_yticks(list(rows.values()), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.3 * whole, 0.4 * whole)
    axes.set_xlabel(f"milliseconds of {whole:.0f}")
    figure.savefig(path, dpi=150)
