"""Kernels in a profile of several GPUs, on a synthetic profile."""

import dataclasses
import types

from scripts.bench.device_trace import _kernels


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
