"""Measures one row of the step benchmark, in a process of its own.

    python -m jaxlora.bench.step.measure '{"model": "tiny", "row": "jaxlora xla"}'

prints one JSON object as its last line: the measured columns, or why the row cannot
run. Two more arguments name a lock file and a time limit in seconds. Rows with the same
lock file take turns on the device, and the process ends by SIGALRM when its time is up.
Waiting for a turn does not count.
"""

import dataclasses
import fcntl
import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp

from jaxlora.bench import training, weights
from jaxlora.bench.options import triton_code
from jaxlora.bench.report import needs_gpu
from jaxlora.bench.shapes import config_json
from jaxlora.bench.step import peers
from jaxlora.bench.step.cases import ROWS, Case, Row, microbatches, result
from jaxlora.bench.tokens import Microbatch
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.base_format import kept_linears
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.profile import step_parts
from jaxlora.train.plan.kernel_choice import choose_attention


def measure(
    case: Case, take_device: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Returns the row's columns, or only `skipped`: why it cannot run.

    Args:
        case: The row.
        take_device: Called before the first step runs.
    """
    row = ROWS[case.row]
    if row.library == "torch":
        take_device()
        return peers.measure(case, row)
    with triton_code(case.capability):
        return _measure_jaxlora(case, row, take_device)


def _measure_jaxlora(
    case: Case, row: Row, take_device: Callable[[], object]
) -> dict[str, Any]:
    model = model_config(config_json(case.model, case.layers))
    drawn = microbatches(case, model.vocab_size)
    setup = _setup(case, row, model, drawn)
    reason = setup.unsupported()
    if reason is not None:
        return {"skipped": f"{row.implementation} cannot run this: {reason}"}
    reason = needs_gpu(case.model, jax.default_backend() == "gpu")
    if reason is not None:
        return {"skipped": reason}
    batches = [m.packed for m in drawn]
    shapes = setup.spec().base_shapes()
    base = weights.random_base(shapes, base_format=setup.options.base_format)
    base = jax.block_until_ready(base)
    trained = training.Training(setup, base, batches[0])
    take_device()
    if not trained.run(batches):
        return {"skipped": "the gradients are not finite"}
    times = training.time_steps(lambda: trained.start(batches), case.repeats)
    num_tokens = sum(m.num_tokens for m in drawn)
    found = result(times, num_tokens, jax.devices()[0].device_kind) | _memory(trained)
    if case.profile:
        found["parts"] = step_parts.measure(
            lambda: trained.start(batches)(),
            step_parts.Attribution(trained.programs, case.rank),
            found["step_ms"],
        )
    return found


def _setup(
    case: Case, row: Row, model: ModelConfig, drawn: Sequence[Microbatch]
) -> training.Setup:
    dtype, base_format = jnp.dtype(case.dtype), row.base_format
    if base_format is not None:
        kept = kept_linears(model, row.keep_bf16)
        base_format = dataclasses.replace(base_format, kept=kept)
    options = DecoderOptions(
        dtype=dtype,
        base_format=base_format,
        remat=row.remat,  # type: ignore[arg-type]
        implementation=row.implementation,
        attention=choose_attention(case.attention, dtype, model).name,
        max_segment_tokens=min(case.longest_tokens, case.microbatch_tokens),
        mean_segment_tokens=min(m.num_tokens // len(m.samples) for m in drawn),
    )
    return training.Setup(
        model=model,
        options=options,
        limits=case.limits,
        num_jobs=case.adapters if row.has_adapters else 0,
        rank=case.rank,
        dropout=case.dropout,
    )


def _memory(trained: training.Training) -> dict[str, Any]:
    """Returns the columns about compilation and memory."""
    peak = training.peak_bytes()
    return {
        "attention": trained.setup.options.attention,
        "compile_seconds": round(trained.compile_seconds, 1),
        "peak_gib": None if peak is None else round(peak / training.GIB, 2),
        "program_gib": round(trained.program_bytes() / training.GIB, 2),
    }


def take_turn(turn: IO[str]) -> None:
    """Waits for the device, with the process's timer stopped."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    fcntl.flock(turn, fcntl.LOCK_EX)
    signal.setitimer(signal.ITIMER_REAL, left)


def main() -> None:
    """Measures the row that the first argument describes in JSON."""
    case = Case(**json.loads(sys.argv[1]))
    began = time.perf_counter()
    take_device: Callable[[], object] = lambda: None
    if sys.argv[2:]:
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))
        # The file stays open, and locked, until the process and its memory are gone.
        turn = Path(sys.argv[2]).open()  # noqa: SIM115
        take_device = functools.partial(take_turn, turn)
    found = measure(case, take_device)
    found["process_seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
