"""Times joint training of n adapters against the same jobs one after the other.

Each job's step has a given number of tokens. Alone, a job has slots for itself and a
microbatch that is as large as its step, up to the capacity; together, the jobs' samples
are packed into shared microbatches of up to the same capacity. Both are this library,
and both times are wall time until every job has taken one optimiser step. Writes
joint.csv and joint.png.

    python -m scripts.bench_joint --output-dir bench --layers 8
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

from jaxlora.data.pack import JobBatch, PackedBatch, pack_microbatch
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.pallas_kernels import BACKENDS
from jaxlora.scheduler import Limits
from jaxlora.train.lineup import pack_window
from jaxlora.train.prepare import chosen_attention
from scripts.bench_models import MODELS, config_json, random_base
from scripts.bench_report import Timing, about, write_csv
from scripts.bench_tokens import Lengths, job_batch
from scripts.bench_training import Setup, Training, time_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A few jobs that are alike.

    Attributes:
        num_jobs: How many.
        step_tokens: Tokens of an optimiser step of each.
        median_tokens: Of a sample.
    """

    num_jobs: int
    step_tokens: int
    median_tokens: int


def batches(case: Case, longest: int, vocab_size: int) -> list[JobBatch]:
    """A global batch of each job, job i in slot i."""
    rng = np.random.default_rng(0)
    lengths = Lengths(median=case.median_tokens, longest=longest)
    return [
        job_batch(slot, lengths.fill(case.step_tokens, rng), vocab_size, rng)
        for slot in range(case.num_jobs)
    ]


def packed(jobs: Sequence[JobBatch], limits: Limits) -> list[PackedBatch]:
    """The jobs' samples in microbatches, packed as the trainer packs them."""
    samples = [s for job in jobs for s in job.to_schedule()]
    by_slot = {job.slot: job for job in jobs}
    return [
        pack_microbatch(microbatch, by_slot, limits)
        for microbatch in pack_window(samples, limits, "joint").microbatches
    ]


def check_finite(
    case: Case, training: Training, steps: Iterable[Sequence[PackedBatch]]
) -> None:
    """Takes the steps once, and stops if their gradients are not finite.

    Raises:
        SystemExit: Of the case: times of such gradients mean nothing.
    """
    if not all(training.run(step) for step in steps):
        raise SystemExit(f"{case}: the gradients are not finite")


class Bench:
    """Runs cases on one base model; programs are compiled once for each shape."""

    def __init__(self, args: argparse.Namespace):
        """Makes the base."""
        self._args = args
        self._model = model_config(config_json(args.model, args.layers))
        setup = self._setup(1, args.microbatch_tokens)
        reason = setup.unsupported()
        if reason is not None:
            raise SystemExit(f"{args.implementation} cannot run this: {reason}")
        self._base = random_base(setup.spec().base_shapes())
        self._compiled: dict[tuple[int, int], Training] = {}

    def _setup(self, num_jobs: int, capacity: int) -> Setup:
        args = self._args
        options = DecoderOptions(
            dtype=jnp.dtype(args.dtype),
            implementation=args.implementation,
            attention=chosen_attention(
                args.attention, jnp.dtype(args.dtype), self._model.head_dim
            ),
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

    def run(self, case: Case) -> dict[str, Any]:
        """Times of both ways, in milliseconds; the columns of a row."""
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
        """Compiled once for each shape, as long as cases have as many jobs."""
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
    """All combinations; those of one shape follow each other."""
    for jobs, tokens, median in itertools.product(
        args.jobs, args.step_tokens, args.median_tokens
    ):
        yield Case(num_jobs=jobs, step_tokens=tokens, median_tokens=median)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed against the number of jobs: together in colour, alone dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    medians = list(dict.fromkeys(row["median_tokens"] for row in rows))
    figure, all_axes = plt.subplots(
        ncols=len(medians), sharey=True, squeeze=False, figsize=(5 * len(medians), 4)
    )
    for axes, median in zip(all_axes[0], medians, strict=True):
        mine = [row for row in rows if row["median_tokens"] == median]
        for i, tokens in enumerate(dict.fromkeys(r["step_tokens"] for r in mine)):
            line = [row for row in mine if row["step_tokens"] == tokens]
            x = [row["num_jobs"] for row in line]
            for way, style in (("together", "-o"), ("alone", "--")):
                y = [row[f"{way}_tokens_per_second"] for row in line]
                label = f"{way}, {tokens} tokens a step"
                axes.plot(x, y, style, color=f"C{i}", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("jobs")
        axes.set_title(f"samples of {median} tokens in the median")
    all_axes[0][0].set_ylabel("tokens/s")
    all_axes[0][0].set_ylim(bottom=0)
    all_axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--output-dir", type=Path, default=Path("bench"))
    out.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    out.add_argument("--layers", type=int, help="instead of the model's own")
    out.add_argument("--implementation", choices=BACKENDS, default="mosaic")
    out.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    out.add_argument("--step-tokens", type=int, nargs="+", default=[512, 2048, 8192])
    out.add_argument("--median-tokens", type=int, nargs="+", default=[128, 600])
    out.add_argument("--longest-tokens", type=int, default=2048)
    out.add_argument("--microbatch-tokens", type=int, default=8192, help="at most")
    out.add_argument("--block-tokens", type=int, default=64)
    out.add_argument("--rank", type=int, default=16)
    out.add_argument("--dropout", type=float, default=0.1)
    out.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    out.add_argument("--attention", choices=["auto", "cudnn", "xla"], default="auto")
    out.add_argument("--repeats", type=int, default=5)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    bench = Bench(args)
    end = about(jax.devices()[0].device_kind)
    layers = "all" if args.layers is None else args.layers
    rows: list[dict[str, Any]] = []
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
        # After every case: a run that is cut short keeps what it has.
        write_csv(args.output_dir / "joint.csv", rows)
    plot(rows, args.output_dir / "joint.png")


if __name__ == "__main__":
    main()
