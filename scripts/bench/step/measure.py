"""Measures one row of the step benchmark, in a process of its own.

    python -m scripts.bench.step.measure '{"model": "tiny", "row": "jaxlora xla"}'

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp

from jaxlora.errors import ConfigError
from jaxlora.models.config import ModelConfig
from jaxlora.models.forward import job_losses, training_options
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.pallas_kernels import compile_program
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stages import MeshStages
from jaxlora.profile import training
from jaxlora.profile.tokens import Microbatch
from jaxlora.profile.training import Training
from scripts.bench.kernel_times import busy_ms, by_kind, ranked, trace
from scripts.bench.report import needs_gpu
from scripts.bench.step import peers
from scripts.bench.step.cases import ROWS, Case, Row, microbatches, result


class BaseAlone(Training):
    """Forward passes, and backward passes down to the first norm.

    The loss of all jobs goes to the only slot, which has no adapter. If jobs had
    gradients of zero, products would draw less power.
    """

    def __init__(self, plan: RunPlan):
        """Makes the weights of a run on one device."""
        assert plan.spec.slots is not None
        slots = dataclasses.replace(plan.spec.slots, num_slots=1)
        options = plan.spec.options
        model = plan.spec.config
        if any(map(model.expert_shape, range(model.num_layers))):
            # XLA has no product for rows that have chosen among weights.
            options = dataclasses.replace(options, implementation="mosaic")
        spec = dataclasses.replace(plan.spec, slots=slots, adapted=(), options=options)
        stages = MeshStages.of(plan.config, spec)
        super().__init__(dataclasses.replace(plan, stages=stages), ())
        paths = (path for path in self.params if path.endswith("attention_norm.scale"))
        self._first = next(paths)
        # These are the options with which the training step is compiled.
        options = training_options(spec)
        self._gradient = jax.jit(self._gradient_of_norm, compiler_options=options)

    def _gradient_of_norm(
        self, base: Mapping[str, jax.Array], batch: PackedBatch
    ) -> jax.Array:
        owner = jnp.minimum(batch.block_adapter, 0)
        batch = dataclasses.replace(batch, block_adapter=owner)
        (table,) = self.slots.tables

        def loss(scale):
            own = {**base, self._first: scale}
            return job_losses(
                self.spec, own, {}, table.settings, batch, None
            ).loss.sum()

        return jax.grad(loss)(base[self._first])

    def start(self, batches: Sequence[PackedBatch]) -> Callable[[], Any]:
        """Queues the passes; returns a function that waits for their gradients."""
        made = [self._gradient(self.params, batch) for batch in batches]
        return functools.partial(jax.block_until_ready, made)

    def is_finite(self, made: Any) -> bool:
        """Whether the gradients of a step are."""
        return all(bool(jnp.isfinite(gradient).all()) for gradient in made)

    def compiled(self, batch: PackedBatch) -> training.Programs:
        """Compiles the program."""
        lowered = self._gradient.lower(self.params, batch)
        return {"accumulate": compile_program(lowered)}


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
    model = case.model_config()
    drawn = microbatches(case, model.vocab_size)
    try:
        plan, jobs = plan_row(case, row, model, drawn)
    except ConfigError as error:
        return {"skipped": str(error)}
    reason = needs_gpu(case.model, jax.default_backend() == "gpu")
    if reason is not None:
        return {"skipped": reason}
    batches = [m.packed for m in drawn]
    trained = Training(plan, jobs) if row.has_adapters else BaseAlone(plan)
    began = time.perf_counter()
    programs = trained.compiled(batches[0])
    compile_seconds = time.perf_counter() - began
    take_device()
    if not trained.is_finite(trained.start(batches)()):
        return {"skipped": "the gradients are not finite"}
    times = training.time_steps(lambda: trained.start(batches), case.repeats)
    num_tokens = sum(m.num_tokens for m in drawn)
    found = result(times, num_tokens, jax.devices()[0].device_kind) | {
        "attention": plan.spec.options.attention,
        "compile_seconds": round(compile_seconds, 1),
        "peak_gib": training.peak_gib(),
        "program_gib": round(training.program_bytes(programs) / training.GIB, 2),
    }
    if case.profile:
        text = programs["step"].as_text() if "step" in programs else None
        optimizer = text.split(maxsplit=2)[1].rstrip(",") if text else None
        step = lambda: trained.start(batches)()
        found["parts"] = parts(step, optimizer, found["step_ms"])
    return found


_PROFILED, _SHOWN = 3, 25  # steps of a profile, and kernels that are printed


def parts(
    run: Callable[[], object], optimizer: str | None, step_ms: float
) -> dict[str, float]:
    """Returns the milliseconds of each kind of kernels, and of gaps between them.

    Args:
        run: Runs one step and waits for its end.
        optimizer: Name of the optimizer's program, whose kernels are a kind of their
            own; None: there is no optimizer.
        step_ms: Time of a step without the profiler, which slows the host down.
    """
    run()
    kernels = trace(run, _PROFILED)
    own = [k.ms for k in kernels if k.module.split("(")[0] == optimizer]
    rest = [(k.name, k.ms) for k in kernels if k.module.split("(")[0] != optimizer]
    for name, count, ms in ranked(rest)[:_SHOWN]:
        line = f"{ms / _PROFILED:9.3f} ms {count // _PROFILED:5} x {name[:80]}"
        print(line, file=sys.stderr)
    found = {**by_kind(rest, 6), "optimizer": sum(own)}
    out = {kind: round(ms / _PROFILED, 3) for kind, ms in found.items()}
    gaps = step_ms - busy_ms(kernels) / _PROFILED
    return out | {"gaps": round(max(0.0, gaps), 3)}


def plan_row(
    case: Case, row: Row, model: ModelConfig, drawn: Sequence[Microbatch]
) -> tuple[RunPlan, list[PreparedJob]]:
    """Plans the run whose step a row measures; its jobs have random tokens.

    Raises:
        ConfigError: The row cannot run here.
    """
    samples = [sample for m in drawn for sample in m.samples]
    # Dropout is compiled in, so that rows of any rate run the same programs.
    more = {"slot_dropout": True, **row.settings}
    config = case.config(case.adapters, len(samples), **more)
    jobs = [training.make_job(job, samples, model) for job in config.jobs]
    # Memory is not checked first: a benchmark shows how accurate the estimate is.
    machine = dataclasses.replace(this_machine(), memory=None)
    mean = min(m.num_tokens // len(m.samples) for m in drawn)
    base = training.model_of_shapes(config, model)
    plan = training.plan_run(config, base, jobs, machine, mean_segment_tokens=mean)
    return plan, jobs


def take_turn(turn: IO[str]) -> None:
    """Waits for the device, with the process's timer stopped."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    fcntl.flock(turn, fcntl.LOCK_EX)
    signal.setitimer(signal.ITIMER_REAL, left)


def main() -> None:
    """Measures the row that the first argument describes in JSON."""
    case = Case.from_json(sys.argv[1])
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
