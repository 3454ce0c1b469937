"""Jobs that learn from preferences train beside others, each as if it were alone."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.errors import CheckpointError, JaxloraError
from jaxlora.train.execute.executor import Executor
from tests import tiny
from tests.jaxlora.train.runs import InterruptAt, Outcome
from tests.jaxlora.train.test_contracts import ROUNDING, assert_same_training
from tests.oracle import relative_error

METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)
KTO_METRICS = (*(name for name in METRICS if "accuracies" not in name), "kl")
REWARD_METRICS = ("accuracy", "margin", "mean_reward")
# `test_preference_runs.py` trains CPO and ORPO, too, beside all other objectives.
SETTINGS = {
    "simpo": {"beta": 2.5, "simpo_gamma": 1.0, "cpo_alpha": 0.3},
    "dpo": {"loss_type": "robust", "label_smoothing": 0.1},
    "kto": {"beta": 0.3, "desirable_weight": 1.5},
    "reward": {"center_rewards_coefficient": 0.1},
}


def write_pairs(path: pathlib.Path, count: int, seed: int) -> str:
    """Writes prompts; the chosen answer repeats one in capitals, the other does not."""
    rng, records = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = "".join(rng.choice(list("abcdefgh "), rng.integers(3, 40)))
        length = rng.integers(2, len(prompt) + 1)
        worse = "".join(rng.choice(list("xyz"), rng.integers(1, 30)))
        answers = {"chosen": prompt[:length].upper(), "rejected": worse}
        records.append({"prompt": prompt} | answers)
    return tiny.write_jsonl(path, records)


def take_apart(path: str) -> str:
    """Writes pairs as labelled answers, in a random order; returns their path."""
    pairs = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    records = [
        {"prompt": pair["prompt"], "completion": pair[answer], "label": label}
        for pair in pairs
        for answer, label in (("chosen", True), ("rejected", False))
    ]
    order = np.random.default_rng(len(records)).permutation(len(records))
    file = pathlib.Path(path).with_suffix(".labels.jsonl")
    return tiny.write_jsonl(file, (records[i] for i in order))


# An objective is above all linears, so one of them is enough.
ADAPTED = ("down_proj",)
# Runs of all objectives share programs: three jobs at a time, in global batches that
# need several microbatches.
SHAPE = {
    "microbatch_tokens": 256,
    "block_tokens": 16,
    "max_concurrent_jobs": 3,
    "slot_rank": 8,
    "slot_targets": ADAPTED,
    "slot_dropout": True,
    "window_steps": 1,
}


@pytest.fixture(scope="module")
def plain(jobs) -> LoraJob:
    """A job without preferences."""
    return jobs[3].replace(target_modules=ADAPTED)


@pytest.fixture(scope="module")
def preference_jobs(jobs, tmp_path_factory) -> dict[str, LoraJob]:
    """A job of each objective."""
    folder = tmp_path_factory.mktemp("pairs")
    out = {
        objective: jobs[i].replace(
            name=objective,
            objective=objective,
            objective_args=args,
            data={"path": write_pairs(folder / f"{i}.jsonl", 15 + i, seed=i)},
            target_modules=ADAPTED,
            batch_size=3 + i,
            # Where the others begin, a job with a reference is not done.
            steps=8 if objective == "dpo" else jobs[i].steps,
        )
        for i, (objective, args) in enumerate(SETTINGS.items())
    }
    labelled = {"path": take_apart(out["kto"].data.path)}
    return out | {"kto": out["kto"].replace(data=labelled)}


@pytest.fixture(scope="module")
def every(plain, preference_jobs) -> list[LoraJob]:
    """All jobs; those with a reference begin first."""
    first = preference_jobs["dpo"], preference_jobs["kto"], plain
    return [*first, *(job for job in preference_jobs.values() if job not in first)]


@pytest.fixture
def make_trainer(model, tmp_path):
    """Makes the trainer of a run in a folder."""

    def make(name: str, jobs, **settings) -> Trainer:
        own = {"model": str(model.folder), "output_dir": str(tmp_path / name)}
        config = RunConfig(jobs=jobs, checkpoint_every=1, **own | SHAPE | settings)
        return Trainer(config, model)

    return make


@pytest.fixture
def train(model, make_trainer):
    """Trains jobs; every call into its own folder."""
    count = iter(range(1000))

    def run(jobs, **settings) -> Outcome:
        trainer = make_trainer(f"run{next(count)}", jobs, **settings)
        return Outcome(trainer, trainer.train())

    return run


@pytest.fixture(scope="module")
def done():
    """The run that several tests compare with; it is trained once."""
    return {}


@pytest.fixture
def together(train, every, done):
    if not done:
        done["run"] = train(every)
    return done["run"]


def test_neighbours_and_layout_do_not_matter(train, every, together):
    """In another order, each job has other neighbours, and its global batches are
    divided in another way.

    Each job alone would need programs of its own, and `test_contracts.py` trains jobs
    alone.
    """
    other = train(every[::-1])
    assert_same_training(together, other, [job.name for job in every])
    assert_same_score(together, other)
    for job in every:
        assert together.bytes[job.name] != other.bytes[job.name], "packed alike"


def score(outcome) -> np.ndarray:
    """The score head that the reward job has exported, as PEFT names it."""
    folder = outcome.trainer.output_dir / "adapters" / "reward"
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    return tensors["base_model.model.score.weight"]


def assert_same_score(one, other) -> None:
    assert relative_error(score(one), score(other)) < ROUNDING


def test_the_reference_is_the_base_without_the_adapter(
    train, preference_jobs, monkeypatch
):
    """At a learning rate of 0, a fresh adapter changes nothing: all rewards are 0.

    Log-probabilities of about 100 nats in float32 differ by 1e-5 in another packing.
    """
    still = {"learning_rate": 0.0, "dropout": 0.0, "objective": "dpo"}
    # Another test has programs of this shape, too.
    shape = {"max_concurrent_jobs": 2}
    job = preference_jobs["simpo"].replace(name="still", objective_args={}, **still)
    count, computed = Executor.log_likelihoods, []
    monkeypatch.setattr(
        Executor,
        "log_likelihoods",
        lambda self, slot, batch, adapter: (
            computed.append(slot) or count(self, slot, batch, adapter)
        ),
    )
    twin = job.replace(name="twin", objective_args={"beta": 1.0})
    found = train([job, twin], **shape)
    assert len(set(computed)) == 1  # for both, as they have the same data
    for losses in (*found.losses.values(), *found.evals.values()):
        assert losses == pytest.approx([np.log(2)] * len(losses), abs=1e-4)
    # An adapter that is not fresh is not a part of the reference.
    taught = train([job.replace(learning_rate=2e-2, name="taught")], **shape)
    folder = taught.trainer.output_dir / "adapters" / "taught"
    start = {"init_from": str(folder), "name": "again"}
    again = train([job.replace(**start)], **shape)
    assert again.losses["again"][0] != pytest.approx(np.log(2), rel=1e-3)
    last = taught.evals["taught"][-1]
    assert again.evals["again"][0] == pytest.approx(last, rel=1e-4)


def test_a_resumed_run_ends_in_the_same_bits(
    model, make_trainer, every, together, tmp_path, monkeypatch
):
    """With the kept log-probabilities of the base, which are not computed again."""
    assert make_trainer("cut", every).train(callbacks=[InterruptAt(1)]).interrupted
    kept = tmp_path / "cut" / "references" / "dpo.safetensors"
    monkeypatch.setattr(Executor, "log_likelihoods", None)
    data, moved = kept.read_bytes(), kept.with_suffix(".moved")
    kept.rename(moved)
    with pytest.raises(CheckpointError, match="by its reference cannot be read"):
        make_trainer("cut", every).train(resume=True)
    other = data.replace(model.fingerprint.encode(), b"0" * len(model.fingerprint))
    assert other != data
    with safetensors.safe_open(moved, framework="np") as file:
        made_from = file.metadata()
    shorter = {name: x[1:] for name, x in safetensors.numpy.load(data).items()}
    fewer = safetensors.numpy.save(shorter, made_from)
    for wrong in (other, fewer):
        kept.write_bytes(wrong)
        with pytest.raises(CheckpointError, match="of other data, another base or"):
            make_trainer("cut", every).train(resume=True)
    moved.rename(kept)
    assert not make_trainer("cut", every).train(resume=True).interrupted
    for job in every:
        file = tmp_path / "cut" / "adapters" / job.name / "adapter_model.safetensors"
        assert file.read_bytes() == together.bytes[job.name]


def test_copies_and_continued_jobs_keep_the_reference(
    make_trainer, preference_jobs, tmp_path, monkeypatch
):
    """It is not computed again, and is there when they are resumed."""

    def trainer(name: str, *jobs: LoraJob) -> Trainer:
        return make_trainer(name, jobs, max_concurrent_jobs=2)

    def kept(name: str, job: str) -> dict[str, list[float]]:
        file = tmp_path / name / "references" / f"{job}.safetensors"
        found = safetensors.numpy.load_file(file)
        return {which: array.tolist() for which, array in found.items()}

    dpo = preference_jobs["dpo"].replace(steps=4)
    at = {"job": "dpo", "step": 1}
    copy = dpo.replace(name="copy", learning_rate=1e-3, clone_of=at)
    assert trainer("one", dpo, copy).train(callbacks=[InterruptAt(2)]).interrupted
    assert kept("one", "dpo") == kept("one", "copy")
    monkeypatch.setattr(Executor, "log_likelihoods", None)
    there = str(tmp_path / "one")
    more = dpo.replace(steps=6, continue_from=there)
    (continued,) = trainer("two", more).train().jobs
    assert continued.progress.step == 6
    assert kept("two", "dpo") == kept("one", "dpo")
    result = trainer("one", dpo, copy).train(resume=True)
    assert [job.progress.step for job in result.jobs] == [4, 4]


def test_metrics_are_reported_as_trl_names_them(plain, preference_jobs, together):
    rewards = {e["job"]: e for e in together.events if "mean_reward" in e}
    assert rewards.keys() == {"reward"}
    assert rewards["reward"].keys() >= {*REWARD_METRICS}
    for job in preference_jobs.values():
        if job.name == "reward":
            continue
        for kind, prefix in (("step", ""), ("eval", "eval_")):
            found = together.of(kind, job=job.name)
            assert found
            for event in found:
                names = KTO_METRICS if job.name == "kto" else METRICS
                of = {name: event[f"{prefix}{name}"] for name in names}
                margin = of["rewards/chosen"] - of["rewards/rejected"]
                assert of["rewards/margins"] == pytest.approx(margin, abs=1e-4)
                assert 0 <= of.get("rewards/accuracies", 0) < 1 + 1e-6
                assert of["logps/chosen"] < 0 > of["logps/rejected"]
                assert of.get("kl", 0) >= 0
    kl = [e["kl"] for e in together.of("step", job="kto")]
    assert kl[0] == pytest.approx(0, abs=1e-4), "a fresh adapter changes nothing"
    assert max(kl) > 1e-3, "the baseline takes part"
    others = [e for e in together.events if e.get("job") == plain.name]
    assert not any("rewards" in key for event in others for key in event)


def test_a_reward_model_is_exported_and_imported(
    train, every, preference_jobs, together
):
    """As PEFT saves a sequence classifier with one label."""
    folder = together.trainer.output_dir / "adapters" / "reward"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["score"]
    found = score(together)
    assert found.shape == (1, 32)
    assert found.dtype == np.float32
    job = preference_jobs["reward"].replace(
        name="again", init_from=str(folder), learning_rate=0.0, steps=1
    )
    # Beside a job of each other objective, as there are programs for all of them.
    others = [one.replace(steps=1) for one in every if one.name != "reward"]
    again = train([job, *others])
    last = together.evals["reward"][-1]
    assert again.evals["again"] == pytest.approx([last, last], rel=1e-5)
    with pytest.raises(JaxloraError, match="score head of a reward model"):
        train([job.replace(objective="simpo", objective_args={})])


@pytest.mark.grid
@pytest.mark.parametrize("mesh", ["stage=2,fsdp=2", "data=2,fsdp=2"])
def test_a_mesh_trains_what_one_device_trains(meshes, preference_jobs, mesh):
    """Pairs and baselines: on stages, and with slots and rows divided among devices.

    The reference of DPO and KTO runs in each step.
    """
    common = {"target_modules": ("v_proj", "down_proj"), "adam_eps": 1e-4}
    names = ("dpo", "kto", "reward")
    jobs = [preference_jobs[name].replace(**common) for name in names]
    in_step = {"reference_logps": "in_step"}
    for i, one in enumerate(jobs[:2]):
        jobs[i] = one.replace(objective_args=one.objective_args | in_step)
    shape = {"microbatch_tokens": 256}
    one = meshes.train("fsdp=1", jobs, **shape)
    other = meshes.train(mesh, jobs, **shape)
    assert_same_training(one, other, [job.name for job in jobs])
