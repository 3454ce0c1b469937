"""Adjusts Pallas' GPU interpreter where it differs from the hardware.

It has no `wgmma` with the left operand in registers. Its race detector wants a proxy
fence between a thread's load of shared memory and a bulk copy that overwrites it, even
with a barrier between them. The hardware needs no fence there, because a load returns
its value before the thread arrives at the barrier. Stores do need the fence.
"""

import functools

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

_Races = gpu_callbacks.GPURaceDetectionState
_Copy = gpu_callbacks.AsyncCopyGmemToSmemTask


def adjust(monkeypatch, *, checks_unions: bool) -> list[_Races]:
    """Adjusts the interpreter until the test ends.

    Args:
        monkeypatch: Pytest's fixture.
        checks_unions: Whether two members of a `RefUnion` may not be in use at once.
            The detector knows unions as a whole. So the check must be off for a ring
            whose stages change from e4m3 to bfloat16 one by one.

    Returns:
        A list to which each kernel that runs adds the state of its race detector.
    """
    found = []

    def races(*args, **kwargs):
        found.append(_Races(*args, **kwargs))
        return found[-1]

    wgmma = _with_registers(gpu_callbacks.wgmma)
    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", races)
    if not checks_unions:
        monkeypatch.setattr(_Races, "_check_ref_union", lambda *_: None)
    monkeypatch.setattr(_Copy, "post_read", _after_loads(_Copy.post_read))
    return found


def _after_loads(post_read):
    """Makes the check of a copy's write ignore loads that happened before the copy."""

    @functools.wraps(post_read)
    def run(self, tma_thread_id, shared_memory):
        if shared_memory.detect_races:
            races, key = gpu_callbacks.get_races(), self.dst_allocation_key
            now = self.clock.generic_clock
            with races.lock:
                reads = races.reads[key]
                reads[:] = [read for read in reads if not read[1].lt(now)]
                union, _ = races.ref_union_members.get(key, (None, None))
                accesses = races.union_accesses[union]
                accesses[:] = [a for a in accesses if a[3] or not a[1].lt(now)]
        post_read(self, tma_thread_id, shared_memory)

    return run


def _with_registers(wgmma):
    """Makes `wgmma` also take values for its left operand."""

    @functools.wraps(wgmma)
    def run(*, a_allocation_key_as_array, **others):
        a = np.asarray(a_allocation_key_as_array)
        if a.ndim == 1:  # this is the key of a buffer
            return wgmma(a_allocation_key_as_array=a, **others)
        return _multiply(a, **others)

    return run


def _multiply(
    a,
    *,
    token,
    mesh_location,
    thread,
    acc_allocation_key_as_array,
    acc_transforms,
    b_allocation_key_as_array,
    b_transforms,
    source_info=None,
    a_transforms=(),
):
    assert not a_transforms
    shared = gpu_callbacks._get_shared_memory()
    logging_info = memory.GPULoggingInfo(mesh_location, thread, source_info)

    def place(key_as_array, transforms):
        key = memory.HostAllocationKey.from_array(key_as_array)
        transforms = gpu_callbacks._remove_noop_transforms(transforms)
        return key, shared.access(key, jax.tree.map(int, transforms))

    def content(at):
        return shared.get_buffer_content(*at, thread, logging_info=logging_info)[0]

    to = place(acc_allocation_key_as_array, acc_transforms)
    b = content(place(b_allocation_key_as_array, b_transforms))
    acc = content(to)
    total = acc + np.matmul(a, b, dtype=acc.dtype)
    shared.store_buffer_content(*to, total, thread, logging_info=logging_info)
    return token
