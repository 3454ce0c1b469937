"""A sweep over two groups: each configuration trains as if it were alone."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from jaxlora import LoraJob, RunConfig, Sweep, Trainer
from jaxlora.common.yaml_file import dump_yaml
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.run.folder import SWEEP_LEDGER
from jaxlora.run.live.mailbox import ControlRequest, Mailbox
from jaxlora.run.live.status_file import read_status
from jaxlora.run.lock import read_owner
from jaxlora.sweeps.engine import run
from jaxlora.sweeps.engine.group_control import GroupControl
from jaxlora.sweeps.engine.group_plan import GroupPlan, GroupPlans
from jaxlora.sweeps.engine.launch import Process, divide, divide_cores
from tests.jaxlora.train.runs import run_of, write_swept_job
from tests.jaxlora.train.thread_workers import ThreadWorkers, use_threads

RATES = 3e-2, 1e-2, 3e-3, 1e-3, 3e-4


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> LoraJob:
    """Eight steps of one whole microbatch each, so that jobs never share one."""
    return write_swept_job(tmp_path_factory.mktemp("data"))


@pytest.fixture
def make(model, job, tmp_path):
    """Returns a function that makes a sweep over five learning rates in two groups."""

    def config(**settings) -> RunConfig:
        swept = {"parameters": {"learning_rate": list(RATES)}, "groups": 2}
        sweep = Sweep(**swept | settings)
        return run_of(
            model,
            tmp_path / "run",
            [job],
            dtype="float32",
            sweep=sweep,
            max_concurrent_jobs=None if sweep.groups == "auto" else 2,
            microbatch_tokens=128,
            block_tokens=16,
            window_steps=2,
            checkpoint_every=2,
            report_to="none",
        )

    return config


@pytest.fixture
def workers(monkeypatch) -> list[ThreadWorkers]:
    """Lets workers be threads; the list gets those of each sweep."""
    return use_threads(monkeypatch)


def alone(config: RunConfig, model, name: str, folder) -> bytes:
    """Trains one configuration to its end by itself; returns its weights."""
    (job,) = (job for job in config.jobs if job.name == name)
    single = config.replace(jobs=(job,), sweep=None, output_dir=str(folder / name))
    (result,) = Trainer(single, model).train().jobs
    return (result.folder / "adapter_model.safetensors").read_bytes()


def test_a_configuration_equals_the_same_job_alone(make, model, workers, tmp_path):
    config = make()
    result = run.run_groups(config)
    assert not result.interrupted and result.sweep is not None
    found = {job.name: job for job in result.jobs}
    finished = [n for n, job in found.items() if job.progress.status == "finished"]
    assert len(finished) == 2  # of five, three go on at a quarter, and two at a half
    stopped = [n for n in found if n not in finished]
    assert all(found[n].progress.stopped_by == "halving" for n in stopped)
    for name in finished:
        weights = found[name].folder / "adapter_model.safetensors"
        assert weights.read_bytes() == alone(config, model, name, tmp_path / "alone")
    # Both groups have trained, and the report is over both.
    records = (tmp_path / "run" / SWEEP_LEDGER).read_text().splitlines()
    given = [r for r in map(json.loads, records) if r["kind"] == "given"]
    assert {record["group"] for record in given} == {0, 1}
    assert set(result.sweep.curves) == set(found)
    assert all(seconds > 0 for seconds in result.sweep.seconds.values())
    assert result.sweep.best.folder == tmp_path / "run" / "adapters" / finished[0]
    status = read_status(tmp_path / "run").run
    assert status.num_slots == 4 and all(j.progress.is_over for j in status.jobs)


def test_groups_follow_their_plan(make, model, workers, monkeypatch, tmp_path):
    """Each has its own slots and jobs, and the plan stays when the sweep goes on."""
    config = make(
        parameters={"rank": [2, 4], "learning_rate": RATES[:2]},
        groups="auto",
        early_exit="none",
    )
    names = {rank: [j.name for j in config.jobs if j.rank == rank] for rank in (2, 4)}
    common = {"mesh": "fsdp=1", "microbatch_tokens": 128, "num_slots": 2}
    plans = GroupPlans(
        groups=(
            GroupPlan(names=tuple(names[2][::-1]), slot_rank=2, **common),
            GroupPlan(names=tuple(names[4]), slot_rank=4, **common),
        ),
        ranks={job.name: job.rank for job in config.jobs},
        seconds=3.0,
    )
    monkeypatch.setattr(run, "plan_in_process", lambda config: plans)
    result = run.run_groups(config)
    assert {job.progress.step for job in result.jobs} == {8}
    records = (tmp_path / "run" / SWEEP_LEDGER).read_text().splitlines()
    given = [r for r in map(json.loads, records) if r["kind"] == "given"]
    first = {r["name"]: r["group"] for r in given}
    assert first[names[2][1]] == 0 and all(first[name] == 1 for name in names[4])
    slots = sorted({len(driver.control._trainer.jobs) for driver in drivers(workers)})
    assert slots == [2, 4]  # the group of small slots does not know the large ones
    for name, rank in ((names[2][1], 2), (names[4][0], 4)):
        own = config.replace(sweep=None, slot_rank=rank, max_concurrent_jobs=2)
        weights = tmp_path / "run" / "adapters" / name / "adapter_model.safetensors"
        assert weights.read_bytes() == alone(own, model, name, tmp_path / "alone")
    assert result.seconds.predicted == 3.0 and result.seconds.measured > 0

    def no_plan(config):
        raise AssertionError("the sweep has its plan")

    monkeypatch.setattr(run, "plan_in_process", no_plan)
    assert not run.run_groups(config, resume=True).interrupted


def drivers(workers: list[ThreadWorkers]) -> list:
    return [driver for one in workers for driver in one.drivers.values()]


def events_of(folder: pathlib.Path, kind: str, name="metrics.jsonl") -> list[dict]:
    """Returns the events of one kind in a file of a folder."""
    lines = (folder / name).read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def metrics(config: RunConfig, kind: str) -> list[dict]:
    """Returns the events of one kind, of all workers."""
    paths = pathlib.Path(config.output_dir).glob("groups/*/metrics*.jsonl")
    return [e for path in paths for e in events_of(path.parent, kind, path.name)]


def test_a_sweep_that_was_killed_goes_on(make, model, workers, monkeypatch):
    config = make(early_exit="none")

    class StopsAtSteps(run.StopRequest):
        @property
        def requested(self):
            return len(metrics(config, "step")) > 8

        @requested.setter
        def requested(self, value):
            """Signals do not count."""

    with monkeypatch.context() as patched:
        patched.setattr(run, "StopRequest", StopsAtSteps)
        assert run.run_groups(config).interrupted
    with pytest.raises(CheckpointError, match="already holds a"):
        run.run_groups(config)
    with pytest.raises(CheckpointError, match=r"rank is 4 in the .* and 8 now"):
        other = [job.replace(rank=8) for job in config.jobs]
        run.run_groups(config.replace(jobs=tuple(other)), resume=True)
    with pytest.raises(ConfigError, match=r"sweep.groups is 2.*run jaxlora sweep"):
        Trainer(config)
    result = run.run_groups(config, resume=True)
    assert [job.progress.step for job in result.jobs] == [8] * len(RATES)
    steps = [(event["job"], event["step"]) for event in metrics(config, "step")]
    assert set(steps) == {(job.name, s) for job in config.jobs for s in range(1, 9)}
    # Each of four slots repeats at most what it did since its checkpoint.
    assert len(steps) - len(set(steps)) <= 4 * (config.checkpoint_every + 1)


def test_a_copy_goes_on_from_the_state_of_another(make, model, workers, monkeypatch):
    """Also after the worker that has both is killed; the report shows the family."""
    config = make(parameters={"learning_rate": RATES[:2]}, early_exit="none")
    longer = [job.replace(steps=40) for job in config.jobs]
    config = config.replace(jobs=tuple(longer))
    folder, name = pathlib.Path(config.output_dir), config.jobs[0].name
    asked: list = []
    has_stepped, is_killed = threading.Event(), threading.Event()
    on_event = GroupControl.on_event

    def hold(self, event):
        """The copy's first step waits for the kill, so that its worker cannot end."""
        on_event(self, event)
        if event.kind == "step" and event.job == "copy" and not is_killed.is_set():
            has_stepped.set()
            assert is_killed.wait(60)

    class Asks(run.StopRequest):
        @property
        def requested(self):
            steps = [event["job"] for event in metrics(config, "step")]
            if not asked and name in steps:
                values = {"learning_rate": 1e-3, "name": "copy"}
                request = ControlRequest(action="clone", job=name, settings=values)
                asked.append(Mailbox(folder).post(request))
            if has_stepped.is_set() and not is_killed.is_set():
                (driven,) = workers
                driven.kill(0 if driven.drivers[0].control._jobs.get("copy") else 1)
                is_killed.set()
            return False

        @requested.setter
        def requested(self, value):
            """Signals do not count."""

    monkeypatch.setattr(run, "StopRequest", Asks)
    monkeypatch.setattr(GroupControl, "on_event", hold)
    result = run.run_groups(config)
    assert Mailbox(folder).take_answer(asked[0]).is_accepted
    assert len(list((folder / "groups").iterdir())) == 3  # one was started again
    found = {job.name: job for job in result.jobs}
    assert found["copy"].progress.status == "finished"
    start = found["copy"].clone_of
    assert start.job == name and 1 <= start.step < 40
    done = [(e["job"], e["step"]) for e in events_of(folder, "step")]
    assert len(done) == len(set(done)) == 40 + 40 + 40 - start.step
    dropped = events_of(folder, "step", "metrics_dropped.jsonl")
    logged = sorted((e["job"], e["step"]) for e in metrics(config, "step"))
    assert logged == sorted(done + [(e["job"], e["step"]) for e in dropped])
    assert f"copy from step {start.step}" in (folder / "sweep.html").read_text()
    copy = config.jobs[0].replace(name="copy", learning_rate=1e-3, clone_of=start)
    one = config.replace(
        jobs=(config.jobs[0], copy), sweep=None, output_dir=str(folder / "one")
    )
    for job in Trainer(one, model).train().jobs:
        expected = (job.folder / "adapter_model.safetensors").read_bytes()
        there = found[job.name].folder / "adapter_model.safetensors"
        assert there.read_bytes() == expected


def test_settings_of_groups_are_checked(make):
    with pytest.raises(ConfigError, match=r"mesh is auto.*list the\s+groups"):
        make().replace(mesh="auto")
    assert [str(mesh) for mesh in make(groups=[2, 1]).sweep.meshes("")] == [
        "fsdp=2",
        "fsdp=1",
    ]
    with pytest.raises(ConfigError, match=r"max_concurrent_jobs.*groups is auto"):
        make(groups="auto").replace(max_concurrent_jobs=2)
    with pytest.raises(ConfigError, match=r"one host, and sweep.ray"):
        Sweep(groups="auto", ray="auto")
    with pytest.raises(ConfigError, match=r"optuna suggests them"):
        make(groups="auto", method="optuna", count=3)
    with pytest.raises(ConfigError, match=r"__main__:f1 .*module of its own"):
        Sweep(groups=2, metric="__main__:f1")
    for wrong in ([], True, ["x"], [0], "many"):
        with pytest.raises(ConfigError, match=r"[Gg]ive|fsdp=4|auto"):
            Sweep(groups=wrong)
    with pytest.raises(ConfigError, match=r"2 \+ 2 = 4 GPUs, and this host has 3"):
        meshes = Sweep(groups=[2, 2]).meshes("")
        divide(meshes, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ConfigError, match="this host has 2: 0, 1"):
        divide(meshes, {"CUDA_VISIBLE_DEVICES": "0,1,-1,2,3"})  # CUDA stops at -1
    found = divide(meshes[:1] * 2, {"CUDA_VISIBLE_DEVICES": "3,5,6,7"})
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == ["3,5", "6,7"]


def test_each_group_has_cores_of_its_own(tmp_path):
    meshes = Sweep(groups=[2, 1]).meshes("")
    first, second = divide_cores(meshes, range(3, 16))
    assert (list(first), list(second)) == ([*range(3, 11)], [*range(11, 16)])
    assert divide_cores(meshes, range(11)) == [None, None]  # too few
    assert divide_cores(meshes[:1], range(16)) == [None]  # all are its own
    before = os.sched_getaffinity(0)
    core = max(before)
    command = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    Process(command, tmp_path, {}, b"", [core]).ending(None)
    assert (tmp_path / "worker.log").read_text() == f"{{{core}}}\n"
    assert os.sched_getaffinity(0) == before


@pytest.mark.grid
def test_processes_that_are_killed(make, model, job, tmp_path):
    """A sweep whose worker and then driver are killed ends as if undisturbed."""
    config = make(early_exit="none")
    longer = [job.replace(steps=150) for job in config.jobs]
    config = config.replace(jobs=tuple(longer), checkpoint_every=10)
    values = config.model_dump(mode="json", exclude_unset=True)
    (tmp_path / "run.yaml").write_text(dump_yaml(values))
    command = [sys.executable, "-m", "jaxlora", "sweep", "--device=cpu"]
    command.append(str(tmp_path / "run.yaml"))
    folder, environ = tmp_path / "run", os.environ | {"PYTHONPATH": os.getcwd()}

    def until(has_come, driver) -> None:
        while not has_come():
            assert driver.poll() is None, "the driver has ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(0.05)

    with subprocess.Popen(command, env=environ, cwd=tmp_path) as driver:
        until(lambda: len(metrics(config, "step")) > 5, driver)
        os.kill(read_owner(folder / "groups" / "0-1" / "run.lock").pid, signal.SIGKILL)
        until(lambda: list(folder.glob("groups/0-2/worker.log")), driver)
        driver.kill()
    done = subprocess.run([*command, "--resume"], env=environ, cwd=tmp_path)
    assert not done.returncode
    for name in (config.jobs[0].name, config.jobs[-1].name):
        weights = folder / "adapters" / name / "adapter_model.safetensors"
        assert weights.read_bytes() == alone(config, model, name, tmp_path / "alone")
    assert len(list((folder / "adapters").iterdir())) == len(RATES)
