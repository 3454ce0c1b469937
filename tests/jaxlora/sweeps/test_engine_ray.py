"""A sweep over the groups of a Ray cluster of one host; it needs jaxlora[ray].

python -m pytest -m "" tests/jaxlora/sweeps/test_engine_ray.py
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from jaxlora.errors import ConfigError
from jaxlora.run.folder import SWEEP_LEDGER
from jaxlora.run.lock import LOCK_FILE, RunLock, read_owner
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sweeps.engine import launch_ray
from jaxlora.sweeps.engine.launch_ray import joined_cluster, run_on_host
from tests.jaxlora.sweeps.test_engine_kills import check_accounted, options_of

ROOT = pathlib.Path(__file__).parents[3]
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="jaxlora[ray] is not installed")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    expected = "RAY_AUTH_MODE=token" if HAS_RAY else r"Install jaxlora\[ray\]"
    with (
        pytest.raises(ConfigError, match=expected),
        joined_cluster("auto", ("true",), [MeshSizes()]),
    ):
        raise AssertionError("it has joined a cluster")


def test_a_host_with_another_folder_is_refused(tmp_path, monkeypatch):
    """Here without Ray: a task looks for the lock of the driver."""
    monkeypatch.setattr(launch_ray, "_SHARE_SECONDS", 0.0)
    command = sys.executable, "-c", "import sys; print(sys.stdin.read())"
    folder = tmp_path / "groups" / "0-1"
    with RunLock(tmp_path):
        owner = read_owner(tmp_path / LOCK_FILE)
        lost = run_on_host(command, folder, {}, b"the door", owner)
    assert re.search(r"ended with 0; .* ends with: the door", lost.reason)
    assert not lost.is_final
    other = tmp_path / "not" / "here" / "0-1"
    lost = run_on_host(command, other, {}, b"the door", owner)
    assert lost.is_final and "do not share output_dir" in lost.reason
    assert "names nobody" in lost.reason and not other.exists()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def cluster(environ: dict[str, str], folder: str):
    """Starts a head on this host; yields its address."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    command += ["--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={address.rpartition(':')[2]}", "--num-cpus=4"]
    command += ["--include-dashboard=false", "--object-store-memory=100000000"]
    command += [f"--temp-dir={folder}", "--disable-usage-stats"]
    with open(f"{folder}/head.log", "w+") as log:
        head = subprocess.Popen(
            command, stdout=log, stderr=log, env=environ, start_new_session=True
        )
        try:
            while "Ray runtime started" not in pathlib.Path(log.name).read_text():
                assert head.poll() is None, pathlib.Path(log.name).read_text()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    head.wait(0.2)
            yield address
        finally:
            head.terminate()
            try:
                head.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Returns the environment of all processes, without a token of other sessions."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    environ |= {"HOME": str(folder), "PYTHONWARNINGS": ""}
    environ["PYTHONPATH"] = f"{ROOT}:{environ.get('PYTHONPATH', '')}"
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    return environ


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test" * 4}


@needs_ray
@pytest.mark.grid
@pytest.mark.parametrize("had_local_session", [False, True])
def test_a_sweep_survives_kills(tmp_path, monkeypatch, had_local_session):
    """The mode of authentication and the token are the same everywhere."""
    environ = environment(tmp_path)
    if had_local_session:  # it leaves a token in the home folder
        code = "import ray; ray.init(num_cpus=1, include_dashboard=False)"
        subprocess.run(
            [sys.executable, "-c", code], env=environ, check=True, timeout=300
        )
    environ |= TOKEN
    options = options_of(tmp_path, jobs=100, groups=2, seed=0, worker_kills=6)
    # The paths of Ray's sockets must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ry") as folder,
        cluster(environ, folder) as address,
    ):
        options |= {"driver_kills": 2, "ray": address}
        command = [sys.executable, "-m", "tests.jaxlora.sweeps.chaos"]
        done = subprocess.run(
            [*command, str(tmp_path / "run"), json.dumps(options)],
            capture_output=True,
            cwd=ROOT,
            env=environ,
            timeout=300,
        )
    assert not done.returncode, done.stderr.decode()[-3000:]
    check_accounted(tmp_path / "run", 100, 6)


class Nodes:
    """A cluster of nodes on this host, each with a place for one group."""

    def __init__(self, environ: dict[str, str], folder: str):
        command = [sys.executable, "-m", "tests.jaxlora.sweeps.ray_nodes", folder]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the cluster has not started"

    def do(self, *actions: str) -> None:
        for action in actions:
            self._process.stdin.write(action + "\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "done\n", action

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def driver(folder: pathlib.Path, environ: dict[str, str], options: dict):
    """Drives a sweep; yields the process, and a function that waits for an event."""
    command = [sys.executable, "-m", "tests.jaxlora.sweeps.chaos", str(folder)]
    errors, ledger = folder.with_suffix(".log"), folder / SWEEP_LEDGER
    with open(errors, "w") as log:
        process = subprocess.Popen(
            [*command, json.dumps(options)], stderr=log, cwd=ROOT, env=environ
        )

    def until(has_come) -> None:
        while not (ledger.exists() and has_come(ledger.read_text())):
            assert process.poll() is None, errors.read_text()[-3000:]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)

    try:
        yield process, until
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def nodes_of(environ: dict[str, str]):
    # The paths of Ray's sockets must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ry") as folder,
        Nodes(environ, folder) as nodes,
    ):
        nodes.do("add", "add")
        yield nodes


def places(run: pathlib.Path) -> set[tuple[str, int]]:
    """Returns which groups have trained each configuration."""
    with open(run / SWEEP_LEDGER) as file:
        records = [json.loads(line) for line in file]
    return {(r["name"], r["group"]) for r in records if r["kind"] == "given"}


@needs_ray
@pytest.mark.grid
def test_nodes_leave_and_join_and_a_head_is_lost(tmp_path):
    """Each group is on a node of its own; its configurations go on in others."""
    environ, first, second = (
        environment(tmp_path) | TOKEN,
        *map(tmp_path.joinpath, "ab"),
    )
    options = options_of(tmp_path, jobs=200, groups=2, seed=0, worker_kills=0)
    options |= {"driver_kills": 0, "pause": 1.0}
    num_workers = lambda run: len(list(run.glob("groups/*/steps.txt")))
    with nodes_of(environ) as nodes:
        given = options | {"ray": nodes.address}
        with driver(first, environ, given) as (process, until):
            until(lambda ledger: num_workers(first) == 2 and ledger.count('"eval"') > 3)
            nodes.do("kill 0")
            until(lambda ledger: "its devices are not there" in ledger)
            nodes.do("add")
            assert process.wait(120) == 0, first.with_suffix(".log").read_text()[-3000:]
        check_accounted(first, 200, 1)
        assert num_workers(first) == 3 and len(places(first)) > 200
        assert "has left the cluster" in first.with_suffix(".log").read_text()
        with driver(second, environ, given) as (process, until):
            until(lambda ledger: num_workers(second) == 2 and '"eval"' in ledger)
            nodes.do("head")
            assert process.wait(120)
    assert "Start a head again" in second.with_suffix(".log").read_text()
    with nodes_of(environ) as nodes:
        given = options | {"ray": nodes.address, "first": 1, "driver_kills": 1}
        with driver(second, environ, given | {"pause": 0}) as (process, _):
            assert process.wait(120) == 0, second.with_suffix(".log").read_text()[
                -3000:
            ]
    check_accounted(second, 200, 0)  # the groups have written checkpoints
