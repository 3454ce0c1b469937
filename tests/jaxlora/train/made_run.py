"""Run folders as a trainer leaves them, made without training."""

import contextlib
import pathlib

import numpy as np

from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.adapters.files.export_record import ExportRecord
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.modules.trained_tensors import tensor_paths
from jaxlora.modules.variants.table import variant_of
from jaxlora.run.folder import write_run_record
from jaxlora.run.identity import RunIdentity
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_run import RunRecord, SavedRun, SavedStream
from jaxlora.scheduler.stream.state import StreamState
from jaxlora.train.saved.checkpoint import Checkpoints

K, N, RANK = 6, 5, 2
LINEARS = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
JOBS = {
    "done": JobProgress(status="finished", reason="all steps are done", step=9),
    "now": JobProgress(status="running", slot=1, step=4),
    "best": JobProgress(status="running", slot=3, step=4),
    "nan": JobProgress(status="failed", reason="loss nan is not finite", step=2),
    "later": JobProgress(),
}


CONFIG = {"microbatch_tokens": 64, "remat": "none", "replicas": None, "mesh": None}


def identity(jobs=JOBS) -> RunIdentity:
    return RunIdentity(
        base="f" * 64,
        settings={"dtype": "float32"},
        jobs={n: {"seed": i, "keep_best": n == "best"} for i, n in enumerate(jobs)},
    )


def record(jobs=JOBS, **config) -> RunRecord:
    return RunRecord(
        started="2026-01-02T03:04:05",
        identity=identity(jobs),
        config=CONFIG | config,
        base_model="nobody/tiny",
        linear_names=tuple(LINEARS),
    )


def adapter(value: float = 0.0) -> Adapter:
    """An adapter whose A has this value everywhere."""
    modules = {
        name: LoraWeights(
            tensors={
                "lora_a": np.full((K, RANK), value, np.float32),
                "lora_b": np.ones((RANK, N), np.float32),
            },
            rank=RANK,
            lora_alpha=4.0,
        )
        for name in LINEARS
    }
    return Adapter(modules=modules)


# A run without samples has this stream; tests save it where they need no microbatches.
NO_STREAM = SavedStream(
    rules="",
    repeated=(),
    state=StreamState(),
    planned=(),
    shapes_from=0,
    leaving={},
    at_border=(),
)


def saved_run(jobs=JOBS) -> SavedRun:
    return SavedRun(
        progress=dict(jobs),
        adapters={n: adapter() for n, job in jobs.items() if job.has_state},
        optimizers={n: "adamw" for n, job in jobs.items() if job.has_state},
        stream=NO_STREAM,
    )


def parked(seed: int = 0) -> ParkedSlot:
    """The random state of a job; `JOBS` has two that have begun and not ended."""
    rng = np.random.default_rng(seed)

    def tensors():
        return {
            path: rng.normal(size=tensor.shape(K, N, RANK)).astype(np.float32)
            for name in LINEARS
            for tensor, path in tensor_paths(name.removeprefix("model."))
            if variant_of(tensor).setting is None
        }

    return ParkedSlot.of({kind: tensors() for kind in ("params", "mu", "nu")})


def states(number: int = 0) -> dict[str, ParkedSlot]:
    """The states of the jobs at a checkpoint, by name."""
    return {"now": parked(number), "best": parked(number + 100)}


def weights(state: ParkedSlot) -> dict[str, np.ndarray]:
    """A and B as PEFT names and turns them."""
    out = {}
    for name in LINEARS:
        path, peft = name.removeprefix("model."), f"base_model.model.{name}"
        out[f"{peft}.lora_A.weight"] = state.params[f"{path}.lora_a"].T
        out[f"{peft}.lora_B.weight"] = state.params[f"{path}.lora_b"].T
    return out


def write_export(folder: pathlib.Path, job: str, step: int, **options) -> pathlib.Path:
    """An adapter as a run exports it; its numbers tell its step."""
    record = ExportRecord(job=job, step=step)
    return export_peft(
        adapter(step),
        folder,
        base_model="nobody/tiny",
        linear_names=LINEARS,
        record=record,
        **options,
    )


def write_checkpoints(folder: pathlib.Path, numbers=(4,), jobs=JOBS) -> None:
    """Checkpoints of seeds that are their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Checkpoints(folder / "checkpoints", keep=9)) as checkpoints:
        for number in numbers:
            checkpoints.save(number, states(number), saved_run(jobs))


def write_run(folder: pathlib.Path, numbers=(4,), jobs=JOBS) -> pathlib.Path:
    """A run of five jobs: finished, running twice, failed and waiting."""
    folder.mkdir(parents=True)
    write_run_record(folder, record(jobs))
    write_export(folder / "adapters" / "done", "done", 9)
    write_export(folder / "adapters" / "best", "best", 2)
    if numbers:
        write_checkpoints(folder, numbers, jobs)
    return folder
