"""Trains a run file's jobs with the fused kernels and without; compares their losses.

Everything but the kernels is the same: data, order, dropout masks and initial weights.
The run has the given number of steps and no evaluations.

Prints how far the losses are apart. Writes convergence.csv, with a row for each step of
each job, and convergence.png. The fused kernels need a Hopper GPU. For the jobs of the
demo:

    python scripts/demo.py --prepare-only
    jaxlora bench convergence ~/.cache/jaxlora/demo/demo.yaml --steps 200
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from matplotlib.figure import Figure

from jaxlora.bench.options import make_parser
from jaxlora.bench.report import about, markdown, write_csv
from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config.run_file import load_run
from jaxlora.errors import JaxloraError
from jaxlora.run.log import METRICS_FILE, read_events

WAYS = {
    "fused": {"implementation": "mosaic", "attention": "cudnn"},
    "plain": {"implementation": "xla", "attention": "xla"},
}
_DURATION_AND_EVALUATION = re.compile(r"epochs|steps|eval_.*|early_.*|keep_best")
Losses = dict[str, dict[int, float]]  # loss by job, then by step


def train(run: Mapping[str, Any], way: str, folder: Path) -> Losses:
    """Trains a run one way; returns training losses in nats per target token.

    Raises:
        JaxloraError: The run failed, for example because there is no Hopper GPU.
    """
    mine = {**run, **WAYS[way], "output_dir": str(folder / way)}
    path = folder / f"{way}.yaml"
    path.write_text(yaml.safe_dump(mine, sort_keys=False))
    command = [sys.executable, "-m", "jaxlora", "train", str(path)]
    if subprocess.run(command, check=False).returncode:
        raise JaxloraError(f"{path}: `jaxlora train` failed; it says why above.")
    found: Losses = {}
    for event in read_events(folder / way / METRICS_FILE):
        if event["event"] == "step":
            found.setdefault(event["job"], {})[event["step"]] = event["loss"]
    return found


def lengthened(run: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Returns a run of `steps` steps for each job, without evaluations."""

    def kept(settings: Mapping[str, Any]) -> dict[str, Any]:
        names = (n for n in settings if not _DURATION_AND_EVALUATION.fullmatch(n))
        return {name: settings[name] for name in names}

    defaults = {**kept(run.get("defaults") or {}), "steps": steps}
    jobs = [kept(job) for job in run["jobs"]]
    return {**run, "defaults": defaults, "jobs": jobs, "checkpoint_every": None}


def differences_table(losses: Mapping[str, Losses]) -> str:
    """Formats how far two ways are apart, in nats per target token, job by job."""
    first, second = losses.values()
    lines = []
    for job, own in first.items():
        gap = np.abs([own[step] - second[job][step] for step in own])
        last = sorted(own)[-len(own) // 10 :]
        ends = [np.mean([way[job][step] for step in last]) for way in losses.values()]
        shown = (f"{number:.4f}" for number in (gap.mean(), gap.max(), *ends))
        lines.append([job, len(own), *shown])
    ends = [f"mean of the last tenth, {way}" for way in losses]
    head = ["job", "steps", "mean difference", "largest difference", *ends]
    return markdown(head, lines)


def plot(losses: Mapping[str, Losses], path: Path) -> None:
    """Draws a panel for each job, with a line for each way."""
    jobs = list(next(iter(losses.values())))
    figure = Figure(figsize=(10, 6), layout="tight")
    panels = figure.subplots(2, -(-len(jobs) // 2), squeeze=False)
    for job, axes in zip(jobs, panels.flat, strict=False):
        for style, (way, found) in zip(("-", ":"), losses.items(), strict=False):
            steps = sorted(found[job])
            axes.plot(steps, [found[job][s] for s in steps], style, label=way)
        axes.set_title(job)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, nats per target token")
        axes.legend()
    figure.savefig(path, dpi=120)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("convergence", __doc__)
    out.add_argument("run_file", type=Path, help="YAML; see docs/run_file.md")
    out.add_argument("--output-dir", type=Path, default=Path("convergence"))
    out.add_argument("--steps", type=int, default=200, help="of each job")
    out.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison with the given options."""
    args = parser().parse_args(argv)
    load_run(args.run_file)  # checks the file before anything is trained
    run = lengthened(
        parse_yaml(args.run_file.read_text(), str(args.run_file)), args.steps
    )
    args.output_dir.mkdir(parents=True, exist_ok=True)
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
        print(differences_table(losses))
