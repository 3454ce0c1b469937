"""A sweep over the groups of a Ray cluster of one host; it needs jaxlora[ray].

python -m pytest -m "" tests/jaxlora/sweeps/test_engine_ray.py
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from jaxlora.errors import ConfigError
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sweeps.engine.ray_workers import joined_cluster
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def cluster(environ: dict[str, str], folder: str):
    """Starts a head on this host; yields its address."""
    address = f"127.0.0.1:{free_port()}"
    ray = str(pathlib.Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
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


@needs_ray
@pytest.mark.grid
@pytest.mark.parametrize("had_local_session", [False, True])
def test_a_sweep_survives_kills(tmp_path, monkeypatch, had_local_session):
    """The mode of authentication and the token are the same everywhere."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    environ |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""}
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    if had_local_session:  # it leaves a token in the home folder
        code = "import ray; ray.init(num_cpus=1, include_dashboard=False)"
        subprocess.run(
            [sys.executable, "-c", code], env=environ, check=True, timeout=300
        )
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test" * 4}
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
