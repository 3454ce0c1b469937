"""Kernels in synthetic profiles, and their kinds."""

import dataclasses
import types

from scripts.bench.kernel_times import (
    Kernel,
    _kernels,
    busy_ms,
    by_kind,
    median_kernels,
    ranked,
)


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


def test_busy_time_counts_overlaps_once():
    spans = [(0, 4), (1, 1), (3, 3), (9, 1)]
    kernels = [
        Kernel(name="a", instruction="", module="", start_ms=start, ms=ms)
        for start, ms in spans
    ]
    assert busy_ms(kernels) == 7


def test_kernels_are_told_apart_by_their_names():
    calls = [("lora_expand_sm90", 5.0), ("fusion_1", 2.0), ("lora_shrink_sm90", 1.0)]
    calls += [("nvjet_sm90_tst_128x256", 4.0), ("cudnn_sdpa_fprop", 3.0)]
    calls += [("fusion_1", 1.5), ("lora_produce_sm90", 0.5), ("dual_kernel", 0.25)]
    calls += [("lora_quantizeshrink", 6.0), ("nvjet_sm90_tss_256x128", 7.0)]
    assert [*by_kind(calls, 2).values()] == [5.0, 6.0, 0.5, 1.25, 3.0, 7.0, 4.0, 3.5]
    assert ranked(calls)[2] == ("lora_expand_sm90", 1, 5.0)
    assert ("fusion_1", 2, 3.5) in ranked(calls)
    assert median_kernels([calls, calls[:], calls])[0] == calls[0]
