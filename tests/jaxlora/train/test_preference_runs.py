"""Jobs that learn from preferences end where TRL took each alone.

The golden files are those of tests/golden/make_preference_runs.py, in float64; here the
weights are float32, and all jobs train together.
"""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob, import_peft, load_model
from jaxlora.adapters.targets import resolve_targets
from jaxlora.config import RunConfig
from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.data.tokens.tokenize import TokenizedData
from jaxlora.hf.names import linear_shapes
from jaxlora.scheduler import Limits
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.staged_executor import StagedExecutor
from jaxlora.train.job_state import JobState
from jaxlora.train.plan.job_slots import pack_whole
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.stream_plan import FixedTicks
from tests.jaxlora.train.planned_run import plan_jobs
from tests.oracle import relative_error

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
FILE = json.loads((GOLDEN / "preference_runs" / "runs.json").read_text())
ABOUT, RUNS = FILE["about"], FILE["runs"]
TARGETS = ("q_proj", "v_proj", "down_proj")


def weights(name: str, when: str, folder: pathlib.Path, model):
    """The adapter before or after training, read from a PEFT folder."""
    path = GOLDEN / "preference_runs" / f"{name}.safetensors"
    tensors = {
        key.removeprefix(f"{when}/"): array
        for key, array in safetensors.numpy.load_file(path).items()
        if key.startswith(when)
    }
    folder = folder / when / name
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": TARGETS}
    if name == "reward":
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    size = model.config.hidden_size
    return import_peft(folder, linear_shapes(model.config), score_size=size)


def samples(record: dict) -> list[TokenizedSample]:
    prompt, value = (
        record["prompt"],
        float(record.get("label", record.get("margin", 0))),
    )
    keys = [key for key in ("completion", "chosen", "rejected") if key in record]
    out = []
    for key in keys:
        ids = [*prompt, *record[key], ABOUT["eos"]]
        is_target = np.arange(len(ids)) >= len(prompt)
        out.append(TokenizedSample(np.array(ids, np.int32), is_target, value))
    return out


def job_state(name: str, folder: pathlib.Path, model) -> JobState:
    args = dict(RUNS[name]["settings"])
    objective = name.partition("-")[0]
    if objective == "simpo":
        args.pop("loss_type")  # a loss of CPO in TRL
    job = LoraJob(
        name=name,
        data={"path": "golden"},
        objective=objective,
        objective_args=args,
        rank=4,
        lora_alpha=8,
        target_modules=TARGETS,
        batch_size=ABOUT["batch_size"],
        learning_rate=ABOUT["learning_rate"],
        lr_schedule="constant",
        adam_eps=ABOUT["adam_eps"],
        max_length=64,
        shuffle=False,
    )
    found = [one for record in RUNS[name]["records"] for one in samples(record)]
    data = TokenizedData(
        source="golden",
        samples=found,
        max_length=64,
        num_records=len(found),
        num_truncated=0,
        num_dropped=0,
        num_without_target=0,
        group_size=1 if name == "kto" else 2,
        is_recombined=name == "kto",
    )
    start = weights(name, "initial", folder, model)
    prepared = PreparedJob(
        settings=job,
        modules=resolve_targets(job, list(linear_shapes(model.config))),
        start=start,
        train_data=data,
        eval_data=None,
    )
    return JobState(prepared, start)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains all jobs together: the model, the jobs, the slots, and each step."""
    folder = tmp_path_factory.mktemp("golden")
    model = load_model(GOLDEN / "peft_run" / "base", dtype="float32")
    jobs = [job_state(name, folder, model) for name in RUNS]
    config = RunConfig(
        model="golden",
        jobs=[job.settings for job in jobs],
        microbatch_tokens=128,
        block_tokens=8,
    )
    plan = plan_jobs(config, model, [job.prepared for job in jobs])
    layout = Layout.of(plan.stages)
    slots, limits = layout.empty_slots(), Limits(capacity=128, block_tokens=8)
    executor = StagedExecutor(layout, model.params, slots, limits)
    for slot, job in enumerate(jobs):
        if job.lacks_references:
            job.references = {
                which: executor.log_likelihoods(slot, batch)
                for which, batch in job.plain_batches(slot).items()
            }
        executor.load(slot, job.start, job.settings.optimizer)
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
    return model, jobs, slots, steps, folder


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_metrics_are_those_of_trl(trained, name):
    golden, ours = RUNS[name]["steps"], trained[3][name]
    losses = [step["loss"] for step in golden]
    assert [step.loss for step in ours] == pytest.approx(losses, rel=2e-5)
    assert len(ours) == 10
    for number, (step, outcome) in enumerate(zip(golden, ours, strict=True)):
        found = dict(outcome.metrics)
        if number == 0 and name.startswith("dpo"):
            # Both rewards are 0, but for rounding.
            del found["rewards/accuracies"]
        wanted = {k: step["metrics"][k] for k in found}
        assert found == pytest.approx(wanted, rel=2e-5, abs=2e-5)
        names = {"rewards/chosen", "accuracy", "kl"} & step["metrics"].keys()
        assert names <= outcome.metrics.keys()


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_of_trl(trained, name):
    model, jobs, slots, _, folder = trained
    (job,) = (job for job in jobs if job.name == name)
    wanted, ours = (
        weights(name, "final", folder, model),
        slots.read(job.slot, job.start),
    )
    assert ours.modules.keys() == wanted.modules.keys()
    for module, found in ours.modules.items():
        assert relative_error(found.a, wanted.modules[module].a) < 1e-4, module
        assert relative_error(found.b, wanted.modules[module].b) < 1e-4, module
    if name == "reward":
        assert wanted.score is not None
        assert relative_error(ours.score, wanted.score) < 1e-4
