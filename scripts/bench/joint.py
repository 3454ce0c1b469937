"""Times joint training of n adapters against the same jobs one after the other.

Each job's step has a given number of tokens. Alone, a job has slots for itself and a
microbatch that is as large as its step, up to the capacity. Together, the jobs' samples
are packed into shared microbatches of up to the same capacity. Both ways use this
library, and both times are wall time until every job has taken one optimizer step.

Prints a table of speedups. With --output-dir, writes joint.csv and joint.png. Needs a
GPU, except for the models tiny and wide-2.

    jaxlora bench joint --output-dir bench --layers 8
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from jaxlora.bench.options import add_output_dir, add_training_options, make_parser
from jaxlora.bench.report import (
    COLOURS,
    MARKS,
    Timing,
    about,
    device_of,
    markdown,
    needs_gpu,
    write_csv,
)
from jaxlora.bench.shapes import LARGE, MODELS, config_json
from jaxlora.bench.tokens import Lengths, job_batch
from jaxlora.bench.training import Setup, Training, time_steps
from jaxlora.bench.weights import random_base
from jaxlora.data.pack import JobBatch, PackedBatch, pack_microbatch
from jaxlora.errors import JaxloraError
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.pallas_kernels import BACKENDS
from jaxlora.scheduler import Limits
from jaxlora.train.plan.kernel_choice import choose_attention
from jaxlora.train.plan.next_window import pack_window

Columns = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A few equal jobs.

    Attributes:
        num_jobs: Number of jobs.
        step_tokens: Tokens of an optimizer step of each job.
        median_tokens: Median length of a sample.
    """

    num_jobs: int
    step_tokens: int
    median_tokens: int


def batches(case: Case, longest: int, vocab_size: int) -> list[JobBatch]:
    """Makes a global batch of each job, with job i in slot i."""
    rng = np.random.default_rng(0)
    lengths = Lengths(median=case.median_tokens, longest=longest)
    return [
        job_batch(slot, lengths.fill(case.step_tokens, rng), vocab_size, rng)
        for slot in range(case.num_jobs)
    ]


def packed(jobs: Sequence[JobBatch], limits: Limits) -> list[PackedBatch]:
    """Packs the jobs' samples into microbatches as the trainer does."""
    samples = [s for job in jobs for s in job.to_schedule()]
    by_slot = {job.slot: job for job in jobs}
    return [
        pack_microbatch(microbatch, by_slot, limits)
        for microbatch in pack_window(samples, limits, "joint").microbatches
    ]


def check_finite(
    case: Case, training: Training, steps: Iterable[Sequence[PackedBatch]]
) -> None:
    """Takes the steps once to check their gradients.

    Raises:
        JaxloraError: The gradients are not finite, so that times mean nothing.
    """
    if not all(training.run(step) for step in steps):
        raise JaxloraError(f"{case}: the gradients are not finite")


class Bench:
    """Runs cases on one base model; programs are compiled once for each shape."""

    def __init__(self, args: argparse.Namespace):
        """Makes the base.

        Raises:
            JaxloraError: The model or the kernels asked for cannot run here.
        """
        self._args = args
        reason = needs_gpu(args.model, jax.default_backend() == "gpu")
        if reason is not None:
            raise JaxloraError(reason)
        self._model = model_config(config_json(args.model, args.layers))
        setup = self._setup(1, args.microbatch_tokens)
        reason = setup.unsupported()
        if reason is not None:
            raise JaxloraError(
                f"{args.implementation} cannot run this: {reason}. "
                "Use --implementation xla."
            )
        self._base = random_base(setup.spec().base_shapes())
        self._compiled: dict[tuple[int, int], Training] = {}

    def _setup(self, num_jobs: int, capacity: int) -> Setup:
        args, dtype = self._args, jnp.dtype(self._args.dtype)
        options = DecoderOptions(
            dtype=dtype,
            implementation=args.implementation,
            attention=choose_attention(args.attention, dtype, self._model).name,
            max_segment_tokens=min(args.longest_tokens, capacity),
            mean_segment_tokens=min(args.median_tokens) // 2,
        )
        return Setup(
            model=self._model,
            options=options,
            limits=Limits(capacity=capacity, block_tokens=args.block_tokens),
            num_jobs=num_jobs,
            rank=args.rank,
            dropout=args.dropout,
        )

    def _capacity(self, num_tokens: int) -> int:
        block = self._args.block_tokens
        return min(self._args.microbatch_tokens, -(-num_tokens // block) * block)

    def run(self, case: Case) -> Columns:
        """Times both ways, and returns the columns of a row."""
        longest = min(self._args.longest_tokens, case.step_tokens)
        jobs = batches(case, longest, self._model.vocab_size)
        alone, microbatches_alone = self._one_by_one(case, jobs)
        together, microbatches = self._together(case, jobs)
        num_tokens = case.num_jobs * case.step_tokens

        def speed(timing: Timing) -> int:
            return round(1000 * num_tokens / timing.median)

        return {
            **dataclasses.asdict(case),
            "alone_ms": round(alone.median, 2),
            "alone_p10_ms": round(alone.p10, 2),
            "alone_p90_ms": round(alone.p90, 2),
            "together_ms": round(together.median, 2),
            "together_p10_ms": round(together.p10, 2),
            "together_p90_ms": round(together.p90, 2),
            "alone_tokens_per_second": speed(alone),
            "together_tokens_per_second": speed(together),
            "speedup": round(alone.median / together.median, 3),
            "alone_microbatches": microbatches_alone,
            "together_microbatches": microbatches,
        }

    def _training(self, setup: Setup, batch: PackedBatch) -> Training:
        """Compiles a shape once, as long as cases have the same number of jobs."""
        key = setup.num_jobs, setup.limits.capacity
        if key not in self._compiled:
            kept = 1, setup.num_jobs
            self._compiled = {k: t for k, t in self._compiled.items() if k[0] in kept}
            self._compiled[key] = Training(setup, self._base, batch)
        return self._compiled[key]

    def _one_by_one(self, case: Case, jobs: Sequence[JobBatch]) -> tuple[Timing, int]:
        setup = self._setup(1, self._capacity(case.step_tokens))
        steps = [
            packed([dataclasses.replace(job, slot=0)], setup.limits) for job in jobs
        ]
        training = self._training(setup, steps[0][0])
        check_finite(case, training, steps)

        def start() -> Callable[[], object]:
            return [training.start(step) for step in steps][-1]

        return self._time(start), sum(map(len, steps))

    def _together(self, case: Case, jobs: Sequence[JobBatch]) -> tuple[Timing, int]:
        capacity = self._capacity(case.num_jobs * case.step_tokens)
        setup = self._setup(case.num_jobs, capacity)
        step = packed(jobs, setup.limits)
        training = self._training(setup, step[0])
        check_finite(case, training, [step])
        return self._time(lambda: training.start(step)), len(step)

    def _time(self, start: Callable[[], Callable[[], object]]) -> Timing:
        return Timing.of(time_steps(start, self._args.repeats, warm_ups=1))


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yields all combinations; cases with the same shapes follow each other."""
    for jobs, tokens, median in itertools.product(
        args.jobs, args.step_tokens, args.median_tokens
    ):
        yield Case(num_jobs=jobs, step_tokens=tokens, median_tokens=median)


def speedup_table(rows: Sequence[Columns]) -> str:
    """Formats speedups of training together, by size of a step and number of jobs.

    The third column is the speed of the fewest jobs, one after the other.
    """
    counts = sorted({row["num_jobs"] for row in rows})
    keys = dict.fromkeys((row["step_tokens"], row["median_tokens"]) for row in rows)
    lines = []
    for tokens, median in keys:
        at = {
            row["num_jobs"]: row
            for row in rows
            if (row["step_tokens"], row["median_tokens"]) == (tokens, median)
        }
        alone = [f"{at[n]['alone_tokens_per_second']:,}" for n in counts[:1] if n in at]
        speedups = [f"{at[n]['speedup']:.2f}" if n in at else "" for n in counts]
        lines.append([f"{tokens:,}", median, *(alone or [""]), *speedups])
    head = ("tokens in a job's step", "median tokens in a sample", "alone, tokens/s")
    return markdown([*head, *(f"speedup, {n} jobs" for n in counts)], lines)


def plot(rows: Sequence[Columns], path: Path) -> None:
    """Draws speed by the number of jobs: solid lines together, dashed lines alone."""
    medians = list(dict.fromkeys(row["median_tokens"] for row in rows))
    counts = sorted({row["num_jobs"] for row in rows})
    figure = Figure(figsize=(5 * len(medians), 4.3), layout="tight")
    models = dict.fromkeys((row["model"], row["layers"]) for row in rows)
    named = [f"{m}" if n == "all" else f"{m}, {n} layers" for m, n in models]
    figure.suptitle(f"{' and '.join(named)} on {device_of(rows)}", fontsize=11)
    all_axes = figure.subplots(ncols=len(medians), sharey=True, squeeze=False)
    for axes, median in zip(all_axes[0], medians, strict=True):
        mine = [row for row in rows if row["median_tokens"] == median]
        for i, tokens in enumerate(dict.fromkeys(r["step_tokens"] for r in mine)):
            line = [row for row in mine if row["step_tokens"] == tokens]
            x = [row["num_jobs"] for row in line]
            for way, style in (("together", f"-{MARKS[i]}"), ("alone", "--")):
                y = [row[f"{way}_tokens_per_second"] for row in line]
                label = f"{way}, {tokens:,} tokens a step"
                axes.plot(x, y, style, color=COLOURS[i], label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("jobs")
        axes.set_title(f"median sample of {median} tokens")
    all_axes[0][0].set_ylabel("tokens/s")
    all_axes[0][0].set_ylim(bottom=0)
    all_axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("joint", __doc__)
    add_output_dir(out)
    out.add_argument("--model", choices=MODELS, default=LARGE)
    add_training_options(out)
    out.add_argument("--implementation", choices=BACKENDS, default="mosaic")
    out.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    out.add_argument("--step-tokens", type=int, nargs="+", default=[512, 2048, 8192])
    out.add_argument("--median-tokens", type=int, nargs="+", default=[128, 600])
    out.add_argument("--repeats", type=int, default=5)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    bench = Bench(args)
    end = about(jax.devices()[0].device_kind)
    layers = "all" if args.layers is None else args.layers
    rows: list[Columns] = []
    for case in cases(args):
        rows.append({"model": args.model, "layers": layers} | bench.run(case) | end)
        row = rows[-1]
        print(
            f"{case.num_jobs:3} jobs of {case.step_tokens:5} tokens a step, samples of "
            f"{case.median_tokens:4}: alone {row['alone_tokens_per_second']:7}, "
            f"together {row['together_tokens_per_second']:7} tokens/s, "
            f"{row['speedup']:6}x",
            flush=True,
        )
        # The file is written after every case, so that an interrupted run keeps it.
        if args.output_dir:
            write_csv(args.output_dir / "joint.csv", rows)
    print(speedup_table(rows))
    if args.output_dir:
        plot(rows, args.output_dir / "joint.png")
