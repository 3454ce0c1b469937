"""Prints what `jaxlora profile` has measured."""

import rich.box
from rich.console import Console
from rich.table import Table

from jaxlora.common.console import show
from jaxlora.costs.device_profile import Profile
from jaxlora.plan.memory.device_memory import format_bytes


def print_profile(profile: Profile, console: Console) -> None:
    """Prints the passes beside their fit, and the rest in a few lines."""
    show(console, f"{profile.description}: {profile.kernels}, remat {profile.remat}")
    show(console, _passes(profile))
    cost = profile.cost
    show(
        console,
        f"fit: {1000 * cost.base:.3f} ms, {1e6 * cost.per_token:.3f} us for each token "
        f"and {1e9 * cost.per_square:.4f} ns for each squared token of a sample; mean "
        f"error {profile.mape:.1%}",
        soft_wrap=True,
    )
    show(console, f"a row of padding takes {profile.padding:.0%} of a token's time")
    slots = f"{profile.num_slots} adapters of rank {profile.rank}"
    show(console, f"optimizer step of {slots}: {1000 * profile.step_seconds:.3f} ms")
    if (link := profile.link) is not None:
        rate, base = link.bytes_per_second / 1e9, 1e6 * link.base_seconds
        show(console, f"between two devices: {rate:,.1f} GB/s after {base:,.0f} us")
    show(console, _memory(profile))


def _table(*columns: str) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _passes(profile: Profile) -> Table:
    table = _table("tokens", "mean length", "ms", "fit", "tokens/s")
    for one in profile.passes:
        fit = 1000 * profile.cost(one.tokens, one.squares)
        table.add_row(
            f"{one.tokens:,}",
            f"{one.squares / one.tokens:,.0f}",  # as a token sees it
            f"{1000 * one.seconds:.3f}",
            f"{fit:.3f}",
            f"{one.tokens / one.seconds:,.0f}",
        )
    return table


def _memory(profile: Profile) -> Table:
    def shown(num_bytes: int | None) -> str:
        return "not reported" if num_bytes is None else format_bytes(num_bytes)

    table = _table("tokens", "memory by the compiler", "peak so far")
    for at in profile.memory:
        row = shown(at.needed_bytes), shown(at.peak_bytes)
        table.add_row(f"{at.tokens:,}", *row)
    return table
