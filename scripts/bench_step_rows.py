"""The rows of the step benchmark, each measured in a process of its own.

    python -m scripts.bench_step_rows '{"model": "tiny", "row": "jaxlora xla"}'

prints one JSON object as its last line: what was measured, or why it cannot run. With
two more arguments, the path of a file and seconds, rows that have the same file take
turns on the device, and the process ends by SIGALRM after so long, waits not counted.
"""

import dataclasses
import fcntl
import functools
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from scripts.bench_report import Timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        model: One of `bench_models.MODELS`.
        row: One of `ROWS`.
        num_layers: Instead of the model's own; None: as it is.
        num_jobs: Adapters; the rows of other libraries have one.
        rank: Of each adapter.
        dropout: Rate of each adapter.
        capacity: Tokens of a microbatch.
        num_microbatches: Of a step.
        block_tokens: Tokens of a block.
        median_tokens: Of a sample.
        longest_tokens: Of a sample.
        dtype: Of weights and activations.
        attention: What runs attention in jaxlora: `auto`, `cudnn` or `xla`.
        repeats: Steps that are timed.
        profile: Whether to attribute device time to parts as well.
    """

    model: str
    row: str
    num_layers: int | None = None
    num_jobs: int = 4
    rank: int = 16
    dropout: float = 0.1
    capacity: int = 8192
    num_microbatches: int = 1
    block_tokens: int = 64
    median_tokens: int = 600
    longest_tokens: int = 2048
    dtype: str = "bfloat16"
    attention: str = "auto"
    repeats: int = 10
    profile: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """How a row runs.

    Attributes:
        library: `jaxlora`, or `torch` for transformers with peft.
        has_adapters: Whether it trains any, or runs the base alone.
        implementation: Which LoRA kernels, for jaxlora.
        remat: What the backward pass computes again; for torch, anything but `none` is
            transformers' gradient checkpointing.
        layout: How torch gets the samples: `packed` under a block mask, `padded`, or
            `flash` for flash attention over packed rows.
    """

    library: str
    has_adapters: bool = True
    implementation: str = "xla"
    remat: str = "none"
    layout: str = "packed"


FROZEN, PEER = "adapters off", "peft, packed"
ROWS = {
    FROZEN: Row(library="jaxlora", has_adapters=False),
    "jaxlora mosaic": Row(library="jaxlora", implementation="mosaic"),
    "jaxlora xla": Row(library="jaxlora"),
    "jaxlora mosaic, remat mlp": Row(
        library="jaxlora", implementation="mosaic", remat="mlp"
    ),
    "jaxlora mosaic, remat layer": Row(
        library="jaxlora", implementation="mosaic", remat="layer"
    ),
    "jaxlora xla, remat layer": Row(library="jaxlora", remat="layer"),
    "torch, adapters off": Row(library="torch", has_adapters=False),
    PEER: Row(library="torch"),
    "peft, padded": Row(library="torch", layout="padded"),
    "peft, flash attention": Row(library="torch", layout="flash"),
    "peft, packed, remat": Row(library="torch", remat="layer"),
}


def microbatches(case: Case, vocab_size: int):
    """The microbatches of a step; the same for every row with so many jobs."""
    from jaxlora.scheduler import Limits
    from scripts.bench_tokens import Lengths, full_microbatch

    limits = Limits(capacity=case.capacity, block_tokens=case.block_tokens)
    lengths = Lengths(median=case.median_tokens, longest=case.longest_tokens)
    return [
        full_microbatch(case.num_jobs, limits, lengths, vocab_size, seed=i)
        for i in range(case.num_microbatches)
    ]


def measure(
    case: Case, take_device: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """What the row's columns hold, or `skipped`: why it cannot run.

    Args:
        case: The row.
        take_device: Called before the first step runs.
    """
    if ROWS[case.row].library == "torch":
        from scripts import bench_step_peers

        take_device()
        return bench_step_peers.measure(case, ROWS[case.row])
    return _measure_jaxlora(case, ROWS[case.row], take_device)


def _measure_jaxlora(
    case: Case, row: Row, take_device: Callable[[], object]
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from jaxlora.hf.config import model_config
    from jaxlora.models.decoder import DecoderOptions
    from jaxlora.scheduler import Limits
    from jaxlora.train.prepare import chosen_attention
    from scripts import bench_training
    from scripts.bench_models import config_json, random_base

    model = model_config(config_json(case.model, case.num_layers))
    drawn = microbatches(case, model.vocab_size)
    longest = min(case.longest_tokens, case.capacity)
    setup = bench_training.Setup(
        model=model,
        options=DecoderOptions(
            dtype=jnp.dtype(case.dtype),
            remat=row.remat,  # type: ignore[arg-type]
            implementation=row.implementation,
            attention=chosen_attention(
                case.attention,  # type: ignore[arg-type]
                jnp.dtype(case.dtype),
                model.head_dim,
            ),
            max_segment_tokens=longest,
            mean_segment_tokens=min(m.num_tokens // len(m.samples) for m in drawn),
        ),
        limits=Limits(capacity=case.capacity, block_tokens=case.block_tokens),
        num_jobs=case.num_jobs if row.has_adapters else 0,
        rank=case.rank,
        dropout=case.dropout,
    )
    reason = setup.unsupported()
    if reason is not None:
        return {"skipped": f"{row.implementation} cannot run this: {reason}"}
    batches = [m.packed for m in drawn]
    base = jax.block_until_ready(random_base(setup.spec().base_shapes()))
    training = bench_training.Training(setup, base, batches[0])
    take_device()
    if not training.run(batches):
        return {"skipped": "the gradients are not finite"}
    times = bench_training.time_steps(lambda: training.start(batches), case.repeats)
    peak = bench_training.peak_bytes()
    found: dict[str, Any] = result(
        times, sum(m.num_tokens for m in drawn), jax.devices()[0].device_kind
    )
    found |= {
        "attention": setup.options.attention,
        "compile_seconds": round(training.compile_seconds, 1),
        "peak_gib": None if peak is None else round(peak / bench_training.GIB, 2),
        "program_gib": round(training.program_bytes() / bench_training.GIB, 2),
    }
    if case.profile:
        from scripts import bench_step_parts

        wall = found["step_ms"]
        found["parts"] = bench_step_parts.measure(training, batches, wall)
    return found


def result(times: list[float], num_tokens: int, device: str) -> dict[str, Any]:
    """The columns that every row has.

    Args:
        times: Of each step, in milliseconds.
        num_tokens: Of a step, without padding.
        device: Its name.
    """
    timing = Timing.of(times)
    return {
        "tokens": num_tokens,
        "tokens_per_second": round(1000 * num_tokens / timing.median),
        "step_ms": round(timing.median, 2),
        "p10_ms": round(timing.p10, 2),
        "p90_ms": round(timing.p90, 2),
        "device": device,
    }


def take_turn(turn: IO[str]) -> None:
    """Waits for the device, with the process's timer stopped."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    fcntl.flock(turn, fcntl.LOCK_EX)
    signal.setitimer(signal.ITIMER_REAL, left)


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    began = time.perf_counter()
    take_device: Callable[[], object] = lambda: None
    if sys.argv[2:]:
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))
        # Open until this process ends, and with it what it has of the device's memory.
        turn = Path(sys.argv[2]).open()  # noqa: SIM115
        take_device = functools.partial(take_turn, turn)
    found = measure(case, take_device)
    found["process_seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
