"""Tables and the plot of the scheduler benchmark."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxlora.bench.report import markdown

# LoRAFusion, section 6.5 and Figure 20: bubbles in percent of time, by adapters.
PAPER = {1: 44.17, 2: 15.00, 3: 12.23, 4: 11.09}
# The packers that are plotted, with their labels.
_SHOWN = {"mlora": "mLoRA's order", "paper": "LoRAFusion", "joint": "default packer"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one packer on one set of jobs, under one cost model."""

    table: str
    lengths: str
    num_jobs: int
    num_samples: int
    batch_size: int
    capacity: int
    packer: str
    cost: str
    planning_seconds: float
    microbatches: int
    no_ops: int
    slots_over_bound: float
    makespan: float
    bubble: float
    over_lower_bound: float
    # Batches packed optimally / at the time limit / greedily / after a failure.
    solver: str


def percent(share: float) -> str:
    """Formats a share as a percentage."""
    return f"{100 * share:.1f}"


def spread(ratios: Sequence[float], digits: int = 3) -> str:
    """Formats minimum, median and maximum."""
    three = min(ratios), statistics.median(ratios), max(ratios)
    return " / ".join(f"{number:.{digits}f}" for number in three)


def adapters_table(runs: Sequence[Run]) -> str:
    """Formats bubbles in percent, with equal stages and with a slower last stage."""
    rows = []
    for count in sorted({r.num_jobs for r in runs}):
        at = {(r.packer, r.cost): r for r in runs if r.num_jobs == count}
        names = ("paper", "no merge", "no milp", "greedy", "mlora", "joint")
        both = [
            " / ".join(percent(at[n, c].bubble) for c in ("even", "last stage +6 %"))
            for n in names
        ]
        rows.append([count, PAPER.get(count, "-"), *both])
    head = (
        "adapters",
        "printed in the paper",
        "its algorithm",
        "without merge",
        "without MILP",
        "without both",
        "mLoRA's order",
        "default packer",
    )
    return markdown(head, rows)


def parts_table(runs: Sequence[Run]) -> str:
    """Formats how much throughput merging and MILP gain, in percent."""
    rows = []
    for count in sorted({r.num_jobs for r in runs}):
        at = {r.packer: r for r in runs if (r.num_jobs, r.cost) == (count, "even")}
        gain = lambda less, at=at: percent(at[less].makespan / at["paper"].makespan - 1)
        optimal, feasible, greedy, failed = map(int, at["paper"].solver.split("/"))
        chosen = (optimal + feasible) / (optimal + feasible + greedy + failed)
        rows.append([count, gain("no merge"), gain("no milp"), percent(chosen)])
    head = ("adapters", "merge, %", "MILP, %", "batches packed by the solver, %")
    return markdown(head, rows)


def grid_table(runs: Sequence[Run]) -> str:
    """Formats simulated speed over LoRAFusion's algorithm, for each kind of jobs."""
    rows = []
    for key in dict.fromkeys((r.lengths, r.batch_size) for r in runs):
        cells = [r for r in runs if (r.lengths, r.batch_size, r.cost) == (*key, "even")]
        at = {(r.packer, r.capacity): r for r in cells}
        sizes = sorted({r.capacity for r in cells})
        best = {
            p: min((at[p, c] for c in sizes), key=lambda r: r.makespan)
            for p in ("paper", "joint", "mlora", "greedy")
        }
        equal = [at["paper", c].makespan / at["joint", c].makespan for c in sizes]
        slots = lambda p, at=at, sizes=sizes: max(
            at[p, c].slots_over_bound for c in sizes
        )
        ratio = lambda p, best=best: f"{best['paper'].makespan / best[p].makespan:.3f}"
        rows.append(
            [
                *key,
                spread(equal),
                ratio("joint"),
                ratio("mlora"),
                ratio("greedy"),
                *(f"{percent(best[p].bubble)}" for p in ("paper", "joint")),
                *(best[p].capacity for p in ("paper", "joint")),
                *(f"{slots(p):.3f}" for p in ("paper", "joint, full")),
                *(percent(best[p].over_lower_bound) for p in ("paper", "joint")),
            ]
        )
    head = (
        "lengths",
        "global batch",
        "default, equal capacity (min / median / max)",
        "default, best capacity",
        "mLoRA, best",
        "greedy, best",
        "bubble, paper",
        "bubble, default",
        "its capacity, paper",
        "its capacity, default",
        "slots over bound, paper",
        "slots over bound, default filling up",
        "over the lower bound, paper, %",
        "over the lower bound, default, %",
    )
    return markdown(head, rows)


def costs_table(runs: Sequence[Run]) -> str:
    """Formats the default packer's speed over LoRAFusion's algorithm, by cost model."""
    rows = []
    for name in dict.fromkeys(r.cost for r in runs):
        cells = [r for r in runs if r.cost == name]
        at = {(r.lengths, r.batch_size, r.capacity, r.packer): r for r in cells}
        equal = [
            r.makespan / at[*key[:3], "joint"].makespan
            for key, r in at.items()
            if key[3] == "paper"
        ]
        best = {}
        for r in cells:
            key = r.lengths, r.batch_size, r.packer
            best[key] = min(best.get(key, r.makespan), r.makespan)
        at_best = [
            m / best[*key[:2], "joint"] for key, m in best.items() if key[2] == "paper"
        ]
        over = [100 * r.over_lower_bound for r in cells if r.packer == "joint"]
        rows.append([name, spread(equal), spread(at_best), spread(over, digits=1)])
    head = (
        "cost model",
        "equal capacity",
        "best capacity",
        "over the lower bound, %",
    )
    return markdown(head, rows)


def planning_table(runs: Sequence[Run]) -> str:
    """Formats the time that each packer takes."""
    rows = []
    for packer in dict.fromkeys(r.packer for r in runs):
        cells = [r for r in runs if r.packer == packer and r.cost == "even"]
        times = [r.planning_seconds for r in cells]
        a_sample = sum(times) / sum(r.num_samples for r in cells)
        rows.append([packer, spread(times), f"{1e3 * a_sample:.4f}"])
    return markdown(("packer", "seconds (min / median / max)", "ms per sample"), rows)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws bubbles by number of adapters, and speeds over LoRAFusion's algorithm."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_bubbles(left, runs)
    _plot_speeds(right, runs)
    figure.savefig(path, dpi=130)


def _plot_bubbles(axes: Axes, runs: Sequence[Run]) -> None:
    adapters = [r for r in runs if r.table == "adapters" and r.cost.startswith("last")]
    counts = sorted({r.num_jobs for r in adapters})
    for packer, label in _SHOWN.items():
        bubble = {r.num_jobs: 100 * r.bubble for r in adapters if r.packer == packer}
        axes.plot(counts, [bubble[c] for c in counts], "o-", label=label)
    axes.plot(list(PAPER), list(PAPER.values()), "kx", label="printed in its paper")
    axes.set(xlabel="adapters", ylabel="bubble, % of time", ylim=(0, None))
    axes.set_title("mix, global batch 16, C = 6144, last stage +6 %")
    axes.legend()


def _plot_speeds(axes: Axes, runs: Sequence[Run]) -> None:
    grid = [r for r in runs if (r.table, r.cost) == ("grid", "even")]
    best: dict[tuple[str, str], float] = {}
    for r in grid:
        key = f"{r.lengths} {r.batch_size}", r.packer
        best[key] = min(best.get(key, r.makespan), r.makespan)
    cases = list(dict.fromkeys(case for case, _ in best))
    for packer, label in _SHOWN.items():
        speed = [best[c, "paper"] / best[c, packer] for c in cases]
        axes.plot(speed, range(len(cases)), "o", label=label)
    axes.set_yticks(range(len(cases)), cases)
    axes.set(xlabel="speed, each at its best capacity, LoRAFusion = 1")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
