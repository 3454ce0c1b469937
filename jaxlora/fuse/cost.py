"""Predicts the time of a site with and without the fused kernels, and decides.

Times are device times of kernels that run one after the other, without the gaps
between them. `plain_costs` counts the kernels into which XLA compiles linears with
adapters and dropout for an H200, forward and backward (jax 0.11.2):

- A matrix product is a kernel by itself. It also adds a tensor to its result if
  nothing else reads the result.
- Element-wise operations with no such kernel between them are one loop, which also
  keeps what later kernels read, such as a dropout mask.
"""

import dataclasses
import functools
import math

from jaxlora.fuse.device_rates import (
    TILE_COLUMNS,
    TILE_ROWS,
    KernelRates,
    describe_device,
)
from jaxlora.fuse.site import Site
from jaxlora.fuse.site_shape import Formed, SiteShape
from jaxlora.pallas_kernels import BACKENDS
from jaxlora.pallas_kernels.mosaic.tuning import (
    OuterCost,
    best_plan,
    shares_for,
    splits_for,
)

# Integer operations of Threefry-2x32 for each output: 20 rounds of an addition, a
# rotation and an exclusive or, the additions of the key, and the two counters. XLA's
# program for an H200 executes 83 of them; it folds the others into constants.
THREEFRY_OPERATIONS = 83
_DROPOUT_OPERATIONS = 9  # per element: a uniform number, a comparison and a choice
_THIN = 64  # a matrix product with a side this narrow is limited by memory
_STEP = 64  # ranks and rows of a step of the kernels
_PART_TOKENS = 512
# Measured on an H200 (docs/measured/kernels.md, "Time per launch"): a kernel that reads
# x or dy takes 4 us longer than the reads alone, and 7 us longer with a mask. Casts of
# A and B, the routing and the sums of parts take 17 us for both passes.
_SHRINK_SECONDS, _MASK_SECONDS, _SMALL_SECONDS = 4e-6, 3e-6, 17e-6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Predicted costs of a piece of a program.

    Attributes:
        num_bytes: Device memory traffic, in bytes.
        seconds: Device time.
    """

    num_bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            num_bytes=self.num_bytes + other.num_bytes,
            seconds=self.seconds + other.seconds,
        )

    def __mul__(self, factor: float) -> "Cost":
        return Cost(num_bytes=factor * self.num_bytes, seconds=factor * self.seconds)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether to run a site in the fused kernels.

    Attributes:
        fused: Whether to fuse it. On a device without fused kernels, sites run through
            the back end in plain JAX, which gives the same values.
        reason: Why it is fused or not, as a clause without a full stop.
        forward_before: Cost of the forward pass as XLA compiles it.
        forward_after: Cost of the forward pass in the fused kernels.
        before: Cost of both passes as XLA compiles them.
        after: Cost of both passes in the fused kernels.
    """

    fused: bool
    reason: str
    forward_before: Cost
    forward_after: Cost
    before: Cost
    after: Cost

    @property
    def speedup(self) -> float:
        """Time before over time after, of both passes."""
        return self.before.seconds / self.after.seconds


def decide(site: Site, device: str | None = None) -> Decision:
    """Decides whether the fused kernels are faster for a site.

    Args:
        site: The site.
        device: JAX's `device_kind` of a device with the Hopper kernels; None: the
            present device, with the kernels of the site's `implementation`.
    """
    implementation = site.implementation if device is None else "mosaic"
    return decide_shape(SiteShape.of(site), device, implementation, site.keeps_s)


@functools.lru_cache(maxsize=1024)
def decide_shape(
    shape: SiteShape,
    device: str | None = None,
    implementation: str = "mosaic",
    keeps_s: bool = False,
) -> Decision:
    """Decides whether the fused kernels are faster for a site of given sizes.

    If the site keeps s, because its function already is a gradient, the kernels compute
    only its forward pass, and s is computed once more beside them. The costs of both
    passes are then those of the forward pass.
    """
    described = describe_device(device)
    before_1, before_2 = plain_costs(shape, described)
    is_plain = BACKENDS[implementation].is_plain
    if is_plain:
        # The back end writes the same tensors as the function.
        after_1, after_2 = before_1, before_2
        reason = f"the back end {implementation} is plain JAX and saves no time"
    else:
        after_1, after_2 = fused_costs(shape, described)
        if keeps_s:
            before_2 = before_1
            after_1 = after_2 = after_1 + _plain_shrink(shape, described)
        passes = "forward" if keeps_s else "forward and backward"
        reason = _compare(before_2.seconds, after_2.seconds, passes)
        reason += _of_formed(shape, described, keeps_s)
    return Decision(
        fused=is_plain or after_2.seconds < before_2.seconds,
        reason=reason,
        forward_before=before_1,
        forward_after=after_1,
        before=before_2,
        after=after_2,
    )


def _plain_shrink(shape: SiteShape, device: KernelRates) -> Cost:
    """Returns the cost of s as XLA compiles it, and of x with each dropout mask."""
    dropped = _kernel(device, 2 * _bytes(shape, shape.in_features), overhead=0.0)
    shrink = _shrink(shape, shape.in_features, device, sum(shape.ranks))
    return shrink + dropped * shape.masks


def _compare(before: float, after: float, passes: str) -> str:
    times = f"{format_time(before)} as XLA compiles it, {format_time(after)} fused"
    if after < before:
        return f"{before / after:.2f} times as fast {passes}: {times}"
    return f"fused kernels would be slower {passes}: {times}"


def _of_formed(shape: SiteShape, device: KernelRates, keeps_s: bool) -> str:
    """Returns a clause about the time to form the arrays that the kernels read."""
    if not shape.formed:
        return ""
    costs = [formed_costs(f, shape, device)[0 if keeps_s else 1] for f in shape.formed]
    seconds = sum(cost.seconds for cost in costs)
    names = ", ".join(sorted({f.role.upper() for f in shape.formed}))
    return f", of which {format_time(seconds)} to form {names}"


def format_time(seconds: float) -> str:
    """Formats a time, such as `12.3 us` or `1.25 ms`."""
    micros = 1e6 * seconds
    if micros < 100:
        return f"{micros:.1f} us"
    return f"{micros:,.0f} us" if micros < 1e4 else f"{micros / 1e3:,.1f} ms"


def _kernel(
    device: KernelRates,
    num_bytes: float,
    busy: float = 0.0,
    overhead: float | None = None,
) -> Cost:
    """Returns the cost of a kernel that moves bytes while it computes.

    Args:
        device: The device.
        num_bytes: Bytes that it reads and writes.
        busy: Seconds of its arithmetic.
        overhead: Seconds that it takes in addition; None: those of a launch.
    """
    overhead = device.launch_seconds if overhead is None else overhead
    seconds = max(num_bytes / device.memory_bytes, busy) + overhead
    return Cost(num_bytes=num_bytes, seconds=seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plain:
    """The costs of the kernels into which XLA compiles a site."""

    shape: SiteShape
    device: KernelRates

    def product(self, batches: int, rows: int, columns: int, inner: int, added=0.0):
        """Returns the cost of a product that also adds a tensor of `added` bytes."""
        elements = rows * inner + inner * columns + rows * columns
        num_bytes = self.shape.itemsize * batches * elements + added
        is_thin = min(rows, columns, inner) <= _THIN
        share = self.device.thin_share if is_thin else self.device.memory_share
        seconds = max(
            num_bytes / (share * self.device.speed.memory_bytes),
            self.device.matmul_seconds((batches, rows, columns, inner)),
        )
        return Cost(num_bytes=num_bytes, seconds=self.device.launch_seconds + seconds)

    def masks(self) -> tuple[Cost, Cost]:
        """Returns the costs of x with dropout in a forward pass, and in both passes."""
        shape, elements = self.shape, self.shape.tokens * self.shape.in_features
        passes = 2 * elements * shape.itemsize
        if not shape.draws_masks:
            each = self._loop(passes + elements) * shape.masks
            return each, each
        busy = _DROPOUT_OPERATIONS * elements / self.device.vector_operations
        busy += THREEFRY_OPERATIONS * elements / self.device.integer_operations
        forward = _kernel(self.device, passes, busy)
        # The backward pass reads the masks, one byte per element.
        both = _kernel(self.device, passes + elements, busy)
        return forward * shape.masks, both * shape.masks

    def linear(self, number: int) -> tuple[Cost, Cost]:
        """Returns the costs of the forward and the backward pass of a linear."""
        shape, loop, product = self.shape, self._loop, self.product
        n, r, k, t = (
            shape.out_features[number],
            shape.ranks[number],
            shape.in_features,
            shape.tokens,
        )
        x, y, s = (t * size * shape.itemsize for size in (k, n, r))
        formed = {f.role: f for f in shape.formed if f.linear == number}
        # All adapters share an A or B that is formed, so it takes one product.
        a, b = (1 if role in formed else shape.adapters for role in "ab")
        is_last = number == len(shape.out_features) - 1
        forward = product(a, t // a, r, k) + loop(2 * s)
        if "w" in formed:  # its scales are applied between the product and the sum
            forward += product(1, t, n, k) + loop(2 * y) + product(b, t // b, n, r, y)
        else:
            forward += product(b, t // b, n, r) + product(1, t, n, k, y)
        if shape.bias or number < shape.scales:
            forward += loop(2 * y)
        backward = product(b, n, r, t // b) + product(b, t // b, r, n) + loop(2 * s)
        # The gradient of x is a sum over all linears and their branches.
        before = 0 if is_last else x
        if shape.masks:
            backward += loop(2 * x + t * k + before) + product(a, t // a, k, r)
        else:
            backward += product(a, t // a, k, r, before)
        backward += product(a, r, k, t // a) + product(1, t, k, n, x)
        if number < shape.scales:
            backward += loop(2 * y) + loop(2 * y) + loop(0)
        if "w" in formed:
            backward += loop(2 * y)
            backward += loop(2 * y) + loop(0) if formed["w"].is_trained else Cost()
        return forward, backward

    def _loop(self, num_bytes: float) -> Cost:
        return _kernel(self.device, num_bytes)


def plain_costs(shape: SiteShape, device: KernelRates) -> tuple[Cost, Cost]:
    """Predicts the forward pass and both passes of a site as XLA compiles them."""
    plain = _Plain(shape, device)
    forward, both = plain.masks() if shape.masks else (Cost(), Cost())
    for number in range(len(shape.out_features)):
        one, back = plain.linear(number)
        forward, both = forward + one, both + one + back
    return forward, both


def fused_costs(shape: SiteShape, device: KernelRates) -> tuple[Cost, Cost]:
    """Predicts the forward pass and both passes of a site in the fused kernels."""
    # The eight small kernels over A, B and the routing take at least their launches.
    small = Cost(seconds=max(_SMALL_SECONDS, 8 * device.launch_seconds) / 2)
    forward = _packing(shape, device) + small
    forward += _shrink(shape, shape.in_features, device, sum(shape.ranks))
    backward = small
    for n, rank in zip(shape.out_features, shape.ranks, strict=True):
        forward += _expand(shape, n, device)
        backward += _shrink(shape, n, device, rank)
    if shape.masks:
        forward += Cost(seconds=_MASK_SECONDS)
    backward += _expand_with_outers(shape, device)
    beside = [_scaling_costs(shape, device)]
    beside += [formed_costs(formed, shape, device) for formed in shape.formed]
    for once, both in beside:
        forward, backward = forward + once, backward + both + once * -1.0
    return forward, forward + backward


def formed_costs(
    formed: Formed, shape: SiteShape, device: KernelRates
) -> tuple[Cost, Cost]:
    """Predicts the costs of forming an array that the kernels read, in both passes.

    The first is that of the forward pass alone. The gradient of a weight's scales needs
    that of the weight, which is a product as large as the frozen one.
    """
    once = _kernel(device, formed.num_bytes)
    if not formed.is_trained:
        return once, once
    both = once * (1 + formed.num_factors)
    if formed.role == "w":
        n = shape.out_features[formed.linear]
        sizes = 1, shape.in_features, n, shape.tokens
        both += _kernel(device, _frozen_bytes(shape, n), device.matmul_seconds(sizes))
    return once, both


def _scaling_costs(shape: SiteShape, device: KernelRates) -> tuple[Cost, Cost]:
    """Returns the costs of the scales of sums.

    The forward pass reads and writes y; the backward pass reads y and dy and writes dy.
    """
    if not shape.scales:
        return Cost(), Cost()
    y = sum(_bytes(shape, n) for n in shape.out_features[: shape.scales])
    forward = _kernel(device, 2 * y)
    return forward, forward + _kernel(device, 3 * y)


def _padded(rank: int) -> int:
    """Returns the rank that the kernels compute with, in whole steps."""
    return _STEP * math.ceil(rank / _STEP)


def _bytes(shape: SiteShape, features: int) -> float:
    """Returns the bytes of a tensor with some features of all tokens."""
    return float(shape.tokens * features * shape.itemsize)


def _frozen_bytes(shape: SiteShape, n: int) -> float:
    """Returns the bytes of x, y and W of a linear."""
    k = shape.in_features
    return _bytes(shape, k) + _bytes(shape, n) + k * n * shape.itemsize


def _packing(shape: SiteShape, device: KernelRates) -> Cost:
    """Returns the cost of drawing the masks and packing them to a bit per element."""
    if not shape.masks:
        return Cost()
    elements = shape.masks * shape.tokens * shape.in_features
    if not shape.draws_masks:
        return _kernel(device, elements + elements / 8)
    drawn = THREEFRY_OPERATIONS * elements / device.integer_operations
    return _kernel(device, elements / 8, drawn)


def _shrink(shape: SiteShape, features: int, device: KernelRates, rank: int) -> Cost:
    """Returns the cost of s or ds: with a small rank, that of reading x or dy once."""
    num_bytes = _bytes(shape, features) + _bytes(shape, rank)
    busy = device.matmul_seconds((1, shape.tokens, rank, features))
    return _kernel(device, num_bytes, busy, _SHRINK_SECONDS)


def _expand(shape: SiteShape, n: int, device: KernelRates) -> Cost:
    """Returns the cost of y: the frozen product with further steps for the ranks."""
    inner = shape.in_features + _padded(shape.rank)
    busy = device.matmul_seconds((1, shape.tokens, n, inner))
    return _kernel(device, _frozen_bytes(shape, n), busy)


def _expand_with_outers(shape: SiteShape, device: KernelRates) -> Cost:
    """Returns the cost of dx, in one launch with dA and dB.

    The plan is that of the kernels: some multiprocessors compute dA and dB beside dx,
    and all of them compute the rest after it.
    """
    k, inner = shape.in_features, sum(shape.out_features)
    tiles = math.ceil(shape.tokens / TILE_ROWS) * math.ceil(k / TILE_COLUMNS)
    outers = [_outer(shape, n, 0, device) for n in shape.out_features]
    outers.append(_outer(shape, k, shape.masks, device))
    steps = math.ceil(inner / _STEP)
    planned_us, _ = best_plan(tiles, steps, outers, device.num_sms)
    alone_us, _ = best_plan(tiles, steps, [], device.num_sms)
    num_bytes = 2 * sum(_bytes(shape, n) for n in shape.out_features)
    num_bytes += 2 * _bytes(shape, k) + k * inner * shape.itemsize
    # The plan's unit is a step on an H200; other devices take a multiple of it.
    inner += _padded(shape.rank)
    alone = device.matmul_seconds((1, shape.tokens, k, inner))
    return _kernel(device, num_bytes, alone * planned_us / alone_us)


def _outer(
    shape: SiteShape, features: int, masks: int, device: KernelRates
) -> OuterCost:
    """Describes the kernel of dA or of one dB."""
    splits = splits_for(device.name, features, device.num_sms)
    tokens = shape.tokens / shape.adapters
    parts = shape.adapters * min(splits, max(1, round(tokens / _PART_TOKENS)))
    shares = shares_for(splits, parts)
    return OuterCost(
        num_items=math.ceil(features / 128) * shares * math.ceil(shape.rank / _STEP),
        steps_per_item=math.ceil(shape.tokens / _STEP) / shares,
        parts_per_item=parts / shares,
        num_masks=masks,
    )
