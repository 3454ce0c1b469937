"""Trains jobs of golden files together, each from the weights of its file."""

import json
import pathlib
from typing import Any

import safetensors.numpy

from jaxlora import import_peft
from jaxlora.adapters.adapter import Adapter
from jaxlora.config import RunConfig
from jaxlora.models.structure import linear_shapes
from jaxlora.scheduler import Limits
from jaxlora.train.execute.executor import Executor
from jaxlora.train.execute.layout import Layout
from jaxlora.train.job_state import JobState
from scripts.bench.mesh.fixed_ticks import FixedTicks, pack_whole
from tests.jaxlora.train.runs import plan_jobs

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
TARGETS = ("q_proj", "v_proj", "down_proj")
RANK, ALPHA = 4, 8


def read_weights(
    path: pathlib.Path, when: str, folder: pathlib.Path, model, *, has_score=False
) -> Adapter:
    """Returns the adapter before or after training, read from a PEFT folder."""
    tensors = {
        key.removeprefix(f"{when}/"): array
        for key, array in safetensors.numpy.load_file(path).items()
        if key.startswith(when)
    }
    folder = folder / when / path.stem
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    config["target_modules"] = TARGETS
    if has_score:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    size = model.config.hidden_size
    return import_peft(folder, linear_shapes(model.config), score_size=size)


def train_together(model, jobs: list[JobState], capacity: int = 128, **slots: Any):
    """Trains jobs, and returns the slots, and the outcome of each job's steps."""
    config = RunConfig(
        model="golden",
        jobs=[job.settings for job in jobs],
        microbatch_tokens=capacity,
        block_tokens=8,
        **slots,
    )
    plan = plan_jobs(config, model, [job.prepared for job in jobs])
    layout = Layout.of(plan.stages)
    slots, limits = layout.empty_slots(), Limits(capacity=capacity, block_tokens=8)
    executor = Executor(layout, model.params, slots, limits)
    for slot, job in enumerate(jobs):
        if job.lacks_references:
            job.references = {
                which: executor.log_likelihoods(slot, batch, None)
                for which, batch in job.plain_batches(slot).items()
            }
        executor.load(slot, slots.pad(job.start), job.settings.optimizer)
        job.update(status="running", slot=slot)
    steps = {job.name: [] for job in jobs}
    every = [
        sample
        for job in jobs
        for step in range(job.num_steps)
        for sample in job.batch(job.slot, step).to_schedule()
    ]
    schedule = pack_whole(every, limits, "joint")
    for item in executor.run(FixedTicks(schedule), dict(enumerate(jobs))):
        for slot, outcome in item.steps.items():
            steps[jobs[slot].name].append(outcome)
    return slots, steps
