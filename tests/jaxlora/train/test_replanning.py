"""A run with `replicas: auto` moves to other replicas when jobs join or leave."""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxlora import Trainer
from jaxlora.config.replicas_config import ReplicaShape
from jaxlora.costs.device_speed import find_speed
from jaxlora.errors import ConfigError
from jaxlora.memory.footprint import num_bytes
from jaxlora.run.folder import (
    CHECKPOINTS,
    as_begun,
    read_run_record,
    write_run_record,
)
from jaxlora.run.identity import RunIdentity
from jaxlora.run.saved_run import RunRecord
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.execute import base_move
from jaxlora.train.open_run import OpenedRun
from jaxlora.train.plan import prepare_run
from jaxlora.train.plan.auto_mesh.machine import this_machine
from jaxlora.train.plan.auto_replicas import moving
from jaxlora.train.plan.auto_replicas.choose import ReplicaLists, Timed
from jaxlora.train.plan.auto_replicas.room import with_list
from jaxlora.train.saved.read_checkpoint import read_newest
from tests.jaxlora.train.at_window import Copies, at_windows
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.outcome import Outcome
from tests.jaxlora.train.test_replicas import ONE as ONE_DEVICE
from tests.jaxlora.train.test_replicas import Runs, resumed

pytestmark = pytest.mark.needs_devices(3)

# While a job runs that others outlive, and after it.
FIRST = (ReplicaShape(tokens=192, tensor=2), ReplicaShape(tokens=64))
THEN = (ReplicaShape(tokens=192), *[ReplicaShape(tokens=64)] * 2)
# One linear is enough: others move as it does.
TARGETS = {"slot_targets": ("down_proj",)}
AUTO = TARGETS | {"replicas": "auto", "window_steps": 2, "remat": "layer"}
ONE = TARGETS | ONE_DEVICE


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model) -> Runs:
    return Runs(tmp_path_factory.mktemp("replanning"), model)


@pytest.fixture(scope="module")
def own_jobs(jobs):
    """Three jobs with dropout and ragged lengths, of which the first one ends early."""
    changes = {"adam_eps": 1e-4, "max_grad_norm": 0.05}
    changes |= {"target_modules": TARGETS["slot_targets"]}
    return tuple(
        job.model_copy(update=changes | {"steps": steps})
        for job, steps in zip((jobs[0], jobs[2], jobs[3]), (2, 9, 10), strict=True)
    )


@pytest.fixture(scope="module", autouse=True)
def choice():
    """Three devices whose rates are known. Replicas follow from the number of jobs."""
    here = dataclasses.replace(
        this_machine(), num_devices=3, speed=find_speed("NVIDIA H100 80GB HBM3")
    )

    def best(self, config):
        chosen = with_list(config, FIRST if len(self._positions) > 2 else THEN)
        return Timed(config=chosen, seconds=0.0, bound=1.0), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_run, "this_machine", lambda *_: here)
        patch.setattr(ReplicaLists, "best", best)
        yield


@pytest.fixture
def at_once(monkeypatch):
    """Moving takes no time."""
    monkeypatch.setattr(moving, "_moving_seconds", lambda *_: 0.0)


def trained(runs, jobs, *callbacks, **settings) -> Outcome:
    trainer = Trainer(runs.config(jobs, **AUTO | settings), runs.model)
    return Outcome(trainer, trainer.train(callbacks=callbacks), runs.model)


@pytest.fixture(scope="module")
def moved(runs, own_jobs, choice, tmp_path_factory) -> tuple[Outcome, Copies]:
    """A run that has moved, and what a kill at each of its checkpoints would leave."""
    copies = Copies(tmp_path_factory.mktemp("copies"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "_moving_seconds", lambda *_: 0.0)
        return trained(runs, own_jobs, copies, checkpoint_every=1), copies


@pytest.fixture
def to_mesh(monkeypatch, at_once):
    """Two jobs are trained on a mesh, in the place of a list."""
    best = ReplicaLists.best

    def on_mesh(self, config):
        if len(self._positions) > 2:
            return best(self, config)
        chosen = config.replace(mesh="data=3", microbatch_tokens=192)
        return Timed(config=chosen, seconds=0.0, bound=1.0), None

    monkeypatch.setattr(ReplicaLists, "best", on_mesh)


def shapes(trainer: Trainer) -> tuple[ReplicaShape, ...]:
    return trainer.config.replica_shapes


def saved(folder: pathlib.Path):
    return read_newest(folder / CHECKPOINTS).run


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    assert one.bytes == other.bytes
    for kind in ("losses", "norms", "evals"):
        assert getattr(one, kind) == getattr(other, kind)


@pytest.mark.usefixtures("at_once")
def test_a_run_moves_when_a_job_leaves(runs, own_jobs, moved, monkeypatch, caplog):
    """With what one device gives; nothing is compiled or read after the move began."""
    counts, move = [], OpenedRun.placed

    def counted(self):
        counts.append(self.layout.num_compilations())
        return move(self)

    monkeypatch.setattr(OpenedRun, "placed", counted)
    with caplog.at_level("INFO"):
        again = trained(runs, own_jobs)
    one, whole = runs.once(own_jobs, **ONE), moved[0]
    assert_same_on_meshes(one, whole)
    assert_same_bits(whole, again)
    assert shapes(whole.trainer) == shapes(again.trainer) == THEN
    assert counts == [again.trainer.layout.num_compilations()]
    assert again.result.num_compilations == 0
    (line,) = (text for text in caplog.messages if "job0 left" in text)
    assert line.startswith(
        "replicas: auto: job0 left: moving from 192 on tensor=2 + 64 tokens to 192 + "
        "2 x 64 tokens, which is predicted to save 0.0 s of the rest of the run; "
        "moving takes 0.0 s"
    )
    assert any(text.startswith("replicas: auto: moved in") for text in caplog.messages)


def test_a_kill_at_any_checkpoint(runs, own_jobs, moved, at_once, tmp_path):
    """Before the move, in it and after it, a resumed run ends in the same bits."""
    whole, copies = moved
    pending, begun, ended = [], [], []
    for number, folder in enumerate(copies.copies):
        replan, record = saved(folder).replan, read_run_record(folder)
        steps = sum(one.step for one in saved(folder).progress.values())
        if len(record.replicas) == 2 and record.replicas[0]["tensor"] == 1:
            ended.append(number)
        elif replan.steps and steps >= replan.due:
            begun.append(number)
        elif replan.steps:
            pending.append(number)
    assert pending and ended and len(begun) == 1, (pending, begun, ended)
    for number in (pending[-1], *begun, ended[0]):
        folder = shutil.copytree(copies.copies[number], tmp_path / f"{number}")
        again = resumed(runs, own_jobs, folder, **AUTO | {"checkpoint_every": 1})
        assert_same_bits(whole, again)
        assert shapes(again.trainer) == THEN


def test_a_failure_within_the_move(runs, own_jobs, moved, at_once, monkeypatch):
    """The checkpoint before it is whole, and the record has the old replicas."""
    move, config = base_move._placed, runs.config(own_jobs, **AUTO)
    calls = []

    def failing(held, where):
        calls.append(where)
        if len(calls) > 5:
            raise MemoryError
        return move(held, where)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(base_move, "_placed", failing)
        Trainer(config, runs.model).train()
    assert saved(pathlib.Path(config.output_dir)).replan.steps
    again = resumed(runs, own_jobs, config.output_dir, **AUTO)
    assert_same_bits(moved[0], again)
    assert shapes(again.trainer) == THEN


def test_a_gain_that_is_smaller_than_the_move(runs, own_jobs, caplog):
    """Jobs that join are weighed as well."""
    late = own_jobs[2].model_copy(update={"name": "late"})
    added = []

    def add(trainer):
        if not added:
            trainer.add_job(late)
            added.append(late)

    config = runs.config(own_jobs, **AUTO)
    trainer = Trainer(config, runs.model)
    with caplog.at_level("INFO"):
        result = trainer.train(callbacks=at_windows(add))
    other = Outcome(trainer, result, runs.model)
    assert shapes(trainer) == FIRST
    lines = [text for text in caplog.messages if "moving takes" in text]
    assert lines and all(": not moving from 192 on tensor=2" in one for one in lines)
    whens = [text.split(": ")[2] for text in caplog.messages if ": auto: " in text]
    assert any("late joined" in one for one in whens)
    one = runs.train(own_jobs, on_window=None, **ONE)
    for name in one.bytes:
        assert other.losses[name] == pytest.approx(one.losses[name], rel=2e-6)


def test_replicas_that_cannot_run(runs, own_jobs, at_once, monkeypatch, caplog):
    def refuse(self, memory=None):
        raise ConfigError("too large")

    monkeypatch.setattr(OpenedRun, "drafted", refuse)
    again = trained(runs, own_jobs)
    assert shapes(again.trainer) == FIRST
    assert "job0 left: not moving to 192 + 2 x 64 tokens, which cannot run: too" in (
        caplog.text
    )


@pytest.mark.grid
@pytest.mark.usefixtures("to_mesh")
def test_a_mesh_is_kept_as_a_list_is(runs, own_jobs, tmp_path):
    copies = Copies(tmp_path)
    whole = trained(runs, own_jobs, copies, checkpoint_every=1)
    assert_same_on_meshes(runs.once(own_jobs, **ONE), whole)
    assert whole.trainer.config.mesh == "data=3" and not shapes(whole.trainer)
    moved = [c for c in copies.copies if read_run_record(c).mesh == "data=3"]
    assert 1 < len(moved) < len(copies.copies)
    again = resumed(runs, own_jobs, moved[0], **AUTO | {"checkpoint_every": 1})
    assert again.trainer.config.mesh == "data=3" and not shapes(again.trainer)
    assert_same_bits(whole, again)


def test_the_record_has_the_mesh_that_was_chosen(runs, own_jobs):
    """A resume takes it in the place of a list; a user may take it back."""
    config = runs.config(own_jobs, **AUTO)
    folder = pathlib.Path(config.output_dir)
    folder.mkdir()
    settings = {"microbatch_tokens": 192, "remat": "layer"}
    identity = RunIdentity(base="", settings=settings, jobs={})
    record = RunRecord(started="2026-11-26", identity=identity, mesh="data=3")
    write_run_record(folder, record)
    begun = as_begun(config)
    assert (begun.config.mesh, begun.config.replicas) == ("data=3", None)
    assert begun.config.microbatch_tokens == 192
    text = "replicas: auto: mesh data=3, as in the run so far"
    assert text in [note.text for note in begun.notes]
    given = config.replace(replicas=[{"microbatch_tokens": 192}])
    assert as_begun(given).config.replica_shapes == THEN[:1]
    with pytest.raises(ValueError, match="data=no"):
        dataclasses.replace(record, mesh="data=no")


@pytest.mark.grid
@pytest.mark.usefixtures("at_once")
def test_what_moves_with_a_run(runs, own_jobs):
    """Quantized weights, the samples of a stream that were read ahead, and texts."""
    first, second, third = own_jobs
    streamed = {"streaming": True, "shuffle_buffer": 8, "bad_records": "drop"}
    data = second.data.model_copy(update=streamed)
    second = second.replace(data=data, eval_fraction=0.0, eval_every=None)
    jobs = first, second, third
    samples = {"prompts": ["ab"], "max_new_tokens": 3}
    settings = {"quantize_base": "int8", "samples": samples}
    trainers = [Trainer(runs.config(jobs, **own | settings)) for own in (ONE, AUTO)]
    one, moved = (Outcome(t, t.train(), t.model) for t in trainers)
    assert shapes(moved.trainer) == THEN
    assert_same_on_meshes(one, moved)
    texts = [(o.result.output_dir / "samples.txt").read_text() for o in (one, moved)]
    assert texts[0].count("ab") == texts[1].count("ab") > 4


# ---- the base and the time -----------------------------------------------------------


def placements() -> list:
    """Ways to place a matrix on up to four devices."""
    devices = jax.devices()
    (mesh,) = stage_meshes(MeshSizes(data=2, tensor=2), devices[:4])
    return [
        SingleDeviceSharding(devices[0]),
        SingleDeviceSharding(devices[3]),
        *(NamedSharding(mesh, PartitionSpec(*spec)) for spec in PLACED),
    ]


PLACED = ((), ("tensor",), (None, "tensor"))


@pytest.mark.needs_devices(4)
def test_devices_get_what_they_lack(monkeypatch):
    """From any placements to any other, and not through the host."""
    rng, places, sent = np.random.default_rng(0), placements(), []
    send = jax.device_put

    def counted(x, *args):
        sent.append(x.size)
        return send(x, *args)

    def read(self):
        raise AssertionError(f"{self.shape} was read by the host")

    for old in places:
        for new in places:
            values = rng.integers(0, 99, (6, 4)).astype(np.float32)
            held = [send(values, old), send(values, places[1])]
            parts = {
                (shard.device, str(shard.index)): shard.data.unsafe_buffer_pointer()
                for x in held
                for shard in x.addressable_shards
            }
            with monkeypatch.context() as patch:
                patch.setattr(ArrayImpl, "_value", property(read))
                patch.setattr(base_move.jax, "device_put", counted)
                sent.clear()
                moved = base_move._placed(held, new)
            assert moved.sharding == new and np.array_equal(moved, values)
            lacking = 0
            for shard in moved.addressable_shards:
                kept = parts.get((shard.device, str(shard.index)))
                if kept is None:
                    lacking += shard.data.size
                else:
                    assert shard.data.unsafe_buffer_pointer() == kept
            assert sum(sent) == lacking, (old, new)


def test_the_time_of_a_move(runs, own_jobs):
    """Half of a batch of each job, its state, and the base for devices that lack it."""
    trainer = Trainer(runs.config(own_jobs, **AUTO), runs.model)
    plan, choice = trainer.plan, trainer._opened.choice
    assert choice is not None
    positions = [
        moving.JobPosition(
            job=i, priority=0, slot=slot, step=1, num_steps=9, batch_tokens=100.0 + i
        )
        for i, slot in enumerate((0, None, 1))
    ]
    config = with_list(plan.config, THEN)
    found = moving._moving_seconds(plan, config, positions, 0.25)
    spec = plan.spec
    weights = num_bytes(spec.adapter_shapes()) / spec.slots.num_slots
    state = 3 * weights / 1e9 + 2 * 0.026
    # The two devices that shared the layers get whole ones; the third has one.
    sent = 2 * num_bytes(spec.base_shapes())
    links = plan.rates.links.speed
    seconds = (100 + 102) / 2 * 0.25 + 2 * state + links.transfer_seconds(sent)
    assert found == pytest.approx(seconds)
    assert moving._moving_seconds(plan, plan.config, [], 1.0) == 0.0
    left = moving._tokens_left(plan, positions)
    assert left == pytest.approx((8 - 2) * 100 + 8 * 101 + (8 - 2) * 102)
