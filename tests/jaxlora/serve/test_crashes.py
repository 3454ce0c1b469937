"""No accepted operation is lost or applied twice, whenever the process is killed."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy
import sqlalchemy as sa

from jaxlora.serve.operation import Done
from tests import tiny
from tests.jaxlora.serve import crash_load

ROOT = pathlib.Path(__file__).parents[3]


class Processes:
    """Makes processes with the load of `crash_load`, one after the other."""

    def __init__(self):
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.jaxlora.serve.crash_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            # No function is changed there, so whole programs may be kept.
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAXLORA_KEEP_PROGRAMS": "1"},
            text=True,
        )

    def close(self) -> None:
        self._parent.stdin.close()
        self._parent.wait()
        self._parent.stdout.close()

    def live(self, output, limit: float | None, after: str, **given) -> bool:
        """Runs a process, and kills it some time after it has written a word.

        Args:
            output: The file that it writes.
            limit: The seconds; None: it is not killed.
            after: The word.
            **given: Other arguments of `crash_load.live`.

        Returns:
            Whether it came to its end.
        """
        self._parent.stdin.write(json.dumps(given | {"output": str(output)}) + "\n")
        self._parent.stdin.flush()
        pid = int(self._parent.stdout.readline())
        errors = output.with_name(f"{output.name}.errors")
        if limit is not None:
            while not (output.exists() and after in output.read_text()):
                time.sleep(0.002)
                assert not (errors.exists() and errors.read_text()), errors.read_text()
            time.sleep(limit)
            # The parent has not waited for it, so the number is still its own.
            os.kill(pid, signal.SIGKILL)
        code = int(self._parent.stdout.readline())
        assert code in (0, -signal.SIGKILL), errors.read_text()
        assert not errors.read_text(), errors.read_text()
        return code == 0


def live_through(processes, folder, model, num_steps: int, kills: list) -> dict:
    """Runs the load in processes that are killed, and in one that is not.

    Args:
        processes: Makes them.
        folder: Folder of the hub.
        model: The base model.
        num_steps: Steps of the load.
        kills: When each process is killed: seconds after it has written a word.

    Returns:
        What became of each operation.
    """
    known, outcomes = {}, {}
    folder.mkdir()
    for number, (limit, after) in enumerate([*kills, (None, "ready")], 1):
        given = {"folder": str(folder), "model": str(model), "num_steps": num_steps}
        output = folder.with_name(f"{folder.name}-{number}.txt")
        given |= {"known": known, "told": [*outcomes]}
        is_done = processes.live(output, limit, after, **given)
        for line in output.read_text().splitlines():
            word, *rest = line.split(" ", 2)
            if word == "accepted":
                key, request_id = rest
                assert known.setdefault(key, request_id) == request_id
            elif word in ("outcome", "again"):
                key, text = rest
                found = json.loads(text)
                assert outcomes.setdefault(key, found) == found, key
        if is_done:
            break
        print(f"{number} kills, {len(outcomes)} outcomes", flush=True)
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
            promise = hub._promises.find(name, number)
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


@pytest.fixture(scope="module")
def processes():
    made = Processes()
    yield made
    made.close()


def test_a_few_kills(tmp_path, model, processes):
    kills = [(0.2, "outcome"), (0.1, "ready")]
    outcomes = live_through(processes, tmp_path / "killed", model, 7, kills)
    check(outcomes, 7)
    assert_replayed_bits_are_equal(tmp_path / "killed", model, 7)


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_datum_that_kills_the_server_is_refused(
    tmp_path, model, processes, is_logged
):
    """It dies in company, is noted, and runs alone twice; all others are done."""
    given = {"folder": str(tmp_path), "model": str(model), "is_logged": is_logged}
    for number in range(1, 6):
        output = tmp_path / f"{number}.txt"
        assert processes.live(output, None, "", **given) == (number == 5)
    lines = [line.split(" ", 2) for line in output.read_text().splitlines()]
    outcomes = {key: json.loads(text) for _, key, text in lines}
    refused = outcomes.pop("a:3")
    assert refused["category"] == "user"
    assert "died several times while datum 3 of it" in refused["message"]
    results = {key: one["result"] for key, one in outcomes.items()}  # none has failed
    steps = [results[key]["step"] for key in ("a:4", "a:6", "b:3", "b:5")]
    assert steps == [1, 2, 1, 2]


@pytest.mark.grid
def test_two_hundred_kills(tmp_path, model, processes):
    rng, killed, whole = random.Random(0), tmp_path / "killed", tmp_path / "whole"
    kills = [
        (rng.expovariate(1 / 0.4), rng.choice(["ready", "outcome", "outcome"]))
        for _ in range(200)
    ]
    check(live_through(processes, killed, model, 400, kills), 400)
    assert_replayed_bits_are_equal(killed, model, 400)
    check(live_through(processes, whole, model, 400, []), 400)
    assert_states_are_close(killed, whole)
