"""Times a linear with many adapters in one call, as in Table 7 of PLoRA."""

from collections.abc import Iterator
from typing import Any

from scripts.bench.shapes import KernelCase

_COUNTS, _METHOD = (2, 8, 32), "jaxlora mosaic"
_PAPER = {2: "1.90 to 2.01", 8: "7.51 to 7.98", 32: "26.5 to 31.2"}
_WIDTHS = {
    "3B attention": (2048, 2048),
    "3B MLP": (2048, 11008),
    "7B attention": (3584, 3584),
    "7B MLP": (3584, 18944),
}
_TOKENS, _RANK = 1024, 64  # of each adapter
_PASSES = ("forward", "backward")
_REPEATS, _SECONDS = 12, 0.15  # calls, and seconds of calls back to back


def kernel_rows() -> Iterator[dict[str, Any]]:
    """Yields the speed of a call over as many calls with one adapter each.

    `linear` is by device time with the frozen product, `adapters` without it, by
    subtraction, and `back_to_back` with it by wall time, forward and backward.
    """
    for name, shape in _WIDTHS.items():
        one = _times(shape, 1)
        for count in _COUNTS:
            many = _times(shape, count)
            row: dict[str, Any] = {"row": "kernels", "layer": name, "adapters": count}
            for key in one:
                alone, packed = one[key], many[key]
                speed = round(count * alone / packed, 2) if packed > 0 else None
                row |= {f"{key}_us": round(packed, 1), f"{key}_speed": speed}
            yield row | {"paper": _PAPER[count]}


def _times(shape: tuple[int, int], count: int) -> dict[str, float]:
    """Returns microseconds of a call with `count` adapters."""
    from scripts.bench.kernels.benchmark import time_jax
    from scripts.bench.kernels.methods import FROZEN

    k, n = shape
    case = KernelCase("", count * _TOKENS, ((k, (n,)),), (_RANK,) * count, rate=0.0)
    found = {
        (method, what): timing.median
        for method, what, timing in time_jax(
            case, _REPEATS, (FROZEN, _METHOD), _SECONDS
        )
    }
    for method in (FROZEN, _METHOD):
        both, forward = found[method, "both"], found[method, "forward"]
        found[method, "backward"] = both - forward
    linear = {f"linear_{what}": found[_METHOD, what] for what in _PASSES}
    adapters = {
        f"adapters_{what}": found[_METHOD, what] - found[FROZEN, what]
        for what in _PASSES
    }
    return linear | adapters | {"back_to_back": found[_METHOD, "both, sustained"]}
