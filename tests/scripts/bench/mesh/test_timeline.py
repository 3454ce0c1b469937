"""Passes of a profiled window, from a made-up profile."""

import numpy as np

from scripts.bench.device_trace import Kernel
from scripts.bench.mesh.timeline import draw_step, measured


def kernels_of(program, device, runs, rng):
    """Kernels of some runs of a program: one that repeats between two that do not."""
    for start, end in runs:
        cuts = np.sort(rng.uniform(start, end, 4))
        edges = [start, *cuts, end]
        names = ["first", "layer", "layer", "layer", "last"]
        for name, left, right in zip(names, edges[:-1], edges[1:], strict=True):
            yield Kernel(
                name=name,
                instruction=f"{name}.1",
                module=program,
                device=device,
                start_ms=left,
                ms=right - left,
            )


def test_runs_are_told_apart_by_the_kernels_that_run_once():
    rng = np.random.default_rng(0)
    edges = np.sort(rng.uniform(0, 100, 12)).reshape(6, 2)
    forward, backward = edges[0::2], edges[1::2]
    last = np.sort(rng.uniform(0, 100, 6)).reshape(3, 2)
    kernels = [
        *kernels_of("jit_backward", 1, backward, rng),
        *kernels_of("jit_forward", 1, forward, rng),
        *kernels_of("jit_accumulate", 3, last, rng),
        *kernels_of("jit_optimizer_step", 3, last[:1], rng),
    ]
    rng.shuffle(kernels)
    found = measured(kernels, [1, 3], [0, 2, 5])
    expected = [(0, "F", forward), (0, "B", backward), (1, "B", last)]
    passes = {
        (stage, kind, tick): tuple(run / 1000)
        for stage, kind, runs in expected
        for tick, run in zip([0, 2, 5], runs, strict=True)
    }
    assert found.num_stages == 2 and len(found.passes) == 9
    for p in found.passes:
        np.testing.assert_allclose((p.start, p.end), passes[p.stage, p.kind, p.tick])


def test_a_step_is_drawn(tmp_path):
    rng = np.random.default_rng(1)
    kernels = [*kernels_of("jit_accumulate", 0, [(0, 9)], rng)]
    kernels += kernels_of("all-reduce", 1, [(0, 9)], rng)
    draw_step(kernels, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
