"""Passes found in the kernels of a profile, on synthetic profiles."""

import dataclasses
import types

import pytest

from jaxlora.bench.mesh.measured_timeline import measured_timeline, runs_of_program
from jaxlora.profile.device_trace import Kernel, _kernels
from jaxlora.scheduler import Limits, Sample, Schedule

MODULES = {"F": "jit_forward(17)", "B": "jit_backward", "FB": "jit_accumulate"}


def kernel(name, start_ms, ms=1.0, module="jit_forward", device=0):
    return Kernel(
        name=name,
        instruction=name,
        module=module,
        start_ms=start_ms,
        ms=ms,
        device=device,
    )


def test_runs_are_divided_by_kernels_that_ran_once_in_each():
    kernels = [
        # Both runs begin with "a", and end with "c"; the first has "b" twice.
        *(kernel("a", 0), kernel("b", 1), kernel("b", 2), kernel("c", 3)),
        *(kernel("a", 10), kernel("c", 12, 5.0)),
    ]
    assert runs_of_program(kernels[::-1], 2) == [(0.0, 0.004), (0.01, 0.017)]


def test_a_kernel_that_ran_twice_in_one_run_does_not_lengthen_another():
    kernels = [kernel("a", 0), kernel("a", 10), kernel("b", 11), kernel("b", 30)]
    kernels += [kernel("a", 20)]
    with pytest.raises(ValueError, match=r"ran 4 times.*ran \[2, 3\] times"):
        runs_of_program(kernels, 4)
    # "b" ran as often as the program, but not once in each run.
    two = [kernel("a", 0), kernel("a", 10), kernel("b", 11), kernel("b", 30)]
    assert runs_of_program(two, 2) == [(0.0, 0.001), (0.01, 0.011)]


def sample(job, batch):
    return Sample(owner=job, batch=batch, index=0, num_tokens=4)


def test_ticks_follow_from_the_order_of_execution():
    """Two stages; the second tick is a no-op; each batch is followed by a step."""
    limits = Limits(capacity=8, block_tokens=4)
    schedule = Schedule(
        microbatches=((sample(0, 0),), (), (sample(0, 1), sample(1, 0))), limits=limits
    )
    kernels = []

    def ran(kind, device, *starts):
        module = MODULES.get(kind, "jit_optimizer_step")
        kernels.extend(kernel(kind, t, 2.0, module, device) for t in starts)

    ran("F", 4, 0, 2)
    ran("FB", 7, 3, 9)
    ran("B", 4, 6, 12)
    ran("step", 4, 8, 14)
    ran("step", 7, 11, 15)
    kernels.append(kernel("copy", 1, module="jit_other", device=4))
    found = measured_timeline(kernels, [4, 7], schedule)
    passes = sorted((p.stage, p.start, p.kind, p.tick) for p in found.passes)
    assert passes == [
        *((0, 0.0, "F", 0), (0, 0.002, "F", 2), (0, 0.006, "B", 0)),
        *((0, 0.008, "step", 0), (0, 0.012, "B", 2), (0, 0.014, "step", 2)),
        *((1, 0.003, "B", 0), (1, 0.009, "B", 2)),
        *((1, 0.011, "step", 0), (1, 0.015, "step", 2)),
    ]
    assert found.makespan == pytest.approx(0.017)


def test_a_profile_of_gpus_has_a_plane_for_each_of_them():
    def event(name, **stats):
        return types.SimpleNamespace(
            name=name, start_ns=3e6, duration_ns=2e6, stats=stats.items()
        )

    def plane(name, line, *events):
        lines = [types.SimpleNamespace(name=line, events=events)]
        return types.SimpleNamespace(name=name, lines=lines)

    facts = {"hlo_module": "jit_forward", "hlo_op": "fusion.1"}
    planes = [
        plane("/host:CPU", "python", event("loop", hlo_op="x")),
        plane("/device:GPU:0", "Stream #13(compute)", event("a", **facts)),
        plane("/device:GPU:3", "Stream #13(compute)", event("b", **facts)),
        plane("/device:GPU:3", "XLA Ops", event("b", **facts)),
    ]
    made = [dataclasses.astuple(k) for k in _kernels(planes)]
    assert made == [
        ("a", "fusion.1", "jit_forward", 3.0, 2.0, 0),
        ("b", "fusion.1", "jit_forward", 3.0, 2.0, 3),
    ]
