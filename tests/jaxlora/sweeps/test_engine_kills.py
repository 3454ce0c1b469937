"""A sweep over several groups, whose workers and drivers are killed at random."""

import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxlora import LoraJob
from jaxlora.config.sweep_config import ExitRule
from jaxlora.sweeps.engine.ledger import Ledger
from jaxlora.sweeps.engine.state import SweepState
from tests.jaxlora.sweeps.fake_worker import loss_of, next_hash

ROOT = pathlib.Path(__file__).parents[3]
SLOTS, STEPS, EVERY = 16, 8, 4


def hash_at(name: str, step: int) -> str:
    state = ""
    for done in range(step):
        state = next_hash(state, name, done)
    return state


def options_of(folder: pathlib.Path, *, worker_kills: int, **options) -> dict:
    """Returns the options of a sweep whose workers kill themselves."""
    kills = folder / "kills"
    kills.mkdir(parents=True)
    return {
        "slots": SLOTS,
        "steps": STEPS,
        "every": EVERY,
        "halving": True,
        "kills": [str(kills), worker_kills, options["seed"]],
    } | options


def sweep(folder: pathlib.Path, **given) -> int:
    """Runs a sweep to its end; returns the largest memory of a driver in bytes."""
    options = options_of(folder, **given)
    command = [sys.executable, "-m", "tests.jaxlora.sweeps.chaos"]
    done = subprocess.run(
        [*command, str(folder / "run"), json.dumps(options)],
        capture_output=True,
        cwd=ROOT,
        timeout=120,
    )
    assert not done.returncode, done.stderr.decode()[-3000:]
    assert len(os.listdir(folder / "kills")) == given["worker_kills"]
    return 1024 * max(map(int, done.stdout.split()))


def check_accounted(folder: pathlib.Path, num_jobs: int, num_worker_kills: int) -> None:
    """Every configuration ended as it would have without a kill, and in the ledger."""
    names = [f"c{i}" for i in range(num_jobs)]
    found = [LoraJob(name=name, data={"path": "x"}) for name in names]
    state = SweepState(found, [ExitRule(type="halving")])
    with contextlib.closing(Ledger(folder)) as ledger:
        records = list(ledger.records)
        ledger.replay(state.apply)
    counts = collections.Counter(record["kind"] for record in records)
    assert counts["ended"] == num_jobs and (counts["lost"] or counts["begin"] > 1)
    evaluated = [
        (n, s) for r in records if r["kind"] == "eval" for n, s, *_ in r["points"]
    ]
    assert len(evaluated) == len(set(evaluated))

    # The kills do not change which configurations go on.
    half = sorted(names, key=lambda name: loss_of(name, 2))[: num_jobs // 2]
    quarter = sorted(half, key=lambda name: loss_of(name, 4))[: num_jobs // 4]
    for name, found in state.configurations.items():
        assert found.is_closed
        step = 8 if name in quarter else 4 if name in half else 2
        assert (name, found.progress.step) == (name, step)
        status = "finished" if step == 8 else "stopped early"
        assert found.progress.status == status
        assert (folder / found.folder / "hash").read_text() == hash_at(name, step)

    # A kill of a worker costs the steps since its checkpoint; one of a driver, none.
    lines = [
        line
        for path in folder.glob("groups/*/steps.txt")
        for line in path.read_text().splitlines()
    ]
    needed = sum(found.progress.step for found in state.configurations.values())
    assert len(set(lines)) == needed
    assert len(lines) - needed <= num_worker_kills * SLOTS * EVERY
    # Checkpoints that nobody needs any more are removed.
    assert len(list(folder.glob("groups/*/checkpoints"))) <= 2 * len(state.starts)


@pytest.mark.parametrize("jobs", [300, pytest.param(1000, marks=pytest.mark.grid)])
def test_many_configurations_survive_twenty_kills(tmp_path, jobs):
    most = sweep(tmp_path, jobs=jobs, groups=4, seed=0, driver_kills=8, worker_kills=12)
    check_accounted(tmp_path / "run", jobs, 12)
    assert most < 200e6  # of which Python and the libraries are 100


def test_workers_that_are_stopped_are_killed(tmp_path):
    """They neither end nor send anything, and their pipes fill."""
    stops = {"signal": "SIGSTOP", "stopped_seconds": 2.0}
    sweep(tmp_path, jobs=60, groups=2, seed=0, driver_kills=0, worker_kills=2, **stops)
    check_accounted(tmp_path / "run", 60, 2)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(1, 6))
def test_other_kills(tmp_path, seed):
    sweep(tmp_path, jobs=300, groups=3, seed=seed, driver_kills=15, worker_kills=25)
    check_accounted(tmp_path / "run", 300, 25)
