"""No accepted operation is lost or applied twice, whenever the process is killed."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import safetensors.numpy
import sqlalchemy as sa

from jaxlora.serve.operation import Done
from tests import tiny
from tests.jaxlora.serve import crash_load

ROOT = pathlib.Path(__file__).parents[3]


class Life:
    """A process with the load of `crash_load`.

    Attributes:
        lines: What it has written.
    """

    def __init__(self, folder, model, num_steps, known):
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.jaxlora.serve.crash_load"),
                *(str(folder), str(model), str(num_steps)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            # No function is changed there, so whole programs may be kept.
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAXLORA_KEEP_PROGRAMS": "1"},
            text=True,
        )
        self.process.stdin.write(json.dumps(known) + "\n")
        self.process.stdin.flush()
        self.lines, self.errors = [], []
        self.is_ready = threading.Event()
        self.threads = [
            threading.Thread(target=self._read),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr)),
        ]
        for thread in self.threads:
            thread.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n").split(" ", 2))
            if line == "ready\n":
                self.is_ready.set()
        self.is_ready.set()

    def end(self, seconds: float | None) -> bool:
        """Kills the process so long after it is ready; returns whether it was done."""
        self.is_ready.wait()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for thread in self.threads:
            thread.join()
        for pipe in self.process.stdin, self.process.stdout, self.process.stderr:
            pipe.close()
        text = "".join(self.errors)
        assert self.process.returncode in (0, -signal.SIGKILL), text
        assert "Traceback" not in text, text
        assert "other bits" not in text, text
        return self.process.returncode == 0


def live_through(folder, model, num_steps: int, seconds: list[float]) -> dict:
    """Runs the load in processes that are killed, and in one that is not.

    Returns:
        What became of each operation.
    """
    known, outcomes, num_kills = {}, {}, 0
    for limit in [*seconds, None]:
        life = Life(folder, model, num_steps, known)
        is_done = life.end(limit)
        for word, *rest in life.lines:
            if word == "accepted":
                key, request_id = rest
                assert known.setdefault(key, request_id) == request_id
            elif word == "outcome":
                key, text = rest
                found = json.loads(text)
                assert outcomes.setdefault(key, found) == found, key
        if is_done:
            break
        num_kills += 1
    print(f"{num_kills} kills")
    return outcomes


def check(outcomes: dict, num_steps: int) -> None:
    """Checks that each operation has its outcome, and has run once."""
    for name in crash_load.MODELS:
        given = crash_load.operations(name, num_steps)
        mine = [outcomes[f"{name}:{i}"] for i in range(1, len(given) + 1)]
        assert [one["kind"] for one in mine] == [type(one).__name__ for one in given]
        steps = [one["step"] for one in mine if one["kind"] == "Step"]
        assert steps == crash_load.steps_taken(num_steps)
        failed = [one["kind"] for one in mine if not one["is_done"]]
        assert failed == ["Pass", "Save"]


def last(folder, name: str) -> pathlib.Path:
    return folder / "files" / crash_load.TENANT / name / "weights" / "last"


def assert_replayed_bits_are_equal(folder, model, num_steps: int) -> None:
    """Replays all that was logged, from the start and without a snapshot.

    The process that does has never been killed, so its state is that of a run without
    crashes, with the same layouts.
    """
    other = folder.with_name(f"{folder.name}-replayed")
    shutil.copytree(folder, other)
    engine = sa.create_engine(f"sqlite:///{other}/jaxlora.db")
    with engine.begin() as connection:
        for statement in (
            "delete from hub_models",
            "delete from operations where kind = 'Unload'",
            "update operations set outcome = null, has_begun = false "
            "where text like '%weights/last%'",
        ):
            connection.execute(sa.text(statement))
    engine.dispose()
    for name in crash_load.MODELS:
        last(other, name).unlink()
    hub = crash_load.open_hub(other, str(model))
    hub.start()
    try:
        for name in crash_load.MODELS:
            number = len(crash_load.operations(name, num_steps)) - (name == "c")
            promise = hub._find(name, number)
            assert isinstance(promise.outcome.result(timeout=300), Done)
        assert hub.status().replayed_microbatches > num_steps
    finally:
        hub.stop()
    for name in crash_load.MODELS:
        assert last(folder, name).read_bytes() == last(other, name).read_bytes()


def assert_states_are_close(folder, other) -> None:
    for name in crash_load.MODELS:
        found, wanted = (
            safetensors.numpy.load_file(last(one, name)) for one in (folder, other)
        )
        assert found.keys() == wanted.keys()
        for key, array in found.items():
            np.testing.assert_allclose(
                array, wanted[key], rtol=1e-2, atol=1e-3, err_msg=f"{name} {key}"
            )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("crashes") / "model")


def test_a_few_kills(tmp_path, model):
    outcomes = live_through(tmp_path / "killed", model, 7, [0.4, 0.3])
    check(outcomes, 7)
    assert_replayed_bits_are_equal(tmp_path / "killed", model, 7)


@pytest.mark.grid
def test_two_hundred_kills(tmp_path, model):
    rng, killed, whole = random.Random(0), tmp_path / "killed", tmp_path / "whole"
    limits = [rng.expovariate(1 / 0.7) for _ in range(200)]
    check(live_through(killed, model, 400, limits), 400)
    assert_replayed_bits_are_equal(killed, model, 400)
    check(live_through(whole, model, 400, []), 400)
    assert_states_are_close(killed, whole)
