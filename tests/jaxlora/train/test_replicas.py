"""Replicas with microbatches of other sizes train as one device does."""

import dataclasses
import itertools
import json
import pathlib
import random
import shutil

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.config.replicas_config import describe_list
from jaxlora.errors import ConfigError
from jaxlora.forecast import plan_run
from jaxlora.plan.job import prepare_run
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh import choose
from jaxlora.plan.mesh.candidates import Search
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.replicas import lists
from jaxlora.plan.stages import MeshStages
from jaxlora.run.folder import CHECKPOINTS
from jaxlora.train.execute.replicas import FurtherReplicas, Replica
from jaxlora.train.saved.read_checkpoint import read_newest
from tests.jaxlora.train.mesh_runs import assert_empty_slot, assert_same_on_meshes
from tests.jaxlora.train.runs import (
    LINEARS,
    InterruptAt,
    Outcome,
    assert_same_bits,
    outcome,
)

pytestmark = pytest.mark.needs_devices(3)

REPLICAS = ({"microbatch_tokens": 192}, {"microbatch_tokens": 64, "count": 2})
ONE = {"microbatch_tokens": 192}  # the same run on one device
UNLIKE = {"replicas": REPLICAS}


def mesh(tensor: int, tokens: int, count: int = 1) -> dict[str, int]:
    return {"tensor": tensor, "microbatch_tokens": tokens, "count": count}


# Replicas on seven devices. Two divide each layer, among two devices and among four,
# which are more than there are key-value heads.
MESHES = {"replicas": (mesh(2, 192), mesh(4, 96), mesh(1, 64))}
DEPLOYMENTS = [
    pytest.param(UNLIKE, id="devices", marks=pytest.mark.grid),
    pytest.param(MESHES, id="meshes", marks=pytest.mark.needs_devices(8)),
]


class Runs:
    """Trains jobs in new folders; all runs share the shapes of their programs."""

    def __init__(self, folder: pathlib.Path, model):
        self._folder, self.model = folder, model
        self._count, self._done = itertools.count(), {}

    def config(self, jobs, **settings) -> RunConfig:
        own = {
            "model": str(self.model.folder),
            "output_dir": str(self._folder / f"run{next(self._count)}"),
            "block_tokens": 16,
            "max_concurrent_jobs": 3,
            "slot_rank": 8,
            "slot_targets": LINEARS,
            "slot_dropout": True,
            "window_steps": 1,
            "checkpoint_every": None,
        }
        return RunConfig(jobs=tuple(jobs), **own | settings)

    def train(self, jobs, *, on_window=None, **settings) -> Outcome:
        config = self.config(jobs, **settings)
        return outcome(config, self.model, on_window=on_window)

    def once(self, jobs, **settings) -> Outcome:
        key = repr((jobs, settings))
        if key not in self._done:
            self._done[key] = self.train(jobs, **settings)
        return self._done[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model) -> Runs:
    return Runs(tmp_path_factory.mktemp("replicas"), model)


@pytest.fixture(scope="module")
def unlike_jobs(jobs):
    """Three jobs with dropout, ragged lengths and batches of other sizes.

    With Adam's usual epsilon, an element whose gradients are rounding would get updates
    as large as the others'.
    """
    changes = {"adam_eps": 1e-4, "max_grad_norm": 0.05, "steps": 5}
    return tuple(job.replace(**changes) for job in (jobs[0], jobs[2], jobs[3]))


def test_equals_one_device(runs, unlike_jobs):
    one, other = runs.once(unlike_jobs, **ONE), runs.once(unlike_jobs, **UNLIKE)
    assert_same_on_meshes(one, other)
    assert {p.status for p in other.progress.values()} == {"finished"}
    lanes = other.trainer.plan.lanes
    assert [r.capacity for r in lanes.replicas] == [192, 64, 64]


@pytest.mark.needs_devices(8)
@pytest.mark.parametrize(
    "settings",
    [
        MESHES,
        *(
            pytest.param({"replicas": replicas}, marks=pytest.mark.grid)
            for replicas in (
                (mesh(1, 192), mesh(2, 64, 3)),
                (mesh(4, 192), mesh(2, 96), mesh(1, 64, 2)),
                (mesh(2, 192), mesh(1, 64, 4)),
            )
        ),
    ],
)
def test_replicas_that_are_meshes_equal_one_device(runs, unlike_jobs, settings):
    """Each divides the base and the adapters in its own way."""
    one, other = runs.once(unlike_jobs, **ONE), runs.once(unlike_jobs, **settings)
    assert_same_on_meshes(one, other)
    tokens = np.zeros(len(other.trainer.plan.lanes.replicas), int)
    for window in other.of("window"):
        tokens += [one["num_tokens"] for one in window["replicas"]]
    assert (tokens > 0).all()


def test_every_replica_trains_what_fits(runs, unlike_jobs):
    """The report names them; only the first one can hold the longest samples."""
    other = runs.once(unlike_jobs, **UNLIKE)
    tokens = np.zeros(3, int)
    for window in other.of("window"):
        each = window["replicas"]
        assert [one["replica"] for one in each] == [1, 2, 3]
        assert [one["microbatch_tokens"] for one in each] == [192, 64, 64]
        tokens += [one["num_tokens"] for one in each]
        for name in ("num_tokens", "num_microbatches"):
            assert sum(one[name] for one in each) == window[name]
        for one in each:
            rows = max(1, one["num_microbatches"] * one["microbatch_tokens"])
            assert one["fill"] == pytest.approx(one["num_tokens"] / rows, abs=1e-4)
    assert (tokens > 0.1 * tokens.sum()).all()
    longest = max(max(job.prepared.lengths(0)) for job in other.trainer.jobs)
    assert longest > 64


@pytest.mark.parametrize("settings", DEPLOYMENTS)
def test_the_same_bits_in_any_order(runs, unlike_jobs, settings, monkeypatch):
    """Replicas run their microbatches in random orders, each its own in order."""
    order, run = random.Random(0), FurtherReplicas.run
    used = []

    def shuffled(self, tick, keys, baseline):
        numbers = order.sample(range(1, 3), 2)
        used.append(tuple(numbers))
        found = {}
        for number in numbers:
            own = [one for one in tick if one.replica == number]
            for one, out in zip(own, run(self, own, keys, baseline), strict=True):
                jax.block_until_ready(out[1].loss)
                found[id(one)] = out
        return iter([found[id(one)] for one in tick])

    whole = runs.once(unlike_jobs, **settings)
    monkeypatch.setattr(FurtherReplicas, "run", shuffled)
    again = runs.train(unlike_jobs, **settings)
    assert len(set(used)) == 2
    assert again.result.num_compilations == 0
    assert_same_bits(again, whole)


def test_a_replica_waits_for_its_own_jobs_only(runs, unlike_jobs, monkeypatch):
    """It takes the new weights of a slot before samples of it, and no others."""
    run, taken, needed = Replica.run, [], []

    def watched(self, one, *given):
        before = set(self.new)
        out = run(self, one, *given)
        taken.append(before - set(self.new))
        needed.append(before & one.slots)
        return out

    monkeypatch.setattr(Replica, "run", watched)
    runs.train(unlike_jobs, **UNLIKE)
    assert taken == needed
    assert any(not one for one in taken) and any(taken)


@pytest.mark.parametrize("settings", DEPLOYMENTS)
def test_nothing_goes_through_the_host(runs, unlike_jobs, settings, monkeypatch):
    """Gradients and weights are sent from device to device."""
    reads, calls, inside = [], [], []
    value = ArrayImpl._value

    def counted(self):
        if inside:
            reads.append(self.shape)
        return value.__get__(self)

    def watched(name):
        send = getattr(FurtherReplicas, name)

        def wrapped(self, *args):
            inside.append(name)
            calls.append(name)
            send(self, *args)
            inside.pop()

        monkeypatch.setattr(FurtherReplicas, name, wrapped)

    monkeypatch.setattr(ArrayImpl, "_value", property(counted))
    for name in ("send", "add", "copy_weights"):
        watched(name)
    runs.train(unlike_jobs, **settings)
    assert set(calls) == {"send", "add", "copy_weights"}
    assert not reads


@pytest.mark.parametrize("settings", DEPLOYMENTS)
def test_a_job_that_diverges_changes_no_other(runs, unlike_jobs, settings):
    """Bit for bit, while the samples of the others share microbatches as before."""
    name = unlike_jobs[0].name

    def with_rate(rate):
        first = unlike_jobs[0].replace(learning_rate=rate, steps=2)
        return runs.train((first, *unlike_jobs[1:]), **settings)

    calm, failed = with_rate(1e-3), with_rate(1e30)
    assert failed.progress[name].status == "failed"
    assert "is not finite" in failed.progress[name].reason
    assert_empty_slot(failed.trainer, 0)
    for job in unlike_jobs[1:]:
        assert failed.bytes[job.name] == calm.bytes[job.name]
        assert failed.losses[job.name] == calm.losses[job.name]


@pytest.mark.parametrize("settings", DEPLOYMENTS)
def test_jobs_come_and_go(runs, unlike_jobs, settings, monkeypatch):
    """They join, pause, resume and end early as on one device; nothing recompiles."""
    stops = {"early_stopping": 2, "early_stopping_delta": 100.0, "eval_every": 1}
    first = unlike_jobs[0].replace(**stops | {"steps": 20})
    late = unlike_jobs[1].replace(name="late", steps=9)
    rest = [job.replace(steps=12) for job in unlike_jobs[1:]]
    discarded, copy = [], FurtherReplicas.copy

    def watched(self, slot):
        discarded.append(len(self._parts.get(slot, ())))
        copy(self, slot)

    monkeypatch.setattr(FurtherReplicas, "copy", watched)

    def train(settings):
        counts = []

        def on_window(trainer):
            counts.append(trainer.layout.num_compilations())
            number = len(counts)
            if number == 2:
                trainer.add_job(late)
            pausing = rest[number // 2 % 2].name
            if 3 < number < 12:
                (trainer.resume_job if number % 2 else trainer.pause_job)(pausing)

        outcome = runs.train((first, *rest), on_window=on_window, **settings)
        assert len(set(counts)) == 1
        return outcome

    one, other = train(ONE), train(settings)
    assert_same_on_meshes(one, other)
    # Some left a slot while replicas had sent gradients of their next batch.
    assert any(discarded)
    kinds = {event["event"] for event in other.events}
    assert {"job_pause", "job_resume"} <= kinds and "late" in other.progress
    assert other.progress[first.name].status == "stopped early"


def kinds_of_jobs(jobs, folder: pathlib.Path) -> list[LoraJob]:
    """Jobs with a baseline over a batch, other optimizers, and tensors beside A and B.

    Args:
        jobs: Three jobs.
        folder: Folder for data of one of them.
    """
    pairs = folder / "pairs.jsonl"
    with pairs.open("w") as file:
        for number in range(24):
            prompt, completion = "ab" * (1 + number % 7), "c" * (1 + number)
            record = {"prompt": prompt, "completion": completion}
            file.write(json.dumps(record | {"label": number % 3 > 0}) + "\n")
    kto = {"data": {"path": str(pairs), "kind": "unpaired"}, "objective": "kto"}
    kinds = (
        kto | {"eval_fraction": 0.0, "eval_every": None, "use_vera": True},
        {
            "optimizer": "schedule_free_adamw",
            "lr_schedule": "constant",
            "trainable_token_indices": [100, 101],
        },
        {"optimizer": "sgd", "use_dora": True, "modules_to_save": ["lm_head"]},
    )
    return [
        # VeRA has no scaling.
        LoraJob(
            **job.model_dump(
                mode="json", exclude={"lora_alpha"} if "use_vera" in kind else None
            )
            | {"adam_eps": 1e-8}
            | kind
        )
        for job, kind in zip(jobs, kinds, strict=True)
    ]


@pytest.mark.grid
def test_kinds_of_jobs(runs, unlike_jobs, tmp_path):
    jobs = kinds_of_jobs(unlike_jobs, tmp_path)
    one, other = (runs.train(jobs, **settings) for settings in (ONE, UNLIKE))
    assert_same_on_meshes(one, other)


def test_memory_is_named_by_replica(runs, unlike_jobs, caplog):
    with caplog.at_level("INFO"):
        outcome = runs.train(unlike_jobs, **UNLIKE)
    needed = [text for text in caplog.messages if " needed on replica " in text]
    assert len(needed) == 3
    assert "needed on replica 1 with microbatches of 192 tokens" in needed[0]
    assert "needed on replica 3 with microbatches of 64 tokens" in needed[2]
    assert outcome.result.num_compilations == 0  # as of any later trainer


def test_a_replica_that_does_not_fit(runs, unlike_jobs, monkeypatch):
    monkeypatch.setattr(MeshStages, "further_bytes", lambda *_: 2**60)
    trainer = Trainer(runs.config(unlike_jobs, **UNLIKE), runs.model)
    with pytest.raises(ConfigError, match="replica 2 with microbatches"):
        trainer.train()


# ---- resume --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(runs, unlike_jobs):
    """The folder of a run that Ctrl-C has ended in the middle of batches."""
    config = runs.config(unlike_jobs, **UNLIKE)
    trainer = Trainer(config, runs.model)
    assert trainer.train(callbacks=[InterruptAt(1)]).interrupted
    found = read_newest(pathlib.Path(config.output_dir) / CHECKPOINTS)
    assert found.run.stream is not None and found.run.stream.repeated
    return pathlib.Path(config.output_dir)


def resumed(runs, jobs, folder, **settings) -> Outcome:
    config = runs.config(jobs, output_dir=str(folder), **settings)
    return outcome(config, runs.model, resume=True)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(UNLIKE, id="same"),
        pytest.param(ONE, id="one device"),
        pytest.param(
            {"replicas": REPLICAS[:1] * 2}, id="other", marks=pytest.mark.grid
        ),
        DEPLOYMENTS[1],
    ],
)
def test_an_interrupted_run_continues(
    runs, unlike_jobs, interrupted, tmp_path, settings
):
    whole = runs.once(unlike_jobs, **UNLIKE)
    folder = shutil.copytree(interrupted, tmp_path / "run")
    again = resumed(runs, unlike_jobs, folder, **settings)
    assert_same_on_meshes(whole, again)
    if settings == UNLIKE:
        assert_same_bits(again, whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE, UNLIKE),
        (MESHES, MESHES),
        pytest.param(MESHES, ONE, marks=pytest.mark.grid),
    ],
)
def test_a_run_continues_on_others(runs, unlike_jobs, before, after):
    if MESHES in (before, after) and jax.device_count() < 8:
        pytest.skip("8 devices are needed")
    whole = runs.once(unlike_jobs, **before)
    config = runs.config(unlike_jobs, **before)
    trainer = Trainer(config, runs.model)
    assert trainer.train(callbacks=[InterruptAt(1)]).interrupted
    again = resumed(runs, unlike_jobs, config.output_dir, **after)
    assert_same_on_meshes(whole, again)
    if before == after:
        assert_same_bits(again, whole)


# ---- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replicas": "some"}, "replicas: must be 'auto'; or expected a list"),
        (
            {"replicas": "auto", "microbatch_tokens": 64},
            "microbatch_tokens=64, and the replicas have their own",
        ),
        ({"replicas": "auto", "mesh": "data=2"}, "mesh is data=2, and replicas have"),
        ({"replicas": "auto", "packer": "greedy"}, "only joint fills replicas"),
        ({"replicas": []}, "the list is empty. Give at least one"),
        (
            {"replicas": [{"stage": 2}, mesh(1, 32)]},
            "replicas.0.stage: 'stage' is a setting of a mesh, and each replica of a "
            "list has all layers. Set tensor in the place of it, or leave replicas out "
            "and set mesh: stage=2.",
        ),
        (
            {"replicas": [mesh(3, 64)]},
            "tensor=3 of a replica does not divide block_tokens=16",
        ),
        ({"replicas": [mesh(2, 64)], "mesh": "tensor=4"}, "mesh is tensor=4, and"),
        (
            {"replicas": [{"microbatch_tokens": 40}]},
            "microbatch_tokens=40 of a replica is not a multiple of block_tokens=16",
        ),
        (UNLIKE | {"microbatch_tokens": 64}, "microbatch_tokens=64, and the replicas"),
        (
            UNLIKE | {"mesh": "fsdp=2"},
            "mesh is fsdp=2, and replicas have",
        ),
        (UNLIKE | {"mesh": "auto"}, "mesh is auto, and replicas have devices of"),
        (UNLIKE | {"packer": "greedy"}, "only joint fills replicas"),
        (UNLIKE | {"microbatch_shapes": [64]}, "each replica has one shape"),
        ({"replicas": [{"count": "two"}]}, "replicas.0.count"),
        ({"replicas": 3}, "replicas: must be 'auto'; or expected a list"),
    ],
)
def test_settings_that_are_refused(runs, unlike_jobs, settings, text):
    with pytest.raises(ConfigError) as caught:
        runs.config(unlike_jobs, **settings)
    assert text in str(caught.value)


def test_too_few_devices(runs, unlike_jobs):
    count = jax.device_count() + 1
    replicas = [{"microbatch_tokens": 192, "count": count}]
    config = runs.config(unlike_jobs, replicas=replicas)
    with pytest.raises(ConfigError, match=f"{count} replicas need {count} devices"):
        Trainer(config, runs.model)


def test_a_sample_that_no_replica_holds(runs, unlike_jobs):
    config = runs.config(unlike_jobs, replicas=[{"microbatch_tokens": 64, "count": 2}])
    with pytest.raises(ConfigError, match="Raise microbatch_tokens"):
        Trainer(config, runs.model)


# ---- plans ---------------------------------------------------------------------------


@pytest.mark.needs_devices(8)
def test_sizes_are_those_that_fit(runs, unlike_jobs, monkeypatch):
    """Where none is given. What fits follows from the devices that share a layer."""
    room = {1: 64, 2: 192, 4: 96}
    here = dataclasses.replace(
        this_machine(), memory=DeviceMemory(num_bytes=2**30, source="a test")
    )
    monkeypatch.setattr(prepare_run, "this_machine", lambda *_: here)
    largest = lambda search, plan, *_: room[plan.stages.sizes.tensor]
    monkeypatch.setattr(Search, "largest", largest)
    replicas = [{"tensor": 1}, {"tensor": 2, "count": 1}, mesh(4, 96)]
    planned = plan_run(runs.config(unlike_jobs, replicas=replicas))
    shapes = planned.config.replica_shapes
    assert [(one.tensor, one.tokens) for one in shapes] == [(2, 192), (4, 96), (1, 64)]
    assert planned.config.mesh == "tensor=2" and planned.config.num_devices == 7
    (note,) = (n.text for n in planned.plan.notes if n.text.startswith("replicas: "))
    assert (
        note == "replicas: 192 on tensor=2 + 96 on tensor=4 + 64 tokens, as many as fit"
    )


def test_a_plan_has_the_microbatches_of_the_run(runs, unlike_jobs):
    planned = plan_run(runs.config(unlike_jobs, **UNLIKE))
    ran = runs.once(unlike_jobs, **UNLIKE).of("window")
    assert planned.num_microbatches == sum(one["num_microbatches"] for one in ran)
    each = [
        (one["num_microbatches"], one["microbatch_tokens"])
        for w in ran
        for one in w["replicas"]
    ]
    rows = sum(number * tokens for number, tokens in each)
    assert planned.fill == pytest.approx(planned.num_tokens / rows)
    assert planned.whole is None and planned.plan.lanes.replicas


@pytest.fixture
def chosen_of(monkeypatch):
    """Limits the choice of `replicas: auto` to three devices and two sizes."""
    here = dataclasses.replace(this_machine(), num_devices=3)
    monkeypatch.setattr(prepare_run, "this_machine", lambda *_: here)
    monkeypatch.setattr(lists, "sizes", lambda *_: [192, 64])
    return lambda gain: monkeypatch.setattr(choose, "_GAIN", gain)


def test_auto_trains_what_is_planned(runs, unlike_jobs, chosen_of, caplog):
    """It resumes with the list that it began with, although a mesh is chosen now."""
    chosen_of(0.0)
    config = runs.config(unlike_jobs, replicas="auto")
    with caplog.at_level("INFO"):
        planned = plan_run(config)
    (line,) = (text for text in caplog.messages if text.startswith("replicas: auto"))
    assert " on 3 devices: it needs " in line
    trainer = Trainer(config, runs.model)
    listed = trainer.config.replica_shapes
    assert planned.config.replica_shapes == listed
    assert {one.tokens for one in listed} <= {192, 64}
    assert describe_list(listed) in line
    assert trainer.train(callbacks=[InterruptAt(1)]).interrupted
    chosen_of(1e6)
    new = plan_run(runs.config(unlike_jobs, replicas="auto")).config
    assert new.mesh == "data=3" and not new.replica_shapes
    again = resumed(runs, unlike_jobs, config.output_dir, replicas="auto")
    assert again.trainer.config.replica_shapes == listed
    assert_same_on_meshes(runs.once(unlike_jobs, **ONE), again)
