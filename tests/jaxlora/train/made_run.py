"""Run folders as a trainer leaves them, made without training."""

import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.adapters.export_record import ExportRecord
from jaxlora.adapters.optimizer import AdapterState, zero_state
from jaxlora.adapters.peft_export import export_peft
from jaxlora.models.stacks import Stack, to_paths
from jaxlora.train.checkpoint import Checkpoints
from jaxlora.train.job_run import JobProgress
from jaxlora.train.run_folder import write_run_record
from jaxlora.train.saved_run import (
    RunIdentity,
    RunRecord,
    SavedAdapter,
    SavedRequests,
    SavedRun,
)

K, N, SLOTS, RANK = 6, 5, 4, 3
LINEARS = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
LINEAR = "self_attn.q_proj"
STACKS = [
    Stack(
        name=f"{LINEAR}.{part}",
        paths=tuple(f"layers.{i}.{LINEAR}.{part}" for i in range(2)),
    )
    for part in ("lora_a", "lora_b")
]
JOBS = {
    "done": JobProgress(status="finished", reason="all steps are done", step=9),
    "now": JobProgress(status="running", slot=1, step=4),
    "best": JobProgress(status="running", slot=3, step=4),
    "nan": JobProgress(status="failed", reason="loss nan is not finite", step=2),
    "later": JobProgress(),
}


def identity(jobs=JOBS) -> RunIdentity:
    return RunIdentity(
        base="f" * 64,
        settings={"microbatch_tokens": 64, "slot_rank": RANK},
        jobs={name: {"seed": i} for i, name in enumerate(jobs)},
    )


def adapter_shape(name: str) -> SavedAdapter:
    return SavedAdapter(
        modules=dict.fromkeys(LINEARS, (2, 4.0)),
        use_rslora=False,
        dropout=0.0,
        keep_best=name == "best",
    )


def saved_run(jobs=JOBS) -> SavedRun:
    return SavedRun(
        identity=identity(jobs),
        progress=dict(jobs),
        adapters={name: adapter_shape(name) for name in jobs},
        base_model="nobody/tiny",
        linear_names=list(LINEARS),
        requests=SavedRequests(),
    )


def state(seed: int = 0) -> AdapterState:
    shapes = {
        f"{LINEAR}.lora_a": jax.ShapeDtypeStruct((SLOTS, 2, K, RANK), jnp.float32),
        f"{LINEAR}.lora_b": jax.ShapeDtypeStruct((SLOTS, 2, RANK, N), jnp.float32),
    }
    rng = np.random.default_rng(seed)

    def tables():
        return {
            path: jnp.asarray(rng.normal(size=s.shape).astype(np.float32))
            for path, s in shapes.items()
        }

    empty = zero_state(shapes, SLOTS)
    return AdapterState(
        params=tables(), mu=tables(), nu=tables(), pending=empty.pending
    )


def slot_weights(state: AdapterState, slot: int) -> dict[str, np.ndarray]:
    """A and B of a slot at rank 2, as PEFT names and turns them."""
    arrays = {n: np.asarray(t[slot]) for n, t in state.params.items()}
    rows = to_paths(STACKS, arrays, axis=0)
    out = {}
    for name in LINEARS:
        path, peft = name.removeprefix("model."), f"base_model.model.{name}"
        out[f"{peft}.lora_A.weight"] = rows[f"{path}.lora_a"][:, :2].T
        out[f"{peft}.lora_B.weight"] = rows[f"{path}.lora_b"][:2].T
    return out


def write_export(folder: pathlib.Path, job: str, step: int) -> pathlib.Path:
    """An adapter as a run exports it; its numbers tell its step."""
    modules = {
        name: LoraWeights(
            tensors={
                "lora_a": np.full((K, 2), step, np.float32),
                "lora_b": np.ones((2, N), np.float32),
            },
            rank=2,
            lora_alpha=4.0,
        )
        for name in LINEARS
    }
    record = ExportRecord(job=job, step=step)
    return export_peft(
        Adapter(modules=modules),
        folder,
        base_model="nobody/tiny",
        linear_names=LINEARS,
        record=record,
    )


def write_checkpoints(folder: pathlib.Path, numbers=(4,), jobs=JOBS) -> None:
    """Checkpoints of seeds that are their numbers."""
    with contextlib.closing(Checkpoints(folder / "checkpoints", STACKS)) as checkpoints:
        for number in numbers:
            checkpoints.save(number, state(number), saved_run(jobs))


def write_run(folder: pathlib.Path, numbers=(4,), jobs=JOBS) -> pathlib.Path:
    """A run of five jobs: finished, running twice, failed and waiting."""
    folder.mkdir(parents=True)
    record = RunRecord(started="2026-01-02T03:04:05", identity=identity(jobs))
    write_run_record(folder, record)
    write_export(folder / "adapters" / "done", "done", 9)
    write_export(folder / "adapters" / "best", "best", 2)
    if numbers:
        write_checkpoints(folder, numbers, jobs)
    return folder
