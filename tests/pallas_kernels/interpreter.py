"""Adjusts Pallas' GPU interpreter where it differs from the hardware.

It runs a thread's jaxpr with NumPy, as compiling it would take longer than running it.
It has no `wgmma` with the left operand in registers. Its race detector wants a proxy
fence between a thread's load of shared memory and a bulk copy that overwrites it, even
with a barrier between them. The hardware needs no fence there, because a load returns
its value before the thread arrives at the barrier. Stores do need the fence. And it
takes any two accesses to a `RefUnion` for accesses to the same bytes, although a ring
may hold one stage as one dtype while the next stage is filled as another.
"""

import collections
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

from tests.pallas_kernels.numpy_jaxpr import compile_functions, evaluate

_Copy = gpu_callbacks.AsyncCopyGmemToSmemTask
_BLOCK_BYTES = 8192
_ALIGNMENT = 1024  # of the buffers in a union


class _Races(gpu_callbacks.GPURaceDetectionState):
    """A race detector to which each block of a union's bytes is a union of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.starts = {}  # the first byte of each buffer in its union
        self.ends = collections.defaultdict(int)  # the bytes of each group of buffers

    def tag_ref_union_member(self, key, union, alias_group):
        if key in self.starts:  # each thread tags all members
            return
        shape, itemsize = self._shape_and_itemsize(key)
        end = self.ends[union, alias_group]
        self.starts[key] = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.ends[union, alias_group] = self.starts[key] + math.prod(shape) * itemsize
        for block in self.blocks(key):
            tagged = (key, block), (union, block), alias_group
            super().tag_ref_union_member(*tagged)

    def check_read(self, thread, clock, buffer_key, rnge, source_info=None):
        super().check_read(thread, clock, buffer_key, rnge, source_info)
        for block in self.blocks(buffer_key, rnge.range):
            at = buffer_key, block
            self._check_ref_union(thread, clock, at, False, source_info)

    def check_write(self, thread, clock, buffer_key, rnge, source_info=None):
        super().check_write(thread, clock, buffer_key, rnge, source_info)
        for block in self.blocks(buffer_key, rnge.range):
            at = buffer_key, block
            self._check_ref_union(thread, clock, at, True, source_info)
            # Whatever follows this access also follows those that it follows.
            with self.lock:
                accesses = self.union_accesses[self.ref_union_members[at][0]]
                accesses[:] = [a for a in accesses if not a[1].lt(clock)]

    def blocks(self, key, ranges=None) -> Iterator[int]:
        """Yields the blocks of a union from the first to the last byte of an access.

        There are none for buffers outside unions.
        """
        if key not in self.starts:
            return
        shape, itemsize = self._shape_and_itemsize(key)
        if ranges is None:
            ranges = [slice(0, n) for n in shape]
        spans = [
            (r, r + 1) if isinstance(r, int) else (r.start, r.stop) for r in ranges
        ]
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        each = list(zip(spans, shape, strides, strict=True))
        first = sum(span[0] * stride for span, _, stride in each)
        last = sum((min(span[1], n) - 1) * stride for span, n, stride in each)
        start = self.starts[key]
        yield from range(
            (start + first * itemsize) // _BLOCK_BYTES,
            (start + (last + 1) * itemsize - 1) // _BLOCK_BYTES + 1,
        )

    @staticmethod
    def _shape_and_itemsize(key) -> tuple[tuple[int, ...], int]:
        buffer = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype(key)
        return tuple(buffer.shape), np.dtype(buffer.dtype).itemsize


def adjust(monkeypatch) -> list[_Races]:
    """Adjusts the interpreter until the test ends.

    Returns:
        A list to which each kernel that runs adds the state of its race detector.
    """
    found = []
    compile_functions()

    def races(*args, **kwargs):
        found.append(_Races(*args, **kwargs))
        return found[-1]

    wgmma = _with_registers(gpu_callbacks.wgmma)
    monkeypatch.setattr(thread_map, "_run_jaxpr", _run_thread)
    monkeypatch.setattr(memory, "_to_int", _to_int)
    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", races)
    monkeypatch.setattr(_Copy, "post_read", _after_loads(_Copy.post_read))
    return found


def _run_thread(jaxpr, consts, *args):
    evaluate(jaxpr, [*consts, *args])


def _to_int(x):
    return x if isinstance(x, jax.core.Tracer) else int(x)


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
                for block in races.blocks(key):
                    union, _ = races.ref_union_members[key, block]
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
